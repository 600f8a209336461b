//! Finding the allocator that a process uses, and the sites to probe in it.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet},
    fmt,
    os::unix::fs::MetadataExt as _,
};

use super::{
    Mapping, Module, ModuleProblem, Process, TargetError,
    elf::{Dynamic, Source, Symbol, Symbols},
    function::{Function, GLIBC},
    mappings,
    placement::{self, Extent},
    site::{ProbeRow, ProbeSite},
};

/// Most other names kept of a function.
const MAX_ALIASES: usize = 8;

/// What was found in a process.
#[derive(Debug)]
pub struct Discovery {
    /// Where probes go.
    pub sites: Vec<ProbeSite>,
    /// Every x86-64 ELF file that the process maps as code.
    pub modules: Vec<Module>,
    /// Where the dynamic loader reports that it has loaded or unloaded a library.
    pub loader: Option<LoaderHook>,
    /// What the user should know about it.
    pub notes: Vec<Note>,
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

/// The function that glibc's dynamic loader calls before and after every change of the list of loaded libraries, for
/// debuggers (`_dl_debug_state`, elf/dl-debug.c of glibc).
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

/// Something that limits what a trace will see. Printed as one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// Another module defines malloc.
    OtherAllocator {
        /// File name of the module.
        module: String,
        /// Whether it is the program itself, which the loader searches first.
        executable: bool,
    },
    /// Functions that this libc does not have.
    Missing {
        /// File name of the libc.
        module: String,
        /// Their names.
        functions: Vec<Cow<'static, str>>,
    },
    /// A function that cannot be probed.
    Unprobed {
        /// File name of the libc.
        module: String,
        /// Its name.
        function: Cow<'static, str>,
        /// Why.
        reason: String,
    },
    /// A module that could not be looked into.
    Unreadable {
        /// Its file name.
        module: String,
        /// Why.
        reason: String,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherAllocator { module, executable: true } => write!(
                f,
                "the program {module:?} defines malloc itself, which takes the place of glibc's: what it allocates \
                 that way is not seen, since memtrace supports only glibc's allocator yet"
            ),
            Self::OtherAllocator { module, executable: false } => write!(
                f,
                "{module:?} defines malloc and may take the place of glibc's (it does if it was preloaded or linked \
                 before libc): what it allocates is not seen, since memtrace supports only glibc's allocator yet"
            ),
            Self::Missing { module, functions } => write!(f, "{module:?} has no {}", functions.join(", ")),
            Self::Unprobed { module, function, reason } => {
                write!(f, "calls of {function} in {module:?} are not seen: {reason}")
            }
            Self::Unreadable { module, reason } => {
                write!(f, "{module:?} could not be searched for an allocator: {reason}")
            }
        }
    }
}

/// Finds the allocator of a running process.
///
/// # Errors
/// [`TargetError::StaticProgram`], [`TargetError::NoGlibc`], [`TargetError::Module`] if the libc cannot be read,
/// [`TargetError::Exited`], and what [`mappings::read`] returns.
pub fn discover(process: &Process) -> Result<Discovery, TargetError> {
    discover_in(process, &mappings::read(process)?)
}

/// As [`discover`], in a memory map that has been read already: for a program that is just starting, once
/// [`mappings::maps_libc`] holds.
///
/// # Errors
/// As [`discover`].
pub fn discover_in(process: &Process, mappings: &[Mapping]) -> Result<Discovery, TargetError> {
    let (discovery, others) = look(process, mappings)?;
    if discovery.sites.is_empty() {
        return Err(no_glibc(process, discovery, others));
    }
    Ok(discovery)
}

/// The modules of a process and its loader's hook, for traces that need no allocator: without sites and notes.
///
/// # Errors
/// [`TargetError::Exited`], and what [`mappings::read`] returns.
pub fn modules(process: &Process) -> Result<Discovery, TargetError> {
    let (discovery, _) = look(process, &mappings::read(process)?)?;
    Ok(Discovery { sites: Vec::new(), notes: Vec::new(), ..discovery })
}

