//! A running fixture, and its side of the protocol.

use std::{ffi::OsStr, process::Command};

use super::{
    build::Fixture,
    process::{Ended, Process, child_of},
    truth::Truth,
};

/// A fixture that has said `ready`.
pub struct Target {
    process: Process,
    pid: u32,
}

impl Target {
    /// Starts a fixture and waits for `ready`.
    pub fn start<A: AsRef<OsStr>>(fixture: Fixture, arguments: &[A]) -> Self {
        Self::of(Command::new(fixture.path()).args(arguments))
    }

    /// Starts a fixture by a command and waits for `ready`.
    pub fn of(command: &mut Command) -> Self {
        let mut process = Process::start(command);
        let line = process.line();
        assert_eq!(line, "ready", "{command:?}: the protocol begins with another line");
        let pid = process.pid();
        Self { process, pid }
    }

    /// As [`Self::of`], for a command that runs the fixture as its child.
    pub fn child_of(command: &mut Command) -> Self {
        let mut target = Self::of(command);
        target.pid = child_of(target.pid);
        target
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Lets it work.
    pub fn go(&mut self) {
        self.process.send("go");
    }

    /// Waits for a line.
    pub fn wait_for(&mut self, line: &str) {
        assert_eq!(self.process.line(), line);
    }

    /// Waits for its truth and for `done`.
    pub fn truth(&mut self) -> Truth {
        let truth = Truth::parse(&self.process.line());
        let line = self.process.line();
        assert_eq!(line, "done", "the protocol goes on with another line");
        truth
    }

    /// Waits for `ready` again (after an exec).
    pub fn wait_ready(&mut self) {
        assert_eq!(self.process.line(), "ready");
    }

    /// How many rounds [`Fixture::Busy`] has made.
    pub fn rounds(&mut self) -> u64 {
        self.ask("rounds")
    }

    /// Lets [`Fixture::Busy`] fork a child that goes on like itself: its process id.
    pub fn fork(&mut self) -> u32 {
        u32::try_from(self.ask("fork")).expect("a process id")
    }

    /// How many rounds that child has made.
    pub fn child_rounds(&mut self) -> u64 {
        self.ask("child")
    }

    fn ask(&mut self, question: &str) -> u64 {
        self.process.send(question);
        self.process.line().parse().expect("a number")
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.process.try_status().is_none()
    }

    /// Lets it go on behind its `done`, whatever it does then.
    pub fn end_line(&mut self) {
        self.process.send("end");
    }

    /// Lets it end, and waits for that.
    pub fn finish(mut self) -> Ended {
        self.process.send_last("end");
        self.process.end()
    }
}
