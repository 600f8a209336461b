//! Reading [`Sections`] from a file.
//!
//! Files are read with pread, never mapped: a mapped file that is truncated meanwhile raises SIGBUS. Every read is
//! bounded.

use std::{
    fs::File,
    io::{self, Read as _},
    ops::Range,
    os::unix::fs::FileExt,
};

use gimli::BaseAddresses;
use object::{
    LittleEndian, Pod, elf,
    pod::{bytes_of_slice_mut, from_bytes, slice_from_bytes},
    read::elf::{ProgramHeader as _, SectionHeader as _},
};

use super::{Section, Sections, UnwindError};

type Header = elf::FileHeader64<LittleEndian>;
type ProgramHeader = elf::ProgramHeader64<LittleEndian>;
type SectionHeader = elf::SectionHeader64<LittleEndian>;

const LE: LittleEndian = LittleEndian;

/// Largest section of unwind information read, bytes. The largest seen has 9 MiB.
const MAX_SECTION: u64 = 64 << 20;
/// Largest table of section names.
const MAX_NAMES: u64 = 1 << 20;
/// Most program headers (the kernel takes about 1,170: 64 KiB of them).
const MAX_SEGMENTS: u64 = 4096;
/// Most section headers; a linked program has about 40.
const MAX_SECTIONS: u64 = 65_536;

/// Largest procedure linkage table read, bytes: 65,536 entries.
const MAX_LINKAGE_TABLE: u64 = 1 << 20;
const LINKAGE_TABLES: [&str; 3] = [".plt", ".plt.sec", ".iplt"];

/// Something that can be read at any offset: a file, or the bytes of the vDSO.
pub trait ReadAt {
    /// Size in bytes.
    ///
    /// # Errors
    /// If it cannot be found out.
    fn size(&self) -> io::Result<u64>;

    /// Fills the buffer from an offset on.
    ///
    /// # Errors
    /// If it cannot be read, or ends before.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, offset)
    }
}

