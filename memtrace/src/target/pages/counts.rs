//! The kernel's own count of a process's page faults.

use std::{fs, io, os::fd::AsRawFd as _};

use super::{Process, TargetError};
use crate::target::procfs;

/// Page faults of all threads of a process since it started, those that have ended included.
///
/// The kernel counts a fault when it is done (`mm_account_fault`, mm/memory.c): not one that fails, and one that is retried
/// only once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Without reading from a disk.
    pub minor: u64,
    /// With reading from a disk.
    pub major: u64,
}

impl FaultCounts {
    /// All of them.
    pub fn total(self) -> u64 {
        self.minor.saturating_add(self.major)
    }
}

/// Reads the counts. They outlive the process's memory: a zombie has them until it is reaped.
///
/// # Errors
/// [`TargetError::Exited`] once it has been reaped, [`TargetError::Io`].
pub fn fault_counts(process: &Process) -> Result<FaultCounts, TargetError> {
    let stat = procfs::read_small(&process.path("stat")).map_err(|error| process.unreadable("stat", error))?;
    // Only now: as long as it has not been reaped its number is not another's.
    if is_reaped(process) {
        return Err(TargetError::Exited { pid: process.pid() });
    }
    parse(&stat).ok_or_else(|| process.unreadable("stat", io::ErrorKind::InvalidData.into()))
}

/// Fields 10 and 12 of `/proc/PID/stat` (proc_pid_stat(5)). The process chooses the second field, which may hold blanks and
/// parentheses: the third starts after the last closing one.
fn parse(stat: &[u8]) -> Option<FaultCounts> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let mut fields = std::str::from_utf8(&stat[end + 1..]).ok()?.split_ascii_whitespace().skip(7);
    let minor = fields.next()?.parse().ok()?;
    let major = fields.nth(1)?.parse().ok()?;
    // A number that a cut line ends in may be cut itself.
    fields.next()?;
    Some(FaultCounts { minor, major })
}

/// Whether nothing is left of the process: its pid file descriptor has no number any more (pidfd_open(2)).
fn is_reaped(process: &Process) -> bool {
    if process.is_alive() {
        return false;
    }
    let path = format!("/proc/self/fdinfo/{}", process.pidfd().as_raw_fd());
    let number = fs::read(path).ok().and_then(|info| procfs::field(&info, "Pid").map(str::to_owned));
    number.as_deref() != Some(process.pid().to_string().as_str())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::target::test_program::{Running, SLEEPER, Workshop};

    #[test]
    fn names_with_parentheses() {
        let stat = b"7 (a) 1 2 (3 \n) S 1 7 7 0 -1 4194304 123 45 6 78 0 0";
        assert_eq!(parse(stat), Some(FaultCounts { minor: 123, major: 6 }));
        let start = stat.len() - b" 78 0 0".len();
        for length in 0..=start {
            assert_eq!(parse(&stat[..length]), None, "{length}");
        }
    }

    #[test]
    fn faults_of_this_process_are_counted() {
        let process = Process::open(std::process::id()).unwrap();
        let before = fault_counts(&process).unwrap();
        let pages = std::hint::black_box(vec![1u8; 64 << 20]);
        let after = fault_counts(&process).unwrap();
        drop(pages);
        // One fault a page, unless huge pages are always on.
        assert!(after.total() >= before.total() + 32, "{before:?} {after:?}");
    }

    #[test]
    fn counts_of_a_zombie_and_after() {
        let workshop = Workshop::new();
        let mut running = Running::program(&workshop.compile("sleeper", SLEEPER, &[]));
        let process = Process::open(running.pid()).unwrap();
        let before = fault_counts(&process).unwrap();
        running.0.kill().unwrap();
        while process.is_alive() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(fault_counts(&process).unwrap().total() >= before.total());
        running.0.wait().unwrap();
        assert!(matches!(fault_counts(&process), Err(TargetError::Exited { .. })));
    }
}
