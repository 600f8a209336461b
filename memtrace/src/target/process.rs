//! The process to trace.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read as _},
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Path, PathBuf},
};

use super::{
    TargetError,
    procfs::{self, Stat},
};

/// A process that was running and could be inspected when it was opened.
///
/// Its pid file descriptor identifies it for good: pids are reused, so every method that reads `/proc/PID` reports
/// [`TargetError::Exited`] when the process has ended meanwhile.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    comm: String,
    uid: u32,
    exe: PathBuf,
    pidfd: OwnedFd,
}

/// Resident memory of a process, in bytes.
///
/// From `/proc/PID/status`, whose counters the kernel updates in per-CPU batches: each may be off by some dozens of
/// pages per CPU (proc_pid_status(5)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rss {
    /// All of it (`VmRSS`).
    pub total: u64,
    /// Anonymous memory (`RssAnon`), which is where allocators put their blocks.
    pub anonymous: u64,
    /// Pages of files (`RssFile`).
    pub file: u64,
    /// Shared memory and tmpfs (`RssShmem`).
    pub shared: u64,
}

/// Seccomp mode, as `/proc/PID/status` numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Seccomp {
    /// No restriction.
    Disabled,
    /// `SECCOMP_MODE_STRICT`: only read, write, exit and sigreturn.
    Strict,
    /// `SECCOMP_MODE_FILTER`.
    Filter,
}

/// What decides whether a kernel's known faults in uprobes would hurt this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HazardInputs {
    /// The strictest mode among its threads.
    pub seccomp: Seccomp,
    /// Whether any thread runs with a hardware shadow stack.
    pub shadow_stack: bool,
}

impl Process {
    /// Opens the process numbered `pid` (by memtrace's own pid namespace) and checks that it can be traced.
    ///
    /// # Errors
    /// [`TargetError`] says what `pid` is instead, or what is missing.
    pub fn open(pid: u32) -> Result<Self, TargetError> {
        let pidfd = match pidfd_open(pid) {
            Ok(pidfd) => pidfd,
            Err(error) => return Err(refused_pidfd(pid, &error)),
        };
        let mut process = Self { pid, comm: String::new(), uid: 0, exe: PathBuf::new(), pidfd };
        process.inspect()?;
        // While the process has not been reaped its pid is not reused, so all that was read is this process's.
        process.check_alive()?;
        Ok(process)
    }

    fn inspect(&mut self) -> Result<(), TargetError> {
        let pid = self.pid;
        let status = self.read("status")?;
        self.comm = self.read_comm()?;
        self.uid = procfs::number(&status, "Uid", 1)
            .and_then(|uid| u32::try_from(uid).ok())
            .ok_or_else(|| self.unreadable("status", io::ErrorKind::InvalidData.into()))?;
        // Kernels differ in whether pidfd_open takes threads.
        if let Some(tgid) = procfs::number(&status, "Tgid", 0).and_then(|tgid| u32::try_from(tgid).ok())
            && tgid != pid
        {
            return Err(TargetError::Thread { pid, process: tgid });
        }
        let stat = Stat::parse(&self.read("stat")?)
            .ok_or_else(|| self.unreadable("stat", io::ErrorKind::InvalidData.into()))?;
        if stat.kernel_thread {
            return Err(TargetError::KernelThread { pid, comm: self.comm.clone() });
        }
        if stat.ended() {
            return Err(self.ended());
        }
        self.exe = fs::read_link(self.path("exe")).map_err(|error| self.unreadable("exe", error))?;
        let mut header = [0; 20];
        let length = self.exe_file()?.read(&mut header).map_err(|error| self.unreadable("exe", error))?;
        check_program(pid, &header[..length])
    }

    /// Its number in memtrace's pid namespace.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Its command name at the time of opening. Any bytes but NUL can be in there (those that are no UTF-8 are
    /// replaced): escape before printing.
    pub fn comm(&self) -> &str {
        &self.comm
    }

    /// Takes over the name of a process that has forked this one, if this one is another program by now.
    pub fn named_as_forked_by(mut self, parent: &Self) -> Self {
        if self.exe != parent.exe {
            self.comm.clone_from(&parent.comm);
        }
        self
    }

