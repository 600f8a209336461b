//! One ELF file that names are taken from: what is where in it.
//!
//! Files of the target are hostile. What they say of sizes is bounded before memory is taken for it, and they are mapped,
//! not read, so that large ones cost no memory of memtrace's own.

use std::{borrow::Cow, fs::File, io::Read, path::Path};

use object::{
    LittleEndian,
    elf::{self, FileHeader64, SectionHeader64},
    read::elf::{FileHeader as _, ProgramHeader as _, SectionHeader as _, SectionTable},
};

use super::sigbus::MappedFile;

/// Most bytes that the compressed parts of one file may take when they are decompressed.
const MAX_DECOMPRESSED: u64 = 2 << 30;
/// Most bytes of a symbol table in `.gnu_debugdata`: the one of a program of a million functions.
const MAX_MINI: u64 = 256 << 20;

/// Most memory that its decompression may take, beside the result: `xz -9` asks for 65 MiB.
const MAX_XZ_MEMORY: u64 = 80 << 20;

/// Most bytes of notes that are searched for a build ID. Sections of a hostile file may overlap without end.
const MAX_NOTES: u64 = 4 << 20;

/// Section of a small symbol table.
const MINI: &str = ".gnu_debugdata";

const ENDIAN: LittleEndian = LittleEndian;

type Header = FileHeader64<LittleEndian>;
type Section = SectionHeader64<LittleEndian>;

/// Why a file, or a part of it, can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file can't be opened or read.
    #[error("the file could not be read: {0}")]
    Io(#[from] std::io::Error),
    /// It is something else.
    #[error("not a usable 64-bit ELF file: {0}")]
    Format(#[from] object::read::Error),
    /// A part of it is compressed in a way that is not known, or damaged.
    #[error("section {section} can't be decompressed: {reason}")]
    Compression {
        /// Name of the section.
        section: String,
        /// What is wrong.
        reason: String,
    },
    /// Its compressed parts are larger than what memtrace wants to keep in memory.
    #[error("decompressed, section {section} would take more than the {limit} bytes left for it")]
    TooLarge {
        /// Name of the section.
        section: String,
        /// How much was left.
        limit: u64,
    },
}

/// Bytes of an ELF file.
#[derive(Debug)]
enum Bytes {
    Mapped(MappedFile),
    Memory(Vec<u8>),
}

/// A 64-bit ELF file for x86-64.
#[derive(Debug)]
pub struct Image {
    bytes: Bytes,
}

/// The name and checksum of a separate debug file (`.gnu_debuglink`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DebugLink {
    /// File name, as the file says.
    pub name: Vec<u8>,
    /// CRC-32 of that file's content.
    pub crc: u32,
}

/// The file that debug information continues in (`.gnu_debugaltlink`, made by dwz).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AltLink {
    /// Path, as the file says: absolute, or relative to the file's own directory.
    pub path: Vec<u8>,
    /// That file's build ID.
    pub build_id: Vec<u8>,
}

