//! Looks up the places of all processes, one file after the other: a file that many processes map is opened and read once, and
//! each of its places is looked up once.

use std::{
    collections::{HashMap, HashSet},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    rc::Rc,
};

use crate::profile::{Mapping, NameProblem, Process};

use super::{
    Names, Options,
    debuginfod::Debuginfod,
    module,
    path::{Frame, Located},
    perf_map::PerfMap,
    place::{self, Places},
    separate,
};

/// What tells files from each other that are held open: while they are, no other file gets their inode number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Identity {
    Inode {
        device: u64,
        inode: u64,
    },
    /// One that can't be found out more of.
    Path(PathBuf),
}

impl Identity {
    fn of(path: &Path) -> Self {
        match std::fs::metadata(path) {
            Ok(file) => Self::Inode { device: file.dev(), inode: file.ino() },
            Err(_) => Self::Path(path.to_path_buf()),
        }
    }
}

/// A file and what is to be looked up in it.
#[derive(Debug)]
pub struct FileLookups<'a> {
    /// The mapping and the process by which it was first met.
    mapping: &'a Mapping,
    process: &'a Process,
    open: &'a Path,
    /// Offsets, each once, and which of the plan's code they are.
    pub offsets: Vec<u64>,
    code: Vec<usize>,
    known: HashMap<u64, usize>,
}

/// What is to be looked up, for all processes together.
#[derive(Debug, Default)]
pub struct Plan<'a> {
    /// In the order in which they were met.
    pub files: Vec<FileLookups<'a>>,
    /// For each process the addresses in code that may have been generated, and which code they are.
    generated: Vec<Vec<(u64, usize)>>,
    /// For each process, parallel to its places, which code is there.
    pub code: Vec<Vec<usize>>,
    /// How many different pieces of code that are.
    pub total: usize,
}

impl<'a> Plan<'a> {
    /// Plans the lookups. `places` are parallel to `processes`.
    pub fn new(processes: &'a [Process], places: &[Places]) -> Self {
        let mut plan = Self::default();
        let mut positions: HashMap<Identity, usize> = HashMap::new();
        for (process, places) in processes.iter().zip(places) {
            let mut files: HashMap<usize, usize> = HashMap::new();
            let mut generated = Vec::new();
            let mut code = Vec::with_capacity(places.len());
            for (address, place) in places.iter() {
                let mapping = &process.mappings[place.mapping];
                let Some(open) = &mapping.open else {
                    generated.push((address, plan.total));
                    code.push(plan.total);
                    plan.total += 1;
                    continue;
                };
                let file = *files.entry(place.mapping).or_insert_with(|| {
                    *positions.entry(Identity::of(open)).or_insert_with(|| {
                        let (offsets, code, known) = Default::default();
                        plan.files.push(FileLookups { mapping, process, open, offsets, code, known });
                        plan.files.len() - 1
                    })
                });
                let file = &mut plan.files[file];
                let piece = *file.known.entry(place.offset).or_insert_with(|| {
                    file.offsets.push(place.offset);
                    file.code.push(plan.total);
                    plan.total += 1;
                    plan.total - 1
                });
                code.push(piece);
            }
            plan.generated.push(generated);
            plan.code.push(code);
        }
        plan
    }
}

/// Looks up what is planned.
pub struct Locator<'a> {
    pub processes: &'a [Process],
    /// Parallel to the processes.
    pub places: &'a [Places],
    pub options: &'a Options,
    pub names: &'a mut Names,
    pub problems: Problems,
}