fn look(process: &Process, mappings: &[Mapping]) -> Result<(Discovery, Others), TargetError> {
    let mut discovery = Discovery { sites: Vec::new(), modules: Vec::new(), loader: None, notes: Vec::new() };
    let exe = process.exe_file()?.metadata().map_err(|error| process.unreadable("exe", error))?;
    let mut others = Others::default();
    let mut seen = HashSet::new();
    for mapping in mappings.iter().filter(|mapping| mapping.executable && mapping.has_file()) {
        if !seen.insert(mapping.file) {
            continue;
        }
        let module = match Module::open(process, mapping) {
            Ok(module) => module,
            Err(ModuleProblem::NotElf | ModuleProblem::OtherMachine | ModuleProblem::NotRegular) => continue,
            Err(problem) => {
                process.check_alive()?;
                others.unreadable(&mut discovery, mapping, problem);
                continue;
            }
        };
        let identity = module.identity();
        let executable = (identity.device, identity.inode) == (exe.dev(), exe.ino());
        discovery.modules.push(module);
        if let Err(problem) = look_into(&mut discovery, executable, &mut others) {
            others.unreadable(&mut discovery, mapping, problem);
        }
    }
    process.check_alive()?;
    Ok((discovery, others))
}

/// What explains that no glibc was found.
#[derive(Default)]
struct Others {
    /// File name of another C library.
    library: Option<String>,
    /// File name of a module that should be glibc, and why it could not be used.
    damaged: Option<(String, ModuleProblem)>,
}

impl Others {
    fn unreadable(&mut self, discovery: &mut Discovery, mapping: &Mapping, problem: ModuleProblem) {
        let name = mapping.file_name();
        discovery.notes.push(Note::Unreadable { module: name.clone(), reason: problem.to_string() });
        if mappings::maps_libc(std::slice::from_ref(mapping)) {
            self.damaged = Some((name, problem));
        }
    }
}

fn no_glibc(process: &Process, discovery: Discovery, others: Others) -> TargetError {
    let pid = process.pid();
    if let Some((name, problem)) = others.damaged {
        return TargetError::Module { pid, name, problem };
    }
    if let Some(found) = others.library {
        return TargetError::NoGlibc { pid, found: Some(found) };
    }
    // Of a static program nothing asks for a loader; nor does the loader itself, run as a program, but then the
    // program that it loads does.
    if discovery.modules.iter().any(Module::has_interpreter) {
        TargetError::NoGlibc { pid, found: None }
    } else {
        TargetError::StaticProgram { pid, exe: process.exe().to_owned() }
    }
}

/// Looks at the symbols of the module added last.
fn look_into(discovery: &mut Discovery, executable: bool, others: &mut Others) -> Result<(), ModuleProblem> {
    let Some(index) = discovery.modules.len().checked_sub(1) else { return Ok(()) };
    let module = &discovery.modules[index];
    let source = Source::new(module.file());
    if executable
        && !module.has_interpreter()
        && let Some(symbols) = source.debugging_symbols()?.filter(|symbols| is_allocator(*symbols))
    {
        let (sites, notes) = resolve(module, index, symbols);
        discovery.sites.extend(sites);
        // What a static program lacks, it does not call.
        discovery.notes.extend(notes.into_iter().filter(|note| !matches!(note, Note::Missing { .. })));
        return Ok(());
    }
    let Some(dynamic) = source.dynamic()? else { return Ok(()) };
    let soname = dynamic.soname.unwrap_or_default();
    if is_loader(soname) {
        if discovery.loader.is_none()
            && let Some(hook) = dynamic.symbols.function("_dl_debug_state")
            && let Some(offset) = module.file_offset(hook.address)
        {
            const STATE: u64 = 24;
            let state = dynamic.symbols.variable("_r_debug").and_then(|debug| debug.checked_add(STATE));
            discovery.loader = Some(LoaderHook { module: index, offset, state });
        }
        // Loaders of glibc before 2.32 export a malloc, for themselves.
        return Ok(());
    }
    if is_glibc(&dynamic) {
        let (sites, notes) = resolve(module, index, dynamic.symbols);
        if sites.is_empty() {
            let reason = notes.first().map(Note::to_string).unwrap_or_default();
            others.damaged = Some((module.name().to_owned(), ModuleProblem::NoSite(reason)));
        }
        discovery.sites.extend(sites);
        discovery.notes.extend(notes);
        return Ok(());
    }
    let c_library = [soname, module.name().as_bytes()].into_iter().any(is_other_c_library);
    if c_library && others.library.is_none() {
        others.library = Some(module.name().to_owned());
    }
    if dynamic.symbols.function("malloc").is_some() {
        let module = module.name().to_owned();
        discovery.notes.push(Note::OtherAllocator { module, executable });
    }
    Ok(())
}

fn is_loader(soname: &[u8]) -> bool {
    soname.starts_with(b"ld-linux")
}

fn is_glibc(dynamic: &Dynamic<'_>) -> bool {
    dynamic.soname == Some(b"libc.so.6")
        && dynamic.versions.iter().any(|version| version.starts_with(b"GLIBC_2."))
        && dynamic.symbols.function("malloc").is_some()
}