    /// Its effective user.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Path of its program in its own mount namespace, for display: it may not lead to the program from here, and
    /// ends in ` (deleted)` when the file is gone.
    pub fn exe(&self) -> &Path {
        &self.exe
    }

    /// The file descriptor that identifies it; readable when the process has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether it still runs: not once it is a zombie.
    pub fn is_alive(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        loop {
            // SAFETY: one valid pollfd.
            match unsafe { libc::poll(&raw mut poll, 1, 0) } {
                0 => return true,
                -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                _ => return false,
            }
        }
    }

    /// Its resident memory.
    ///
    /// # Errors
    /// [`TargetError::Exited`] once it has ended.
    pub fn rss(&self) -> Result<Rss, TargetError> {
        let status = self.read("status")?;
        let rss = parse_rss(&status);
        self.check_alive()?;
        // A process that is about to end has given up its memory before it is a zombie.
        rss.ok_or(TargetError::Exited { pid: self.pid })
    }

    /// What the check for kernel hazards needs to know: the seccomp mode and shadow stack of all threads.
    ///
    /// # Errors
    /// [`TargetError::Exited`] once it has ended.
    pub fn hazard_inputs(&self) -> Result<HazardInputs, TargetError> {
        let mut inputs = HazardInputs { seccomp: Seccomp::Disabled, shadow_stack: false };
        let tasks = fs::read_dir(self.path("task")).map_err(|error| self.unreadable("task", error))?;
        for task in tasks {
            let task = task.map_err(|error| self.unreadable("task", error))?;
            match procfs::read_small(&task.path().join("status")) {
                Ok(status) => add_hazards(&mut inputs, &status),
                // The thread has ended.
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(self.unreadable("task/*/status", error)),
            }
        }
        self.check_alive()?;
        Ok(inputs)
    }

    /// Stack pointers of its threads, those left out that are running at this moment.
    pub fn stack_pointers(&self) -> Vec<u64> {
        let tasks = fs::read_dir(self.path("task")).into_iter().flatten().flatten();
        tasks.filter_map(|task| stack_pointer(&procfs::read_small(&task.path().join("syscall")).ok()?)).collect()
    }

    /// Opens its program, even if the file has been deleted or is in another mount namespace.
    pub(super) fn exe_file(&self) -> Result<File, TargetError> {
        File::open(self.path("exe")).map_err(|error| self.unreadable("exe", error))
    }

    /// `/proc/PID/NAME`.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.pid))
    }

    /// [`TargetError::Exited`] if it has ended.
    pub(super) fn check_alive(&self) -> Result<(), TargetError> {
        if self.is_alive() { Ok(()) } else { Err(TargetError::Exited { pid: self.pid }) }
    }

    /// The error for `/proc/PID/NAME` having failed with `error`.
    pub(super) fn unreadable(&self, name: &str, error: io::Error) -> TargetError {
        let pid = self.pid;
        if !self.is_alive() {
            return TargetError::Exited { pid };
        }
        match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => TargetError::PermissionDenied { pid, owner: self.owner() },
            // It lives, but /proc does not show it (mount option hidepid).
            Some(libc::ENOENT) if !self.path("").exists() => TargetError::PermissionDenied { pid, owner: None },
            // Files that are there as long as the process has memory: it is ending.
            Some(libc::ENOENT | libc::ESRCH) => TargetError::Exited { pid },
            _ => TargetError::Io { path: self.path(name).display().to_string(), source: error },
        }
    }

    fn owner(&self) -> Option<u32> {
        use std::os::unix::fs::MetadataExt as _;
        let status = self.read("status").ok();
        let uid = status.and_then(|status| procfs::number(&status, "Uid", 1)).and_then(|uid| u32::try_from(uid).ok());
        uid.or_else(|| fs::metadata(self.path("")).ok().map(|metadata| metadata.uid()))
    }

    /// The error for a process whose main thread has ended.
    pub(super) fn ended(&self) -> TargetError {
        let (pid, comm) = (self.pid, self.comm.clone());
        // The pidfd tells the end of the whole process.
        if self.is_alive() { TargetError::MainThreadEnded { pid, comm } } else { TargetError::Zombie { pid, comm } }
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, TargetError> {
        procfs::read_small(&self.path(name)).map_err(|error| self.unreadable(name, error))
    }

    fn read_comm(&self) -> Result<String, TargetError> {
        let comm = self.read("comm")?;
        let comm = comm.strip_suffix(b"\n").unwrap_or(&comm);
        Ok(OsStr::from_bytes(comm).to_string_lossy().into_owned())
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))?;
    if pid == 0 {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    // SAFETY: takes two integers.
    let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new file descriptor that nothing else owns; descriptors fit into an i32.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as i32) })
}

