//! The order in which the dynamic linker searches modules for a name: the first definition is the one that all modules use
//! (ld.so(8); System V ABI, "Shared Object Dependencies").
//!
//! glibc's and musl's loaders keep a list of what they have loaded in that order, for debuggers: the program, what is
//! preloaded, the libraries asked for breadth-first, then what was opened later. It is read from the process's memory. While
//! a program is starting the list is not there yet; then the order follows from what the files ask for. What was opened
//! later is last for all others; code that calls it got its address by dlsym(3), so nothing shadows it.
//!
//! Not seen: RTLD_DEEPBIND and dlmopen(3), which search in other orders.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    os::unix::fs::FileExt as _,
};

use crate::target::{Mapping, Module, Process, mappings::FileKey};

use super::scan::Scan;

/// Most entries of the list, and of a dynamic section.
const MAX_ENTRIES: usize = 1 << 16;
const MAX_DYNAMIC: u64 = 4096;

/// A module and what it says.
pub struct Looked<'a> {
    pub module: &'a Module,
    pub scan: &'a Scan,
}

/// Where modules are searched.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Place of each module (by its index) that was loaded when the program started.
    places: HashMap<usize, usize>,
}

impl Order {
    /// Finds the order of `looked`. `program`: index of the program.
    pub fn of(process: &Process, mappings: &[Mapping], looked: &[Looked<'_>], program: usize) -> Self {
        let by_key: HashMap<FileKey, usize> =
            looked.iter().enumerate().map(|(index, one)| (one.module.key(), index)).collect();
        let list = loaded(process, mappings, looked, program).map(|keys| {
            let mut seen = HashSet::new();
            keys.iter().filter_map(|key| by_key.get(key).copied()).filter(|index| seen.insert(*index)).collect()
        });
        let order = match list {
            Some(list) => at_start(list, looked),
            None => starting(looked, program),
        };
        Self { places: order.into_iter().enumerate().map(|(place, index)| (index, place)).collect() }
    }

    /// Place of a module; `None` if it was opened later.
    pub fn place(&self, module: usize) -> Option<usize> {
        self.places.get(&module).copied()
    }
}

/// Of the loader's list what was loaded when the program started: up to the last library that one of these asks for.
fn at_start(mut list: Vec<usize>, looked: &[Looked<'_>]) -> Vec<usize> {
    let names = names(looked);
    let places: HashMap<usize, usize> = list.iter().enumerate().map(|(place, index)| (*index, place)).collect();
    let mut end = list.len().min(1);
    let mut next = 0;
    // What stands before a library that was asked for was loaded before it: preloaded, for example, with what that needs.
    while next < end {
        for needed in &looked[list[next]].scan.needed {
            if let Some(place) = names.get(needed.as_slice()).and_then(|index| places.get(index)) {
                end = end.max(place + 1);
            }
        }
        next += 1;
    }
    list.truncate(end);
    list
}

/// The order while a program is starting: the program, what nobody asks for (it is preloaded, the first at the highest
/// address, since each mapping is put below the one before), the rest breadth-first.
fn starting(looked: &[Looked<'_>], program: usize) -> Vec<usize> {
    let names = names(looked);
    let reachable = |from: &[usize]| {
        let mut order = from.to_vec();
        let mut seen: HashSet<usize> = order.iter().copied().collect();
        let mut next = 0;
        while let Some(index) = order.get(next).copied() {
            let needed = looked.get(index).map_or(&[][..], |one| &one.scan.needed);
            order.extend(
                needed
                    .iter()
                    .filter_map(|name| names.get(name.as_slice()).copied())
                    .filter(|index| seen.insert(*index)),
            );
            next += 1;
        }
        order
    };
    let asked: HashSet<usize> = reachable(&[program]).into_iter().collect();
    let others = (0..looked.len()).rev().filter(|index| !asked.contains(index) && !looked[*index].scan.loader);
    let roots: Vec<usize> = std::iter::once(program).chain(others).collect();
    reachable(&roots)
}

/// Modules by the names that others ask for them by.
fn names<'a>(looked: &[Looked<'a>]) -> HashMap<&'a [u8], usize> {
    let mut names = HashMap::new();
    for (index, one) in looked.iter().enumerate() {
        names.entry(one.module.name().as_bytes()).or_insert(index);
    }
    for (index, one) in looked.iter().enumerate().filter(|(_, one)| !one.scan.soname.is_empty()) {
        names.insert(one.scan.soname.as_slice(), index);
    }
    names
}

