//! Resource limits of memtrace itself.

use std::{fs::File, os::fd::AsRawFd as _};

use anyhow::bail;

/// Raises the soft limit of open files to the hard one: every module of a target is held open, and there may be more of
/// them than the usual 1024. A command that memtrace starts has its limits by then and is not affected.
pub fn raise_open_files() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure outlives the call.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 || limit.rlim_cur >= limit.rlim_max {
        return;
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: as above. If it is refused the old limit stays, and a target with more modules gives an error that says so.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
}

/// Files that can always be opened beside those of traced processes: the report takes some.
const RESERVE: u64 = 64;

/// Checks that there is room for the files of one more process, so that a trace of many comes to its end.
///
/// # Errors
/// There is not, with what to do.
pub fn check_open_files() -> anyhow::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure outlives the call.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return Ok(());
    }
    // The kernel gives the lowest number that is free.
    let lowest = File::open("/proc/self/limits").ok().and_then(|file| u64::try_from(file.as_raw_fd()).ok());
    if lowest.is_some_and(|lowest| lowest < limit.rlim_cur.saturating_sub(RESERVE)) {
        return Ok(());
    }
    bail!("memtrace has as many files open as it may ({}): raise the limit (`ulimit -n`)", limit.rlim_cur)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_process_more_is_refused_before_the_last_file_is_open() {
        check_open_files().unwrap();
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the structure outlives the call.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
        let mut open = Vec::new();
        while open.len() as u64 + RESERVE / 2 < limit.rlim_cur && check_open_files().is_ok() {
            open.push(File::open("/dev/null").unwrap());
        }
        assert!(check_open_files().unwrap_err().to_string().contains("ulimit -n"));
        // Others can still be opened.
        File::open("/dev/null").unwrap();
    }

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        raise_open_files();
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 1 };
        // SAFETY: the structure outlives the call.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
        assert_eq!(limit.rlim_cur, limit.rlim_max);
    }
}
