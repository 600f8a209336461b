//! Reading ELF files that may be truncated, damaged or made to harm.
//!
//! Files are read with pread, never mapped: a mapped file that is truncated meanwhile raises SIGBUS. Every read is
//! bounded, and so is the sum of all reads of a file.

use std::{
    cell::Cell,
    collections::HashMap,
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    ops::Range,
    os::unix::fs::FileExt as _,
};

use object::{
    LittleEndian, ReadCache, ReadRef, elf,
    read::elf::{Dyn as _, FileHeader as _, ProgramHeader as _, SectionHeader as _, Sym as _},
};

use super::{ModuleProblem, catalogue};

type Header = elf::FileHeader64<LittleEndian>;

/// Largest table read. The largest seen, the dynamic strings of a C++ compiler's library, has about 20 MiB.
const MAX_READ: u64 = 64 << 20;
/// Most bytes read of one file, tables that are read twice counted twice.
const MAX_TOTAL: u64 = 256 << 20;
/// Most program headers (the kernel takes about 1,170: 64 KiB of them) and version definitions.
const MAX_HEADERS: usize = 4096;
/// Largest note or dynamic segment.
const MAX_SEGMENT: u64 = 1 << 20;
/// Longest symbol name that is looked at; longer ones are no allocator's functions.
const MAX_NAME: usize = 256;
/// Longest build ID; the usual ones have 8 to 20 bytes.
const MAX_BUILD_ID: usize = 64;

const LE: LittleEndian = LittleEndian;

/// A part of the file that is mapped (`PT_LOAD`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it starts in the file.
    pub offset: u64,
    /// Virtual address of that byte, as the file's symbols number it.
    pub address: u64,
    /// Bytes that come from the file.
    pub size: u64,
    /// Whether code can run there.
    pub executable: bool,
}

impl Segment {
    /// File offset of an address inside.
    pub fn file_offset(&self, address: u64) -> Option<u64> {
        let inside = address.checked_sub(self.address).filter(|inside| *inside < self.size)?;
        self.offset.checked_add(inside)
    }

    /// Address of a file offset inside.
    pub fn address_of(&self, offset: u64) -> Option<u64> {
        let inside = offset.checked_sub(self.offset).filter(|inside| *inside < self.size)?;
        self.address.checked_add(inside)
    }
}

/// What the program headers say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers {
    pub segments: Vec<Segment>,
    /// Whether a dynamic loader is asked for (`PT_INTERP`).
    pub interpreter: bool,
    /// Virtual address of the dynamic section (`PT_DYNAMIC`).
    pub dynamic: Option<u64>,
    pub build_id: Option<Vec<u8>>,
}

/// A file to read from; keeps what it has read.
pub struct Source<'f> {
    cache: ReadCache<Positioned<'f>>,
    budget: Cell<u64>,
}

impl<'f> Source<'f> {
    pub fn new(file: &'f File) -> Self {
        Self { cache: ReadCache::new(Positioned { file, position: 0 }), budget: Cell::new(MAX_TOTAL) }
    }

    fn data(&self) -> Bounded<'_, 'f> {
        Bounded(self)
    }

    /// Reads and checks the file header.
    fn header(&self) -> Result<&Header, ModuleProblem> {
        let ident = self.data().read_bytes_at(0, 5).map_err(|()| ModuleProblem::NotElf)?;
        match ident {
            [0x7f, b'E', b'L', b'F', elf::ELFCLASS64] => {}
            [0x7f, b'E', b'L', b'F', _] => return Err(ModuleProblem::OtherMachine),
            _ => return Err(ModuleProblem::NotElf),
        }
        let header = Header::parse(self.data()).map_err(malformed)?;
        if !header.is_little_endian() || header.e_machine(LE) != elf::EM_X86_64 {
            return Err(ModuleProblem::OtherMachine);
        }
        Ok(header)
    }

    fn program_headers(&self) -> Result<&[elf::ProgramHeader64<LittleEndian>], ModuleProblem> {
        let header = self.header()?;
        if usize::from(header.e_phnum(LE)) > MAX_HEADERS {
            return Err(ModuleProblem::TooLarge("program headers"));
        }
        header.program_headers(LE, self.data()).map_err(malformed)
    }

    /// Reads the program headers.
    pub fn headers(&self) -> Result<Headers, ModuleProblem> {
        let mut headers = Headers::default();
        for program in self.program_headers()? {
            match program.p_type(LE) {
                elf::PT_LOAD => headers.segments.push(Segment {
                    offset: program.p_offset(LE),
                    address: program.p_vaddr(LE),
                    size: program.p_filesz(LE),
                    executable: program.p_flags(LE) & elf::PF_X != 0,
                }),
                elf::PT_INTERP => headers.interpreter = true,
                elf::PT_DYNAMIC => headers.dynamic = Some(program.p_vaddr(LE)),
                elf::PT_NOTE if headers.build_id.is_none() => {
                    check_segment(program)?;
                    let notes = program.notes(LE, self.data()).map_err(malformed)?;
                    headers.build_id = notes.into_iter().flatten().map_while(Result::ok).find_map(|note| {
                        (note.name() == elf::ELF_NOTE_GNU
                            && note.n_type(LE) == elf::NT_GNU_BUILD_ID
                            && note.desc().len() <= MAX_BUILD_ID)
                            .then(|| note.desc().to_vec())
                    });
                }
                _ => {}
            }
        }
        Ok(headers)
    }

