//! What the kernel is, and what it shows in `/sys` and `/proc`.

use std::{ffi::CStr, fs, path::Path};

use super::{Check, Privileges};
use crate::kernel::{multi, release::Release};

/// The oldest release that has all that memtrace uses. What decides it, and the next oldest:
///
/// | since | what |
/// | --- | --- |
/// | 5.17 | `bpf_loop` |
/// | 5.15 | `bpf_get_attach_cookie` in uprobe programs |
/// | 5.12 | atomic operations that return a value |
/// | 5.8 | ring buffers, CAP_BPF, CAP_PERFMON |
/// | 5.6 | reading maps in batches |
/// | 5.5 | `bpf_probe_read_user` |
/// | 5.3 | loops, `pidfd_open` |
const MINIMUM: Release = Release::new(5, 17);

/// `uname -m`.
pub fn machine() -> String {
    // SAFETY: a block of character arrays, for which zero is a value.
    let mut name = unsafe { std::mem::zeroed::<libc::utsname>() };
    // SAFETY: the block outlives the call.
    if unsafe { libc::uname(&raw mut name) } != 0 {
        return String::new();
    }
    // SAFETY: the kernel ends the text with a null byte.
    unsafe { CStr::from_ptr(name.machine.as_ptr()) }.to_string_lossy().into_owned()
}

/// Checks the processor architecture.
pub fn architecture(machine: &str) -> Check {
    const NAME: &str = "architecture";
    if machine == "x86_64" {
        Check::ok(NAME, "x86-64")
    } else {
        Check::missing(NAME, format!("{machine}: memtrace supports only x86-64 yet"), "use it on an x86-64 machine")
    }
}

/// Checks the kernel's version. `bpf_loop` tells whether that helper was found: distributors bring features to
/// kernels with older numbers.
pub fn release(release: Option<Release>, bpf_loop: bool) -> Check {
    const NAME: &str = "kernel";
    match release {
        Some(release) if release >= MINIMUM => Check::ok(NAME, format!("Linux {release}")),
        Some(release) if bpf_loop => Check::ok(NAME, format!("Linux {release}, with the features of a newer one")),
        Some(release) => {
            Check::missing(NAME, format!("Linux {release} is too old (no bpf_loop)"), "use Linux 5.17 or newer")
        }
        None => Check::missing(NAME, "/proc/sys/kernel/osrelease can't be read", "mount -t proc proc /proc"),
    }
}

/// Gathers the facts for the checks of this module that follow the kernel's version, and makes them.
pub fn gather(release: Option<Release>, privileges: &Privileges) -> Vec<Check> {
    let pmu = Path::new("/sys/bus/event_source/devices/uprobe/type").exists();
    let links = multi::supported(release);
    let mut checks = vec![
        perf(pmu, links),
        multi_links(links),
        btf(Path::new("/sys/kernel/btf/vmlinux").exists()),
        tracefs(tracefs_mount(&fs::read_to_string("/proc/self/mounts").unwrap_or_default())),
        lockdown(&fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default()),
    ];
    if let Ok(scope) = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope") {
        checks.push(yama(scope.trim(), privileges.may_ptrace()));
    }
    checks
}

/// Checks the kernel's type information.
fn btf(there: bool) -> Check {
    const NAME: &str = "kernel type information";
    if there {
        Check::ok(NAME, "/sys/kernel/btf/vmlinux")
    } else {
        Check::degraded(
            NAME,
            "no /sys/kernel/btf/vmlinux; lost: nothing in this version, which reads no kernel structures",
            "use a kernel built with CONFIG_DEBUG_INFO_BTF",
        )
    }
}

/// Where tracefs is mounted, by the text of `/proc/self/mounts`.
fn tracefs_mount(mounts: &str) -> Option<&str> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let path = fields.next()?;
        (fields.next()? == "tracefs").then_some(path)
    })
}

/// Checks tracefs.
fn tracefs(mounted: Option<&str>) -> Check {
    const NAME: &str = "tracefs";
    match mounted {
        Some(path) => Check::ok(NAME, path),
        None => Check::degraded(
            NAME,
            "not mounted; lost: nothing, memtrace opens one of its own where it needs it",
            "mount -t tracefs tracefs /sys/kernel/tracing",
        ),
    }
}

/// Checks the perf event source of uprobes; `links` tells whether it is used at all.
fn perf(there: bool, links: bool) -> Check {
    const NAME: &str = "uprobes";
    if there {
        Check::ok(NAME, "/sys/bus/event_source/devices/uprobe")
    } else if links {
        Check::ok(NAME, "no perf event source for them, and none is needed: links over many sites take its place")
    } else {
        Check::missing(
            NAME,
            "no /sys/bus/event_source/devices/uprobe",
            "use a kernel built with CONFIG_UPROBE_EVENTS (and mount /sys: mount -t sysfs sysfs /sys)",
        )
    }
}

