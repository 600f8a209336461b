//! Feeds the kernel side with unwind tables for the code that the target maps.

use std::{
    cmp::Ordering,
    collections::{HashMap, HashSet},
    path::Path,
};

use memtrace_common::{
    settings::Unwind,
    unwind::{CodeMapping, MAX_MAPPINGS},
};

use crate::{
    collect::modules::{Code, Modules},
    kernel::{KernelError, Tracer, code::TableRef},
    profile::UnwindProblem,
    target::{
        Mapping, Module, Process,
        mappings::{self, FileKey},
    },
    unwind::{Table, UnwindError},
};

/// Stands for the vDSO, which is no file. No file has this number.
const VDSO: FileKey = FileKey { device: (u32::MAX, u32::MAX), inode: 0 };

/// By what the table of a mapping's code is found.
fn key(mapping: &Mapping) -> FileKey {
    if mapping.is_vdso() { VDSO } else { mapping.file }
}

/// How a module's frames are unwound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// By its table.
    Rows,
    /// By frame pointers: it has no unwind information.
    NoInformation,
    /// By frame pointers: it is no file that can be used, for the reason given.
    NoModule(String),
    /// Not at all: its unwind information can't be used, for the reason given.
    Unusable(String),
    /// Not at all: there was no room for its table.
    NoRoom,
}

impl State {
    /// Why not by rows; `None` if it is by rows.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Rows => None,
            Self::NoInformation => Some("it has no unwind information"),
            Self::NoModule(reason) | Self::Unusable(reason) => Some(reason),
            Self::NoRoom => Some("there is no room for its table (raise --memory-budget)"),
        }
    }

    /// Whether stacks end there: code with unwind information was compiled without frame pointers, most likely.
    pub fn is_cut(&self) -> bool {
        matches!(self, Self::Unusable(_) | Self::NoRoom)
    }
}

/// A module and how its frames are unwound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleState {
    /// File name. Any characters can be in there.
    pub name: String,
    /// Rows of its table.
    pub rows: u64,
    /// Bytes of its table.
    pub bytes: u64,
    /// Bytes of code whose rules the table can't express: stacks through it are cut.
    pub unsupported_code: u64,
    /// How its frames are unwound.
    pub state: State,
}

/// The unwind tables of a target's modules.
#[derive(Debug, Default)]
pub struct Unwinding {
    /// Tables made but not handed over yet.
    waiting: HashMap<FileKey, Table>,
    placed: HashMap<FileKey, TableRef>,
    states: HashMap<FileKey, ModuleState>,
    /// Base address of every module's table, as an ELF address.
    bases: HashMap<FileKey, u64>,
    /// Most mappings of a process that found no place in the kernel side's list.
    left_out: usize,
    /// How many modules through which stacks are cut have been told of.
    told: usize,
}

/// Most of them that are told of at once; the report has all.
const MOST_TOLD: usize = 10;

impl Unwinding {
    /// Makes the tables of all modules that have none yet.
    pub fn prepare(&mut self, process: &Process, modules: &Modules) {
        for code in modules.code() {
            let key = key(code.mapping);
            if self.states.contains_key(&key) {
                continue;
            }
            if let Some(problem) = code.problem {
                let (name, state) = (code.mapping.file_name(), State::NoModule(problem.to_owned()));
                self.states.insert(key, ModuleState { name, rows: 0, bytes: 0, unsupported_code: 0, state });
            } else if let Some(module) = code.module {
                self.add(key, module.name(), Table::read(module.file()));
            } else if key == VDSO {
                let bytes = mappings::read_vdso(process, code.mapping);
                self.add(key, "[vdso]", bytes.map_err(UnwindError::from).and_then(|bytes| Table::read(&bytes[..])));
            }
        }
    }

    fn add(&mut self, key: FileKey, name: &str, table: Result<Table, UnwindError>) {
        let (state, table) = match table {
            Ok(table) if table.rows().is_empty() => (State::NoInformation, None),
            Ok(table) => (State::Rows, Some(table)),
            Err(error) => {
                self.tell(name, &error.to_string());
                (State::Unusable(error.to_string()), None)
            }
        };
        let rows = table.as_ref().map_or(0, |table| table.rows().len() as u64);
        let bytes = table.as_ref().map_or(0, |table| table.bytes() as u64);
        let unsupported = |table: &Table| table.summary().unsupported.iter().map(|(_, share)| share.bytes).sum();
        let unsupported_code = table.as_ref().map_or(0, unsupported);
        self.states.insert(key, ModuleState { name: name.to_owned(), rows, bytes, unsupported_code, state });
        if let Some(table) = table {
            self.bases.insert(key, table.base());
            self.waiting.insert(key, table);
        }
    }

    fn tell(&mut self, name: &str, reason: &str) {
        self.told += 1;
        match self.told.cmp(&(MOST_TOLD + 1)) {
            Ordering::Less => tracing::warn!("stacks through {name:?} are cut: {reason}"),
            Ordering::Equal => tracing::warn!("stacks through more modules are cut; the report names them"),
            Ordering::Greater => {}
        }
    }

