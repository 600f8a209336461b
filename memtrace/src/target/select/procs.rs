//! The processes that a `/proc` shows, and what selections ask about each.
//!
//! Processes end at any time: what cannot be read any more is `None`, never an error.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::super::{
    TargetError,
    procfs::{self, Stat},
};

/// A mounted `/proc`. Its numbers are those of the pid namespace that it was mounted for.
#[derive(Clone, Debug)]
pub struct Procs {
    root: PathBuf,
    own: u32,
}

impl Procs {
    /// `root` is where it is mounted.
    pub fn new(root: &Path) -> Self {
        // memtrace's number there, which is another one than getpid's if /proc is that of an outer namespace.
        let own = fs::read_link(root.join("self")).ok().and_then(|own| own.to_str()?.parse().ok());
        Self { root: root.to_owned(), own: own.unwrap_or_else(std::process::id) }
    }

    /// memtrace itself.
    pub fn own(&self) -> u32 {
        self.own
    }

    /// `/proc/NAME`.
    pub fn global(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// `/proc/PID/NAME`.
    pub fn path(&self, pid: u32, name: &str) -> PathBuf {
        self.root.join(format!("{pid}/{name}"))
    }

    /// The numbers of all processes, kernel threads and zombies included, ascending.
    ///
    /// # Errors
    /// [`TargetError::Io`] if there is no `/proc`.
    pub fn all(&self) -> Result<Vec<u32>, TargetError> {
        let failed = |source: io::Error| TargetError::Io { path: self.root.to_string_lossy().into_owned(), source };
        let mut pids = Vec::new();
        for entry in fs::read_dir(&self.root).map_err(failed)? {
            pids.extend(entry.map_err(failed)?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
        }
        pids.sort_unstable();
        Ok(pids)
    }

    /// The processes of user programs that are running, without memtrace itself; ascending.
    ///
    /// # Errors
    /// As [`Self::all`].
    pub fn traceable(&self) -> Result<Vec<u32>, TargetError> {
        Ok(self.all()?.into_iter().filter(|pid| self.is_traceable(*pid)).collect())
    }

    /// Whether it runs, is no kernel thread and not memtrace itself.
    pub fn is_traceable(&self, pid: u32) -> bool {
        let stat = || Stat::parse(&procfs::read_small(&self.path(pid, "stat")).ok()?);
        pid != self.own && stat().is_some_and(|stat| !stat.kernel_thread && !stat.ended())
    }

    /// Its command name: any bytes but NUL, newlines too.
    pub fn comm(&self, pid: u32) -> Option<Vec<u8>> {
        let mut comm = procfs::read_small(&self.path(pid, "comm")).ok()?;
        if comm.last() == Some(&b'\n') {
            comm.pop();
        }
        Some(comm)
    }

    /// Its numbers in the pid namespace of this `/proc` and, from there inwards, in all others that it is in; the last is
    /// that of its own namespace (`NSpid`, proc_pid_status(5)).
    pub fn numbers(&self, pid: u32) -> Option<Vec<u32>> {
        let status = procfs::read_small(&self.path(pid, "status")).ok()?;
        let numbers = procfs::field(&status, "NSpid")?.split_ascii_whitespace().map(str::parse);
        numbers.collect::<Result<Vec<u32>, _>>().ok().filter(|numbers| !numbers.is_empty())
    }
}
