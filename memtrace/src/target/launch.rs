//! Starting a command so that it can be traced from its first allocation.
//!
//! The command runs under ptrace until its C library's code is mapped, which is before anything of that library can
//! be called; there the caller attaches its probes. It then runs on to the program's entry point, where all libraries
//! it was linked with are mapped, and is let go: for good, or until it ends, where it is held once more so that its memory
//! can be looked at. If memtrace dies meanwhile the kernel lets it go too.

use std::{
    ffi::OsString,
    io,
    os::unix::process::CommandExt as _,
    process::{Command, ExitStatus},
};

use libc::{c_int, c_long, c_void, pid_t};

/// Why a command could not be started for tracing.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The program is not there or can't be executed.
    #[error("{program}: {source}")]
    Spawn {
        /// Name as given.
        program: String,
        /// The system's words.
        source: io::Error,
    },
    /// ptrace or /proc refused.
    #[error("the command can't be held at its start ({what}: {source}): is another debugger or a sandbox at work?")]
    Hold {
        /// What was tried.
        what: &'static str,
        /// The system's words.
        source: io::Error,
    },
}

/// A command held before its first own instruction.
#[derive(Debug)]
pub struct Launched {
    pid: pid_t,
    /// Address of the program's entry point and the word that is there.
    entry: (u64, c_long),
}

/// What a command does that was let go until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It runs.
    Runs,
    /// It has executed another program and is held before that one's first instruction.
    Executed,
    /// It is held at its end, with its memory intact.
    Ending,
    /// It has ended.
    Ended(ExitStatus),
}

/// How far a held command ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// The condition came true.
    Condition,
    /// The program's entry point.
    Entry,
    /// It ended.
    Ended(ExitStatus),
}

