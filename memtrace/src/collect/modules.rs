//! The target's code mappings, collected while it lives and kept with their files open, so that its stacks can be named
//! after it has exited.

use std::collections::HashMap;

use crate::{
    profile,
    target::{Mapping, Module, Process, TargetError, mappings, mappings::FileKey},
};

/// Most mappings kept: a target that maps code for ever must not make memtrace grow for ever.
const MAX_MAPPINGS: usize = 65_536;

/// Code mappings seen so far.
#[derive(Debug, Default)]
pub struct Modules {
    /// In the order in which they were first seen. Where one replaced another, both are kept.
    seen: Vec<profile::Mapping>,
    /// Files by identity; `None` for those that could not be opened.
    files: HashMap<FileKey, Option<Module>>,
}

impl Modules {
    /// Reads the memory map and adds what is new. Returns whether there was anything new.
    ///
    /// # Errors
    /// The map can't be read: the process has exited, for example.
    pub fn refresh(&mut self, process: &Process) -> Result<bool, TargetError> {
        let mappings = mappings::read(process)?;
        Ok(self.add(process, &mappings))
    }

    /// Adds what is new in `mappings`. Returns whether there was anything new.
    pub fn add(&mut self, process: &Process, mappings: &[Mapping]) -> bool {
        let before = self.seen.len();
        for mapping in mappings.iter().filter(|mapping| mapping.executable) {
            let name = mapping.name.to_string_lossy();
            let known = self.seen.iter().rev().any(|seen| {
                (seen.start, seen.end, seen.offset) == (mapping.start, mapping.end, mapping.offset) && seen.name == name
            });
            if known || self.seen.len() >= MAX_MAPPINGS {
                continue;
            }
            let open = if mapping.has_file() {
                self.files
                    .entry(mapping.file)
                    .or_insert_with(|| Module::open(process, mapping).ok())
                    .as_ref()
                    .map(Module::path)
            } else {
                None
            };
            self.seen.push(profile::Mapping {
                start: mapping.start,
                end: mapping.end,
                offset: mapping.offset,
                name: name.into_owned(),
                open,
            });
        }
        self.seen.len() > before
    }

    /// Whether `address` lies in code seen so far.
    pub fn contains(&self, address: u64) -> bool {
        self.seen.iter().any(|mapping| (mapping.start..mapping.end).contains(&address))
    }

    /// The mappings. Their paths ([`profile::Mapping::open`]) can be used for as long as `self` lives.
    pub fn mappings(&self) -> &[profile::Mapping] {
        &self.seen
    }
}
