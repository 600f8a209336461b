//! The kernel's own sums of a process's memory.

use std::fs;

/// Resident bytes; `None` if the process has ended.
pub fn rss(pid: u32) -> Option<u64> {
    field(pid, "Rss:")
}

/// A field of smaps_rollup in bytes.
pub fn field(pid: u32, name: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    let kilobytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kilobytes * 1024)
}
