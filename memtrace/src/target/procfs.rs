//! Reading the text files of `/proc/PID`: bounded reads, and parsers of what is needed.

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
};

/// Most bytes of a small `/proc` file.
const SMALL: u64 = 64 * 1024;

/// `flags` of `/proc/PID/stat`: a kernel thread (`PF_KTHREAD`, include/linux/sched.h).
const PF_KTHREAD: u64 = 0x0020_0000;

/// Reads a whole file of at most `limit` bytes; a longer one is an error ([`io::ErrorKind::FileTooLarge`]).
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(bytes)
}

/// Reads a small file, such as `status`.
pub fn read_small(path: &Path) -> io::Result<Vec<u8>> {
    read(path, SMALL)
}

/// Value of the line `KEY:<blanks>VALUE` of a `status` file (proc_pid_status(5)).
///
/// The process chooses what stands in the `Name:` line, but the kernel escapes newlines there, so that it cannot
/// make up other lines.
pub fn field<'a>(status: &'a [u8], key: &str) -> Option<&'a str> {
    status.split(|byte| *byte == b'\n').find_map(|line| {
        let value = line.strip_prefix(key.as_bytes())?.strip_prefix(b":")?;
        Some(std::str::from_utf8(value).ok()?.trim())
    })
}

/// A `status` field that is a number, or several of which the `index`th is wanted.
pub fn number(status: &[u8], key: &str, index: usize) -> Option<u64> {
    field(status, key)?.split_ascii_whitespace().nth(index)?.parse().ok()
}

/// A `status` field in `kB` (which is KiB), in bytes.
pub fn kibibytes(status: &[u8], key: &str) -> Option<u64> {
    number(status, key, 0)?.checked_mul(1024)
}

/// What is needed of `/proc/PID/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// State letter: `R`, `S`, …, `Z` for a zombie, `X` for dead.
    pub state: u8,
    /// Whether it is a kernel thread.
    pub kernel_thread: bool,
}

impl Stat {
    /// Parses the file. The process chooses the second field, which may hold blanks, newlines and parentheses: the
    /// rest starts after the last closing one (proc_pid_stat(5)).
    pub fn parse(stat: &[u8]) -> Option<Self> {
        let end = stat.iter().rposition(|byte| *byte == b')')?;
        let mut fields = std::str::from_utf8(&stat[end + 1..]).ok()?.split_ascii_whitespace();
        let state = fields.next()?;
        // Of the fields after the name: state, ppid, pgrp, session, tty_nr, tpgid, flags.
        let flags: u64 = fields.nth(5)?.parse().ok()?;
        Some(Self { state: *state.as_bytes().first()?, kernel_thread: flags & PF_KTHREAD != 0 })
    }

    /// Whether the thread has ended.
    pub fn ended(self) -> bool {
        matches!(self.state, b'Z' | b'X' | b'x')
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn fields_of_status() {
        let status = b"Name:\ta\\nTgid:\\t9\nTgid:\t41\nUid:\t1\t2\t3\t4\nRssAnon:\t     112 kB\nSeccomp:\t2\nSeccomp_filters:\t1\n";
        assert_eq!(number(status, "Tgid", 0), Some(41));
        assert_eq!(number(status, "Uid", 1), Some(2));
        assert_eq!(kibibytes(status, "RssAnon"), Some(112 * 1024));
        assert_eq!(number(status, "Seccomp", 0), Some(2));
        assert_eq!(field(status, "VmRSS"), None);
        assert_eq!(kibibytes(b"RssAnon: 18446744073709551615 kB", "RssAnon"), None);
    }

    #[test]
    fn stat_with_a_hostile_name() {
        let stat = b"7 (a) Z 1 1 1 0 -1 2097152 (\n)) S 1 1 1 0 -1 4194304 0 0";
        let parsed = Stat::parse(stat).unwrap();
        assert_eq!(parsed.state, b'S');
        assert!(!parsed.kernel_thread);
        assert!(!parsed.ended());
        let kernel = Stat::parse(b"2 (kthreadd) S 0 0 0 0 -1 2129984 0 0").unwrap();
        assert!(kernel.kernel_thread);
        assert!(Stat::parse(b"2 (x) Z 0 0 0 0 -1 4 0").unwrap().ended());
    }

    #[test]
    fn damaged_stat_is_none() {
        let whole = b"2 (x) Z 0 0 0 0 -1 4 0";
        for length in 0..whole.len() - 3 {
            assert_eq!(Stat::parse(&whole[..length]), None, "{length}");
        }
    }

    #[test]
    fn reads_are_bounded() {
        let error = read(Path::new("/dev/zero"), 100).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert!(read(Path::new("/proc/self/status"), SMALL).is_ok());
    }
}
