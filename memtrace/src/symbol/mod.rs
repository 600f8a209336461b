//! Names for the addresses of a profile.
//!
//! - [`place`]: which mapping every address lies in;
//! - [`module`]: function names out of one file;
//! - [`vet`]: what of a file is safe to be parsed at all;
//! - [`demangle`]: readable names of bounded length;
//! - [`path`]: one recorded stack to one named call path.
//!
//! All names come from files of the target, which may be hostile: they are bounded in length here, and escaped where
//! they are printed.

mod demangle;
mod module;
mod path;
mod place;
mod vet;

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::profile::{Mapping, NameProblem, NamedProfile, NamedStack, Profile};

use self::{
    path::{Located, NameId, NamedPath},
    place::Places,
};

/// Names every address of `profile` and merges the stacks that got the same names.
///
/// Every distinct address is looked up once, all addresses of one file together. Return addresses are looked up at
/// address - 1, which lies inside the call instruction. Inlined functions are frames of their own. What has no name
/// is `[unknown] (libfoo.so+0x1234)`, the number being the return address's offset in the file, or for code that is in
/// no file, the offset from the start of its mapping; outside every mapping it is `[unknown] (0x7f0012345678)`.
///
/// `progress` is called with the number of distinct addresses done so far and their total.
///
/// The files are opened through [`Mapping::open`], so this works after the target has exited.
pub fn name(profile: &Profile, progress: &mut dyn FnMut(usize, usize)) -> NamedProfile {
    let mut names = Names::default();
    let places = Places::of(profile);
    let mut problems = Vec::new();
    let located = locate(profile, &places, &mut names, &mut problems, progress);
    let mut merged = Merged::default();
    for stack in &profile.stacks {
        let path = path::name(profile, stack, &places, &located, &mut names);
        merged.add(path, stack);
    }
    NamedProfile {
        subject: profile.subject,
        process: profile.process.clone(),
        duration: profile.duration,
        end: profile.end,
        older: profile.older,
        functions: profile.functions.clone(),
        stacks: merged.finish(&names),
        events: profile.events,
        losses: profile.losses.clone(),
        rss: profile.rss,
        memory: profile.memory.clone(),
        problems,
    }
}

/// Every distinct name once.
#[derive(Default)]
struct Names {
    ids: HashMap<Arc<str>, NameId>,
    names: Vec<Arc<str>>,
}

impl Names {
    fn id(&mut self, name: &str) -> NameId {
        if let Some(id) = self.ids.get(name) {
            return *id;
        }
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

/// Looks up every address of `places`, one file after the other. The result is parallel to the addresses.
fn locate(
    profile: &Profile,
    places: &Places,
    names: &mut Names,
    problems: &mut Vec<NameProblem>,
    progress: &mut dyn FnMut(usize, usize),
) -> Vec<Located> {
    let total = places.len();
    let mut located = vec![Located::default(); total];
    let mut done = 0;
    progress(done, total);
    for (file, addresses) in by_file(profile, places) {
        match &file {
            File::Open(path) => {
                let offsets: Vec<u64> = addresses.iter().map(|lookup| lookup.offset).collect();
                let answer = module::functions(path, &offsets, &mut |count| {
                    progress(done + count, total);
                });
                let module = addresses.first().map_or(0, |lookup| lookup.mapping);
                if let Some(problem) = answer.problem {
                    problems.push(NameProblem {
                        module: place::module_name(&profile.mappings[module]).into_owned(),
                        problem,
                    });
                }
                for (lookup, functions) in addresses.iter().zip(answer.functions) {
                    located[lookup.index].functions = functions.iter().map(|name| names.id(name)).collect();
                }
            }
            File::Closed(module) => problems.push(NameProblem {
                module: module.clone(),
                problem: "the file could not be opened while it was mapped: no names".into(),
            }),
            // Generated code, and the vDSO, have no file that could name them.
            File::None => {}
        }
        done += addresses.len();
        progress(done, total);
    }
    located
}

/// Where the names of a mapping come from.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum File {
    Open(PathBuf),
    Closed(String),
    None,
}

impl File {
    fn of(mapping: &Mapping) -> Self {
        match &mapping.open {
            Some(path) => Self::Open(path.clone()),
            None if Path::new(&mapping.name).is_absolute() => Self::Closed(place::module_name(mapping).into_owned()),
            None => Self::None,
        }
    }
}

/// One address to look up.
struct Lookup {
    /// Position in the list of addresses.
    index: usize,
    mapping: usize,
    /// In the file, of the address looked up.
    offset: u64,
}

fn by_file(profile: &Profile, places: &Places) -> BTreeMap<File, Vec<Lookup>> {
    let mut files: BTreeMap<File, Vec<Lookup>> = BTreeMap::new();
    for (index, place) in places.iter().enumerate() {
        let file = match place.mapping {
            Some(mapping) => File::of(&profile.mappings[mapping]),
            None => File::None,
        };
        files.entry(file).or_default().push(Lookup {
            index,
            mapping: place.mapping.unwrap_or_default(),
            offset: place.offset,
        });
    }
    files
}

/// The stacks so far, merged by what is shown of them.
#[derive(Default)]
struct Merged {
    positions: HashMap<NamedPath, usize>,
    stacks: Vec<(NamedPath, NamedStack)>,
}

impl Merged {
    fn add(&mut self, path: NamedPath, stack: &crate::profile::Stack) {
        let position = *self.positions.entry(path).or_insert_with_key(|path| {
            let empty = NamedStack {
                frames: Vec::new(),
                truncated: path.truncated,
                recorded: 0,
                allocated: Default::default(),
                freed: Default::default(),
                unfreed: Default::default(),
                oldest: None,
                growth: Vec::new(),
                resident: None,
            };
            self.stacks.push((path.clone(), empty));
            self.stacks.len() - 1
        });
        let sum = &mut self.stacks[position].1;
        sum.recorded += 1;
        sum.allocated = sum.allocated.plus(stack.allocated);
        sum.freed = sum.freed.plus(stack.freed);
        sum.unfreed = sum.unfreed.plus(stack.unfreed);
        sum.oldest = sum.oldest.max(stack.oldest);
        add_growth(&mut sum.growth, &stack.growth);
        if let Some(resident) = stack.resident {
            sum.resident = Some(sum.resident.unwrap_or_default().plus(resident));
        }
    }

    fn finish(self, names: &Names) -> Vec<NamedStack> {
        self.stacks
            .into_iter()
            .map(|(path, mut stack)| {
                stack.frames = path.frames.iter().map(|id| Arc::clone(names.get(*id))).collect();
                stack
            })
            .collect()
    }
}

/// Adds elementwise. Both series end at the end of the trace, so a shorter one lacks moments at its beginning.
fn add_growth(sum: &mut Vec<u64>, series: &[u64]) {
    if sum.len() < series.len() {
        let missing = series.len() - sum.len();
        sum.splice(0..0, std::iter::repeat_n(0, missing));
    }
    let skipped = sum.len() - series.len();
    for (total, value) in sum[skipped..].iter_mut().zip(series) {
        *total = total.saturating_add(*value);
    }
}

#[cfg(test)]
mod tests;
