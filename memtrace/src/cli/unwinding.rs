//! Feeds the kernel side with unwind tables for the code that the target maps.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

use memtrace_common::unwind::CodeMapping;

use crate::{
    collect::modules::Modules,
    kernel::{KernelError, Tracer, code::TableRef},
    target::{Module, mappings::FileKey},
    unwind::Table,
};

/// How a module's frames are unwound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// By its table.
    Rows,
    /// By frame pointers: it has no unwind information.
    NoInformation,
    /// By frame pointers: its unwind information can't be used, for the reason given.
    Unusable(String),
    /// By frame pointers: there was no room for its table.
    NoRoom,
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
    /// Mappings that found no place in the kernel side's list.
    left_out: usize,
}

impl Unwinding {
    /// Makes the tables of all modules that have none yet.
    pub fn prepare(&mut self, modules: &Modules) {
        let missing: Vec<FileKey> = modules
            .code()
            .filter_map(|code| code.module.map(|_| code.mapping.file))
            .filter(|key| !self.states.contains_key(key))
            .collect::<HashSet<_>>()
            .into_iter()
            .collect();
        for key in missing {
            let Some(module) = modules.module(key) else { continue };
            let (state, table) = match Table::read(module.file()) {
                Ok(table) if table.rows().is_empty() => (State::NoInformation, None),
                Ok(table) => (State::Rows, Some(table)),
                Err(error) => {
                    tracing::warn!("{:?} is unwound by frame pointers: {error}", module.name());
                    (State::Unusable(error.to_string()), None)
                }
            };
            let rows = table.as_ref().map_or(0, |table| table.rows().len() as u64);
            let bytes = table.as_ref().map_or(0, |table| table.bytes() as u64);
            let unsupported = |table: &Table| table.summary().unsupported.iter().map(|(_, share)| share.bytes).sum();
            let unsupported_code = table.as_ref().map_or(0, unsupported);
            let name = module.name().to_owned();
            self.states.insert(key, ModuleState { name, rows, bytes, unsupported_code, state });
            if let Some(table) = table {
                self.bases.insert(key, table.base());
                self.waiting.insert(key, table);
            }
        }
    }

    /// Rows and index entries of the tables made so far.
    pub fn size(&self) -> (u64, u64) {
        self.waiting.values().fold((0, 0), |(rows, blocks), table| {
            (rows + table.rows().len() as u64, blocks + table.index().len() as u64)
        })
    }

    /// Hands new tables and the current mappings over to the kernel side.
    ///
    /// # Errors
    /// Its tables can't be written.
    pub fn hand_over(&mut self, tracer: &mut Tracer, modules: &Modules) -> Result<(), KernelError> {
        for (key, table) in self.waiting.drain() {
            match tracer.add_table(table.rows(), table.index())? {
                Some(place) => {
                    self.placed.insert(key, place);
                }
                None => {
                    if let Some(state) = self.states.get_mut(&key) {
                        tracing::warn!("{:?} is unwound by frame pointers: no room for its table", state.name);
                        state.state = State::NoRoom;
                    }
                }
            }
        }
        let mut mappings: Vec<CodeMapping> = modules
            .code()
            // Return addresses in there are not the program's: the kernel side has to see that no code is known.
            .filter(|code| code.mapping.name != Path::new("[uprobes]"))
            .map(|code| {
                let key = code.mapping.file;
                let place = self.placed.get(&key).copied().unwrap_or_default();
                let base = code
                    .module
                    .and_then(|module| module.code_address(code.mapping))
                    .zip(self.bases.get(&key))
                    .map(|(address, base)| code.mapping.start.wrapping_sub(address.wrapping_sub(*base)));
                let place = if base.is_some() { place } else { TableRef::default() };
                CodeMapping {
                    start: code.mapping.start,
                    end: code.mapping.end,
                    base: base.unwrap_or_default(),
                    first_row: place.first_row,
                    rows: place.rows,
                    first_block: place.first_block,
                    blocks: place.blocks | if code.module.is_some_and(stays) { 0 } else { CodeMapping::REMOVABLE },
                }
            })
            .collect();
        mappings.sort_unstable_by_key(|mapping| mapping.start);
        let left_out = tracer.set_mappings(&mappings)?;
        if left_out > self.left_out {
            tracing::warn!(
                "{left_out} code mappings of the target are beyond those that can be unwound: stacks through them are cut"
            );
        }
        self.left_out = left_out;
        Ok(())
    }

    /// The modules by name, and how their frames are unwound.
    pub fn modules(&self) -> Vec<ModuleState> {
        let mut states: Vec<ModuleState> = self.states.values().cloned().collect();
        states.sort_by(|a, b| a.name.cmp(&b.name));
        states
    }
}

/// Whether a module stays for as long as the process lives: the program and the C library, which both name a dynamic
/// loader, and the loader.
fn stays(module: &Module) -> bool {
    module.has_interpreter() || module.name().starts_with("ld-")
}