impl ReadAt for [u8] {
    fn size(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let source = usize::try_from(offset).ok().and_then(|offset| self.get(offset..)?.get(..buffer.len()));
        buffer.copy_from_slice(source.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl Sections {
    /// Reads the unwind information of an ELF program or library, through its section headers, or where there are none
    /// through its program headers. A file may have none.
    ///
    /// # Errors
    /// All of [`UnwindError`] but those of [`Table::build`](super::Table::build).
    pub fn read(file: &(impl ReadAt + ?Sized)) -> Result<Self, UnwindError> {
        let header = read_header(file)?;
        let segments: Vec<ProgramHeader> = match u64::from(header.e_phnum.get(LE)) {
            count @ 1..=MAX_SEGMENTS if usize::from(header.e_phentsize.get(LE)) == size_of::<ProgramHeader>() => {
                read_array(file, header.e_phoff.get(LE), count, "program headers")?
            }
            _ => return Err(UnwindError::Malformed("program headers")),
        };
        let loads = || segments.iter().filter(|segment| segment.p_type(LE) == elf::PT_LOAD);
        let base = loads()
            .filter(|segment| segment.p_memsz(LE) > 0)
            .map(|segment| segment.p_vaddr(LE))
            .min()
            .ok_or(UnwindError::Malformed("nothing to load"))?;
        let code: Vec<_> = loads()
            .filter(|segment| segment.p_flags(LE) & elf::PF_X != 0)
            .map(|segment| range(segment.p_vaddr(LE), segment.p_filesz(LE)))
            .collect();
        let mut sections = Self { base, code, ..Self::default() };
        match read_section_headers(file, &header)? {
            Some(named) => sections.add_by_section_headers(file, &named)?,
            None => sections.add_by_program_headers(file, &segments)?,
        }
        Ok(sections)
    }

    fn add_by_section_headers(
        &mut self,
        file: &(impl ReadAt + ?Sized),
        named: &NamedSections,
    ) -> Result<(), UnwindError> {
        let code: Vec<_> = named
            .headers
            .iter()
            .filter(|section| {
                section.sh_type(LE) != elf::SHT_NOBITS && section.sh_flags(LE) & u64::from(elf::SHF_EXECINSTR) != 0
            })
            .map(|section| range(section.sh_addr(LE), section.sh_size(LE)))
            .filter(|section| {
                self.code.iter().any(|segment| segment.start <= section.start && section.end <= segment.end)
            })
            .collect();
        // Sections are narrower: addresses that the linker gave to removed functions (0 and 1) are in none.
        if !code.is_empty() {
            self.code = code;
        }
        self.eh_frame = named.find(".eh_frame").map(|section| read_section(file, section, ".eh_frame")).transpose()?;
        for name in LINKAGE_TABLES {
            let section = named.find(name).filter(|section| section.sh_size(LE) <= MAX_LINKAGE_TABLE);
            self.linkage_tables.extend(section.map(|section| read_section(file, section, name)).transpose()?);
        }
        if let Some(section) = named.find(".debug_frame") {
            match read_debug_frame(file, section) {
                Ok(data) => self.debug_frame = Some(Section { address: 0, data }),
                Err(UnwindError::Io(error)) => return Err(error.into()),
                // Programs run without it, and most have .eh_frame too.
                Err(_) => self.debug_frame_unread = true,
            }
        }
        Ok(())
    }

    fn add_by_program_headers(
        &mut self,
        file: &(impl ReadAt + ?Sized),
        segments: &[ProgramHeader],
    ) -> Result<(), UnwindError> {
        let Some(header) = segments.iter().find(|segment| segment.p_type(LE) == elf::PT_GNU_EH_FRAME) else {
            return Ok(());
        };
        let address = header.p_vaddr(LE);
        let data = read_bytes(file, header.p_offset(LE), header.p_filesz(LE), ".eh_frame_hdr")?;
        let bases = BaseAddresses::default().set_eh_frame_hdr(address);
        let frames = gimli::EhFrameHdr::new(&data, gimli::LittleEndian)
            .parse(&bases, 8)
            .and_then(|parsed| parsed.eh_frame_ptr().direct())
            .map_err(|_| UnwindError::Malformed(".eh_frame_hdr"))?;
        let (offset, rest) = segments
            .iter()
            .filter(|segment| segment.p_type(LE) == elf::PT_LOAD)
            .find_map(|segment| {
                let inside = frames.checked_sub(segment.p_vaddr(LE))?;
                let rest = segment.p_filesz(LE).checked_sub(inside).filter(|rest| *rest > 0)?;
                Some((segment.p_offset(LE).checked_add(inside)?, rest))
            })
            .ok_or(UnwindError::Malformed(".eh_frame_hdr"))?;
        let section = read_bytes(file, offset, rest.min(MAX_SECTION), ".eh_frame")?;
        self.eh_frame_hdr = Some(Section { address, data });
        self.eh_frame = Some(Section { address: frames, data: section });
        Ok(())
    }
}

fn read_header(file: &(impl ReadAt + ?Sized)) -> Result<Header, UnwindError> {
    let mut ident = [0; 6];
    match file.read_exact_at(&mut ident, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(UnwindError::NotElf),
        read => read?,
    }
    if ident[..4] != elf::ELFMAG {
        return Err(UnwindError::NotElf);
    }
    if ident[4..] != [elf::ELFCLASS64, elf::ELFDATA2LSB] {
        return Err(UnwindError::OtherMachine);
    }
    let headers: Vec<Header> = read_array(file, 0, 1, "header")?;
    let header = *headers.first().ok_or(UnwindError::Malformed("header"))?;
    let linked = matches!(header.e_type.get(LE), elf::ET_EXEC | elf::ET_DYN);
    if header.e_machine.get(LE) != elf::EM_X86_64 || !linked {
        return Err(UnwindError::OtherMachine);
    }
    Ok(header)
}

/// Section headers and their names.
struct NamedSections {
    headers: Vec<SectionHeader>,
    names: Vec<u8>,
}

impl NamedSections {
    /// The section of that name, if it has contents.
    fn find(&self, name: &str) -> Option<&SectionHeader> {
        self.headers.iter().filter(|section| section.sh_type(LE) != elf::SHT_NOBITS).find(|section| {
            let rest = self.names.get(section.sh_name(LE) as usize..).unwrap_or_default();
            rest.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.first() == Some(&0))
        })
    }
}

/// `None` if there are none, or if they have been cut off: nothing needs them for running.
fn read_section_headers(file: &(impl ReadAt + ?Sized), header: &Header) -> Result<Option<NamedSections>, UnwindError> {
    let start = header.e_shoff.get(LE);
    let size = size_of::<SectionHeader>() as u64;
    if start == 0 || u64::from(header.e_shentsize.get(LE)) != size || start.saturating_add(size) > file.size()? {
        return Ok(None);
    }
    let (mut count, mut names) = (u64::from(header.e_shnum.get(LE)), u32::from(header.e_shstrndx.get(LE)));
    if count == 0 || names == u32::from(elf::SHN_XINDEX) {
        // Large numbers are in the first section's header.
        let first: Vec<SectionHeader> = read_array(file, start, 1, "section headers")?;
        let Some(first) = first.first() else { return Ok(None) };
        count = if count == 0 { first.sh_size(LE) } else { count };
        names = if names == u32::from(elf::SHN_XINDEX) { first.sh_link(LE) } else { names };
    }
    let end = count.checked_mul(size).and_then(|bytes| bytes.checked_add(start));
    if count > MAX_SECTIONS || end.is_none_or(|end| file.size().is_ok_and(|size| end > size)) {
        return Ok(None);
    }
    let headers: Vec<SectionHeader> = read_array(file, start, count, "section headers")?;
    let Some(names) = headers.get(names as usize).filter(|section| section.sh_size(LE) <= MAX_NAMES) else {
        return Ok(None);
    };
    let names = read_bytes(file, names.sh_offset(LE), names.sh_size(LE), "section names")?;
    Ok(Some(NamedSections { headers, names }))
}

fn read_section(
    file: &(impl ReadAt + ?Sized),
    section: &SectionHeader,
    what: &'static str,
) -> Result<Section, UnwindError> {
    let data = read_bytes(file, section.sh_offset(LE), section.sh_size(LE), what)?;
    Ok(Section { address: section.sh_addr(LE), data })
}

/// Reads a section that may be compressed (ELF specification, "Section Compression"). Of the methods only zlib is
/// supported, which is what Go's linker uses.
fn read_debug_frame(file: &(impl ReadAt + ?Sized), section: &SectionHeader) -> Result<Vec<u8>, UnwindError> {
    const WHAT: &str = ".debug_frame";
    let data = read_section(file, section, WHAT)?.data;
    if section.sh_flags(LE) & u64::from(elf::SHF_COMPRESSED) == 0 {
        return Ok(data);
    }
    let (header, stream) = from_bytes::<elf::CompressionHeader64<LittleEndian>>(&data)
        .ok()
        .filter(|(header, _)| header.ch_type.get(LE) == elf::ELFCOMPRESS_ZLIB)
        .ok_or(UnwindError::Malformed(WHAT))?;
    let size = header.ch_size.get(LE);
    check_size(size, WHAT)?;
    let mut whole = Vec::new();
    let read = flate2::read::ZlibDecoder::new(stream).take(size).read_to_end(&mut whole);
    if read.is_ok_and(|read| read as u64 == size) { Ok(whole) } else { Err(UnwindError::Malformed(WHAT)) }
}

fn check_size(size: u64, what: &'static str) -> Result<(), UnwindError> {
    if size > MAX_SECTION { Err(UnwindError::TooLarge { what, size, limit: MAX_SECTION }) } else { Ok(()) }
}

fn read_bytes(
    file: &(impl ReadAt + ?Sized),
    offset: u64,
    size: u64,
    what: &'static str,
) -> Result<Vec<u8>, UnwindError> {
    check_size(size, what)?;
    if offset.checked_add(size).is_none_or(|end| file.size().is_ok_and(|size| end > size)) {
        return Err(UnwindError::Malformed(what));
    }
    let mut bytes = vec![0; size as usize];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

fn read_array<T: Pod>(
    file: &(impl ReadAt + ?Sized),
    offset: u64,
    count: u64,
    what: &'static str,
) -> Result<Vec<T>, UnwindError> {
    let size = count.checked_mul(size_of::<T>() as u64).ok_or(UnwindError::Malformed(what))?;
    if offset.checked_add(size).is_none_or(|end| file.size().is_ok_and(|size| end > size)) {
        return Err(UnwindError::Malformed(what));
    }
    // Of words, since the headers are to be aligned like them.
    let mut words = vec![0u64; (size as usize).div_ceil(8)];
    let bytes = &mut bytes_of_slice_mut(&mut words)[..size as usize];
    file.read_exact_at(bytes, offset)?;
    let (array, _) = slice_from_bytes(bytes, count as usize).map_err(|()| UnwindError::Malformed(what))?;
    Ok(array.to_vec())
}

/// The addresses of a section or segment; those that would wrap around end at the last address.
fn range(start: u64, size: u64) -> Range<u64> {
    start..start.saturating_add(size)
}

#[cfg(test)]
#[path = "elf_tests.rs"]
mod tests;