impl Locator<'_> {
    /// What the pieces of code are called.
    pub fn locate(&mut self, plan: &Plan<'_>, progress: &mut dyn FnMut(usize, usize)) -> Vec<Located> {
        let total = plan.total;
        let mut located = vec![Located::default(); total];
        let mut done = 0;
        progress(done, total);
        let mut debug_files = DebugFiles::new(self.options.debuginfod.clone().map(Debuginfod::new));
        for file in &plan.files {
            let mapping = file.mapping;
            let path = mapping.name.strip_suffix(" (deleted)").unwrap_or(&mapping.name);
            let report = &mut |count| progress(done + count, total);
            let debug_files = debug_files.of(file.process.names.root.as_deref());
            let answer = module::frames(file.open, Path::new(path), &file.offsets, debug_files, self.names, report);
            for problem in answer.problems {
                self.problems.of_module(mapping, problem);
            }
            for (piece, frames) in file.code.iter().zip(answer.frames) {
                located[*piece].frames = frames;
            }
            done += file.offsets.len();
            progress(done, total);
        }
        for (process, generated) in self.processes.iter().zip(&plan.generated) {
            self.name_generated(process, generated, &mut located);
            done += generated.len();
        }
        progress(done, total);
        self.report_closed(plan, &located);
        if !self.options.lines {
            let frames = located.iter_mut().flat_map(|located| &mut located.frames);
            frames.for_each(|frame| frame.line = None);
        }
        located
    }

    /// Names code that is in no file by the map that its process wrote.
    fn name_generated(&mut self, process: &Process, places: &[(u64, usize)], located: &mut [Located]) {
        let Some(path) = process.names.perf_map.as_deref().filter(|_| !places.is_empty()) else { return };
        let map = match PerfMap::read(path) {
            Ok(map) => map,
            Err(error) => {
                self.problems.add("perf map", format!("it could not be read: {error}: no names for generated code"));
                return;
            }
        };
        if map.cut {
            let problem = "only its first 64 MiB are used: names of generated code are missing or old";
            self.problems.add("perf map", problem.into());
        }
        let mut places = places.to_vec();
        places.sort_unstable();
        let addresses: Vec<u64> = places.iter().map(|(address, _)| *address).collect();
        for ((_, index), name) in places.iter().zip(map.names(&addresses)) {
            if let Some(name) = name {
                located[*index].frames = vec![Frame::named(self.names.id(&name))];
            }
        }
    }

    /// Says which files could not be opened, where that costs a name.
    fn report_closed(&mut self, plan: &Plan<'_>, located: &[Located]) {
        for ((process, places), code) in self.processes.iter().zip(self.places).zip(&plan.code) {
            let mut closed: Vec<usize> = places
                .iter()
                .zip(code)
                .filter(|((_, place), piece)| {
                    let mapping = &process.mappings[place.mapping];
                    let is_closed = mapping.open.is_none() && Path::new(&mapping.name).is_absolute();
                    is_closed && located[**piece].frames.is_empty()
                })
                .map(|((_, place), _)| place.mapping)
                .collect();
            closed.sort_unstable();
            closed.dedup();
            for mapping in closed {
                let problem = "the file could not be opened while it was mapped: no names";
                self.problems.of_module(&process.mappings[mapping], problem.into());
            }
        }
        let left_out = self.processes.iter().map(|process| process.names.left_out).filter(|left_out| *left_out > 0);
        let (count, sum) = left_out.fold((0, 0u64), |(count, sum), left_out| (count + 1, sum.saturating_add(left_out)));
        let of = match (count, self.processes.len()) {
            (0, _) => return,
            (1, 1) => "the process were not kept, for it has".to_owned(),
            (count, _) => format!("{count} of the processes were not kept, for they have"),
        };
        let problem = format!("at least {sum} code mappings of {of} too many: addresses in them have no names");
        self.problems.add("mappings", problem);
    }
}

/// What went wrong, each once: many processes can have the same modules.
#[derive(Default)]
pub struct Problems {
    known: HashSet<(String, String)>,
    problems: Vec<NameProblem>,
}

impl Problems {
    fn add(&mut self, module: &str, problem: String) {
        if self.known.insert((module.to_owned(), problem.clone())) {
            self.problems.push(NameProblem { module: module.to_owned(), problem });
        }
    }

    fn of_module(&mut self, mapping: &Mapping, problem: String) {
        self.add(&place::module_name(mapping), problem);
    }

    /// In the order in which they were met.
    pub fn finish(self) -> Vec<NameProblem> {
        self.problems
    }
}

/// Where debug files are looked for, for the root directory of one process after the other. A file that several processes
/// map is looked for below that of the first.
struct DebugFiles {
    server: Option<Rc<Debuginfod>>,
    /// The last: neighbours mostly have the same.
    last: Option<(Option<Identity>, separate::Places)>,
}

impl DebugFiles {
    fn new(server: Option<Debuginfod>) -> Self {
        Self { server: server.map(Rc::new), last: None }
    }

    fn of(&mut self, root: Option<&Path>) -> &separate::Places {
        let identity = root.map(Identity::of);
        let last = self.last.take().filter(|(last, _)| *last == identity);
        let new = || (identity, separate::Places::new(root, self.server.clone()));
        &self.last.insert(last.unwrap_or_else(new)).1
    }
}