impl Image {
    /// Maps the regular file at `path`.
    ///
    /// # Errors
    /// It can't be read, or is no ELF file for x86-64.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file").into());
        }
        Self::of(&file)
    }

    /// Maps an open file.
    ///
    /// # Errors
    /// It is no ELF file for x86-64.
    pub fn of(file: &File) -> Result<Self, ImageError> {
        Self::checked(Bytes::Mapped(MappedFile::of(file)?))
    }

    fn checked(bytes: Bytes) -> Result<Self, ImageError> {
        let image = Self { bytes };
        let header = Header::parse(image.data())?;
        if header.e_ident.data != elf::ELFDATA2LSB || header.e_machine.get(ENDIAN) != elf::EM_X86_64 {
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "not for x86-64").into());
        }
        // One whose tables can't be found is of no use.
        image.sections()?;
        header.program_headers(ENDIAN, image.data())?;
        Ok(image)
    }

    /// The whole file.
    pub fn data(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped(file) => file,
            Bytes::Memory(bytes) => bytes,
        }
    }

    /// Whether it got shorter while it was read.
    pub fn was_truncated(&self) -> bool {
        matches!(&self.bytes, Bytes::Mapped(file) if file.was_truncated())
    }

    fn sections(&self) -> Result<SectionTable<'_, Header>, ImageError> {
        Ok(Header::parse(self.data())?.sections(ENDIAN, self.data())?)
    }

    fn section(&self, name: &str) -> Option<&Section> {
        let sections = self.sections().ok()?;
        // Debug files keep the headers of what they leave out.
        let (_, section) = sections.section_by_name(ENDIAN, name.as_bytes())?;
        (section.sh_type(ENDIAN) != elf::SHT_NOBITS).then_some(section)
    }

    /// Whether it has a section of this name with a content.
    pub fn has(&self, name: &str) -> bool {
        self.section(name).is_some_and(|section| section.sh_size(ENDIAN) != 0)
    }

    /// Content of a section that is never compressed; `None` if there is none.
    fn plain(&self, name: &str) -> Option<&[u8]> {
        self.section(name)?.data(ENDIAN, self.data()).ok()
    }

    /// Its GNU build ID, if it has one of 2 to 64 bytes.
    pub fn build_id(&self) -> Option<&[u8]> {
        let header = Header::parse(self.data()).ok()?;
        let sections = self.sections().ok()?;
        let usable = |id: &&[u8]| (2..=64).contains(&id.len());
        let mut left = MAX_NOTES;
        let mut has_room = |size: u64| {
            left = left.saturating_sub(size.saturating_add(1));
            left > 0
        };
        for section in sections.iter().filter(|section| section.sh_type(ENDIAN) == elf::SHT_NOTE) {
            if has_room(section.sh_size(ENDIAN))
                && let Ok(Some(mut notes)) = section.notes(ENDIAN, self.data())
            {
                while let Ok(Some(note)) = notes.next() {
                    if note.name() == elf::ELF_NOTE_GNU && note.n_type(ENDIAN) == elf::NT_GNU_BUILD_ID {
                        return Some(note.desc()).filter(usable);
                    }
                }
            }
        }
        let segments = header.program_headers(ENDIAN, self.data()).ok()?.iter();
        for segment in segments.filter(|segment| segment.p_type(ENDIAN) == elf::PT_NOTE) {
            if has_room(segment.p_filesz(ENDIAN))
                && let Ok(Some(mut notes)) = segment.notes(ENDIAN, self.data())
            {
                while let Ok(Some(note)) = notes.next() {
                    if note.name() == elf::ELF_NOTE_GNU && note.n_type(ENDIAN) == elf::NT_GNU_BUILD_ID {
                        return Some(note.desc()).filter(usable);
                    }
                }
            }
        }
        None
    }

    /// Virtual address, as symbols number it, of the byte at a file offset; `None` if it is not loaded.
    pub fn address_of(&self, offset: u64) -> Option<u64> {
        let header = Header::parse(self.data()).ok()?;
        let segments = header.program_headers(ENDIAN, self.data()).ok()?;
        let mut found = None;
        for segment in segments.iter().filter(|segment| segment.p_type(ENDIAN) == elf::PT_LOAD) {
            let (start, size) = (segment.p_offset(ENDIAN), segment.p_filesz(ENDIAN));
            if let Some(distance) = offset.checked_sub(start).filter(|distance| *distance < size) {
                let address = segment.p_vaddr(ENDIAN).wrapping_add(distance);
                // Where segments share a page of the file, code is meant.
                if segment.p_flags(ENDIAN) & elf::PF_X != 0 {
                    return Some(address);
                }
                found.get_or_insert(address);
            }
        }
        found
    }

    /// Content of a section, decompressed if need be, empty if there is none. What decompression takes is subtracted
    /// from `budget`.
    ///
    /// # Errors
    /// The section is damaged or too large.
    pub fn content<'a>(&'a self, name: &str, budget: &mut Budget) -> Result<Cow<'a, [u8]>, ImageError> {
        if let Some(section) = self.section(name) {
            let data = section.data(ENDIAN, self.data())?;
            if section.sh_flags(ENDIAN) & u64::from(elf::SHF_COMPRESSED) == 0 {
                return Ok(Cow::Borrowed(data));
            }
            let (header, offset, size) = section.compression(ENDIAN, self.data())?.ok_or_else(|| damaged(name, ""))?;
            let packed = object::read::ReadRef::read_bytes_at(self.data(), offset, size)
                .map_err(|()| damaged(name, "it is beyond the end of the file"))?;
            return match header.ch_type.get(ENDIAN) {
                elf::ELFCOMPRESS_ZLIB => budget.read(name, flate2::read::ZlibDecoder::new(packed)).map(Cow::Owned),
                elf::ELFCOMPRESS_ZSTD => {
                    let decoder = ruzstd::decoding::StreamingDecoder::new(packed)
                        .map_err(|error| damaged(name, &error.to_string()))?;
                    budget.read(name, decoder).map(Cow::Owned)
                }
                other => Err(damaged(name, &format!("unknown kind {other}"))),
            };
        }
        // The older form of compression: `.zdebug_info`, which begins with `ZLIB` and the size.
        if let Some(name) = name.strip_prefix(".debug_").map(|rest| format!(".zdebug_{rest}"))
            && let Some(packed) = self.plain(&name)
        {
            let packed = packed.get(12..).filter(|_| packed.starts_with(b"ZLIB"));
            let packed = packed.ok_or_else(|| damaged(&name, "no size"))?;
            return budget.read(&name, flate2::read::ZlibDecoder::new(packed)).map(Cow::Owned);
        }
        Ok(Cow::Borrowed(&[]))
    }

    /// Name and checksum of the file that debug information was split off to.
    pub fn debug_link(&self) -> Option<DebugLink> {
        let content = self.plain(".gnu_debuglink")?;
        let name = content.split(|byte| *byte == 0).next().filter(|name| name.len() < content.len())?;
        let checksum = content.get((name.len() + 1).next_multiple_of(4)..)?;
        Some(DebugLink { name: name.to_vec(), crc: u32::from_le_bytes(checksum.get(..4)?.try_into().ok()?) })
    }

    /// The file that debug information continues in.
    pub fn alt_link(&self) -> Option<AltLink> {
        let content = self.plain(".gnu_debugaltlink")?;
        let end = content.iter().position(|byte| *byte == 0)?;
        let (path, build_id) = (&content[..end], &content[end + 1..]);
        let usable = !path.is_empty() && (2..=64).contains(&build_id.len());
        usable.then(|| AltLink { path: path.to_vec(), build_id: build_id.to_vec() })
    }

    /// The symbol table that distributions leave in otherwise stripped programs (MiniDebugInfo, `.gnu_debugdata`): an
    /// ELF file of its own, compressed by xz.
    ///
    /// # Errors
    /// It is damaged or too large.
    pub fn mini_debug_info(&self) -> Result<Option<Self>, ImageError> {
        let Some(packed) = self.plain(MINI) else { return Ok(None) };
        Ok(Some(Self::checked(Bytes::Memory(unpack_xz(packed, MAX_MINI)?))?))
    }

    /// CRC-32 of the whole file, as debug links have it.
    pub fn crc(&self) -> u32 {
        let mut crc = flate2::Crc::new();
        crc.update(self.data());
        crc.sum()
    }

    /// Its symbol table (`.symtab`) and its dynamic one, those of them that it has.
    pub fn symbol_tables(&self) -> impl Iterator<Item = SymbolTable<'_>> {
        [elf::SHT_SYMTAB, elf::SHT_DYNSYM].into_iter().filter_map(|kind| {
            let sections = self.sections().ok()?;
            let table = sections.symbols(ENDIAN, self.data(), kind).ok()?;
            let strings = sections.section(table.string_section()).ok()?.data(ENDIAN, self.data()).ok()?;
            let dynamic = kind == elf::SHT_DYNSYM;
            (!table.is_empty()).then_some(SymbolTable { symbols: table.symbols(), strings, sections, dynamic })
        })
    }
}