    /// Reads the dynamic symbol table and what belongs to it; `None` if the file has none.
    pub fn dynamic(&self) -> Result<Option<Dynamic<'_>>, ModuleProblem> {
        let data = self.data();
        let Some(symbols) = self.symbols(elf::SHT_DYNSYM, "dynamic symbols")? else { return Ok(None) };
        let mut dynamic = Dynamic { symbols, soname: None, needed: Vec::new(), symbolic: false, versions: Vec::new() };
        for program in self.program_headers()? {
            if program.p_type(LE) == elf::PT_DYNAMIC {
                check_segment(program)?;
                let entries = program.dynamic(LE, data).map_err(malformed)?.unwrap_or_default();
                let entries = entries.iter().take_while(|entry| entry.d_tag(LE) != u64::from(elf::DT_NULL));
                for entry in entries {
                    let value = entry.d_val(LE);
                    match u32::try_from(entry.d_tag(LE)) {
                        Ok(elf::DT_SONAME) => dynamic.soname = symbols.string(value),
                        Ok(elf::DT_NEEDED) => dynamic.needed.extend(symbols.string(value)),
                        Ok(elf::DT_SYMBOLIC) => dynamic.symbolic = true,
                        Ok(elf::DT_FLAGS) => dynamic.symbolic |= value & u64::from(elf::DF_SYMBOLIC) != 0,
                        _ => {}
                    }
                }
            }
        }
        for section in self.header()?.section_headers(LE, data).map_err(malformed)? {
            if section.sh_type(LE) != elf::SHT_GNU_VERDEF {
                continue;
            }
            check_size(section.sh_size(LE), MAX_SEGMENT, "version definitions")?;
            let definitions = section.gnu_verdef(LE, data).map_err(malformed)?;
            for definition in definitions.into_iter().flat_map(|(definitions, _)| definitions).take(MAX_HEADERS) {
                let (_, mut names) = definition.map_err(malformed)?;
                if let Some(name) = names.next().map_err(malformed)? {
                    dynamic.versions.extend(symbols.string(name.vda_name.get(LE).into()));
                }
            }
        }
        Ok(Some(dynamic))
    }

    /// Addresses of the words that the dynamic loader fills with the addresses of functions, and the functions' names.
    pub fn function_slots(&self, symbols: Symbols<'_>) -> Result<HashMap<u64, Vec<u8>>, ModuleProblem> {
        let data = self.data();
        let mut slots = HashMap::new();
        for section in self.header()?.section_headers(LE, data).map_err(malformed)? {
            if section.sh_type(LE) != elf::SHT_RELA {
                continue;
            }
            check_size(section.sh_size(LE), MAX_READ, "relocations")?;
            let relocations: &[elf::Rela64<LittleEndian>] = section.data_as_array(LE, data).map_err(malformed)?;
            for relocation in relocations {
                let info = relocation.r_info.get(LE);
                if !matches!(info as u32, elf::R_X86_64_JUMP_SLOT | elf::R_X86_64_GLOB_DAT) {
                    continue;
                }
                let name = usize::try_from(info >> 32).ok().and_then(|index| symbols.name(index));
                if let Some(name) = name.filter(|name| catalogue::known(name).is_some()) {
                    slots.insert(relocation.r_offset.get(LE), name.to_vec());
                }
            }
        }
        Ok(slots)
    }

    /// Reads a symbol table and its strings.
    fn symbols(&self, kind: u32, what: &'static str) -> Result<Option<Symbols<'_>>, ModuleProblem> {
        let data = self.data();
        let sections = self.header()?.section_headers(LE, data).map_err(malformed)?;
        let Some(table) = sections.iter().find(|section| section.sh_type(LE) == kind) else { return Ok(None) };
        check_size(table.sh_size(LE), MAX_READ, what)?;
        let symbols = table.data_as_array(LE, data).map_err(malformed)?;
        let strings = sections
            .get(table.link(LE).0)
            .ok_or_else(|| ModuleProblem::Malformed(format!("no string table for the {what}")))?;
        check_size(strings.sh_size(LE), MAX_READ, "strings of symbols")?;
        Ok(Some(Symbols { symbols, strings: strings.data(LE, data).map_err(malformed)? }))
    }
}

fn check_segment(program: &elf::ProgramHeader64<LittleEndian>) -> Result<(), ModuleProblem> {
    check_size(program.p_filesz(LE), MAX_SEGMENT, "a note or dynamic segment")
}

fn check_size(size: u64, limit: u64, what: &'static str) -> Result<(), ModuleProblem> {
    if size > limit { Err(ModuleProblem::TooLarge(what)) } else { Ok(()) }
}

fn malformed(error: object::read::Error) -> ModuleProblem {
    ModuleProblem::Malformed(error.to_string())
}

