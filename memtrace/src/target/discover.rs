//! Finding the allocators that a process uses, and the sites to probe in them.
//!
//! Every module that the process maps as code is looked at ([`scan`]). Those that are allocators are probed, where the
//! dynamic linker chose their definitions ([`order`]), and there the functions that do the work ([`sites`]).

mod inner;
mod note;
mod order;
mod scan;
mod sites;

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use super::{
    Mapping, Module, ModuleProblem, Process, TargetError,
    catalogue::{self, Family},
    mappings::{self, FileKey},
    rooted::Root,
    site::{ProbeRow, ProbeSite},
};
pub use note::Note;
use order::{Looked, Order};
use scan::{Hit, Scan};

/// What was found in a process.
#[derive(Debug, Default)]
pub struct Discovery {
    /// Where probes go.
    pub sites: Vec<ProbeSite>,
    /// Every x86-64 ELF file that the process maps as code.
    pub modules: Vec<Module>,
    /// Where the dynamic loader reports that it has loaded or unloaded a library.
    pub loader: Option<LoaderHook>,
    /// What the user should know about it.
    pub notes: Vec<Note>,
    /// The files that have been looked at, also those that are no modules.
    seen: HashSet<FileKey>,
}

impl Discovery {
    /// The module behind a mapping.
    pub fn module_of(&self, mapping: &Mapping) -> Option<&Module> {
        self.modules.iter().find(|module| mapping.has_file() && module.key() == mapping.file)
    }

    /// The sites as a table.
    pub fn rows(&self) -> Vec<ProbeRow> {
        let name = |site: &ProbeSite| self.modules.get(site.module).map_or("", Module::name);
        self.sites.iter().map(|site| site.row(name(site))).collect()
    }
}

/// The function that the dynamic loaders of glibc and musl call before and after every change of the list of loaded
/// libraries, for debuggers (`_dl_debug_state`, elf/dl-debug.c of glibc, ldso/dynlink.c of musl, which calls it after only).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoaderHook {
    /// Index in [`Discovery::modules`].
    pub module: usize,
    /// File offset of its first instruction.
    pub offset: u64,
    /// Virtual address, as the file numbers it, of the variable that says what is changing: `r_state` of `_r_debug`, in
    /// `struct r_debug` of glibc's link.h.
    pub state: Option<u64>,
}

/// Finds the allocators of a running process.
///
/// # Errors
/// [`TargetError::StaticProgram`] or [`TargetError::NoAllocator`] if nothing can be probed, [`TargetError::Module`] if that
/// is because a module cannot be read, [`TargetError::Exited`], and what [`mappings::read`] returns.
pub fn discover(process: &Process) -> Result<Discovery, TargetError> {
    discover_in(process, &mappings::read(process)?)
}

/// As [`discover`], in a memory map that has been read already: for a program that is just starting, once
/// [`mappings::maps_libc`] holds.
///
/// # Errors
/// As [`discover`].
pub fn discover_in(process: &Process, mappings: &[Mapping]) -> Result<Discovery, TargetError> {
    let mut discovery = Discovery::default();
    let survey = Survey::of(process, mappings, &mut discovery, true)?;
    let looked = survey.looked(&discovery.modules);
    let order = Order::of(process, mappings, &looked, survey.program(&discovery.modules));
    let (sites, notes) = found(&survey, &discovery.modules, choose(&looked, Some(&order)));
    discovery.sites = sites;
    discovery.notes.extend(notes);
    if discovery.sites.is_empty() {
        return Err(survey.nothing(process, &discovery));
    }
    Ok(discovery)
}

/// Looks at the modules of a process that were not there when `discovery` was made or last looked at: the numbers of the
/// sites that are new. Those that were there keep their numbers. Of libraries that are opened later every allocator is
/// probed, since its functions may be called by their addresses (dlsym(3)).
///
/// # Errors
/// [`TargetError::Exited`], and [`TargetError::Io`] if the program cannot be found out.
pub fn look_again(
    process: &Process,
    discovery: &mut Discovery,
    mappings: &[Mapping],
) -> Result<Range<usize>, TargetError> {
    let before = discovery.sites.len();
    let survey = Survey::of(process, mappings, discovery, true)?;
    let looked = survey.looked(&discovery.modules);
    let (sites, notes) = found(&survey, &discovery.modules, choose(&looked, None));
    discovery.sites.extend(sites);
    discovery.notes.extend(notes);
    Ok(before..discovery.sites.len())
}

/// The modules of a process and its loader's hook, for traces that need no allocator: without sites and notes.
///
/// # Errors
/// [`TargetError::Exited`], and what [`mappings::read`] returns.
pub fn modules(process: &Process) -> Result<Discovery, TargetError> {
    let mut discovery = Discovery::default();
    Survey::of(process, &mappings::read(process)?, &mut discovery, false)?;
    Ok(Discovery { notes: Vec::new(), ..discovery })
}