/// The loader's list, if it is complete.
fn loaded(process: &Process, mappings: &[Mapping], looked: &[Looked<'_>], program: usize) -> Option<Vec<FileKey>> {
    let memory = Memory { file: File::open(process.path("mem")).ok()?, mappings };
    let description = description(&memory, looked, program)?;
    // struct r_debug: int r_version; struct link_map *r_map; ElfW(Addr) r_brk; enum r_state (0: consistent).
    let (first, state) = (memory.word(description.checked_add(8)?)?, memory.word(description.checked_add(24)?)? as u32);
    if first == 0 || state != 0 {
        return None;
    }
    memory.list(first)
}

/// Address of the loader's `struct r_debug`: its own variable, or what the program's dynamic section tells debuggers.
fn description(memory: &Memory<'_>, looked: &[Looked<'_>], program: usize) -> Option<u64> {
    const DT_DEBUG: u64 = 21;
    for one in looked {
        if let Some(address) = one.scan.debug {
            return Some(memory.bias(one.module)?.wrapping_add(address));
        }
    }
    let module = looked.get(program)?.module;
    let start = memory.bias(module)?.wrapping_add(module.dynamic_section()?);
    for entry in 0..MAX_DYNAMIC {
        let address = start.checked_add(entry * 16)?;
        match memory.word(address)? {
            0 => return None,
            DT_DEBUG => return memory.word(address.checked_add(8)?).filter(|address| *address != 0),
            _ => {}
        }
    }
    None
}

/// Memory of the process.
struct Memory<'a> {
    file: File,
    mappings: &'a [Mapping],
}

impl Memory<'_> {
    fn word(&self, address: u64) -> Option<u64> {
        let mut word = [0; 8];
        self.file.read_exact_at(&mut word, address).ok()?;
        Some(u64::from_le_bytes(word))
    }

    /// What is added to a module's addresses where it is mapped.
    fn bias(&self, module: &Module) -> Option<u64> {
        let code = self.mappings.iter().find(|mapping| mapping.executable && mapping.file == module.key())?;
        Some(code.start.wrapping_sub(module.code_address(code)?))
    }

    /// The files of a list of `struct link_map`: l_addr, l_name, l_ld, l_next.
    fn list(&self, first: u64) -> Option<Vec<FileKey>> {
        let mut keys = Vec::new();
        let mut entry = first;
        while entry != 0 {
            if keys.len() >= MAX_ENTRIES {
                return None;
            }
            let (dynamic, next) = (self.word(entry.checked_add(16)?)?, self.word(entry.checked_add(24)?)?);
            let after = self.mappings.partition_point(|mapping| mapping.end <= dynamic);
            let mapping = self.mappings.get(after).filter(|mapping| mapping.start <= dynamic);
            // The vDSO has no file.
            keys.push(mapping.map_or(FileKey { device: (0, 0), inode: 0 }, |mapping| mapping.file));
            entry = next;
        }
        Some(keys)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// What a process has in its memory leads neither round in circles nor out of it.
    #[test]
    fn hostile_lists() {
        let file = || File::open("/proc/self/mem").unwrap();
        let memory = Memory { file: file(), mappings: &[] };
        // l_addr, l_name, l_ld, l_next
        let mut entries = [[0u64; 4], [0; 4], [0; 4]];
        let address = |index: usize, entries: &[[u64; 4]; 3]| (&raw const entries[index]) as u64;
        entries[0][3] = address(1, &entries);
        entries[1][3] = address(2, &entries);
        assert_eq!(memory.list(address(0, &entries)).map(|keys| keys.len()), Some(3));
        entries[2][3] = address(0, &entries);
        assert_eq!(memory.list(address(0, &entries)), None);
        for wild in [1, 4096, u64::MAX - 20, u64::MAX] {
            entries[2][3] = wild;
            assert_eq!(memory.list(address(0, &entries)), None, "{wild:#x}");
        }
    }
}
