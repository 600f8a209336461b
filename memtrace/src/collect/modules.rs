//! The target's code mappings, collected while it lives and kept with their files open, so that its stacks can be named
//! after it has exited.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    os::fd::AsRawFd as _,
    path::PathBuf,
    rc::Rc,
};

use crate::{
    profile::{self, NameSources},
    target::{
        Mapping, Module, ModuleProblem, Process, TargetError, generated, mappings, mappings::FileKey, rooted::Root,
    },
};

/// Most mappings kept: a target that maps code for ever must not make memtrace grow for ever.
const MAX_MAPPINGS: usize = 65_536;
/// From how many kept on those without a file are not: a just-in-time compiler splits its memory again and again, which
/// must not cost libraries their names.
const MAX_WITHOUT_FILE: usize = MAX_MAPPINGS / 2;

/// How often the memory map is read when it changes meanwhile.
const ATTEMPTS: u32 = 4;

/// Code mappings seen so far.
#[derive(Debug, Default)]
pub struct Modules {
    /// In the order in which they were first seen. Where one replaced another, both are kept.
    seen: Vec<profile::Mapping>,
    /// They, as the memory map shows them, with their positions.
    known: HashMap<Mapping, usize>,
    /// Most that there was no room for at any time.
    left_out: u64,
    /// Files by identity; `None` for those that could not be opened.
    files: HashMap<FileKey, Option<Module>>,
    /// Why files that should be modules could not be opened as such.
    problems: HashMap<FileKey, String>,
    /// Their identities in the order in which they were opened.
    opened: Vec<FileKey>,
    /// Those in force when the map was last read.
    current: Vec<Mapping>,
    /// Those in force before that.
    before: Vec<Mapping>,
    /// What may have been missed between.
    visits: Visits,
    /// The process's root directory.
    root: Option<Root>,
    /// What it wrote about its generated code.
    perf_map: Option<File>,
    vdso: Option<Rc<File>>,
}

/// Moments at which a library may have come and gone between two reads of the memory map, so that it was in neither.
#[derive(Debug, Default)]
struct Visits {
    /// Whether there was one so far: what is mapped for the first time later may be where it was.
    any: bool,
    /// For every mapping seen, whether one may have been at its addresses.
    doubtful: Vec<bool>,
}

impl Visits {
    /// One may have been anywhere but where the mappings at the positions `stayed` are. `seen`: how many there are by now.
    fn add(&mut self, stayed: &HashSet<usize>, seen: usize) {
        self.extend(seen);
        self.any = true;
        for (position, doubtful) in self.doubtful.iter_mut().enumerate() {
            *doubtful |= !stayed.contains(&position);
        }
    }

    fn extend(&mut self, seen: usize) {
        self.doubtful.resize(seen, self.any);
    }

    fn doubtful(&self) -> Vec<usize> {
        (0..self.doubtful.len()).filter(|position| self.doubtful[*position]).collect()
    }
}

/// A mapping of code that is in force.
#[derive(Clone, Copy, Debug)]
pub struct Code<'a> {
    /// As the memory map shows it.
    pub mapping: &'a Mapping,
    /// The file behind it, if there is one that could be opened.
    pub module: Option<&'a Module>,
    /// Why there is none, where there should be one.
    pub problem: Option<&'a str>,
}

impl Modules {
    /// Reads the memory map and adds what is new. Returns whether the mappings of code are others than before: one that
    /// was seen earlier can come back, and one can go.
    ///
    /// # Errors
    /// The map can't be read: the process has exited, for example.
    pub fn refresh(&mut self, process: &Process) -> Result<bool, TargetError> {
        self.before = self.current.clone();
        if self.root.is_none() {
            self.root = Root::of(process).ok();
        }
        for _ in 0..ATTEMPTS {
            let mappings = mappings::read(process)?;
            let (seen, opened) = (self.seen.len(), self.opened.len());
            let added = self.add(process, &mappings);
            if self.opened.len() == opened || executable(&mappings::read(process)?).eq(executable(&mappings)) {
                break;
            }
            // Another file may have taken a mapping's place before it was opened by the mapping's address.
            self.seen.truncate(seen);
            for mapping in added {
                self.known.remove(&mapping);
            }
            for key in self.opened.drain(opened..) {
                self.files.remove(&key);
                self.problems.remove(&key);
            }
            self.current.retain(|mapping| !mapping.has_file() || self.files.contains_key(&mapping.file));
        }
        self.open_perf_map(process);
        Ok(self.current != self.before)
    }

