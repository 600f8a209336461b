//! Names for the addresses of a profile.
//!
//! - [`place`]: which mappings every address of a process lies in;
//! - [`locate`]: what is at the places of all processes;
//! - [`module`]: frames of one module: its own files and those that belong to it, put together;
//! - [`symbols`], [`dwarf`]: the functions and the debug information of one ELF file
//!   ([`image`](crate::target::image));
//! - [`separate`], [`debuginfod`]: where debug information is when it is not in the module;
//! - [`perf_map`]: generated code;
//! - [`demangle`]: readable names of bounded length;
//! - [`path`]: one recorded stack to one named call path;
//! - [`merge`]: those that show the same become one; the groups that results are split by.
//!
//! All names come from files of the target, which may be hostile: they are bounded in length here, and escaped where
//! they are printed.

mod calls;
pub mod debuginfod;
mod demangle;
mod dwarf;
mod locate;
mod merge;
mod meter;
mod module;
mod path;
mod perf_map;
mod place;
mod separate;
pub(crate) mod symbols;

use std::{collections::HashMap, sync::Arc};

use crate::profile::{Amount, Leaf, NamedProcess, NamedProfile, Process, Profile, Stack};

use self::{
    locate::{Locator, Plan, Problems},
    merge::{Groups, Merged},
    path::{Known, NameId},
    place::Places,
};

/// Most bytes of all names together; what does not fit is [`NO_ROOM`].
const MAX_NAMES: usize = 512 << 20;
const NO_ROOM: &str = "[unknown] (no room for its name)";

/// What names are to be like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Whether stacks are told apart by source lines, and carry them.
    pub lines: bool,
    /// Where debug files are fetched from that are not on this machine; nowhere by default.
    pub debuginfod: Option<debuginfod::Settings>,
}

/// Names every address of `profile` and merges the stacks that got the same names, if they are of processes with the same command
/// name and of the same group.
///
/// Every file is read once, with the addresses of all processes that map it, and every place in it is looked up once. Return
/// addresses are looked up at address - 1, which lies inside the call instruction. Inlined functions are frames of their own.
/// What has no name is `[unknown] (libfoo.so+0x1234)`, the number being the return address's offset in the file, or for code
/// that is in no file, the offset from the start of its mapping; outside every mapping it is `[unknown] (0x7f0012345678)`.
/// Where several files were mapped at one address of a process during the trace and they do not agree on the name, it is
/// `[ambiguous] (liba.so+0x1234 or libb.so+0x5678)`.
///
/// `progress` is called with the number of distinct places done so far and their total.
///
/// The files are opened through [`crate::profile::Mapping::open`] and [`crate::profile::NameSources`], so this works after the
/// targets have exited.
///
/// # Panics
/// The process or thread of a stack is none of the profile's.
pub fn name(profile: &Profile, options: &Options, progress: &mut dyn FnMut(usize, usize)) -> NamedProfile {
    let mut names = Names::default();
    // First, so that there is room for them: they tell stacks apart.
    let comms: Vec<NameId> = profile.processes.iter().map(|process| names.id(&process.comm)).collect();
    let mut stacks: Vec<Vec<&Stack>> = vec![Vec::new(); profile.processes.len()];
    for stack in &profile.stacks {
        stacks[stack.process].push(stack);
    }
    let places: Vec<Places> =
        profile.processes.iter().zip(&stacks).map(|(process, stacks)| places_of(process, stacks)).collect();
    let plan = Plan::new(&profile.processes, &places);
    let mut locator = Locator {
        processes: &profile.processes,
        places: &places,
        options,
        names: &mut names,
        problems: Problems::default(),
    };
    let located = locator.locate(&plan, progress);
    let problems = locator.problems.finish();
    let mut processes: Vec<NamedProcess> = profile.processes.iter().map(merge::process).collect();
    let mut through = vec![Amount::default(); profile.functions.len()];
    let (mut merged, mut groups) = (Merged::default(), Groups::new(profile));
    for stack in &profile.stacks {
        let process = &profile.processes[stack.process];
        let known = Known {
            functions: &profile.functions,
            process,
            places: &places[stack.process],
            code: &plan.code[stack.process],
            located: &located,
        };
        let path = path::name(&known, stack, &mut names);
        merged.add(comms[stack.process], groups.of(stack), path, stack, &names);
        if let Leaf::Function(function) = stack.leaf
            && let Some(sum) = through.get_mut(function)
        {
            *sum = sum.plus(stack.allocated);
        }
        let sum = &mut processes[stack.process];
        sum.allocated = sum.allocated.plus(stack.allocated);
        sum.freed = sum.freed.plus(stack.freed);
        sum.unfreed = sum.unfreed.plus(stack.unfreed);
    }
    NamedProfile {
        subject: profile.subject,
        processes,
        missed_more: profile.missed_more,
        threads: profile.threads.clone(),
        by: profile.by,
        groups: groups.finish(),
        duration: profile.duration,
        end: profile.end,
        older: profile.older,
        functions: profile.functions.clone(),
        through,
        everywhere: profile.everywhere,
        attached_late: profile.attached_late.clone(),
        stacks: merged.finish(&names, options.lines),
        events: profile.events,
        losses: profile.losses.clone(),
        unwinding: profile.unwinding.clone(),
        memory: profile.memory.clone(),
        problems,
    }
}

fn places_of(process: &Process, stacks: &[&Stack]) -> Places {
    let mut places = Places::of(&process.mappings, stacks);
    calls::settle(&process.mappings, stacks, &mut places);
    places
}

/// Every distinct name once.
#[derive(Default)]
struct Names {
    ids: HashMap<Arc<str>, NameId>,
    names: Vec<Arc<str>>,
    bytes: usize,
}

impl Names {
    fn id(&mut self, name: &str) -> NameId {
        if let Some(id) = self.ids.get(name) {
            return *id;
        }
        if self.bytes + name.len() > MAX_NAMES && name != NO_ROOM {
            return self.id(NO_ROOM);
        }
        self.bytes += name.len();
        let name: Arc<str> = name.into();
        let id = self.names.len();
        self.names.push(Arc::clone(&name));
        self.ids.insert(name, id);
        id
    }

    fn get(&self, id: NameId) -> &Arc<str> {
        &self.names[id]
    }
}

#[cfg(test)]
mod fuzz_tests;
#[cfg(test)]
mod place_tests;
#[cfg(test)]
mod process_tests;
#[cfg(test)]
mod tests;