/// Checks the links over many sites.
fn multi_links(supported: bool) -> Check {
    const NAME: &str = "uprobe links over many sites";
    if supported {
        Check::ok(NAME, "there, with a process filter that covers all threads")
    } else {
        Check::degraded(
            NAME,
            "not there: detaching takes about 0.1 s for each probe instead of for all together",
            "use Linux 6.10 or newer",
        )
    }
}

/// Checks the lockdown security module; `modes` is its file, empty if there is none.
///
/// Confidentiality forbids reading kernel memory (`bpf_probe_read_kernel`), kprobes and tracefs; reading the memory of
/// user programs (`bpf_probe_read_user`, kernel/trace/bpf_trace.c since 5.5) and uprobes stay allowed.
fn lockdown(modes: &str) -> Check {
    const NAME: &str = "lockdown";
    let mode = modes.split(['[', ']']).nth(1).unwrap_or("");
    match mode {
        "" | "none" => Check::ok(NAME, "none"),
        "integrity" => Check::ok(NAME, "integrity: only writing kernel memory is forbidden"),
        "confidentiality" => Check::ok(
            NAME,
            "confidentiality: reading kernel memory is forbidden; memtrace reads that of the traced process only",
        ),
        other => Check::degraded(
            NAME,
            format!("a mode this version does not know: {other:?}"),
            "if the check of probes fails, boot without lockdown=",
        ),
    }
}

/// Checks the Yama security module, which restricts ptrace(2) (security/yama/yama_lsm.c). Attaching to a running process
/// needs no ptrace; a command started by memtrace is held by PTRACE_TRACEME.
fn yama(scope: &str, may_ptrace: bool) -> Check {
    const NAME: &str = "yama ptrace_scope";
    match scope {
        "0" | "1" => Check::ok(NAME, scope),
        "2" if may_ptrace => Check::ok(NAME, scope),
        "2" => Check::degraded(
            NAME,
            "2: without CAP_SYS_PTRACE a command can't be held at its start (`-- CMD`)",
            "run it with sudo, or sysctl kernel.yama.ptrace_scope=1",
        ),
        _ => Check::degraded(
            NAME,
            format!("{scope}: a command can't be held at its start (`-- CMD`); attaching to running processes works"),
            "boot with kernel.yama.ptrace_scope=1 in /etc/sysctl.d (a value of 3 can't be lowered before)",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn architectures() {
        assert_eq!(architecture("x86_64").state, State::Ok);
        assert_eq!(architecture("aarch64").state, State::Missing);
        assert_eq!(architecture("").state, State::Missing);
        assert_eq!(architecture(&machine()).state, State::Ok);
    }

    #[test]
    fn releases() {
        let state = |major, minor, bpf_loop| release(Some(Release::new(major, minor)), bpf_loop).state;
        assert_eq!(state(5, 17, true), State::Ok);
        assert_eq!(state(6, 18, false), State::Ok);
        assert_eq!(state(5, 14, true), State::Ok);
        assert_eq!(state(5, 10, false), State::Missing);
        assert_eq!(release(None, true).state, State::Missing);
    }

    #[test]
    fn perf_events_are_needed_without_links_only() {
        assert_eq!(perf(true, false).state, State::Ok);
        assert_eq!(perf(false, true).state, State::Ok);
        assert_eq!(perf(false, false).state, State::Missing);
        assert_eq!(multi_links(true).state, State::Ok);
        assert_eq!(multi_links(false).state, State::Degraded);
    }

    #[test]
    fn file_systems() {
        assert_eq!(btf(true).state, State::Ok);
        assert_eq!(btf(false).state, State::Degraded);
        assert_eq!(tracefs(Some("/sys/kernel/tracing")).state, State::Ok);
        assert_eq!(tracefs(None).state, State::Degraded);
        let mounts = "sysfs /sys sysfs rw 0 0\nnone /sys/kernel/tracing tracefs rw 0 0\n";
        assert_eq!(tracefs_mount(mounts), Some("/sys/kernel/tracing"));
        assert_eq!(tracefs_mount("tracefs /x sysfs rw 0 0\nx\n\n"), None);
    }

    #[test]
    fn lockdown_modes() {
        assert_eq!(lockdown("").detail, "none");
        assert_eq!(lockdown("[none] integrity confidentiality\n").detail, "none");
        assert!(lockdown("none [integrity] confidentiality\n").detail.starts_with("integrity"));
        let check = lockdown("none integrity [confidentiality]\n");
        assert_eq!(check.state, State::Ok);
        assert!(check.detail.starts_with("confidentiality"));
        assert_eq!(lockdown("none [total]").state, State::Degraded);
    }

    #[test]
    fn yama_scopes() {
        assert_eq!(yama("0", false).state, State::Ok);
        assert_eq!(yama("1", false).state, State::Ok);
        assert_eq!(yama("2", true).state, State::Ok);
        assert_eq!(yama("2", false).state, State::Degraded);
        assert_eq!(yama("3", true).state, State::Degraded);
    }
}
