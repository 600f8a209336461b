//! The kernel's own sums: `/proc/PID/smaps_rollup` and `/proc/PID/smaps` (proc_pid_smaps(5)).

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read as _},
};

use super::{Process, TargetError, gone, unreadable};
use crate::target::procfs;

/// Most bytes of a line that are looked at. Only lines with a path can be longer, whose end does not matter.
const MAX_LINE: u64 = 1024;

/// Sums over a process's mappings, in bytes.
///
/// The kernel walks the page tables for them, so they are exact, unlike the counters in `/proc/PID/status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rollup {
    /// Resident memory.
    pub rss: u64,
    /// Anonymous memory in that; `None` if the kernel does not say.
    pub anonymous: Option<u64>,
    /// Swapped-out memory, shared memory included.
    pub swap: Option<u64>,
    /// hugetlbfs pages, which are not in [`Self::rss`].
    pub hugetlb: Option<u64>,
}

/// What `/proc/PID/smaps` says of a mapping, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// Resident memory.
    pub rss: u64,
    /// Swapped-out memory.
    pub swap: u64,
    /// Memory mapped by huge page table entries.
    pub huge: u64,
    /// hugetlbfs pages.
    pub hugetlb: u64,
}

/// Reads the sums over all mappings.
///
/// # Errors
/// [`TargetError::Exited`] once the process has ended, [`TargetError::MainThreadEnded`],
/// [`TargetError::PermissionDenied`], [`TargetError::Io`].
pub fn rollup(process: &Process) -> Result<Rollup, TargetError> {
    const NAME: &str = "smaps_rollup";
    let text = procfs::read_small(&process.path(NAME)).map_err(|error| unreadable(process, NAME, error))?;
    process.check_alive()?;
    if text.is_empty() {
        return Err(gone(process));
    }
    parse_rollup(&text).ok_or_else(|| process.unreadable(NAME, io::ErrorKind::InvalidData.into()))
}

/// `None` without `Rss`.
fn parse_rollup(text: &[u8]) -> Option<Rollup> {
    let mut rollup = Rollup::default();
    let mut rss = None;
    for (key, value) in text.split(|byte| *byte == b'\n').filter_map(field) {
        let of = match key {
            b"Rss" => &mut rss,
            b"Anonymous" => &mut rollup.anonymous,
            b"Swap" => &mut rollup.swap,
            b"Shared_Hugetlb" | b"Private_Hugetlb" => &mut rollup.hugetlb,
            _ => continue,
        };
        *of = Some(of.unwrap_or(0).saturating_add(value));
    }
    rollup.rss = rss?;
    Some(rollup)
}

/// Calls `visit` for every mapping, ascending.
///
/// # Errors
/// As [`rollup`], and those of `visit`.
pub fn each(process: &Process, visit: impl FnMut(Entry) -> io::Result<()>) -> Result<(), TargetError> {
    let file = File::open(process.path("smaps")).map_err(|error| unreadable(process, "smaps", error))?;
    parse(BufReader::with_capacity(1 << 18, file), visit).map_err(|error| unreadable(process, "smaps", error))
}

fn parse(mut text: impl BufRead, mut visit: impl FnMut(Entry) -> io::Result<()>) -> io::Result<()> {
    let mut line = Vec::new();
    let mut current: Option<Entry> = None;
    loop {
        line.clear();
        if text.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        if line.pop() != Some(b'\n') {
            text.skip_until(b'\n')?;
        }
        if let Some((start, end)) = header(&line) {
            if let Some(complete) = current.replace(Entry { start, end, ..Entry::default() }) {
                visit(complete)?;
            }
        } else if let (Some(entry), Some((key, value))) = (&mut current, field(&line)) {
            let of = match key {
                b"Rss" => &mut entry.rss,
                b"Swap" => &mut entry.swap,
                b"AnonHugePages" | b"ShmemPmdMapped" | b"FilePmdMapped" => &mut entry.huge,
                b"Shared_Hugetlb" | b"Private_Hugetlb" => &mut entry.hugetlb,
                _ => continue,
            };
            *of = of.saturating_add(value);
        }
    }
    current.map_or(Ok(()), visit)
}

/// `start-end …`, hexadecimal.
fn header(line: &[u8]) -> Option<(u64, u64)> {
    let end = line.iter().position(|byte| *byte == b' ')?;
    let (start, end) = std::str::from_utf8(&line[..end]).ok()?.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    (start < end).then_some((start, end))
}

/// `Key:   123 kB`, in bytes.
fn field(line: &[u8]) -> Option<(&[u8], u64)> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    let value = line[colon + 1..].strip_suffix(b" kB")?.trim_ascii();
    let value: u64 = std::str::from_utf8(value).ok()?.parse().ok()?;
    Some((&line[..colon], value.checked_mul(1024)?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn entries(text: &[u8]) -> Vec<Entry> {
        let mut entries = Vec::new();
        parse(text, |entry| {
            entries.push(entry);
            Ok(())
        })
        .unwrap();
        entries
    }

    #[test]
    fn sums_with_and_without_every_field() {
        let whole = b"5594f905d000-7ffc62d66000 ---p 00000000 00:00 0    [rollup]\nRss:    1640 kB\nPss:   392 kB\n\
                      Anonymous:     112 kB\nShared_Hugetlb:    2048 kB\nPrivate_Hugetlb:   4096 kB\nSwap:    8 kB\n";
        let expected =
            Rollup { rss: 1640 << 10, anonymous: Some(112 << 10), swap: Some(8 << 10), hugetlb: Some(6 << 20) };
        assert_eq!(parse_rollup(whole), Some(expected));
        assert_eq!(parse_rollup(b"Rss: 4 kB"), Some(Rollup { rss: 4096, ..Rollup::default() }));
        assert_eq!(parse_rollup(b"Pss: 4 kB"), None);
        assert_eq!(parse_rollup(b"Rss: 99999999999999999999 kB"), None);
        assert_eq!(parse_rollup(b""), None);
    }

    #[test]
    fn mappings_with_hostile_names() {
        let long = format!("2000-3000 r-xp 0 8:1 5 /{}Rss: 7 kB", "x".repeat(5000));
        let text = format!(
            "1000-2000 rw-p 0 0:0 0 [heap]\nRss:  8 kB\nAnonHugePages:   2048 kB\nFilePmdMapped:  2048 kB\n{long}\n\
             Rss:  4 kB\nSwap:  12 kB\nVmFlags: rd ex \n3000-4000 r-xp 0 8:1 5 /Rss: 9 kB"
        );
        let expected = [
            Entry { start: 0x1000, end: 0x2000, rss: 8192, huge: 4 << 20, ..Entry::default() },
            Entry { start: 0x2000, end: 0x3000, rss: 4096, swap: 12288, ..Entry::default() },
            Entry { start: 0x3000, end: 0x4000, ..Entry::default() },
        ];
        assert_eq!(entries(text.as_bytes()), expected);
        assert!(entries(b"").is_empty());
        assert!(entries(b"Rss: 4 kB\n").is_empty());
        for length in 0..text.len() {
            let _ = entries(&text.as_bytes()[..length]);
        }
    }
}