/// What one look at a process found.
struct Survey {
    /// Index in [`Discovery::modules`] of the first new module.
    first: usize,
    /// What each of the new modules says.
    scans: Vec<Scan>,
    /// Index of the program among the new modules.
    program: Option<usize>,
    /// File name of a module that should be a C library, and why it could not be used.
    damaged: Option<(String, ModuleProblem)>,
}

impl Survey {
    /// Opens the modules of `mappings` that are new and looks at them; without `allocators` only for the loader's hook.
    fn of(
        process: &Process,
        mappings: &[Mapping],
        discovery: &mut Discovery,
        allocators: bool,
    ) -> Result<Self, TargetError> {
        let exe = process.exe_file()?.metadata().map_err(|error| process.unreadable("exe", error))?;
        let root = Root::of(process).ok();
        let first = discovery.modules.len();
        let mut survey = Self { first, scans: Vec::new(), program: None, damaged: None };
        for mapping in mappings.iter().filter(|mapping| mapping.executable && mapping.has_file()) {
            if !discovery.seen.insert(mapping.file) {
                continue;
            }
            let module = match Module::open(process, mapping) {
                Ok(module) => module,
                Err(ModuleProblem::NotElf | ModuleProblem::OtherMachine | ModuleProblem::NotRegular) => continue,
                Err(problem) => {
                    process.check_alive()?;
                    survey.unreadable(discovery, mapping, problem);
                    continue;
                }
            };
            let identity = module.identity();
            let program = (identity.device, identity.inode) == (exe.dev(), exe.ino());
            let scan = if allocators {
                Scan::of(&module, mapping.path().unwrap_or(Path::new("")), root.as_ref(), program)
            } else {
                Scan::of_dynamic(&module)
            };
            let mut scan = scan.unwrap_or_else(|problem| {
                survey.unreadable(discovery, mapping, problem);
                Scan::default()
            });
            if let Some(problem) = scan.problem.take() {
                survey.unreadable(discovery, mapping, problem);
            }
            if program {
                survey.program = Some(survey.scans.len());
            }
            add_hook(discovery, &module, &scan);
            discovery.modules.push(module);
            survey.scans.push(scan);
        }
        process.check_alive()?;
        Ok(survey)
    }

    fn unreadable(&mut self, discovery: &mut Discovery, mapping: &Mapping, problem: ModuleProblem) {
        let name = mapping.file_name();
        discovery.notes.push(Note::Unreadable { module: name.clone(), reason: problem.to_string() });
        if mappings::maps_libc(std::slice::from_ref(mapping)) {
            self.damaged = Some((name, problem));
        }
    }

    fn looked<'a>(&'a self, modules: &'a [Module]) -> Vec<Looked<'a>> {
        modules[self.first..].iter().zip(&self.scans).map(|(module, scan)| Looked { module, scan }).collect()
    }

    /// The program among the new modules: the file that runs, or what the loader was told to run.
    fn program(&self, modules: &[Module]) -> usize {
        let looked = self.looked(modules);
        let program = self.program.filter(|index| !self.scans[*index].loader);
        program.or_else(|| looked.iter().position(|one| one.module.has_interpreter())).unwrap_or(0)
    }

    /// Why nothing can be probed.
    fn nothing(self, process: &Process, discovery: &Discovery) -> TargetError {
        let pid = process.pid();
        if let Some((name, problem)) = self.damaged {
            return TargetError::Module { pid, name, problem };
        }
        let libraries = self.scans.iter().zip(&discovery.modules).filter(|(scan, _)| scan.c_library);
        let unprobed = discovery.notes.iter().find(|note| matches!(note, Note::Unprobed { .. }));
        if let Some(note) = unprobed {
            let name = libraries.map(|(_, module)| module.name()).next().unwrap_or_default().to_owned();
            return TargetError::Module { pid, name, problem: ModuleProblem::NoSite(note.to_string()) };
        }
        // Of a static program nothing asks for a loader; nor does the loader itself, run as a program, but then the
        // program that it loads does.
        if discovery.modules.iter().any(Module::has_interpreter) {
            let found = libraries.map(|(_, module)| module.name().to_owned()).next();
            TargetError::NoAllocator { pid, found }
        } else {
            let allocator = self.scans.iter().find_map(|scan| scan.text);
            TargetError::StaticProgram { pid, exe: process.exe().to_owned(), allocator }
        }
    }
}

/// Takes note of the loader's hook, if this is the loader.
fn add_hook(discovery: &mut Discovery, module: &Module, scan: &Scan) {
    const STATE: u64 = 24;
    if let Some(hook) = scan.hook.filter(|_| discovery.loader.is_none() && !scan.glibc)
        && let Some(offset) = module.file_offset(hook)
    {
        let state = scan.debug.and_then(|debug| debug.checked_add(STATE));
        discovery.loader = Some(LoaderHook { module: discovery.modules.len(), offset, state });
    }
}

/// What to probe in one module.
struct Chosen<'a> {
    /// Index among the modules that were looked at.
    module: usize,
    hits: Vec<&'a Hit>,
    notes: Vec<Note>,
}

