//! Capabilities (capabilities(7)) and namespaces.

use std::{
    fs::{self, File},
    io,
};

use super::Check;

/// Capability numbers, include/uapi/linux/capability.h.
const CAP_SYS_PTRACE: u32 = 19;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

/// What `setcap` has to give. CAP_CHECKPOINT_RESTORE opens `/proc/PID/map_files`.
const SETCAP: &str = "cap_bpf,cap_perfmon,cap_sys_ptrace,cap_checkpoint_restore=ep";

/// What `/proc/PID/ns/user` leads to in the initial user namespace; the number is fixed (`PROC_USER_INIT_INO` in
/// include/linux/proc_ns.h).
const INITIAL_USER_NAMESPACE: &str = "user:[4026531837]";

/// What this process may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Privileges {
    /// The effective set: bit N is capability N.
    pub effective: u64,
    /// Whether the capabilities count outside of a user namespace.
    pub initial_user_namespace: bool,
}

impl Privileges {
    /// Those of this process; none if `/proc` does not tell.
    pub fn gather() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        Self {
            effective: effective(&status).unwrap_or(0),
            initial_user_namespace: fs::read_link("/proc/self/ns/user")
                .is_ok_and(|link| link.as_os_str() == INITIAL_USER_NAMESPACE),
        }
    }

    fn has(&self, capability: u32) -> bool {
        self.effective & 1 << capability != 0
    }

    /// Names of the capabilities that are needed and not there. CAP_SYS_ADMIN includes CAP_BPF and CAP_PERFMON
    /// (`bpf_capable` and `perfmon_capable` in include/linux/capability.h).
    pub fn lacking(&self) -> Vec<&'static str> {
        let admin = self.has(CAP_SYS_ADMIN);
        [
            ("CAP_BPF", admin || self.has(CAP_BPF)),
            ("CAP_PERFMON", admin || self.has(CAP_PERFMON)),
            ("CAP_SYS_PTRACE", self.has(CAP_SYS_PTRACE)),
        ]
        .into_iter()
        .filter(|(_, there)| !there || !self.initial_user_namespace)
        .map(|(name, _)| name)
        .collect()
    }

    /// Whether this process may trace the threads of others with ptrace(2).
    pub fn may_ptrace(&self) -> bool {
        self.has(CAP_SYS_PTRACE)
    }
}

/// `CapEff` of a `status` file.
fn effective(status: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(value.trim(), 16).ok()
}

/// Path of this program as a word for the shell.
pub fn own_path() -> String {
    std::env::current_exe().map_or_else(|_| "memtrace".into(), |path| shell_word(&path.to_string_lossy()))
}

fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+".contains(c);
    if !text.is_empty() && text.chars().all(plain) { text.into() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

/// Checks the capabilities. `path` is that of memtrace, for the command that gives them.
pub fn check(privileges: &Privileges, path: &str) -> Check {
    const NAME: &str = "privileges";
    if !privileges.initial_user_namespace {
        return Check::missing(
            NAME,
            "this user namespace's capabilities do not count for eBPF and perf events",
            "run memtrace as root outside of it (outside of a rootless container)",
        );
    }
    let lacking = privileges.lacking();
    if lacking.is_empty() {
        return Check::ok(NAME, "CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE");
    }
    Check::missing(
        NAME,
        format!("lacks {}", lacking.join(", ")),
        format!("run it with sudo, or once: sudo setcap {SETCAP} {path}"),
    )
}

/// Opens the first file of `/proc/self/map_files`, which takes CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN
/// (proc_pid_map_files(5)) even for one's own.
pub fn open_mapped_file() -> io::Result<()> {
    let first = fs::read_dir("/proc/self/map_files")?.next().ok_or(io::ErrorKind::NotFound)??;
    File::open(first.path()).map(drop)
}

/// Checks that the files of mappings can be opened.
pub fn mapped_files(opened: &io::Result<()>) -> Check {
    const NAME: &str = "mapped files";
    match opened {
        Ok(()) => Check::ok(NAME, "/proc/PID/map_files can be opened"),
        Err(error) => Check::degraded(
            NAME,
            format!("/proc/PID/map_files can't be opened ({error}): files that were replaced or deleted can't be used"),
            "run it with sudo, or give it CAP_CHECKPOINT_RESTORE (Linux 5.9) or CAP_SYS_ADMIN",
        ),
    }
}

/// Checks the pid namespace.
pub fn pid_namespace(initial: bool) -> Check {
    const NAME: &str = "pid namespace";
    if initial {
        return Check::ok(NAME, "the initial one: every process can be traced");
    }
    Check::degraded(
        NAME,
        "not the initial one: only the processes in it can be traced, by their numbers in it",
        "to trace others, run memtrace outside of the container (or in one with the host's pid namespace)",
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::State;
    use super::*;

    const fn with(capabilities: &[u32]) -> Privileges {
        let mut effective = 0;
        let mut i = 0;
        while i < capabilities.len() {
            effective |= 1 << capabilities[i];
            i += 1;
        }
        Privileges { effective, initial_user_namespace: true }
    }

    #[test]
    fn effective_set_is_parsed() {
        let status = "Name:\tx\nCapPrm:\t0000000000000001\nCapEff:\t000001fffeffffff\nCapBnd:\t0\n";
        assert_eq!(effective(status), Some(0x1ff_feff_ffff));
        assert_eq!(effective("CapEff:\t0000000000000000\n"), Some(0));
        assert_eq!(effective("CapEff:\txyz\n"), None);
        assert_eq!(effective(""), None);
    }

    #[test]
    fn names_what_is_lacking() {
        assert_eq!(with(&[]).lacking(), ["CAP_BPF", "CAP_PERFMON", "CAP_SYS_PTRACE"]);
        assert_eq!(with(&[CAP_BPF, CAP_PERFMON]).lacking(), ["CAP_SYS_PTRACE"]);
        assert_eq!(with(&[CAP_SYS_ADMIN]).lacking(), ["CAP_SYS_PTRACE"]);
        assert!(with(&[CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE]).lacking().is_empty());
        assert!(with(&[CAP_SYS_ADMIN, CAP_SYS_PTRACE]).lacking().is_empty());
        let container = Privileges { effective: u64::MAX, initial_user_namespace: false };
        assert_eq!(container.lacking().len(), 3);
    }

    #[test]
    fn fix_names_the_command() {
        let check = check(&with(&[CAP_BPF]), "/opt/memtrace");
        assert_eq!(check.state, State::Missing);
        assert_eq!(check.detail, "lacks CAP_PERFMON, CAP_SYS_PTRACE");
        assert!(check.fix.unwrap().ends_with(&format!("sudo setcap {SETCAP} /opt/memtrace")));
        let container = Privileges { effective: u64::MAX, initial_user_namespace: false };
        assert_eq!(super::check(&container, "x").state, State::Missing);
        assert_eq!(super::check(&with(&[CAP_SYS_ADMIN, CAP_SYS_PTRACE]), "x").state, State::Ok);
    }

    #[test]
    fn paths_are_quoted_for_the_shell() {
        assert_eq!(shell_word("/usr/bin/memtrace"), "/usr/bin/memtrace");
        assert_eq!(shell_word("/my dir/it's"), r"'/my dir/it'\''s'");
        assert_eq!(shell_word(""), "''");
    }

    #[test]
    fn namespaces() {
        assert_eq!(pid_namespace(true).state, State::Ok);
        assert_eq!(pid_namespace(false).state, State::Degraded);
    }

    #[test]
    fn map_files_are_a_loss_only() {
        assert_eq!(mapped_files(&Ok(())).state, State::Ok);
        assert_eq!(mapped_files(&Err(io::Error::from_raw_os_error(libc::EPERM))).state, State::Degraded);
    }
}
