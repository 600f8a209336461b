//! The memory map of a process (proc_pid_maps(5)).

use std::{
    ffi::OsStr,
    fs::File,
    io,
    os::unix::{
        ffi::{OsStrExt as _, OsStringExt as _},
        fs::FileExt as _,
    },
    path::{Path, PathBuf},
};

use super::{Process, TargetError, procfs};

/// Most bytes of a memory map that are read: some 600,000 mappings, ten times the kernel's default limit.
const MAX_BYTES: u64 = 64 << 20;

/// What the kernel appends to the path of a file that has been unlinked.
const DELETED: &[u8] = b" (deleted)";

/// Identity of a mapped file as the memory map shows it. Equal for mappings of one file; not always what `stat`
/// says of the file (btrfs).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileKey {
    /// Major and minor number of the device.
    pub device: (u32, u32),
    /// Inode number; 0: no file.
    pub inode: u64,
}

/// One line of a memory map.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// Address after the last; greater than `start`.
    pub end: u64,
    /// Whether code can run there.
    pub executable: bool,
    /// Whether it can be written.
    pub writable: bool,
    /// Whether what is written there is seen by others that map the file (`MAP_SHARED`).
    pub shared: bool,
    /// File offset of `start`, bytes.
    pub offset: u64,
    /// The file.
    pub file: FileKey,
    /// Path in the process's mount namespace, or a name such as `[vdso]`, `[heap]`, `[uprobes]`; empty for anonymous
    /// memory. Exactly as the map shows it, ` (deleted)` included, with escaped newlines turned back. Any bytes but
    /// NUL can be in there: escape before printing.
    pub name: PathBuf,
}

impl Mapping {
    /// Whether a file is behind it.
    pub fn has_file(&self) -> bool {
        self.file.inode != 0
    }

    /// Its path without ` (deleted)`, if it has a file with a path. (A file can really be called so; what is opened
    /// by that path has to be compared with [`Self::file`].)
    pub fn path(&self) -> Option<&Path> {
        let name = self.name.as_os_str().as_bytes();
        let name = name.strip_suffix(DELETED).unwrap_or(name);
        (self.has_file() && name.starts_with(b"/")).then(|| Path::new(OsStr::from_bytes(name)))
    }

    /// Whether it is the kernel's code for the process (see [`read_vdso`]).
    pub fn is_vdso(&self) -> bool {
        !self.has_file() && self.name == Path::new("[vdso]")
    }

    /// File name for display: the last part of the path, without ` (deleted)`; the whole name if it is not a path.
    /// Escape before printing.
    pub fn file_name(&self) -> String {
        let name = self.path().and_then(Path::file_name).unwrap_or(self.name.as_os_str());
        name.to_string_lossy().into_owned()
    }

    /// File offset of an address in the mapping.
    pub fn file_offset(&self, address: u64) -> Option<u64> {
        if !(self.start..self.end).contains(&address) {
            return None;
        }
        self.offset.checked_add(address - self.start)
    }
}

/// Reads the memory map of a process.
///
/// # Errors
/// [`TargetError::Exited`] if it has ended, [`TargetError::PermissionDenied`], [`TargetError::Mappings`].
pub fn read(process: &Process) -> Result<Vec<Mapping>, TargetError> {
    let pid = process.pid();
    let text = procfs::read(&process.path("maps"), MAX_BYTES).map_err(|error| match error.kind() {
        std::io::ErrorKind::FileTooLarge => TargetError::Mappings { pid, reason: "it is larger than 64 MiB".into() },
        _ => process.unreadable("maps", error),
    })?;
    let mappings =
        parse(&text).map_err(|line| TargetError::Mappings { pid, reason: format!("line {line} is damaged") })?;
    process.check_alive()?;
    if mappings.is_empty() {
        return Err(process.ended());
    }
    Ok(mappings)
}

