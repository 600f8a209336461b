//! Finding custom functions in the modules of a process.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashSet},
};

use super::{
    super::{
        Module, ModuleProblem, Process, TargetError,
        discover::Note,
        elf::Symbol,
        function::Role,
        near::Nearest,
        placement::{self, Extent},
        site::ProbeSite,
    },
    CustomError, names,
    spec::{Name, Spec, Target},
    tables::{Files, Tables, soname},
};

/// Most functions that one pattern may stand for.
const MAX_FUNCTIONS: usize = 64;
/// Most other names kept of a function.
const MAX_ALIASES: usize = 8;
/// Most names that an error lists.
const LISTED: usize = 5;

/// A custom function to probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CustomSite {
    /// Where and what; its module is an index in the modules that were searched.
    pub site: ProbeSite,
    /// Index of what asked for it in the given specs: the first, if several did.
    pub spec: usize,
}

/// What was found.
#[derive(Debug, Default)]
pub struct Resolved {
    /// Where probes go, in the order of modules and addresses.
    pub sites: Vec<CustomSite>,
    /// For each spec, how many of the sites are its.
    pub matched: Vec<usize>,
    /// For each spec, in how many of the searched modules it would have been.
    pub searched: Vec<usize>,
    /// What the user should know: functions that cannot be probed, modules that cannot be read; each with its spec.
    pub notes: Vec<(usize, Note)>,
}

/// Finds the functions in `modules[from..]` and places their probes. To be called again with a larger `from` when
/// modules have been loaded; what is known of the earlier modules does not count then.
///
/// # Errors
/// [`CustomError::TooMany`], [`CustomError::Conflict`]; [`CustomError::Target`] if the process has ended.
pub fn resolve(process: &Process, specs: &[Spec], modules: &[Module], from: usize) -> Result<Resolved, CustomError> {
    let mut resolved =
        Resolved { matched: vec![0; specs.len()], searched: vec![0; specs.len()], ..Resolved::default() };
    if specs.is_empty() {
        return Ok(resolved);
    }
    let files = Files::of(process)?;
    for (index, module) in modules.iter().enumerate().skip(from) {
        look_into(&mut resolved, specs, index, module, &files)?;
    }
    Ok(resolved)
}

/// Checks that every spec has its function, of all modules that `resolved` is about: the indexes of those that may yet get
/// one, since the module that they name has not been loaded.
///
/// # Errors
/// [`CustomError::NoFunction`], [`CustomError::NotProbed`].
pub fn check(
    process: &Process,
    specs: &[Spec],
    resolved: &Resolved,
    modules: &[Module],
) -> Result<Vec<usize>, CustomError> {
    let mut waiting = Vec::new();
    for (index, spec) in specs.iter().enumerate() {
        if resolved.matched.get(index).is_some_and(|matched| *matched > 0) {
            continue;
        }
        if spec.names_module() && resolved.searched.get(index) == Some(&0) {
            waiting.push(index);
            continue;
        }
        let (pid, text) = (process.pid(), spec.text.clone());
        let explains = |note: &Note| spec.names_module() || matches!(note, Note::Unprobed { .. });
        if let Some((_, note)) = resolved.notes.iter().find(|(of, note)| *of == index && explains(note)) {
            return Err(CustomError::NotProbed { pid, text, reason: note.to_string() });
        }
        let near = similar(process, spec, modules)?;
        return Err(CustomError::NoFunction { pid, text, near, with_module: spec.names_module() });
    }
    Ok(waiting)
}

/// Takes the sites out of a discovery whose functions the user has described: the user knows better.
pub fn overrule(discovered: &mut Vec<ProbeSite>, custom: &[CustomSite]) {
    let described: HashSet<_> = custom.iter().map(|found| (found.site.module, found.site.function_offset)).collect();
    discovered.retain(|site| !described.contains(&(site.module, site.function_offset)));
}

/// A function that specs stand for.
#[derive(Default)]
struct Candidate {
    /// All that do.
    specs: BTreeSet<usize>,
    name: String,
    /// Other names.
    aliases: BTreeSet<String>,
    size: u64,
    indirect: bool,
}

