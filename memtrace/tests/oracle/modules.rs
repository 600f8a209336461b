//! The program's modules, as framehop takes them.

use std::{collections::BTreeMap, fs, fs::File, path::Path};

use framehop::{ExplicitModuleSectionInfo, Module, Unwinder as _, x86_64::UnwinderX86_64};
use memtrace::{
    profile::Mapping,
    unwind::{Reason, Table},
};
use memtrace_common::unwind::{CfaRule, Row};
use object::{
    LittleEndian, Object as _, ObjectSection as _,
    read::elf::{ElfFile64, ProgramHeader as _},
};

/// Code mappings and the files behind them.
pub struct Modules {
    pub unwinder: UnwinderX86_64<Vec<u8>>,
    known: Vec<Known>,
}

/// One mapping.
struct Known {
    start: u64,
    end: u64,
    name: String,
    /// Whether it was mapped while the program ran already.
    late: bool,
    /// Run-time address minus the file's.
    bias: u64,
    table: Option<Table>,
}

/// What memtrace's rows say at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// No code is mapped there that comes from a file.
    NoModule,
    /// Code without unwind information.
    None,
    /// A rule that rows can't express.
    Unsupported(Option<Reason>),
    /// A rule.
    Some(Row),
}

impl Modules {
    /// Reads the files of `mappings`, of which the first `early` were there before the program ran.
    pub fn read(mappings: &[Mapping], early: usize) -> Self {
        let mut unwinder = UnwinderX86_64::new();
        let mut known = Vec::new();
        let mut ranges: BTreeMap<(String, u64), (u64, u64)> = BTreeMap::new();
        for (number, mapping) in mappings.iter().enumerate() {
            // The vDSO and the kernel's other pages: nothing in there allocates.
            let Some(path) = &mapping.open else { continue };
            let bias = bias(path, mapping);
            let table = Table::read(&File::open(path).expect("the module's file")).ok();
            let (start, end, name) = (mapping.start, mapping.end, mapping.name.clone());
            known.push(Known { start, end, name, late: number >= early, bias, table });
            let range = ranges.entry((path.display().to_string(), bias)).or_insert((mapping.start, mapping.end));
            *range = (range.0.min(mapping.start), range.1.max(mapping.end));
        }
        for ((path, bias), (start, end)) in ranges {
            let data = fs::read(&path).expect("the module's file");
            let elf = ElfFile64::<LittleEndian>::parse(&*data).expect("an ELF file");
            let section = |name: &str| {
                let section = elf.section_by_name(name)?;
                let range = section.address()..section.address() + section.size();
                Some((range, section.data().ok()?.to_vec()))
            };
            let (eh_frame, eh_frame_hdr) = (section(".eh_frame"), section(".eh_frame_hdr"));
            let info = ExplicitModuleSectionInfo {
                base_svma: 0,
                text_svma: section(".text").map(|text| text.0),
                got_svma: section(".got").map(|got| got.0),
                eh_frame_svma: eh_frame.as_ref().map(|section| section.0.clone()),
                eh_frame: eh_frame.map(|section| section.1),
                eh_frame_hdr_svma: eh_frame_hdr.as_ref().map(|section| section.0.clone()),
                eh_frame_hdr: eh_frame_hdr.map(|section| section.1),
                ..Default::default()
            };
            unwinder.add_module(Module::new(path, start..end, bias, info));
        }
        Self { unwinder, known }
    }

    fn find(&self, address: u64) -> Option<&Known> {
        self.known.iter().rev().find(|known| (known.start..known.end).contains(&address))
    }

    /// Whether the code there was mapped while the program ran already.
    pub fn is_late(&self, return_address: u64) -> bool {
        self.find(return_address - 1).is_some_and(|known| known.late)
    }

    /// What memtrace's rows say for a return address.
    pub fn rows(&self, return_address: u64) -> Rows {
        let Some(known) = self.find(return_address - 1) else { return Rows::NoModule };
        let Some(table) = &known.table else { return Rows::None };
        let pc = return_address - 1 - known.bias - table.base();
        match table.lookup(pc) {
            None => Rows::None,
            Some(row) if row.cfa == CfaRule::NoInfo => Rows::None,
            Some(row) if row.cfa == CfaRule::Unsupported => Rows::Unsupported(Reason::of(row)),
            Some(row) => Rows::Some(row),
        }
    }

    /// Module and file address, for people.
    pub fn name(&self, address: u64) -> String {
        match self.find(address.saturating_sub(1)) {
            Some(known) => {
                let file = known.name.rsplit('/').next().unwrap_or_default();
                format!("{file}+{:#x}", address - known.bias)
            }
            None => format!("{address:#x}"),
        }
    }
}

/// Run-time address minus file address, from the segment that the mapping is of.
fn bias(path: &Path, mapping: &Mapping) -> u64 {
    let data = fs::read(path).expect("the module's file");
    let elf = ElfFile64::<LittleEndian>::parse(&*data).expect("an ELF file");
    let segment = elf.elf_program_headers().iter().find(|segment| {
        let (offset, size) = (segment.p_offset(LittleEndian), segment.p_filesz(LittleEndian));
        segment.p_type(LittleEndian) == object::elf::PT_LOAD
            && offset & !0xfff <= mapping.offset
            && mapping.offset < offset + size
            && segment.p_flags(LittleEndian) & object::elf::PF_X != 0
    });
    let segment = segment.unwrap_or_else(|| panic!("no code segment behind {}", mapping.name));
    let address = segment.p_vaddr(LittleEndian) + mapping.offset - segment.p_offset(LittleEndian);
    mapping.start.wrapping_sub(address)
}
