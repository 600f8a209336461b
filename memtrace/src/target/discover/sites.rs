//! The sites of one module: its functions by address, without those that only lead to another, each with a place for its
//! probe.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::target::{
    Module,
    catalogue::{Family, Known},
    function::{Function, Role},
    placement::{self, Extent},
    site::ProbeSite,
};

use super::{
    Note,
    inner::{Inner, Names},
    scan::{Hit, Scan},
};

/// Most other names kept of a function.
const MAX_ALIASES: usize = 8;
/// Most sites of one module: there are some 200 known names, and a program has one or two allocators.
const MAX_SITES: usize = 512;

/// Most known functions kept of one address.
const MAX_FUNCTIONS: usize = 64;

/// One address with functions to trace.
#[derive(Debug, Default)]
pub struct Found {
    /// The functions, the first of the catalogue first.
    functions: Vec<(&'static Known, Vec<u8>)>,
    size: u64,
    indirect: bool,
    names: Vec<String>,
}

impl Found {
    fn add(&mut self, hit: &Hit) {
        if self.functions.len() < MAX_FUNCTIONS {
            self.functions.push((hit.known, hit.name()));
        }
        self.size = self.size.max(hit.size);
        self.indirect |= hit.indirect;
        self.add_name(&hit.name());
    }

    fn add_name(&mut self, name: &[u8]) {
        if self.names.len() > MAX_ALIASES {
            return;
        }
        let name = String::from_utf8_lossy(name);
        if !self.names.iter().any(|known| *known == name) {
            self.names.push(name.into_owned());
        }
    }

    /// The function that the address is taken for, and those that cannot be the same.
    pub fn split(&self) -> Option<(Function, Vec<&'static Known>)> {
        let (first, name) = self.functions.first()?;
        let others = self.functions.iter().map(|(known, _)| *known);
        let others = others.filter(|other| (first.role, first.arguments) != (other.role, other.arguments)).collect();
        let name = String::from_utf8_lossy(name).into_owned().into();
        Some((Function { name, role: first.role, arguments: first.arguments }, others))
    }
}

/// Places probes in a module, number `index`, for the functions `hits`, which are in the catalogue's order.
pub fn resolve(module: &Module, index: usize, scan: &Scan, hits: &[&Hit]) -> (Vec<ProbeSite>, Vec<Note>) {
    let mut found: BTreeMap<u64, Found> = BTreeMap::new();
    for hit in hits {
        found.entry(hit.address).or_default().add(hit);
    }
    for hit in &scan.hits {
        if let Some(entry) = found.get_mut(&hit.address) {
            entry.add_name(&hit.name());
        }
    }
    let inner = look_inside(module, scan, &found);
    leave_out_operators(&mut found, &inner);
    leave_out_jumps(&mut found, &inner);
    let frees: BTreeSet<u64> = found.iter().filter(|(_, entry)| is_free(entry)).map(|(address, _)| *address).collect();
    let mut found: Vec<_> = found.into_iter().collect();
    found.sort_by_key(|(address, entry)| (entry.functions.first().map(|(known, _)| known.rank), *address));
    let (mut sites, mut notes) = (Vec::new(), Vec::new());
    for (address, entry) in found {
        let Some((function, others)) = entry.split() else { continue };
        let module_name = || module.name().to_owned();
        for other in others {
            notes.push(Note::Unprobed {
                module: module_name(),
                function: other.name.into(),
                reason: format!("it has the same code as {}, which takes other arguments", function.name),
            });
        }
        if sites.len() >= MAX_SITES {
            let reason = format!("{MAX_SITES} functions of the module are probed already");
            notes.push(Note::Unprobed { module: module_name(), function: function.name, reason });
            break;
        }
        let extent = Extent { address, size: entry.size, indirect: entry.indirect };
        match placement::place(module, extent, function.role, function.arguments) {
            Ok((function_offset, placement)) => sites.push(ProbeSite {
                module: index,
                aliases: entry.names.into_iter().filter(|name| *name != *function.name).take(MAX_ALIASES).collect(),
                function: function.name,
                role: function.role,
                arguments: function.arguments,
                constant: None,
                repeats: function.role == Role::Free
                    && inner
                        .get(&address)
                        .is_some_and(|inner| inner.calls.iter().any(|call| *call != address && frees.contains(call))),
                function_offset,
                probe_offset: function_offset.saturating_add(placement.offset),
                placement,
            }),
            Err(reason) => notes.push(Note::Unprobed { module: module_name(), function: function.name, reason }),
        }
    }
    (sites, notes)
}

fn is_free(entry: &Found) -> bool {
    entry.functions.first().is_some_and(|(known, _)| known.role == Role::Free)
}

fn look_inside(module: &Module, scan: &Scan, found: &BTreeMap<u64, Found>) -> HashMap<u64, Inner> {
    let exported = scan.hits.iter().filter(|hit| hit.exported).map(|hit| (hit.name(), hit.address)).collect();
    let names = Names::new(&scan.slots, &exported);
    let inside = |(address, entry): (&u64, &Found)| (*address, Inner::of(module, *address, entry.size, &names));
    found.iter().take(MAX_SITES).map(inside).collect()
}

/// Takes C++'s functions out where `operator new` does no more than to call malloc (and a handler if that fails), as the
/// ones of libstdc++ and libc++ do: every call of theirs is a call of a C function.
fn leave_out_operators(found: &mut BTreeMap<u64, Found>, inner: &HashMap<u64, Inner>) {
    let is = |entry: &Found, name: &str| entry.functions.iter().any(|(known, _)| known.name == name);
    let mallocs: BTreeSet<u64> =
        found.iter().filter(|(_, entry)| is(entry, "malloc")).map(|(address, _)| *address).collect();
    let only_calls = found.iter().filter(|(_, entry)| is(entry, "_Znwm")).any(|(address, _)| {
        inner
            .get(address)
            .is_some_and(|inner| !inner.thread_local && inner.calls.iter().any(|call| mallocs.contains(call)))
    });
    if only_calls {
        for entry in found.values_mut() {
            entry.functions.retain(|(known, _)| known.family != Family::Cxx);
        }
        found.retain(|_, entry| !entry.functions.is_empty());
    }
}

/// Takes functions out that begin with a jump to one that does the same with the same arguments, which becomes theirs too.
fn leave_out_jumps(found: &mut BTreeMap<u64, Found>, inner: &HashMap<u64, Inner>) {
    const MAX_JUMPS: usize = 8;
    let kind = |entry: &Found| entry.functions.first().map(|(known, _)| (known.role, known.arguments));
    let next = |address: u64| {
        let target = inner.get(&address)?.jump?;
        let (from, to) = (found.get(&address)?, found.get(&target)?);
        (target != address && kind(from) == kind(to)).then_some(target)
    };
    let mut moved = Vec::new();
    for address in found.keys() {
        let mut end = *address;
        for _ in 0..MAX_JUMPS {
            let Some(target) = next(end) else { break };
            end = target;
        }
        // A circle leads nowhere.
        if end != *address && next(end).is_none() {
            moved.push((*address, end));
        }
    }
    for (from, to) in moved {
        if let Some(entry) = found.remove(&from)
            && let Some(target) = found.get_mut(&to)
        {
            for name in entry.names {
                target.add_name(name.as_bytes());
            }
        }
    }
}
