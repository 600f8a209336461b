//! Resource limits of memtrace itself.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        raise_open_files();
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 1 };
        // SAFETY: the structure outlives the call.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
        assert_eq!(limit.rlim_cur, limit.rlim_max);
    }
}