/// Why `pidfd_open` said no: pidfd_open(2), and Linux 6.9 and later say ENOENT instead of EINVAL for threads.
fn refused_pidfd(pid: u32, error: &io::Error) -> TargetError {
    match error.raw_os_error() {
        Some(libc::ENOSYS) => TargetError::NoPidfd,
        Some(libc::ESRCH) => TargetError::NoSuchProcess { pid },
        Some(libc::EINVAL | libc::ENOENT) => {
            let status = procfs::read_small(Path::new(&format!("/proc/{pid}/status"))).unwrap_or_default();
            match procfs::number(&status, "Tgid", 0).and_then(|tgid| u32::try_from(tgid).ok()) {
                Some(process) if process != pid => TargetError::Thread { pid, process },
                _ => TargetError::NoSuchProcess { pid },
            }
        }
        _ => TargetError::Io {
            path: format!("pidfd of {pid}"),
            source: io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO)),
        },
    }
}

/// Checks the first 20 bytes of a program: an ELF file (System V ABI, `e_ident` and `e_machine`), 64-bit, x86-64.
fn check_program(pid: u32, header: &[u8]) -> Result<(), TargetError> {
    const CLASS_32: u8 = 1;
    const CLASS_64: u8 = 2;
    const LITTLE_ENDIAN: u8 = 1;
    const X86_64: [u8; 2] = [62, 0];
    match header {
        [0x7f, b'E', b'L', b'F', CLASS_32, ..] => Err(TargetError::ThirtyTwoBit { pid }),
        [0x7f, b'E', b'L', b'F', CLASS_64, LITTLE_ENDIAN, rest @ ..] if rest.get(12..14) == Some(&X86_64) => Ok(()),
        _ => Err(TargetError::OtherMachine { pid }),
    }
}

/// `None` if the lines are missing: the process has no memory (any more).
fn parse_rss(status: &[u8]) -> Option<Rss> {
    Some(Rss {
        total: procfs::kibibytes(status, "VmRSS")?,
        anonymous: procfs::kibibytes(status, "RssAnon")?,
        file: procfs::kibibytes(status, "RssFile")?,
        shared: procfs::kibibytes(status, "RssShmem")?,
    })
}

/// Takes the `status` of one thread into account.
fn add_hazards(inputs: &mut HazardInputs, status: &[u8]) {
    let seccomp = match procfs::number(status, "Seccomp", 0) {
        // The line is missing if the kernel has no seccomp.
        None | Some(0) => Seccomp::Disabled,
        Some(1) => Seccomp::Strict,
        Some(_) => Seccomp::Filter,
    };
    inputs.seccomp = inputs.seccomp.max(seccomp);
    inputs.shadow_stack |= procfs::field(status, "x86_Thread_features")
        .is_some_and(|features| features.split_ascii_whitespace().any(|feature| feature == "shstk"));
}

/// The last but one number of `/proc/PID/task/TID/syscall` (proc_pid_syscall(5)); `None` for `running`.
fn stack_pointer(text: &[u8]) -> Option<u64> {
    let mut words = std::str::from_utf8(text).ok()?.split_ascii_whitespace().rev();
    let pointer = words.nth(1)?.strip_prefix("0x")?;
    u64::from_str_radix(pointer, 16).ok()
}

#[cfg(test)]
#[path = "process_tests.rs"]
mod tests;