impl Launched {
    /// Starts `argv` and holds it right after `execve`.
    ///
    /// # Errors
    /// [`LaunchError::Spawn`] if it can't be executed. After any other error the command has been killed.
    pub fn spawn(argv: &[OsString]) -> Result<Self, LaunchError> {
        let [program, arguments @ ..] = argv else {
            return Err(LaunchError::Spawn {
                program: "command".into(),
                source: io::Error::new(io::ErrorKind::InvalidInput, "nothing to start"),
            });
        };
        let mut command = Command::new(program);
        command.args(arguments);
        // SAFETY: between fork and exec only a system call is made.
        unsafe {
            command.pre_exec(|| {
                if libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) < 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let child = command
            .spawn()
            .map_err(|source| LaunchError::Spawn { program: program.to_string_lossy().into_owned(), source })?;
        // Its status is taken with waitpid, here and by the caller; the handle does neither kill nor wait when dropped.
        let pid = child.id() as pid_t;
        let mut launched = Self { pid, entry: (0, 0) };
        match launched.hold() {
            Ok(()) => Ok(launched),
            Err(error) => {
                launched.kill();
                Err(error)
            }
        }
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.pid as u32
    }

    fn hold(&mut self) -> Result<(), LaunchError> {
        let what = "waiting for execve";
        let status = wait(self.pid).map_err(|source| LaunchError::Hold { what, source })?;
        if !libc::WIFSTOPPED(status) {
            return Err(LaunchError::Hold { what, source: io::Error::other("it ended") });
        }
        self.hold_at_entry()
    }

    /// Prepares a command that is held after `execve` for [`Self::run_until`] and [`Self::run_to_entry`].
    ///
    /// # Errors
    /// ptrace refused.
    pub fn hold_at_entry(&mut self) -> Result<(), LaunchError> {
        self.request(libc::PTRACE_SETOPTIONS, 0, libc::PTRACE_O_TRACESYSGOOD as usize, "PTRACE_SETOPTIONS")?;
        let address = entry_point(self.pid).map_err(|source| LaunchError::Hold { what: "auxv", source })?;
        let word = self.request(libc::PTRACE_PEEKTEXT, address as usize, 0, "PTRACE_PEEKTEXT")?;
        self.entry = (address, word);
        // int3 in the lowest byte: the instruction at the address.
        let trap = (word & !0xff) | 0xcc;
        self.request(libc::PTRACE_POKETEXT, address as usize, trap as usize, "PTRACE_POKETEXT")?;
        Ok(())
    }

    /// Lets the command run until `condition` is true, checked after each of its `mmap` calls, or until its entry point.
    ///
    /// # Errors
    /// ptrace refused. The command is left as it is: kill it.
    pub fn run_until(&mut self, mut condition: impl FnMut() -> bool) -> Result<Reached, LaunchError> {
        if condition() {
            return Ok(Reached::Condition);
        }
        self.run(true, &mut condition)
    }

    /// Lets the command run to its entry point.
    ///
    /// # Errors
    /// As [`Self::run_until`].
    pub fn run_to_entry(&mut self) -> Result<Reached, LaunchError> {
        self.run(false, &mut || false)
    }

    fn run(&mut self, stop_at_mmap: bool, condition: &mut dyn FnMut() -> bool) -> Result<Reached, LaunchError> {
        let resume = if stop_at_mmap { libc::PTRACE_SYSCALL } else { libc::PTRACE_CONT };
        let mut signal = 0;
        loop {
            self.request(resume, 0, signal as usize, "resuming")?;
            let status = wait(self.pid).map_err(|source| LaunchError::Hold { what: "waiting", source })?;
            if !libc::WIFSTOPPED(status) {
                use std::os::unix::process::ExitStatusExt as _;
                return Ok(Reached::Ended(ExitStatus::from_raw(status)));
            }
            signal = 0;
            match libc::WSTOPSIG(status) {
                // A system call's entry or exit (PTRACE_O_TRACESYSGOOD).
                stop if stop == libc::SIGTRAP | 0x80 => {
                    if self.registers()?.orig_rax == libc::SYS_mmap as u64 && condition() {
                        return Ok(Reached::Condition);
                    }
                }
                libc::SIGTRAP => {
                    if self.at_entry()? {
                        return Ok(Reached::Entry);
                    }
                    signal = libc::SIGTRAP;
                }
                other => signal = other,
            }
        }
    }

    /// If the command has run into the trap at its entry point: takes the trap out again and says so.
    fn at_entry(&mut self) -> Result<bool, LaunchError> {
        let mut registers = self.registers()?;
        if registers.rip != self.entry.0 + 1 {
            return Ok(false);
        }
        self.request(libc::PTRACE_POKETEXT, self.entry.0 as usize, self.entry.1 as usize, "PTRACE_POKETEXT")?;
        registers.rip = self.entry.0;
        self.request(libc::PTRACE_SETREGS, 0, (&raw const registers) as usize, "PTRACE_SETREGS")?;
        Ok(true)
    }

    fn registers(&self) -> Result<libc::user_regs_struct, LaunchError> {
        // SAFETY: a block of integers, for which zero is a value.
        let mut registers = unsafe { std::mem::zeroed::<libc::user_regs_struct>() };
        self.request(libc::PTRACE_GETREGS, 0, (&raw mut registers) as usize, "PTRACE_GETREGS")?;
        Ok(registers)
    }

    /// Lets the command go on by itself.
    ///
    /// # Errors
    /// ptrace refused.
    pub fn release(self) -> Result<(), LaunchError> {
        self.request(libc::PTRACE_DETACH, 0, 0, "PTRACE_DETACH").map(drop)
    }

    /// Lets the command go on until it ends ([`Self::progress`]).
    ///
    /// # Errors
    /// ptrace refused.
    pub fn release_until_end(&self) -> Result<(), LaunchError> {
        let options = libc::PTRACE_O_TRACEEXIT | libc::PTRACE_O_TRACEEXEC;
        self.request(libc::PTRACE_SETOPTIONS, 0, options as usize, "PTRACE_SETOPTIONS")?;
        self.request(libc::PTRACE_CONT, 0, 0, "resuming").map(drop)
    }

    /// Lets the command go on from where it is held at its end.
    ///
    /// # Errors
    /// ptrace refused.
    pub fn resume(&self) -> Result<(), LaunchError> {
        self.request(libc::PTRACE_CONT, 0, 0, "resuming").map(drop)
    }

    /// What the command does now. To be called when it may have changed (`SIGCHLD`), by the thread that started it; hands
    /// on the signals that were sent to the command.
    ///
    /// # Errors
    /// ptrace refused, or the command was waited for elsewhere.
    pub fn progress(&self) -> Result<Progress, LaunchError> {
        use std::os::unix::process::ExitStatusExt as _;
        loop {
            let mut status = 0;
            // SAFETY: the status outlives the call.
            let changed = unsafe { libc::waitpid(self.pid, &raw mut status, libc::WNOHANG) };
            if changed == 0 {
                return Ok(Progress::Runs);
            }
            if changed < 0 {
                let source = io::Error::last_os_error();
                if source.kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                return Err(LaunchError::Hold { what: "waiting", source });
            }
            if !libc::WIFSTOPPED(status) {
                return Ok(Progress::Ended(ExitStatus::from_raw(status)));
            }
            let event = status >> 16;
            // The first thread can end long before its process does.
            if event == libc::PTRACE_EVENT_EXIT && ends_with_all_threads(self.pid) {
                return Ok(Progress::Ending);
            }
            if event == libc::PTRACE_EVENT_EXEC {
                return Ok(Progress::Executed);
            }
            let signal = if event == 0 && self.is_delivery() { libc::WSTOPSIG(status) } else { 0 };
            self.request(libc::PTRACE_CONT, 0, signal as usize, "resuming")?;
        }
    }

    /// Whether the stop is for the delivery of a signal: there is none to hand on when the whole group was stopped.
    fn is_delivery(&self) -> bool {
        let mut information = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
        self.request(libc::PTRACE_GETSIGINFO, 0, information.as_mut_ptr() as usize, "PTRACE_GETSIGINFO").is_ok()
    }

    /// Ends the command, which has not begun its own work yet.
    pub fn kill(self) {
        // SAFETY: signals a child that has not been waited for, so that its id can't belong to another process.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        while let Ok(status) = wait(self.pid) {
            if !libc::WIFSTOPPED(status) {
                break;
            }
        }
    }

    fn request(
        &self,
        request: libc::c_uint,
        address: usize,
        data: usize,
        what: &'static str,
    ) -> Result<c_long, LaunchError> {
        // SAFETY: `errno` of this thread. PTRACE_PEEKTEXT returns its value, which may be -1.
        unsafe { *libc::__errno_location() = 0 };
        // SAFETY: acts on a child held by this thread; addresses in our memory are those of live registers above.
        let result = unsafe { libc::ptrace(request, self.pid, address as *mut c_void, data as *mut c_void) };
        let error = io::Error::last_os_error();
        if result == -1 && error.raw_os_error() != Some(0) {
            return Err(LaunchError::Hold { what, source: error });
        }
        Ok(result)
    }
}

/// Whether a process whose first thread ends is ending as a whole: every other thread is about to be killed.
fn ends_with_all_threads(pid: pid_t) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    let others = tasks.flatten().filter(|task| task.file_name().to_str() != Some(&pid.to_string()));
    others.into_iter().all(|task| {
        // A thread that is gone by now was one of them.
        let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let pending = field("SigPnd:").and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(u64::MAX);
        let ended = field("State:").is_none_or(|state| state.starts_with(['Z', 'X']));
        ended || pending & 1 << (libc::SIGKILL - 1) != 0
    })
}

