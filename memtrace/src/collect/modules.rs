//! The target's code mappings, collected while it lives and kept with their files open, so that its stacks can be named
//! after it has exited.

use std::collections::HashMap;

use crate::{
    profile,
    target::{Mapping, Module, Process, TargetError, mappings, mappings::FileKey},
};

/// Most mappings kept: a target that maps code for ever must not make memtrace grow for ever.
const MAX_MAPPINGS: usize = 65_536;

/// How often the memory map is read when it changes meanwhile.
const ATTEMPTS: u32 = 4;

/// Code mappings seen so far.
#[derive(Debug, Default)]
pub struct Modules {
    /// In the order in which they were first seen. Where one replaced another, both are kept.
    seen: Vec<profile::Mapping>,
    /// Files by identity; `None` for those that could not be opened.
    files: HashMap<FileKey, Option<Module>>,
    /// Their identities in the order in which they were opened.
    opened: Vec<FileKey>,
    /// Those in force when the map was last read.
    current: Vec<Mapping>,
}

/// A mapping of code that is in force.
#[derive(Clone, Copy, Debug)]
pub struct Code<'a> {
    /// As the memory map shows it.
    pub mapping: &'a Mapping,
    /// The file behind it, if there is one that could be opened.
    pub module: Option<&'a Module>,
}

impl Modules {
    /// Reads the memory map and adds what is new. Returns whether the mappings of code are others than before: one that
    /// was seen earlier can come back, and one can go.
    ///
    /// # Errors
    /// The map can't be read: the process has exited, for example.
    pub fn refresh(&mut self, process: &Process) -> Result<bool, TargetError> {
        let before = self.current.clone();
        for _ in 0..ATTEMPTS {
            let mappings = mappings::read(process)?;
            let (seen, opened) = (self.seen.len(), self.opened.len());
            self.add(process, &mappings);
            if self.opened.len() == opened || executable(&mappings::read(process)?).eq(executable(&mappings)) {
                break;
            }
            // Another file may have taken a mapping's place before it was opened by the mapping's address.
            self.seen.truncate(seen);
            for key in self.opened.drain(opened..) {
                self.files.remove(&key);
            }
            self.current.retain(|mapping| !mapping.has_file() || self.files.contains_key(&mapping.file));
        }
        Ok(self.current != before)
    }

    /// Adds what is new in `mappings`.
    fn add(&mut self, process: &Process, mappings: &[Mapping]) {
        self.current = executable(mappings).cloned().collect();
        for mapping in executable(mappings) {
            let name = mapping.name.to_string_lossy();
            let known = self.seen.iter().rev().any(|seen| {
                (seen.start, seen.end, seen.offset) == (mapping.start, mapping.end, mapping.offset) && seen.name == name
            });
            if known || self.seen.len() >= MAX_MAPPINGS {
                continue;
            }
            let open = if mapping.has_file() {
                let file = self.files.entry(mapping.file).or_insert_with(|| {
                    self.opened.push(mapping.file);
                    Module::open(process, mapping).ok()
                });
                file.as_ref().map(Module::path)
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
    }

    /// The mappings of code in force when the map was last read, by address.
    pub fn code(&self) -> impl Iterator<Item = Code<'_>> {
        self.current.iter().map(|mapping| Code { mapping, module: self.module(mapping.file) })
    }

    /// The file behind mappings with this identity.
    pub fn module(&self, key: FileKey) -> Option<&Module> {
        self.files.get(&key)?.as_ref()
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

fn executable(mappings: &[Mapping]) -> impl Iterator<Item = &Mapping> {
    mappings.iter().filter(|mapping| mapping.executable)
}
