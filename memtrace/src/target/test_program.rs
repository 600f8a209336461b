//! Small programs to look at in tests.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use tempfile::TempDir;

/// A program that prints a line and sleeps.
pub const SLEEPER: &str = r#"
#include <stdio.h>
#include <unistd.h>
int main(void) { puts("ready"); fflush(stdout); for (;;) pause(); }
"#;

/// A directory with what was compiled; removed at the end.
pub struct Workshop(pub TempDir);

impl Workshop {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Compiles C source with the system's compiler.
    pub fn compile(&self, name: &str, source: &str, flags: &[&str]) -> PathBuf {
        let file = self.0.path().join(format!("{name}.c"));
        let output = self.0.path().join(name);
        std::fs::write(&file, source).unwrap();
        let done = Command::new("cc").arg(&file).arg("-o").arg(&output).args(flags).output().expect("cc is installed");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        output
    }
}

/// A running program; killed at the end.
pub struct Running(pub Child);

impl Running {
    /// Starts a command and waits for its first line.
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }

    pub fn program(path: &Path) -> Self {
        Self::start(&mut Command::new(path))
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn is_root() -> bool {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::geteuid() == 0 }
}