/// Waits for the next change of state of a child: its wait status.
///
/// # Errors
/// It is no child of this process.
pub fn wait(pid: pid_t) -> io::Result<c_int> {
    let mut status = 0;
    loop {
        // SAFETY: the status outlives the call.
        if unsafe { libc::waitpid(pid, &raw mut status, 0) } >= 0 {
            return Ok(status);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// `AT_ENTRY` of a process: the run-time address of its program's entry point.
fn entry_point(pid: pid_t) -> io::Result<u64> {
    const AT_ENTRY: u64 = 9;
    let auxv = std::fs::read(format!("/proc/{pid}/auxv"))?;
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
    auxv.chunks_exact(16)
        .find(|pair| word(&pair[..8]) == AT_ENTRY)
        .map(|pair| word(&pair[8..]))
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no entry point"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt as _;

    fn maps_libc(pid: u32) -> bool {
        std::fs::read_to_string(format!("/proc/{pid}/maps"))
            .unwrap()
            .lines()
            .any(|line| line.contains("r-xp") && line.contains("libc.so"))
    }

    fn argv(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn holds_before_the_c_library_runs_and_lets_go() {
        let mut launched = Launched::spawn(&argv(&["sh", "-c", "exit 7"])).unwrap();
        let pid = launched.pid();
        assert!(!maps_libc(pid), "execve alone maps no C library");
        assert_eq!(launched.run_until(|| maps_libc(pid)).unwrap(), Reached::Condition);
        assert_eq!(launched.run_to_entry().unwrap(), Reached::Entry);
        launched.release().unwrap();
        let status = ExitStatus::from_raw(wait(pid as pid_t).unwrap());
        assert_eq!(status.code(), Some(7));
    }

    /// Calls `progress` until it says something else than that the command runs.
    fn next(launched: &Launched) -> Progress {
        loop {
            match launched.progress().unwrap() {
                Progress::Runs => std::thread::sleep(std::time::Duration::from_millis(1)),
                other => return other,
            }
        }
    }

    #[test]
    fn is_held_at_its_end_with_its_memory() {
        // The signal that it sends itself must reach it.
        let mut launched = Launched::spawn(&argv(&["sh", "-c", "trap 'exit 9' USR1; kill -USR1 $$; exit 3"])).unwrap();
        let pid = launched.pid();
        assert_eq!(launched.run_to_entry().unwrap(), Reached::Entry);
        launched.release_until_end().unwrap();
        assert_eq!(next(&launched), Progress::Ending);
        assert!(maps_libc(pid));
        launched.release().unwrap();
        let status = ExitStatus::from_raw(wait(pid as pid_t).unwrap());
        assert_eq!(status.code(), Some(9));
    }

    #[test]
    fn is_held_where_it_executes_another_program() {
        let mut launched = Launched::spawn(&argv(&["sh", "-c", "exec sh -c 'exit 5'"])).unwrap();
        let pid = launched.pid();
        assert_eq!(launched.run_to_entry().unwrap(), Reached::Entry);
        launched.release_until_end().unwrap();
        assert_eq!(next(&launched), Progress::Executed);
        launched.hold_at_entry().unwrap();
        assert!(!maps_libc(pid));
        assert_eq!(launched.run_until(|| maps_libc(pid)).unwrap(), Reached::Condition);
        assert_eq!(launched.run_to_entry().unwrap(), Reached::Entry);
        launched.release_until_end().unwrap();
        assert_eq!(next(&launched), Progress::Ending);
        launched.release().unwrap();
        assert_eq!(ExitStatus::from_raw(wait(pid as pid_t).unwrap()).code(), Some(5));
    }

    #[test]
    fn a_killed_command_has_ended() {
        let mut launched = Launched::spawn(&argv(&["sleep", "1000"])).unwrap();
        assert_eq!(launched.run_to_entry().unwrap(), Reached::Entry);
        launched.release_until_end().unwrap();
        // SAFETY: signals a child that has not been waited for.
        unsafe { libc::kill(launched.pid() as pid_t, libc::SIGKILL) };
        let ended = match next(&launched) {
            Progress::Ending => {
                launched.resume().unwrap();
                next(&launched)
            }
            other => other,
        };
        assert!(matches!(ended, Progress::Ended(status) if status.signal() == Some(libc::SIGKILL)), "{ended:?}");
    }

    #[test]
    fn stops_at_the_entry_point_when_the_condition_never_holds() {
        let mut launched = Launched::spawn(&argv(&["true"])).unwrap();
        assert_eq!(launched.run_until(|| false).unwrap(), Reached::Entry);
        launched.kill();
    }

    #[test]
    fn a_missing_program_is_an_error() {
        let error = Launched::spawn(&argv(&["/nonexistent/program"])).unwrap_err();
        assert!(matches!(error, LaunchError::Spawn { .. }), "{error}");
    }
}
