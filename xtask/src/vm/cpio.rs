//! Writing an initramfs: a cpio archive in the "newc" form (Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeSet;

/// Types of files in `st_mode`.
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const CHARACTER_DEVICE: u32 = 0o020_000;
const SYMBOLIC_LINK: u32 = 0o120_000;

/// An archive in memory. Paths are relative to the root, without a leading slash.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    /// Everything that is there.
    paths: BTreeSet<String>,
}

/// What makes an entry besides its name and contents.
#[derive(Default)]
struct Meta {
    mode: u32,
    /// Of the last change, in seconds.
    time: u32,
    device: (u32, u32),
}

impl Archive {
    /// Adds a directory with those above it, unless it is there.
    pub fn directory(&mut self, path: &str) {
        self.directory_with(path, 0o755);
    }

    /// Adds a directory to which everybody may write.
    pub fn open_directory(&mut self, path: &str) {
        self.directory_with(path, 0o1777);
    }

    fn directory_with(&mut self, path: &str, permissions: u32) {
        if !path.is_empty() && self.is_new(path) {
            self.entry(path, &Meta { mode: DIRECTORY | permissions, ..Meta::default() }, &[]);
        }
    }

    /// Adds an executable file that was changed last at `time`, and the directories above it, unless it is there.
    pub fn executable(&mut self, path: &str, time: u32, contents: &[u8]) {
        if self.is_new(path) {
            self.entry(path, &Meta { mode: REGULAR | 0o755, time, ..Meta::default() }, contents);
        }
    }

    /// Adds a symbolic link, and the directories above it, unless it is there.
    pub fn link(&mut self, path: &str, to: &str) {
        if self.is_new(path) {
            self.entry(path, &Meta { mode: SYMBOLIC_LINK | 0o777, ..Meta::default() }, to.as_bytes());
        }
    }

    /// Adds a character device.
    pub fn device(&mut self, path: &str, major: u32, minor: u32) {
        self.is_new(path);
        self.entry(path, &Meta { mode: CHARACTER_DEVICE | 0o600, device: (major, minor), ..Meta::default() }, &[]);
    }

    /// The archive with its end mark.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", &Meta::default(), &[]);
        self.bytes
    }

    /// Whether nothing has this path yet; makes the directories above it.
    fn is_new(&mut self, path: &str) -> bool {
        let new = self.paths.insert(path.to_owned());
        if let (true, Some((parent, _))) = (new, path.rsplit_once('/')) {
            self.directory(parent);
        }
        new
    }

    fn entry(&mut self, path: &str, meta: &Meta, contents: &[u8]) {
        self.entries += 1;
        let mut header = String::from("070701");
        let words = [
            self.entries,
            meta.mode,
            0, // uid
            0, // gid
            1, // links
            meta.time,
            contents.len() as u32,
            0, // device it is on
            0,
            meta.device.0,
            meta.device.1,
            path.len() as u32 + 1,
            0, // no checksum
        ];
        for word in words {
            header.push_str(&format!("{word:08x}"));
        }
        self.bytes.extend(header.as_bytes());
        self.bytes.extend(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(contents);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// Name, mode and contents of every entry.
    fn read(bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let word = |number: usize| {
                let from = at + 6 + number * 8;
                u32::from_str_radix(std::str::from_utf8(&bytes[from..from + 8]).unwrap(), 16).unwrap()
            };
            let (mode, size, name) = (word(1), word(6) as usize, word(11) as usize);
            let contents = (at + 110 + name).next_multiple_of(4);
            let path = String::from_utf8(bytes[at + 110..at + 110 + name - 1].to_vec()).unwrap();
            entries.push((path, mode, bytes[contents..contents + size].to_vec()));
            at = (contents + size).next_multiple_of(4);
        }
        entries
    }

    #[test]
    fn directories_come_once_and_before_their_files() {
        let mut archive = Archive::default();
        archive.executable("usr/lib/a.so", 7, b"12345");
        archive.link("usr/lib/b.so", "a.so");
        archive.executable("usr/lib/a.so", 7, b"again");
        archive.directory("usr");
        archive.device("dev/console", 5, 1);
        let entries = read(&archive.finish());
        let names: Vec<&str> = entries.iter().map(|(name, ..)| name.as_str()).collect();
        assert_eq!(names, ["usr", "usr/lib", "usr/lib/a.so", "usr/lib/b.so", "dev", "dev/console", "TRAILER!!!"]);
        assert_eq!(entries[2].1, 0o100_755);
        assert_eq!(entries[2].2, b"12345");
        assert_eq!((entries[3].1, entries[3].2.as_slice()), (0o120_777, b"a.so".as_slice()));
        assert_eq!(entries[5].1, 0o020_600);
    }
}
