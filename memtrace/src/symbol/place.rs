//! Which mapping every address of a profile lies in.

use std::borrow::Cow;

use crate::profile::{Leaf, Mapping, Profile};

/// Every distinct return address of a profile, in order, with its place.
pub struct Places {
    addresses: Vec<u64>,
    places: Vec<Place>,
}

/// The place of one return address.
#[derive(Clone, Copy, Default)]
pub struct Place {
    /// Index in [`Profile::mappings`].
    pub mapping: Option<usize>,
    /// File offset of the address to look up; 0 without a mapping.
    pub offset: u64,
}

/// The address to look up for a return address: a byte of the call instruction. The return address itself may belong
/// to the next line, or after a call that never returns, to the next function.
fn lookup(return_address: u64) -> u64 {
    return_address.saturating_sub(1)
}

impl Places {
    /// Finds the place of every address. Where mappings overlap, because one replaced another during the trace, the
    /// one that stands later in the list wins.
    pub fn of(profile: &Profile) -> Self {
        let mut addresses: Vec<u64> = profile
            .stacks
            .iter()
            .filter(|stack| !matches!(stack.leaf, Leaf::Unknown | Leaf::Unattributed | Leaf::Others))
            .flat_map(|stack| &stack.frames)
            .chain(profile.stacks.iter().filter_map(|stack| stack.touch.as_ref()).flat_map(|touch| &touch.frames))
            .copied()
            .collect();
        addresses.sort_unstable();
        addresses.dedup();
        let mut places = vec![Place::default(); addresses.len()];
        for (index, mapping) in profile.mappings.iter().enumerate() {
            let first = addresses.partition_point(|address| lookup(*address) < mapping.start);
            let last = addresses.partition_point(|address| lookup(*address) < mapping.end);
            for position in first..last.max(first) {
                let distance = lookup(addresses[position]).saturating_sub(mapping.start);
                places[position] = Place { mapping: Some(index), offset: mapping.offset.saturating_add(distance) };
            }
        }
        Self { addresses, places }
    }

    /// Number of distinct addresses.
    pub fn len(&self) -> usize {
        self.addresses.len()
    }

    /// The places, in the order of the addresses.
    pub fn iter(&self) -> impl Iterator<Item = Place> {
        self.places.iter().copied()
    }

    /// Position of a return address in the list, and its place.
    pub fn find(&self, return_address: u64) -> Option<(usize, Place)> {
        let position = self.addresses.binary_search(&return_address).ok()?;
        Some((position, self.places[position]))
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