fn look_into(
    resolved: &mut Resolved,
    specs: &[Spec],
    index: usize,
    module: &Module,
    files: &Files,
) -> Result<(), CustomError> {
    let (soname, program) = (soname(module), files.is_program(module));
    let here: Vec<_> = (0..specs.len())
        .filter(|spec| is_module(specs[*spec].module.as_ref(), module, soname.as_deref(), program))
        .collect();
    if here.is_empty() {
        return Ok(());
    }
    let mut candidates: BTreeMap<u64, Candidate> = BTreeMap::new();
    for spec in &here {
        resolved.searched[*spec] += 1;
        if let Target::Address(address) = specs[*spec].function {
            add(&mut candidates, specs, *spec, module, address, None)?;
        }
    }
    let tables = match Tables::of(module, files) {
        Ok(tables) => Some(tables),
        Err(problem) => {
            unreadable(resolved, &here, module, &problem);
            None
        }
    };
    let mut too_many = None;
    let problem = tables.as_ref().map_or(Ok(()), |tables| {
        tables.functions(&mut |symbol| {
            for spec in &here {
                if too_many.is_none() && is_function(&specs[*spec], &symbol) {
                    let added = add(&mut candidates, specs, *spec, module, symbol.address, Some(&symbol));
                    too_many = added.and_then(|()| limit(&candidates, specs, *spec)).err();
                }
            }
        })
    });
    if let Some(error) = too_many {
        return Err(error);
    }
    if let Err(problem) = problem {
        unreadable(resolved, &here, module, &problem);
    }
    name_all(tables.as_ref(), &mut candidates);
    for (address, candidate) in candidates {
        place(resolved, specs, index, module, address, candidate);
    }
    for spec in here {
        if resolved.matched[spec] > MAX_FUNCTIONS {
            let of_spec = resolved.sites.iter().filter(|site| site.spec <= spec);
            let examples = of_spec.map(|site| site.site.function.clone().into_owned()).take(LISTED).collect();
            return Err(too_many_functions(&specs[spec], examples));
        }
    }
    Ok(())
}

/// Notes that a module's symbols cannot be read, for those who would be in it.
fn unreadable(resolved: &mut Resolved, here: &[usize], module: &Module, problem: &ModuleProblem) {
    let note = Note::Unreadable { module: module.name().to_owned(), reason: problem.to_string() };
    resolved.notes.extend(here.iter().map(|spec| (*spec, note.clone())));
}

fn place(resolved: &mut Resolved, specs: &[Spec], index: usize, module: &Module, address: u64, candidate: Candidate) {
    let Some(first) = candidate.specs.first().copied() else { return };
    let spec = &specs[first];
    let extent = Extent { address, size: candidate.size, indirect: candidate.indirect };
    let function = Cow::Owned(candidate.name);
    match placement::place(module, extent, spec.role, spec.arguments) {
        Ok((function_offset, placement)) => {
            candidate.specs.iter().for_each(|spec| resolved.matched[*spec] += 1);
            resolved.sites.push(CustomSite {
                site: ProbeSite {
                    module: index,
                    aliases: candidate.aliases.into_iter().collect(),
                    function,
                    role: spec.role,
                    arguments: spec.arguments,
                    constant: spec.constant,
                    // It may well hand the block on to free.
                    repeats: spec.role == Role::Free,
                    function_offset,
                    probe_offset: function_offset.saturating_add(placement.offset),
                    placement,
                },
                spec: first,
            });
        }
        Err(reason) => {
            let note = Note::Unprobed { module: module.name().to_owned(), function, reason };
            resolved.notes.extend(candidate.specs.iter().map(|spec| (*spec, note.clone())));
        }
    }
}

/// Notes that a spec stands for the function at an address.
fn add(
    candidates: &mut BTreeMap<u64, Candidate>,
    specs: &[Spec],
    spec: usize,
    module: &Module,
    address: u64,
    symbol: Option<&Symbol<'_>>,
) -> Result<(), CustomError> {
    let candidate = candidates.entry(address).or_default();
    candidate.specs.insert(spec);
    // All before agree with each other.
    let other = candidate.specs.iter().copied().find(|other| *other != spec).unwrap_or(spec);
    let (first, second) = (&specs[other.min(spec)], &specs[other.max(spec)]);
    if (first.role, first.arguments, first.constant) != (second.role, second.arguments, second.constant) {
        let function =
            symbol.and_then(|symbol| text(symbol.name)).map_or_else(|| format!("{address:#x}"), str::to_owned);
        return Err(CustomError::Conflict {
            first: first.text.clone(),
            second: second.text.clone(),
            function,
            module: module.name().to_owned(),
        });
    }
    // The name that was asked for is the one that is shown.
    if let Some(symbol) = symbol.filter(|_| candidate.name.is_empty()) {
        candidate.name = shown(symbol);
    }
    Ok(())
}