    /// What a process has at its fork: the mappings that are in force in the one that forked it. The child itself may be another
    /// program by now, with other code at the same addresses.
    pub fn forked(&self) -> Self {
        let mut forked = Self {
            files: self.files.clone(),
            problems: self.problems.clone(),
            vdso: self.vdso.clone(),
            ..Self::default()
        };
        forked.opened.clone_from(&self.opened);
        for mapping in &self.current {
            if let Some(seen) = self.known.get(mapping).and_then(|position| self.seen.get(*position)) {
                forked.known.insert(mapping.clone(), forked.seen.len());
                forked.seen.push(seen.clone());
            }
        }
        forked.current.clone_from(&self.current);
        forked
    }

    /// To be called after [`Self::refresh`], with how often the loader has reported a change of its list of libraries since
    /// the call before (twice for every call of dlopen or dlclose that has an effect), and whether libraries were removed.
    pub fn note_loader(&mut self, reports: u64, removed: bool) {
        let visit = removed && reports.div_ceil(2) > changed_files(&self.before, &self.current);
        if visit {
            let position = |mapping: &Mapping| self.known.get(mapping).copied();
            let stayed = |mapping: &&Mapping| self.before.contains(mapping);
            let stayed = self.current.iter().filter(stayed).filter_map(position).collect();
            self.visits.add(&stayed, self.seen.len());
        } else {
            self.visits.extend(self.seen.len());
        }
    }

    /// Forgets the mappings from position `seen` on, which turned out to be another program's.
    pub fn forget_since(&mut self, seen: usize) {
        self.seen.truncate(seen);
        self.known.retain(|_, position| *position < seen);
        self.current = self.before.clone();
    }

    /// Opens the map of generated code while there is a process to ask: again every time, since it may have been written
    /// anew.
    fn open_perf_map(&mut self, process: &Process) {
        // Generated code can be in unnamed files too, mapped twice so that it is never writable and executable at once.
        let generated = |mapping: &Mapping| !mapping.has_file() || self.module(mapping.file).is_none();
        if let Some(root) = &self.root
            && self.current.iter().any(|mapping| generated(mapping) && !is_kernels(mapping))
            && let Some(file) = generated::perf_map(process, root)
        {
            self.perf_map = Some(file);
        }
    }

    /// Adds what is new in `mappings`, and returns it.
    fn add(&mut self, process: &Process, mappings: &[Mapping]) -> Vec<Mapping> {
        self.current = executable(mappings).cloned().collect();
        let (mut added, mut left_out) = (Vec::new(), 0);
        for mapping in executable(mappings) {
            if self.known.contains_key(mapping) {
                continue;
            }
            if self.seen.len() >= if mapping.has_file() { MAX_MAPPINGS } else { MAX_WITHOUT_FILE } {
                left_out += 1;
                continue;
            }
            let open = self.open(process, mapping);
            self.known.insert(mapping.clone(), self.seen.len());
            added.push(mapping.clone());
            self.seen.push(profile::Mapping {
                start: mapping.start,
                end: mapping.end,
                offset: mapping.offset,
                name: mapping.name.to_string_lossy().into_owned(),
                open,
            });
        }
        self.left_out = self.left_out.max(left_out);
        added
    }

