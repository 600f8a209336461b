//! Names for the addresses of a profile.
//!
//! - [`place`]: which mappings every address lies in;
//! - [`module`]: frames of one module: its own files and those that belong to it, put together;
//! - [`symbols`], [`dwarf`]: the functions and the debug information of one ELF file
//!   ([`image`](crate::target::image));
//! - [`separate`], [`debuginfod`]: where debug information is when it is not in the module;
//! - [`perf_map`]: generated code;
//! - [`demangle`]: readable names of bounded length;
//! - [`path`]: one recorded stack to one named call path.
//!
//! All names come from files of the target, which may be hostile: they are bounded in length here, and escaped where
//! they are printed.

mod calls;
pub mod debuginfod;
mod demangle;
mod dwarf;
mod module;
mod path;
mod perf_map;
mod place;
mod separate;
pub(crate) mod symbols;

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::profile::{Mapping, NameProblem, NamedProfile, NamedStack, Profile, SourceLine};

use self::{
    debuginfod::Debuginfod,
    path::{Frame, Known, Located, NameId, NamedPath},
    perf_map::PerfMap,
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

/// Names every address of `profile` and merges the stacks that got the same names.
///
/// Every distinct address is looked up once, all addresses of one file together. Return addresses are looked up at
/// address - 1, which lies inside the call instruction. Inlined functions are frames of their own. What has no name
/// is `[unknown] (libfoo.so+0x1234)`, the number being the return address's offset in the file, or for code that is in
/// no file, the offset from the start of its mapping; outside every mapping it is `[unknown] (0x7f0012345678)`. Where
/// several files were mapped at one address during the trace and they do not agree on the name, it is
/// `[ambiguous] (liba.so+0x1234 or libb.so+0x5678)`.
///
/// `progress` is called with the number of distinct addresses done so far and their total.
///
/// The files are opened through [`Mapping::open`] and [`crate::profile::NameSources`], so this works after the target has
/// exited.
pub fn name(profile: &Profile, options: &Options, progress: &mut dyn FnMut(usize, usize)) -> NamedProfile {
    let mut names = Names::default();
    let mut places = Places::of(profile);
    calls::settle(profile, &mut places);
    let mut locator = Locator { profile, options, names: &mut names, problems: Vec::new() };
    let located = locator.locate(&places, progress);
    let problems = locator.problems;
    let known = Known { profile, places: &places, located: &located };
    let mut merged = Merged::default();
    for stack in &profile.stacks {
        merged.add(path::name(&known, stack, &mut names), stack);
    }
    NamedProfile {
        subject: profile.subject,
        process: profile.process.clone(),
        duration: profile.duration,
        end: profile.end,
        older: profile.older,
        functions: profile.functions.clone(),
        stacks: merged.finish(&names, options.lines),
        events: profile.events,
        losses: profile.losses.clone(),
        unwinding: profile.unwinding.clone(),
        rss: profile.rss,
        memory: profile.memory.clone(),
        children: profile.children.clone(),
        problems,
    }
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

/// Looks up places, one file after the other.
struct Locator<'a> {
    profile: &'a Profile,
    options: &'a Options,
    names: &'a mut Names,
    problems: Vec<NameProblem>,
}

impl Locator<'_> {
    /// What is at the places, parallel to them.
    fn locate(&mut self, places: &Places, progress: &mut dyn FnMut(usize, usize)) -> Vec<Located> {
        let total = places.len();
        let mut located = vec![Located::default(); total];
        let mut done = 0;
        progress(done, total);
        let server = self.options.debuginfod.clone().map(Debuginfod::new);
        let debug_files = separate::Places::new(self.profile.names.root.as_deref(), server);
        // Places in code that may have been generated.
        let mut generated = Vec::new();
        for (file, lookups) in by_file(self.profile, places) {
            let Some(first) = lookups.first() else { continue };
            let mapping = &self.profile.mappings[first.mapping];
            match &file {
                File::Open(open) => {
                    let offsets: Vec<u64> = lookups.iter().map(|lookup| lookup.offset).collect();
                    let path = mapping.name.strip_suffix(" (deleted)").unwrap_or(&mapping.name);
                    let report = &mut |count| progress(done + count, total);
                    let answer = module::frames(open, Path::new(path), &offsets, &debug_files, self.names, report);
                    for problem in answer.problems {
                        self.problem(mapping, problem);
                    }
                    for (lookup, frames) in lookups.iter().zip(answer.frames) {
                        located[lookup.index].frames = frames;
                    }
                }
                File::Closed(_) | File::None => {
                    generated.extend(lookups.iter().map(|lookup| (lookup.address, lookup.index)))
                }
            }
            done += lookups.len();
            progress(done, total);
        }
        self.name_generated(generated, &mut located);
        self.report_closed(places, &located);
        if !self.options.lines {
            let frames = located.iter_mut().flat_map(|located| &mut located.frames);
            frames.for_each(|frame| frame.line = None);
        }
        located
    }

    /// Names code that is in no file by the map that the target wrote.
    fn name_generated(&mut self, mut places: Vec<(u64, usize)>, located: &mut [Located]) {
        let Some(path) = self.profile.names.perf_map.as_deref().filter(|_| !places.is_empty()) else { return };
        let module = || "perf map".to_owned();
        let map = match PerfMap::read(path) {
            Ok(map) => map,
            Err(error) => {
                let problem = format!("it could not be read: {error}: no names for generated code");
                self.problems.push(NameProblem { module: module(), problem });
                return;
            }
        };
        if map.cut {
            let problem = "only its first 64 MiB are used: names of generated code are missing or old".into();
            self.problems.push(NameProblem { module: module(), problem });
        }
        places.sort_unstable();
        let addresses: Vec<u64> = places.iter().map(|(address, _)| *address).collect();
        for ((_, index), name) in places.iter().zip(map.names(&addresses)) {
            if let Some(name) = name {
                located[*index].frames = vec![Frame::named(self.names.id(&name))];
            }
        }
    }

    /// Says which files could not be opened, where that costs a name.
    fn report_closed(&mut self, places: &Places, located: &[Located]) {
        let mut closed: Vec<usize> = places
            .iter()
            .zip(located)
            .filter(|((_, place), located)| {
                let mapping = &self.profile.mappings[place.mapping];
                located.frames.is_empty() && matches!(File::of(mapping), File::Closed(_))
            })
            .map(|((_, place), _)| place.mapping)
            .collect();
        closed.sort_unstable();
        closed.dedup_by_key(|mapping| &self.profile.mappings[*mapping].name);
        for mapping in closed {
            let problem = "the file could not be opened while it was mapped: no names";
            self.problem(&self.profile.mappings[mapping], problem.into());
        }
        if self.profile.names.left_out > 0 {
            let problem = format!(
                "at least {} code mappings of the process were not kept, for it has too many: addresses in them have no names",
                self.profile.names.left_out
            );
            self.problems.push(NameProblem { module: "mappings".into(), problem });
        }
    }

    fn problem(&mut self, mapping: &Mapping, problem: String) {
        self.problems.push(NameProblem { module: place::module_name(mapping).into_owned(), problem });
    }
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
            None if Path::new(&mapping.name).is_absolute() => Self::Closed(mapping.name.clone()),
            None => Self::None,
        }
    }
}

/// One place to look up.
struct Lookup {
    /// Position in the list of places.
    index: usize,
    mapping: usize,
    /// The address looked up, and its offset in the file.
    address: u64,
    offset: u64,
}

fn by_file(profile: &Profile, places: &Places) -> BTreeMap<File, Vec<Lookup>> {
    let mut files: BTreeMap<File, Vec<Lookup>> = BTreeMap::new();
    for (index, (address, place)) in places.iter().enumerate() {
        let file = File::of(&profile.mappings[place.mapping]);
        files.entry(file).or_default().push(Lookup { index, mapping: place.mapping, address, offset: place.offset });
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
                lines: Vec::new(),
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

    fn finish(self, names: &Names, lines: bool) -> Vec<NamedStack> {
        self.stacks
            .into_iter()
            .map(|(path, mut stack)| {
                stack.frames = path.frames.iter().map(|frame| Arc::clone(names.get(frame.name))).collect();
                if lines {
                    let line = |(file, line)| SourceLine { file: Arc::clone(names.get(file)), line };
                    stack.lines = path.frames.iter().map(|frame| frame.line.map(line)).collect();
                }
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
mod place_tests;
#[cfg(test)]
mod tests;
