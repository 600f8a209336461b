//! A running memtrace.

use std::{ffi::OsStr, process::Command};

use super::process::{Ended, Process};

/// What the line on standard error that tells that recording has begun starts with.
const TRACING: &str = "tracing ";

pub struct Memtrace {
    process: Process,
}

/// `memtrace` with arguments.
pub fn command<A: AsRef<OsStr>>(arguments: &[A]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_memtrace"));
    command.args(arguments);
    command
}

/// Runs memtrace to its end with a closed input.
pub fn run<A: AsRef<OsStr>>(arguments: &[A]) -> Ended {
    Memtrace::start(arguments).end()
}

impl Memtrace {
    pub fn start<A: AsRef<OsStr>>(arguments: &[A]) -> Self {
        let mut process = Process::start(&mut command(arguments));
        process.close_input();
        Self { process }
    }

    /// Starts it and waits until it records. Panics with its words if it ends before that.
    pub fn tracing<A: AsRef<OsStr>>(arguments: &[A]) -> Self {
        let mut memtrace = Self::start(arguments);
        memtrace.wait_until_tracing();
        memtrace
    }

    /// As [`Self::tracing`], of one that was started by a command of its own.
    pub fn tracing_by(process: Process) -> Self {
        let mut memtrace = Self { process };
        memtrace.process.close_input();
        memtrace.wait_until_tracing();
        memtrace
    }

    pub fn wait_until_tracing(&mut self) {
        self.process.wait_for_error_line(TRACING);
    }

    /// Waits until it traces the program that a process has become which was named by its number.
    pub fn wait_until_followed(&mut self) {
        self.process.wait_for_error("exec that is followed", |line| line.contains("executed another program: tracing"));
    }

    /// Waits until it says that it knows the code of a file mapped during the trace, or of no file for an empty name. It
    /// says so with `-v`.
    pub fn wait_for_code(&mut self, name: &str) {
        let end = format!("{name}\" is known,");
        self.process.wait_for_error(&format!("code of {name:?}"), |line| {
            line.contains("the code of \"") && line.contains(&end) && (!name.is_empty() || line.contains("of \"\""))
        });
    }

    /// Waits for a line on standard error with `part` in it.
    pub fn wait_for_line(&mut self, part: &str) -> String {
        self.process.wait_for_error(&format!("line with `{part}`"), |line| line.contains(part))
    }

    /// Whether it has said that it records.
    pub fn has_traced(&mut self) -> bool {
        self.process.error_so_far().lines().any(|line| line.starts_with(TRACING))
    }

    /// Gives it more of the CPUs than the targets get, which keep them all busy: it starts up sooner.
    pub fn hurry(&self) {
        // SAFETY: a system call without pointers; the child has not been waited for.
        let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, self.process.pid(), -10) };
        assert_eq!(result, 0, "the priority of memtrace can't be raised");
    }

    pub fn signal(&self, signal: libc::c_int) {
        self.process.signal(signal);
    }

    /// Ends the trace as Ctrl-C does and waits for the report.
    pub fn interrupt(self) -> Ended {
        self.process.signal(libc::SIGINT);
        self.process.end()
    }

    /// Waits for the end that it comes to by itself.
    pub fn end(self) -> Ended {
        self.process.end()
    }
}

impl Ended {
    /// Panics unless memtrace succeeded.
    pub fn success(self) -> Self {
        assert_eq!(self.code(), 0, "memtrace failed:\n{}", self.stderr);
        self
    }

    /// Whether recording had begun.
    pub fn traced(&self) -> bool {
        self.stderr.lines().any(|line| line.starts_with(TRACING))
    }
}
