//! What of a file is safe to be parsed at all.
//!
//! blazesym allocates what a compressed section says its content takes, and opens the files that debug links name. Both
//! are the target's words, so they are looked at first.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use object::{
    Endianness,
    elf::FileHeader64,
    read::{
        ReadCache,
        elf::{CompressionHeader as _, FileHeader as _, SectionHeader as _},
    },
};

/// Most bytes that the compressed sections of a file may claim to take when decompressed.
const MAX_DECOMPRESSED: u64 = 2 << 30;

/// How far a file is used.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Symbols and debug information, separate debug files included.
    Full,
    /// Only its symbol tables, and why.
    SymbolsOnly(String),
    /// Not at all, and why.
    Refused(String),
}

/// Looks at the section headers of a file.
pub fn vet(path: &Path) -> Verdict {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) => return Verdict::Refused(format!("the file could not be opened: {error}")),
    };
    match file.metadata() {
        Ok(metadata) if metadata.is_file() => {}
        Ok(_) => return Verdict::Refused("not a regular file".into()),
        Err(error) => return Verdict::Refused(format!("the file could not be read: {error}")),
    }
    let data = ReadCache::new(file);
    match sections(path, &data) {
        Ok(None) => Verdict::Full,
        Ok(Some(reason)) => Verdict::SymbolsOnly(reason),
        Err(error) => Verdict::Refused(format!("not a usable 64-bit ELF file: {error}")),
    }
}

/// Why debug information is not to be used, if so.
fn sections(path: &Path, data: &ReadCache<File>) -> Result<Option<String>, object::read::Error> {
    let header = FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let mut decompressed = 0u64;
    for section in sections.iter() {
        match section.compression(endian, data) {
            Ok(Some((compression, _, _))) => {
                decompressed = decompressed.saturating_add(compression.ch_size(endian));
            }
            Ok(None) => {}
            Err(error) => return Ok(Some(format!("debug information not used: {error}"))),
        }
    }
    if decompressed > MAX_DECOMPRESSED {
        return Ok(Some(format!("debug information not used: decompressed it would take {decompressed} bytes")));
    }
    for name in [".gnu_debugaltlink", ".debug_sup"] {
        if sections.section_by_name(endian, name.as_bytes()).is_some() {
            return Ok(Some(format!("debug information not used: it continues in a file named by section {name}")));
        }
    }
    if let Some((_, section)) = sections.section_by_name(endian, b".gnu_debuglink") {
        let content = section.data(endian, data)?;
        let name = content.split(|byte| *byte == 0).next().unwrap_or_default();
        if !link_is_safe(path, name) {
            return Ok(Some(
                "debug information not used: its debug link leads outside the debug directories or to no regular file"
                    .into(),
            ));
        }
    }
    Ok(None)
}

/// Whether the file that a debug link names next to the module is one that can be opened without harm: opening a FIFO
/// would wait forever. The debug directories of the system itself are trusted.
fn link_is_safe(path: &Path, name: &[u8]) -> bool {
    let Ok(name) = std::str::from_utf8(name) else {
        return false;
    };
    if name.is_empty() || name == ".." || name == "." || name.contains('/') {
        return false;
    }
    let module = path.canonicalize().unwrap_or_else(|_| PathBuf::from(path));
    match module.with_file_name(name).metadata() {
        Ok(metadata) => metadata.is_file(),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn own_program_is_used_in_full() {
        assert_eq!(vet(Path::new("/proc/self/exe")), Verdict::Full);
    }

    #[test]
    fn other_things_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let garbage = directory.path().join("garbage");
        std::fs::write(&garbage, [0x7f; 5000]).unwrap();
        for path in [&garbage, directory.path(), &directory.path().join("missing")] {
            assert!(matches!(vet(path), Verdict::Refused(_)), "{path:?}");
        }
    }

    #[test]
    fn links() {
        let directory = tempfile::tempdir().unwrap();
        let module = directory.path().join("libx.so");
        std::fs::write(&module, "").unwrap();
        std::fs::write(directory.path().join("libx.debug"), "").unwrap();
        std::fs::create_dir(directory.path().join("trap")).unwrap();
        assert!(link_is_safe(&module, b"libx.debug"));
        assert!(link_is_safe(&module, b"absent.debug"));
        for name in [&b"trap"[..], b"", b"..", b"../x", b"/etc/passwd", b"\xff"] {
            assert!(!link_is_safe(&module, name), "{name:?}");
        }
    }
}