/// Whether a module defines a whole allocator: functions that belong together have one heap.
fn is_allocator(symbols: Symbols<'_>) -> bool {
    ["malloc", "free", "calloc", "realloc"].iter().all(|name| !definitions(symbols, name).is_empty())
}

/// Names of C libraries and their loaders: musl, uClibc, bionic, dietlibc.
fn is_other_c_library(name: &[u8]) -> bool {
    const STARTS: [&[u8]; 5] = [b"ld-musl-", b"libc.musl-", b"ld-uClibc", b"libuClibc", b"libc.so"];
    name != b"libc.so.6" && STARTS.iter().any(|start| name.starts_with(start))
}

/// The definitions of a function: those for other object files, or the only other one.
fn definitions<'a>(symbols: Symbols<'a>, name: &str) -> Vec<Symbol<'a>> {
    let mut found: Vec<_> = symbols.functions().filter(|symbol| symbol.name == name.as_bytes()).collect();
    if found.iter().any(|symbol| !symbol.local) {
        found.retain(|symbol| !symbol.local);
    } else if found.iter().any(|symbol| symbol.address != found[0].address) {
        // Functions of other kinds, by that name.
        found.clear();
    }
    found
}

/// One address with functions to trace.
#[derive(Default)]
struct Found {
    /// Indexes in [`GLIBC`].
    functions: Vec<usize>,
    size: u64,
    indirect: bool,
    /// Those of the table first.
    names: Vec<String>,
}

impl Found {
    fn add_name(&mut self, name: &[u8]) {
        let name = String::from_utf8_lossy(name);
        if self.names.len() <= MAX_ALIASES && !self.names.iter().any(|known| *known == name) {
            self.names.push(name.into_owned());
        }
    }
}

/// Finds the functions of [`GLIBC`] and places their probes.
fn resolve(module: &Module, index: usize, symbols: Symbols<'_>) -> (Vec<ProbeSite>, Vec<Note>) {
    let mut found: BTreeMap<u64, Found> = BTreeMap::new();
    for (function, known) in GLIBC.iter().enumerate() {
        for symbol in definitions(symbols, &known.name) {
            let entry = found.entry(symbol.address).or_default();
            entry.functions.push(function);
            entry.size = entry.size.max(symbol.size);
            entry.indirect |= symbol.indirect;
            entry.add_name(symbol.name);
        }
    }
    for symbol in symbols.functions() {
        if let Some(entry) = found.get_mut(&symbol.address) {
            entry.add_name(symbol.name);
        }
    }
    let missing: Vec<_> = (0..GLIBC.len())
        .filter(|wanted| !found.values().any(|entry| entry.functions.contains(wanted)))
        .map(|wanted| GLIBC[wanted].name.clone())
        .collect();
    let mut found: Vec<_> = found.into_iter().collect();
    found.sort_by_key(|(address, entry)| (entry.functions.iter().min().copied(), *address));
    let mut sites = Vec::new();
    let mut notes = Vec::new();
    for (address, entry) in found {
        let (Some(function), others) = split(&entry) else { continue };
        let module_name = || module.name().to_owned();
        for other in others {
            notes.push(Note::Unprobed {
                module: module_name(),
                function: other.name.clone(),
                reason: format!("it has the same code as {}, which takes other arguments", function.name),
            });
        }
        let extent = Extent { address, size: entry.size, indirect: entry.indirect };
        match placement::place(module, extent, function.role, function.arguments) {
            Ok((function_offset, placement)) => sites.push(ProbeSite {
                module: index,
                function: function.name.clone(),
                aliases: entry.names.into_iter().filter(|name| *name != *function.name).take(MAX_ALIASES).collect(),
                role: function.role,
                repeats: false,
                arguments: function.arguments,
                function_offset,
                probe_offset: function_offset.saturating_add(placement.offset),
                placement,
            }),
            Err(reason) => {
                notes.push(Note::Unprobed { module: module_name(), function: function.name.clone(), reason })
            }
        }
    }
    if !missing.is_empty() {
        notes.push(Note::Missing { module: module.name().to_owned(), functions: missing });
    }
    (sites, notes)
}

/// The function that an address is taken for, and those that cannot be the same.
fn split(entry: &Found) -> (Option<&'static Function>, Vec<&'static Function>) {
    let mut indexes = entry.functions.clone();
    indexes.sort_unstable();
    indexes.dedup();
    let mut functions = indexes.into_iter().filter_map(|index| GLIBC.get(index));
    let first = functions.next();
    let others = functions
        .filter(|other| first.is_some_and(|first| (first.role, first.arguments) != (other.role, other.arguments)))
        .collect();
    (first, others)
}

#[cfg(test)]
#[path = "discover_tests.rs"]
mod tests;