    /// Rows and index entries of the tables made so far.
    pub fn size(&self) -> (u64, u64) {
        self.waiting.values().fold((0, 0), |(rows, blocks), table| {
            (rows + table.rows().len() as u64, blocks + table.index().len() as u64)
        })
    }

    /// Hands new tables and the current mappings of the image `number` over to the kernel side.
    ///
    /// # Errors
    /// Its tables can't be written.
    pub fn hand_over(&mut self, tracer: &mut Tracer, number: u32, modules: &Modules) -> Result<(), KernelError> {
        let mut waiting: Vec<(FileKey, Table)> = self.waiting.drain().collect();
        let lasting: HashSet<FileKey> = modules.code().filter(stays).map(|code| key(code.mapping)).collect();
        // What every stack leads through comes first, then small tables before large ones.
        waiting.sort_by_key(|(key, table)| (!lasting.contains(key), table.rows().len(), *key));
        for (key, table) in waiting {
            match tracer.add_table(table.rows(), table.index())? {
                Some(place) => {
                    self.placed.insert(key, place);
                }
                None => {
                    if let Some(state) = self.states.get_mut(&key) {
                        state.state = State::NoRoom;
                        let name = state.name.clone();
                        self.tell(&name, State::NoRoom.reason().unwrap_or_default());
                    }
                }
            }
        }
        let mut mappings: Vec<CodeMapping> = modules
            .code()
            // Return addresses in there are not the program's: the kernel side has to see that no code is known.
            .filter(|code| code.mapping.name != Path::new("[uprobes]"))
            .map(|code| {
                let key = key(code.mapping);
                let place = self.placed.get(&key).copied().unwrap_or_default();
                let base = code_address(&code)
                    .zip(self.bases.get(&key))
                    .map(|(address, base)| code.mapping.start.wrapping_sub(address.wrapping_sub(*base)));
                let place = if base.is_some() { place } else { TableRef::default() };
                let cut = place.rows == 0 && self.states.get(&key).is_some_and(|module| module.state.is_cut());
                let mut blocks = place.blocks;
                if !stays(&code) {
                    blocks |= CodeMapping::REMOVABLE;
                }
                if cut {
                    blocks |= CodeMapping::CUT;
                }
                CodeMapping {
                    start: code.mapping.start,
                    end: code.mapping.end,
                    base: base.unwrap_or_default(),
                    first_row: place.first_row,
                    rows: place.rows,
                    first_block: place.first_block,
                    blocks,
                }
            })
            .collect();
        let left_out = mappings.len().saturating_sub(MAX_MAPPINGS as usize);
        if left_out > 0 {
            // Code that is made at run time comes in the largest numbers.
            mappings.sort_by_key(|mapping| (mapping.rows == 0, mapping.start));
            mappings.truncate(MAX_MAPPINGS as usize);
        }
        mappings.sort_unstable_by_key(|mapping| mapping.start);
        let mut left_out = left_out;
        if !tracer.set_mappings(number, &mappings)? {
            left_out = left_out.saturating_add(mappings.len());
        }
        if left_out > self.left_out {
            tracing::warn!(
                "{left_out} code mappings of a process are beyond those that can be unwound: stacks through them are cut"
            );
        }
        // Of one process after the other: those with the most.
        self.left_out = self.left_out.max(left_out);
        Ok(())
    }

    /// Code mappings beyond those that can be unwound.
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// Modules whose frames are not unwound by rows, with what happens to stacks through them.
    pub fn problems(&self, unwind: Unwind) -> Vec<UnwindProblem> {
        self.modules()
            .into_iter()
            .filter_map(|module| {
                let reason = module.state.reason()?;
                let cut = unwind == Unwind::Dwarf || module.state.is_cut();
                let consequence = if cut { "stacks through it are cut" } else { "it is followed by frame pointers" };
                Some(UnwindProblem { module: module.name, problem: format!("{reason}; {consequence}") })
            })
            .collect()
    }

    /// The modules by name, and how their frames are unwound.
    pub fn modules(&self) -> Vec<ModuleState> {
        let mut states: Vec<ModuleState> = self.states.values().cloned().collect();
        states.sort_by(|a, b| a.name.cmp(&b.name));
        states
    }
}

/// Address of a mapping's first byte, as the file numbers it.
fn code_address(code: &Code<'_>) -> Option<u64> {
    // The vDSO's image is mapped as a whole, from its first byte, which has address 0.
    if code.mapping.is_vdso() { Some(0) } else { code.module?.code_address(code.mapping) }
}

/// Whether code stays for as long as the process lives: the program and the C library, which both name a dynamic loader,
/// the loader, and the vDSO.
fn stays(code: &Code<'_>) -> bool {
    let stays = |module: &Module| module.has_interpreter() || module.name().starts_with("ld-");
    code.mapping.is_vdso() || code.module.is_some_and(stays)
}