/// Chooses the functions to probe in every module that was looked at. Without an order nothing shadows anything.
fn choose<'a>(looked: &[Looked<'a>], order: Option<&Order>) -> Vec<Chosen<'a>> {
    let place = |module: usize| order.and_then(|order| order.place(module));
    // The first in the order that defines a name.
    let mut first: HashMap<Vec<u8>, (usize, usize)> = HashMap::new();
    for (index, one) in looked.iter().enumerate().filter(|(_, one)| !one.scan.loader) {
        let Some(place) = place(index) else { continue };
        for hit in one.scan.hits.iter().filter(|hit| hit.exported) {
            let entry = first.entry(hit.name()).or_insert((place, index));
            *entry = (*entry).min((place, index));
        }
    }
    let mut chosen = Vec::new();
    for (index, one) in looked.iter().enumerate().filter(|(_, one)| !one.scan.loader) {
        let shadowed_by = |hit: &Hit| {
            let (_, other) = first.get(&hit.name()).filter(|_| hit.exported && place(index).is_some())?;
            (*other != index && !one.scan.symbolic).then_some(*other)
        };
        let (mut hits, mut shadowed) = (Vec::new(), BTreeMap::<usize, Vec<&Hit>>::new());
        for hit in one.scan.allocators() {
            match shadowed_by(hit) {
                Some(other) => shadowed.entry(other).or_default().push(hit),
                None => hits.push(hit),
            }
        }
        let dead: HashSet<&str> = shadowed.values().flatten().map(|hit| hit.known.name).collect();
        // glibc's and musl's reallocarray calls realloc as everybody does, and glibc's cfree, which no new program can
        // link to, has free's code.
        let follows = |hit: &Hit| match hit.known.name {
            "reallocarray" => Some("realloc"),
            "cfree" => Some("free"),
            _ => None,
        };
        if one.scan.c_library {
            hits.retain(|hit| !follows(hit).is_some_and(|name| dead.contains(name)));
        }
        let note = |(other, hits): (&usize, &Vec<&Hit>)| Note::Shadowed {
            module: one.module.name().to_owned(),
            by: looked[*other].module.name().to_owned(),
            functions: plain(hits),
        };
        let notes = shadowed.iter().map(note);
        let notes = notes.filter(|note| !matches!(note, Note::Shadowed { functions, .. } if functions.is_empty()));
        chosen.push(Chosen { module: index, hits, notes: notes.collect() });
    }
    chosen
}

/// The C library's among the functions, for a note.
fn plain(hits: &[&Hit]) -> Vec<Cow<'static, str>> {
    let plain = hits.iter().filter(|hit| hit.known.family == Family::C && hit.prefix.is_empty());
    let mut names: Vec<&'static str> = plain.map(|hit| hit.known.name).collect();
    names.dedup();
    names.into_iter().map(Cow::Borrowed).collect()
}

/// The sites for what was chosen.
fn found(survey: &Survey, modules: &[Module], chosen: Vec<Chosen<'_>>) -> (Vec<ProbeSite>, Vec<Note>) {
    let (mut all_sites, mut all_notes) = (Vec::new(), Vec::new());
    for Chosen { module: looked, hits, notes } in chosen {
        let index = survey.first + looked;
        let (Some(module), Some(scan)) = (modules.get(index), survey.scans.get(looked)) else { continue };
        all_notes.extend(notes);
        let program = survey.program == Some(looked);
        let other =
            |allocator| Note::OtherAllocator { module: module.name().to_owned(), executable: program, allocator };
        if let Some(text) = scan.text {
            all_notes.push(other(Cow::Borrowed(text)));
        }
        if hits.is_empty() {
            continue;
        }
        let (sites, mut notes) = sites::resolve(module, index, scan, &hits);
        let allocates = |name: &str| name == "malloc";
        if hits.iter().any(|hit| allocates(hit.known.name) && hit.prefix.is_empty())
            && !sites.iter().any(|site| allocates(&site.function) || site.aliases.iter().any(|alias| allocates(alias)))
        {
            notes.push(other(Cow::Borrowed("malloc")));
        }
        if scan.glibc {
            notes.extend(missing(module, scan));
        }
        all_sites.extend(sites);
        all_notes.extend(notes);
    }
    (all_sites, all_notes)
}

/// The functions that every glibc had, as far as this one lacks some.
fn missing(module: &Module, scan: &Scan) -> Option<Note> {
    const NOT_GLIBC: [&str; 3] = ["reallocf", "free_sized", "free_aligned_sized"];
    let known = catalogue::family(Family::C).filter(|known| !NOT_GLIBC.contains(&known.name));
    let has = |name: &str| scan.hits.iter().any(|hit| hit.prefix.is_empty() && hit.known.name == name);
    let functions: Vec<_> = known.filter(|known| !has(known.name)).map(|known| known.name.into()).collect();
    (!functions.is_empty()).then(|| Note::Missing { module: module.name().to_owned(), functions })
}

#[cfg(test)]
#[path = "discover_tests.rs"]
mod tests;
