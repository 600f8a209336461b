//! Which mapping every address of a process lies in.

use std::{borrow::Cow, ops::Range};

use crate::profile::{Leaf, Mapping, Stack};

/// Most places of one address that are told apart.
const MAX_PLACES: usize = 8;

/// Every distinct return address of a process, in order, with its places.
#[derive(Default)]
pub struct Places {
    addresses: Vec<u64>,
    /// The places of all addresses, one address after the other.
    places: Vec<Place>,
    /// Where those of each address begin in [`Self::places`], and where the last ones end.
    starts: Vec<usize>,
}

/// A place of one return address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index in [`crate::profile::Process::mappings`].
    pub mapping: usize,
    /// File offset of the address to look up.
    pub offset: u64,
}

/// The address to look up for a return address: a byte of the call instruction. The return address itself may belong
/// to the next line, or after a call that never returns, to the next function.
pub fn lookup(return_address: u64) -> u64 {
    return_address.saturating_sub(1)
}

impl Places {
    /// Finds the places of every address of a process with these mappings and stacks. There are several where one mapping took the place of another during the trace:
    /// a recorded stack does not tell when it was recorded. The same place of the same file counts once.
    pub fn of(mappings: &[Mapping], stacks: &[&Stack]) -> Self {
        let mut addresses: Vec<u64> = stacks
            .iter()
            .filter(|stack| !matches!(stack.leaf, Leaf::Unknown | Leaf::Unattributed | Leaf::Others))
            .flat_map(|stack| &stack.frames)
            .chain(stacks.iter().filter_map(|stack| stack.touch.as_ref()).flat_map(|touch| &touch.frames))
            .copied()
            .collect();
        addresses.sort_unstable();
        addresses.dedup();
        let mut found: Vec<(usize, Place)> = Vec::with_capacity(addresses.len());
        let mut last: Vec<Option<usize>> = vec![None; addresses.len()];
        for (index, mapping) in mappings.iter().enumerate() {
            let first = addresses.partition_point(|address| lookup(*address) < mapping.start);
            let end = addresses.partition_point(|address| lookup(*address) < mapping.end);
            for position in first..end.max(first) {
                let distance = lookup(addresses[position]).saturating_sub(mapping.start);
                let place = Place { mapping: index, offset: mapping.offset.saturating_add(distance) };
                match last[position].map(|entry| &mut found[entry].1) {
                    Some(before) if same(mappings, *before, place) => *before = place,
                    _ => {
                        last[position] = Some(found.len());
                        found.push((position, place));
                    }
                }
            }
        }
        found.sort_by_key(|(position, _)| *position);
        Self::arranged(mappings, addresses, found)
    }

    fn arranged(mappings: &[Mapping], addresses: Vec<u64>, found: Vec<(usize, Place)>) -> Self {
        let mut places: Vec<Place> = Vec::with_capacity(found.len());
        let mut starts = Vec::with_capacity(addresses.len() + 1);
        let mut rest = found.into_iter().peekable();
        for position in 0..addresses.len() {
            let start = places.len();
            starts.push(start);
            while let Some((_, place)) = rest.next_if(|(at, _)| *at == position) {
                if places.len() < start + MAX_PLACES
                    && !places[start..].iter().any(|known| same(mappings, *known, place))
                {
                    places.push(place);
                }
            }
        }
        starts.push(places.len());
        Self { addresses, places, starts }
    }

    /// Number of places.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// All places with the address to look up there, in the order of the addresses.
    pub fn iter(&self) -> impl Iterator<Item = (u64, Place)> {
        self.addresses.iter().enumerate().flat_map(|(position, address)| {
            self.places[self.starts[position]..self.starts[position + 1]].iter().map(|place| (lookup(*address), *place))
        })
    }

    /// Positions of the places of a return address; empty if it lies in no mapping.
    pub fn find(&self, return_address: u64) -> Range<usize> {
        match self.addresses.binary_search(&return_address) {
            Ok(position) => self.starts[position]..self.starts[position + 1],
            Err(_) => 0..0,
        }
    }

    /// Addresses with several places.
    pub fn ambiguous(&self) -> impl Iterator<Item = u64> {
        let several = |position: &usize| self.starts[position + 1] - self.starts[*position] > 1;
        (0..self.addresses.len()).filter(several).map(|position| self.addresses[position])
    }

    /// Keeps the places of return addresses that `fits` is true of, and those of addresses of which it is never true.
    pub fn retain(&mut self, mut fits: impl FnMut(u64, Place) -> bool) {
        let mut kept = Vec::with_capacity(self.places.len());
        for (position, address) in self.addresses.iter().enumerate() {
            let all = self.starts[position]..self.starts[position + 1];
            let start = kept.len();
            kept.extend(self.places[all.clone()].iter().copied().filter(|place| fits(*address, *place)));
            if kept.len() == start {
                kept.extend_from_slice(&self.places[all]);
            }
            self.starts[position] = start;
        }
        if let Some(end) = self.starts.last_mut() {
            *end = kept.len();
        }
        self.places = kept;
    }

    /// The place at a position.
    pub fn get(&self, position: usize) -> Place {
        self.places[position]
    }
}

/// Whether two places are the same code: one byte of one file, or memory of one kind without a file.
fn same(mappings: &[Mapping], a: Place, b: Place) -> bool {
    let (first, second) = (&mappings[a.mapping], &mappings[b.mapping]);
    match (&first.open, &second.open) {
        (Some(one), Some(other)) => one == other && a.offset == b.offset,
        // One of the kinds is a file that could not be opened: what it is, its name says.
        (None, None) => {
            module_name(first) == module_name(second) && (!first.name.starts_with('/') || a.offset == b.offset)
        }
        _ => false,
    }
}

/// Name of the module behind a mapping: its file name without directories, `[anon]` for code in no file.
pub fn module_name(mapping: &Mapping) -> Cow<'_, str> {
    // The kernel's mark of a file without a name in any directory (man 5 proc_pid_maps).
    let name = mapping.name.strip_suffix(" (deleted)");
    let name = name.unwrap_or(&mapping.name);
    match name.rsplit('/').next() {
        None | Some("") => Cow::Borrowed("[anon]"),
        Some(file) => super::demangle::bounded(file),
    }
}