/// A symbol table of a file.
pub struct SymbolTable<'a> {
    /// The symbols.
    pub symbols: &'a [elf::Sym64<LittleEndian>],
    /// Their names, each ended by a zero byte.
    pub strings: &'a [u8],
    /// Whether it is `.dynsym`.
    pub dynamic: bool,
    sections: SectionTable<'a, Header>,
}

impl SymbolTable<'_> {
    /// Address after the last of a section.
    pub fn section_end(&self, number: u16) -> Option<u64> {
        let section = self.sections.section(object::SectionIndex(number.into())).ok()?;
        section.sh_addr(ENDIAN).checked_add(section.sh_size(ENDIAN))
    }
}

fn unpack_xz(packed: &[u8], limit: u64) -> Result<Vec<u8>, ImageError> {
    let stream = liblzma::stream::Stream::new_stream_decoder(MAX_XZ_MEMORY, 0)
        .map_err(|error| damaged(MINI, &error.to_string()))?;
    Budget(limit).read(MINI, liblzma::bufread::XzDecoder::new_stream(packed, stream))
}

fn damaged(section: &str, reason: &str) -> ImageError {
    ImageError::Compression { section: section.to_owned(), reason: reason.to_owned() }
}

/// How many bytes decompression may still take.
#[derive(Debug)]
pub struct Budget(u64);

impl Default for Budget {
    fn default() -> Self {
        Self(MAX_DECOMPRESSED)
    }
}

impl Budget {
    fn read(&mut self, section: &str, packed: impl Read) -> Result<Vec<u8>, ImageError> {
        let mut bytes = Vec::new();
        let limit = self.0;
        let result = packed.take(limit.saturating_add(1)).read_to_end(&mut bytes);
        result.map_err(|error| damaged(section, &error.to_string()))?;
        let rest = limit.checked_sub(bytes.len() as u64);
        self.0 = rest.ok_or_else(|| ImageError::TooLarge { section: section.to_owned(), limit })?;
        Ok(bytes)
    }
}

#[cfg(test)]
#[path = "image_tests.rs"]
mod tests;