/// Reads the kernel's code that is mapped into every process (vdso(7)): an ELF image, without a file.
///
/// # Errors
/// It can't be read, or is unusually large.
pub fn read_vdso(process: &Process, mapping: &Mapping) -> io::Result<Vec<u8>> {
    /// It has one or two pages.
    const MOST: u64 = 64 << 10;
    let size = mapping.end - mapping.start;
    if size > MOST {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut bytes = vec![0; size as usize];
    File::open(process.path("mem"))?.read_exact_at(&mut bytes, mapping.start)?;
    Ok(bytes)
}

/// Parses a memory map.
///
/// # Errors
/// The number of the first line (from 1) that is none.
pub fn parse(text: &[u8]) -> Result<Vec<Mapping>, usize> {
    text.split(|byte| *byte == b'\n')
        .enumerate()
        .filter(|(_, line)| !line.is_empty())
        .map(|(index, line)| parse_line(line).ok_or(index + 1))
        .collect()
}

/// `start-end perms offset major:minor inode   name`, numbers but the inode hexadecimal.
fn parse_line(line: &[u8]) -> Option<Mapping> {
    let mut rest = line;
    let mut field = || {
        let length = rest.iter().position(|byte| *byte == b' ').unwrap_or(rest.len());
        let (field, after) = rest.split_at(length);
        rest = after.strip_prefix(b" ").unwrap_or(after);
        std::str::from_utf8(field).ok()
    };
    let (start, end) = field()?.split_once('-')?;
    let permissions = field()?.as_bytes();
    let offset = hex(field()?)?;
    let (major, minor) = field()?.split_once(':')?;
    let inode = field()?.parse().ok()?;
    let (start, end) = (hex(start)?, hex(end)?);
    if start >= end || permissions.len() != 4 {
        return None;
    }
    Some(Mapping {
        start,
        end,
        writable: permissions[1] == b'w',
        executable: permissions[2] == b'x',
        shared: permissions[3] == b's',
        offset,
        file: FileKey { device: (u32::try_from(hex(major)?).ok()?, u32::try_from(hex(minor)?).ok()?), inode },
        name: unescape(rest.trim_ascii_start()),
    })
}

fn hex(digits: &str) -> Option<u64> {
    // from_str_radix takes a sign.
    if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    u64::from_str_radix(digits, 16).ok()
}

/// Turns `\012` back into a newline. The kernel escapes nothing else there, not even the backslash, so a file really
/// called `\012` cannot be told from one with a newline.
fn unescape(name: &[u8]) -> PathBuf {
    const NEWLINE: &[u8] = b"\\012";
    let mut bytes = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((first, after)) = rest.split_first() {
        if let Some(after) = rest.strip_prefix(NEWLINE) {
            bytes.push(b'\n');
            rest = after;
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

/// Whether the code of a glibc is mapped, judged by the file's name alone: the cheap check while a new program is
/// starting, before [`super::discover`](fn@super::discover) is worth calling.
pub fn maps_libc(mappings: &[Mapping]) -> bool {
    mappings.iter().any(|mapping| {
        mapping.executable && mapping.has_file() && {
            let name = mapping.file_name();
            // glibc installed its libc as libc-2.33.so up to that version.
            name == "libc.so.6" || (name.starts_with("libc-2.") && name.ends_with(".so"))
        }
    })
}

/// Where the memory that `brk` makes begins, also as long as there is none: field 47 of `/proc/PID/stat`
/// (proc_pid_stat(5)). `None` if the kernel does not tell.
///
/// # Errors
/// [`TargetError::Exited`], [`TargetError::Io`].
pub fn heap_start(process: &Process) -> Result<Option<u64>, TargetError> {
    let stat = procfs::read_small(&process.path("stat")).map_err(|error| process.unreadable("stat", error))?;
    Ok(field_47(&stat).filter(|start| *start != 0))
}

/// The process chooses the second field, which may hold blanks and parentheses: the third starts after the last closing one.
fn field_47(stat: &[u8]) -> Option<u64> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    std::str::from_utf8(&stat[end + 1..]).ok()?.split_ascii_whitespace().nth(44)?.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const MAP: &[u8] = b"\
55d0a7c00000-55d0a7c02000 r--p 00000000 fe:00 247282                     /usr/bin/head\n\
55d0a7c02000-55d0a7c08000 r-xp 00002000 fe:00 247282                     /usr/bin/head\n\
55d0a8000000-55d0a8021000 rw-p 00000000 00:00 0                          [heap]\n\
7f0000000000-7f0000001000 r-xs 00003000 08:11 99                         /tmp/a b  c\\012d (deleted)\n\
7f0000002000-7f0000003000 rw-p 00000000 00:00 0 \n\
7f0000004000-7f0000005000 r-xp 00000000 00:01 5                          /memfd:jit (deleted)\n\
7fffffffe000-7ffffffff000 r-xp 00000000 00:00 0                          [vdso]\n\
7fffffffd000-7fffffffe000 --xp 00000000 00:00 0                          [uprobes]\n\
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]\n";

    #[test]
    fn every_kind_of_line() {
        let mappings = parse(MAP).unwrap();
        assert_eq!(mappings.len(), 9);
        let code = &mappings[1];
        assert_eq!((code.start, code.end, code.offset), (0x55d0_a7c0_2000, 0x55d0_a7c0_8000, 0x2000));
        assert!(code.executable && !code.writable && code.has_file());
        assert_eq!(code.file, FileKey { device: (0xfe, 0), inode: 247_282 });
        assert_eq!(code.path(), Some(Path::new("/usr/bin/head")));
        assert_eq!(code.file_name(), "head");
        let heap = &mappings[2];
        assert!(heap.writable && !heap.executable && !heap.shared && !heap.has_file());
        assert_eq!((heap.path(), heap.file_name().as_str()), (None, "[heap]"));
        let odd = &mappings[3];
        assert!(odd.shared);
        assert_eq!(odd.name, Path::new("/tmp/a b  c\nd (deleted)"));
        assert_eq!(odd.path(), Some(Path::new("/tmp/a b  c\nd")));
        assert_eq!(odd.file_name(), "a b  c\nd");
        let anonymous = &mappings[4];
        assert_eq!(anonymous.name, Path::new(""));
        assert_eq!(mappings[5].file_name(), "memfd:jit");
        assert_eq!(mappings[8].start, 0xffff_ffff_ff60_0000);
    }

    #[test]
    fn addresses_to_file_offsets() {
        let mappings = parse(MAP).unwrap();
        let code = &mappings[1];
        assert_eq!(code.file_offset(0x55d0_a7c0_2010), Some(0x2010));
        assert_eq!(code.file_offset(code.end), None);
        assert_eq!(code.file_offset(code.start - 1), None);
        let far = Mapping { offset: u64::MAX, ..code.clone() };
        assert_eq!(far.file_offset(code.start + 1), None);
    }

    #[test]
    fn damaged_lines_are_named() {
        assert_eq!(parse(b""), Ok(Vec::new()));
        for line in [
            "x-2 r-xp 0 0:0 0 a",
            "1-+2 r-xp 0 0:0 0 a",
            "2-1 r-xp 0 0:0 0 a",
            "1-2 rxp 0 0:0 0 a",
            "1-2 r-xp",
            "1-2 r-xp 0 0:0 x a",
            "1-2 r-xp 0 00 0 a",
            "11111111111111111-2 r-xp 0 0:0 0",
            "1-2 r-xp 0 100000000:0 0",
        ] {
            let text = format!("1-2 r-xp 0 0:0 0 a\n{line}\n");
            assert_eq!(parse(text.as_bytes()), Err(2), "{line}");
        }
    }

    #[test]
    fn any_cut_and_any_flipped_byte_is_survived() {
        for length in 0..MAP.len() {
            let _ = parse(&MAP[..length]);
        }
        let mut text = MAP.to_vec();
        for index in 0..text.len() {
            for bit in 0..8 {
                text[index] ^= 1 << bit;
                let _ = parse(&text);
                text[index] ^= 1 << bit;
            }
        }
    }

    #[test]
    fn own_map_has_libc_and_main() {
        let process = Process::open(std::process::id()).unwrap();
        let mappings = read(&process).unwrap();
        let here = own_map_has_libc_and_main as fn() as usize as u64;
        let own = mappings.iter().find(|mapping| (mapping.start..mapping.end).contains(&here)).unwrap();
        assert!(own.executable);
        assert_eq!(own.path(), Some(std::env::current_exe().unwrap().as_path()));
        assert!(maps_libc(&mappings));
    }

    #[test]
    fn the_heap_starts_where_the_map_shows_it() {
        assert_eq!(field_47(b"7 (a) 1 (3 \n) S"), None);
        let process = Process::open(std::process::id()).unwrap();
        let mappings = read(&process).unwrap();
        let heap = mappings.iter().find(|mapping| mapping.name.as_os_str() == "[heap]").unwrap();
        assert_eq!(heap_start(&process).unwrap().map(|start| start & !4095), Some(heap.start));
    }

    #[test]
    fn libc_by_name() {
        let named = |name: &str| {
            let mut mapping = parse(b"1000-2000 r-xp 0 8:1 5 /x").unwrap().remove(0);
            mapping.name = name.into();
            mapping
        };
        assert!(maps_libc(&[named("/lib/x86_64-linux-gnu/libc.so.6")]));
        assert!(maps_libc(&[named("/lib64/libc-2.31.so (deleted)")]));
        assert!(!maps_libc(&[named("/lib/ld-musl-x86_64.so.1")]));
        assert!(!maps_libc(&[named("/lib/libcrypt.so.1"), named("/lib/libc.so")]));
        let data = Mapping { executable: false, ..named("/lib/libc.so.6") };
        assert!(!maps_libc(&[data]));
        assert!(!maps_libc(&[]));
    }
}