    /// Where the file behind a mapping can be read from now on.
    fn open(&mut self, process: &Process, mapping: &Mapping) -> Option<PathBuf> {
        if mapping.has_file() {
            let file = self.files.entry(mapping.file).or_insert_with(|| {
                self.opened.push(mapping.file);
                match Module::open(process, mapping) {
                    Ok(module) => Some(module),
                    // Programs map other files executable too.
                    Err(ModuleProblem::NotElf | ModuleProblem::OtherMachine | ModuleProblem::NotRegular) => None,
                    Err(problem) => {
                        self.problems.insert(mapping.file, problem.to_string());
                        None
                    }
                }
            });
            return file.as_ref().map(|module| module.path());
        }
        if mapping.is_vdso() && self.vdso.is_none() {
            self.vdso = generated::vdso(process, mapping).ok().map(Rc::new);
        }
        self.vdso.as_deref().filter(|_| mapping.is_vdso()).map(descriptor)
    }

    /// The mappings of code in force when the map was last read, by address.
    pub fn code(&self) -> impl Iterator<Item = Code<'_>> {
        self.current.iter().map(|mapping| Code {
            mapping,
            module: self.module(mapping.file),
            problem: self.problems.get(&mapping.file).map(String::as_str),
        })
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

    /// What else names come from; the paths can be used for as long as `self` lives.
    pub fn name_sources(&self) -> NameSources {
        NameSources {
            root: self.root.as_ref().map(Root::path),
            perf_map: self.perf_map.as_ref().map(descriptor),
            left_out: self.left_out,
            doubtful: self.visits.doubtful(),
        }
    }
}

/// How many files were mapped in one of the two maps only. Each can explain one call of dlopen or dlclose.
fn changed_files(before: &[Mapping], after: &[Mapping]) -> u64 {
    let files = |mappings: &[Mapping]| -> HashSet<FileKey> {
        mappings.iter().filter(|mapping| mapping.has_file()).map(|mapping| mapping.file).collect()
    };
    files(before).symmetric_difference(&files(after)).count() as u64
}

fn descriptor(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Whether a mapping without a file is the kernel's own: `[vdso]`, `[uprobes]`, `[vsyscall]`.
fn is_kernels(mapping: &Mapping) -> bool {
    ["[vdso]", "[uprobes]", "[vsyscall]"].iter().any(|name| mapping.name.as_os_str() == *name)
}

fn executable(mappings: &[Mapping]) -> impl Iterator<Item = &Mapping> {
    mappings.iter().filter(|mapping| mapping.executable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_that_a_visitor_can_not_have_been_at() {
        let mut visits = Visits::default();
        // 0 and 1 stayed; 2 went, and 3 came.
        visits.add(&HashSet::from([0, 1]), 4);
        assert_eq!(visits.doubtful(), [2, 3]);
        // 4 came later: before that, the visitor may have been there.
        visits.extend(5);
        assert_eq!(visits.doubtful(), [2, 3, 4]);
        visits.add(&HashSet::from([0, 3, 4]), 5);
        assert_eq!(visits.doubtful(), [1, 2, 3, 4]);
    }

    #[test]
    fn what_changes_explain() {
        let map = |text: &str| mappings::parse(text.as_bytes()).unwrap_or_default();
        let before = map("1000-2000 r-xp 0 8:1 5 /a\n3000-4000 r-xp 0 8:1 6 /b\n5000-6000 r-xp 0 0:0 0 \n");
        let after = map("1000-2000 r-xp 0 8:1 5 /a (deleted)\n3000-4000 r-xp 0 8:1 7 /c\n");
        assert_eq!(changed_files(&before, &after), 2);
        let mut modules = Modules { before: before.clone(), current: after, ..Modules::default() };
        // One closed and one opened.
        modules.note_loader(4, true);
        assert!(!modules.visits.any);
        // Another one in between.
        modules.note_loader(5, true);
        assert!(modules.visits.any);
        // Nothing but loading.
        let mut modules = Modules { current: before, ..Modules::default() };
        modules.note_loader(20, false);
        assert!(!modules.visits.any);
    }
}
