//! Names of generated code, out of the map that a just-in-time compiler writes for profilers.
//!
//! Every line is `START SIZE NAME`, the numbers hexadecimal, the name up to the end of the line (the kernel's sources,
//! tools/perf/Documentation/jit-interface.txt). Code is generated anew where other code was, so of lines that overlap the
//! later one holds. The target writes the file: it may hold anything, and may be written while it is read.

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
};

use super::demangle;

/// Most bytes of a map that are read: half a million functions of a large program.
const MAX_BYTES: u64 = 64 << 20;

/// A map.
#[derive(Debug, Default)]
pub struct PerfMap {
    text: Vec<u8>,
    /// Whether there was more than is read.
    pub cut: bool,
}

impl PerfMap {
    /// Reads the map at `path`, at most 64 MiB of it.
    ///
    /// # Errors
    /// It can't be read.
    pub fn read(path: &Path) -> io::Result<Self> {
        let mut text = Vec::new();
        File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut text)?;
        let cut = text.len() as u64 > MAX_BYTES;
        text.truncate(MAX_BYTES as usize);
        // A line that is being written is none yet.
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        text.truncate(whole);
        Ok(Self { text, cut })
    }

    /// The name for each of `addresses`, which are in ascending order.
    pub fn names(&self, addresses: &[u64]) -> Vec<Option<String>> {
        let mut names = vec![None; addresses.len()];
        // For every position the first one from there on that has no name yet: no position is looked at twice, however
        // often lines overlap.
        let mut next: Vec<usize> = (0..=addresses.len()).collect();
        for line in self.text.split(|byte| *byte == b'\n').rev() {
            let Some((start, end, name)) = parse(line) else { continue };
            let first = addresses.partition_point(|address| *address < start);
            let mut position = find(&mut next, first);
            while position < addresses.len() && addresses[position] < end {
                names[position] = Some(demangle::bounded(&String::from_utf8_lossy(name)).into_owned());
                next[position] = position + 1;
                position = find(&mut next, position);
            }
        }
        names
    }
}

/// Follows the links from `position` to their end, and shortens them.
fn find(next: &mut [usize], position: usize) -> usize {
    let mut end = position;
    while next[end] != end {
        end = next[end];
    }
    let mut link = position;
    while next[link] != end && link != end {
        (next[link], link) = (end, next[link]);
    }
    end
}

fn parse(line: &[u8]) -> Option<(u64, u64, &[u8])> {
    let mut fields = line.splitn(3, |byte| *byte == b' ');
    let (start, size, name) = (number(fields.next()?)?, number(fields.next()?)?, fields.next()?);
    let name = name.trim_ascii();
    if size == 0 || name.is_empty() {
        return None;
    }
    Some((start, start.checked_add(size)?, name))
}

fn number(digits: &[u8]) -> Option<u64> {
    // Some writers put 0x in front.
    let digits = std::str::from_utf8(digits).ok()?;
    let digits = digits.strip_prefix("0x").unwrap_or(digits);
    if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    u64::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn names(text: &[u8], addresses: &[u64]) -> Vec<Option<String>> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("map");
        std::fs::write(&path, text).unwrap();
        PerfMap::read(&path).unwrap().names(addresses)
    }

    #[test]
    fn later_lines_win() {
        let text = b"1000 100 old\n1080 40 LazyCompile:~f /a b.js:1:2\n0x10c0 10 new\n1000 8 newest\n";
        let found = names(text, &[0xfff, 0x1000, 0x1007, 0x1008, 0x1080, 0x10bf, 0x10c0, 0x10d0, 0x10ff, 0x1100]);
        let js = Some("LazyCompile:~f /a b.js:1:2");
        let expected =
            [None, Some("newest"), Some("newest"), Some("old"), js, js, Some("new"), Some("old"), Some("old"), None];
        assert_eq!(found.iter().map(Option::as_deref).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn lines_that_are_none() {
        let lines: &[&[u8]] = &[
            b"",
            b"x 10 f",
            b"1000",
            b"1000 10",
            b"1000 10 ",
            b"1000 0 f",
            b"1000 -1 f",
            b"+1000 10 f",
            b"ffffffffffffffff 10 f",
            b"11111111111111111 10 f",
            b"\xff 10 f",
        ];
        for line in lines {
            assert_eq!(names(&[line, &b"\n"[..]].concat(), &[0x1000, 0x1001]), [None, None], "{line:?}");
        }
        // Not finished.
        assert_eq!(names(b"1000 10 f", &[0x1000]), [None]);
        assert_eq!(names(b"1000 10 \xff\n", &[0x1000]), [Some("\u{fffd}".to_owned())]);
    }

    /// Every line covers every address: what is read must be looked at once, not once for every line.
    #[test]
    fn overlapping_lines_cost_nothing() {
        let mut text = Vec::new();
        for line in 0..200_000 {
            text.extend(format!("0 ffffffff f{line}\n").into_bytes());
        }
        let addresses: Vec<u64> = (0..50_000).collect();
        let found = names(&text, &addresses);
        assert!(found.iter().all(|name| name.as_deref() == Some("f199999")));
    }

    #[test]
    fn a_large_map_is_cut() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("map");
        File::create(&path).unwrap().set_len(MAX_BYTES + 5).unwrap();
        let map = PerfMap::read(&path).unwrap();
        assert!(map.cut && map.text.is_empty());
    }
}