/// Adds to every function the sizes and names that the symbols at its address have.
fn name_all(tables: Option<&Tables>, candidates: &mut BTreeMap<u64, Candidate>) {
    // What cannot be read has been noted.
    let _ = tables.map(|tables| {
        tables.functions(&mut |symbol| {
            let Some(candidate) = candidates.get_mut(&symbol.address) else { return };
            candidate.size = candidate.size.max(symbol.size);
            candidate.indirect |= symbol.indirect;
            if candidate.name.is_empty() {
                candidate.name = shown(&symbol);
            } else if candidate.aliases.len() < MAX_ALIASES && candidate.name != shown(&symbol) {
                candidate.aliases.insert(shown(&symbol));
            }
        })
    });
    for (address, candidate) in candidates {
        if candidate.name.is_empty() {
            candidate.name = format!("{address:#x}");
        }
    }
}

fn limit(candidates: &BTreeMap<u64, Candidate>, specs: &[Spec], spec: usize) -> Result<(), CustomError> {
    let of_spec = || candidates.values().filter(|candidate| candidate.specs.contains(&spec));
    if candidates.len() <= MAX_FUNCTIONS || of_spec().count() <= MAX_FUNCTIONS {
        return Ok(());
    }
    Err(too_many_functions(&specs[spec], of_spec().take(LISTED).map(|candidate| candidate.name.clone()).collect()))
}

fn too_many_functions(spec: &Spec, examples: Vec<String>) -> CustomError {
    CustomError::TooMany { text: spec.text.clone(), most: MAX_FUNCTIONS, examples }
}

/// Whether a module is the one that was named: by its file name, which may have more numbers behind it
/// (`libpool.so.1` names `libpool.so.1.2.3`), or by its `DT_SONAME`.
fn is_module(wanted: Option<&Name>, module: &Module, soname: Option<&str>, program: bool) -> bool {
    let Some(wanted) = wanted else { return true };
    let name = module.name();
    if wanted.is(name) || soname.is_some_and(|soname| wanted.is(soname)) {
        return true;
    }
    match wanted {
        Name::Exact(exact) if exact == "exe" => program,
        Name::Exact(exact) => name.strip_prefix(exact.as_str()).is_some_and(|rest| rest.starts_with('.')),
        Name::Like(_) => false,
    }
}

fn is_function(spec: &Spec, symbol: &Symbol<'_>) -> bool {
    let Some(name) = text(symbol.name) else { return false };
    match &spec.function {
        Target::Symbol(Name::Exact(exact)) => exact == name,
        // What compilers split off or specialize (`pool_get.cold`, `pool_get.isra.0`) takes other arguments.
        Target::Symbol(Name::Like(pattern)) => {
            (!name.contains('.') || pattern.to_string().contains('.')) && pattern.matches(name)
        }
        Target::Readable(wanted) => {
            wanted == name
                || (!name.contains('.')
                    && names::fragment(wanted).is_none_or(|fragment| name.contains(fragment))
                    && names::readable(name)
                        .is_some_and(|readable| readable.whole == *wanted || readable.bare == *wanted))
        }
        Target::Address(_) => false,
    }
}

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

fn shown(symbol: &Symbol<'_>) -> String {
    let name = String::from_utf8_lossy(symbol.name);
    names::readable(&name).map_or_else(|| name.into_owned(), |readable| readable.whole)
}

/// Names of functions that resemble the one that was not found.
fn similar(process: &Process, spec: &Spec, modules: &[Module]) -> Result<Vec<String>, TargetError> {
    let files = Files::of(process)?;
    // Where the mangled name contains what was asked for, names need not be demangled.
    let (wanted, demangled) = match &spec.function {
        Target::Symbol(name) => (name.text().replace(['*', '?'], ""), false),
        Target::Readable(name) => (names::fragment(name).unwrap_or(name).to_owned(), names::fragment(name).is_none()),
        Target::Address(_) => return Ok(Vec::new()),
    };
    let mut nearest = Nearest::new(&wanted, LISTED);
    for module in modules {
        if !is_module(spec.module.as_ref(), module, soname(module).as_deref(), files.is_program(module)) {
            continue;
        }
        // A module that cannot be read has no names to suggest.
        let _ = Tables::of(module, &files).and_then(|tables| {
            tables.functions(&mut |symbol| {
                if let Some(name) = text(symbol.name) {
                    let readable = demangled.then(|| names::readable(name)).flatten();
                    nearest.offer(readable.as_ref().map_or(name, |readable| &readable.bare), || name.to_owned());
                }
            })
        });
    }
    Ok(nearest.best().into_iter().map(|name| names::readable(&name).map_or(name, |readable| readable.whole)).collect())
}

#[cfg(test)]
#[path = "resolve_tests.rs"]
mod tests;