/// The dynamic symbols of a file: what it exports and imports.
pub struct Dynamic<'a> {
    pub symbols: Symbols<'a>,
    /// `DT_SONAME`.
    pub soname: Option<&'a [u8]>,
    /// `DT_NEEDED`: the libraries that it asks for.
    pub needed: Vec<&'a [u8]>,
    /// Whether its own symbols come first for itself (`DT_SYMBOLIC`, `DF_SYMBOLIC`).
    pub symbolic: bool,
    /// Names of the symbol versions that the file defines.
    pub versions: Vec<&'a [u8]>,
}

/// A symbol table.
#[derive(Clone, Copy)]
pub struct Symbols<'a> {
    symbols: &'a [elf::Sym64<LittleEndian>],
    strings: &'a [u8],
}

/// A function that a file defines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol<'a> {
    pub name: &'a [u8],
    /// Virtual address.
    pub address: u64,
    /// Bytes; 0 if not known.
    pub size: u64,
    /// Whether the address is that of a resolver which returns the function's address (`STT_GNU_IFUNC`).
    pub indirect: bool,
    /// Whether other object files can't refer to it (`STB_LOCAL`): there can be several of one name. What a linker hides
    /// becomes local too.
    pub local: bool,
}

impl<'a> Symbols<'a> {
    /// The functions that the file defines, in all their versions. Those with very long names are left out.
    pub fn functions(self) -> impl Iterator<Item = Symbol<'a>> {
        self.symbols
            .iter()
            .filter(|symbol| symbol.st_shndx(LE) != elf::SHN_UNDEF)
            .filter(|symbol| matches!(symbol.st_type(), elf::STT_FUNC | elf::STT_GNU_IFUNC))
            .filter_map(move |symbol| {
                Some(Symbol {
                    name: self.string(symbol.st_name(LE).into())?,
                    address: symbol.st_value(LE),
                    size: symbol.st_size(LE),
                    indirect: symbol.st_type() == elf::STT_GNU_IFUNC,
                    local: symbol.st_bind() == elf::STB_LOCAL,
                })
            })
    }

    /// A symbol table and its strings.
    pub fn new(symbols: &'a [elf::Sym64<LittleEndian>], strings: &'a [u8]) -> Self {
        Self { symbols, strings }
    }

    /// How many symbols it has.
    pub fn len(self) -> usize {
        self.symbols.len()
    }

    /// Name of the symbol of that number.
    fn name(self, index: usize) -> Option<&'a [u8]> {
        self.string(self.symbols.get(index)?.st_name(LE).into())
    }

    /// The function of that name.
    pub fn function(self, name: &str) -> Option<Symbol<'a>> {
        self.functions().find(|symbol| symbol.name == name.as_bytes())
    }

    /// Address of the variable of that name.
    pub fn variable(self, name: &str) -> Option<u64> {
        self.symbols
            .iter()
            .filter(|symbol| symbol.st_shndx(LE) != elf::SHN_UNDEF && symbol.st_type() == elf::STT_OBJECT)
            .find(|symbol| self.string(symbol.st_name(LE).into()) == Some(name.as_bytes()))
            .map(|symbol| symbol.st_value(LE))
    }

    /// The string at an offset; `None` if there is none, or a very long one. Bounded, since strings of a hostile
    /// file may overlap.
    fn string(self, offset: u64) -> Option<&'a [u8]> {
        let rest = self.strings.get(usize::try_from(offset).ok()?..)?;
        let rest = &rest[..rest.len().min(MAX_NAME + 1)];
        let length = rest.iter().position(|byte| *byte == 0)?;
        Some(&rest[..length])
    }
}

/// A file with a position of its own, so that other users of the file descriptor are not disturbed.
struct Positioned<'f> {
    file: &'f File,
    position: u64,
}

impl Read for Positioned<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.position)?;
        self.position += count as u64;
        Ok(count)
    }
}

impl Seek for Positioned<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::Current(distance) => self.position.checked_add_signed(distance),
            SeekFrom::End(distance) => self.file.metadata()?.len().checked_add_signed(distance),
        }
        .ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

/// Access to a [`Source`] that refuses reads beyond its limits.
#[derive(Clone, Copy)]
struct Bounded<'a, 'f>(&'a Source<'f>);

impl<'a> Bounded<'a, '_> {
    fn spend(self, size: u64) -> Result<(), ()> {
        if size > MAX_READ {
            return Err(());
        }
        let rest = self.0.budget.get().checked_sub(size).ok_or(())?;
        self.0.budget.set(rest);
        Ok(())
    }
}

impl<'a> ReadRef<'a> for Bounded<'a, '_> {
    fn len(self) -> Result<u64, ()> {
        (&self.0.cache).len()
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'a [u8], ()> {
        self.spend(size)?;
        (&self.0.cache).read_bytes_at(offset, size)
    }

    fn read_bytes_at_until(self, range: Range<u64>, delimiter: u8) -> Result<&'a [u8], ()> {
        // The cache gives up after 4096 bytes.
        self.spend(4096)?;
        (&self.0.cache).read_bytes_at_until(range, delimiter)
    }
}

#[cfg(test)]
#[path = "elf_tests.rs"]
mod tests;
