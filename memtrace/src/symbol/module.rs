//! Function names out of one file, by blazesym.

use std::{
    any::Any,
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use blazesym::symbolize::{
    Input, Reason, Symbolized, Symbolizer,
    source::{Elf, Source},
};

use super::{
    demangle,
    vet::{Verdict, vet},
};

/// Offsets looked up between two reports of progress.
const CHUNK: usize = 256;

/// What one file says about a list of offsets.
pub struct Answer {
    /// For every offset the functions whose code is there, each inlined into the one before it: the first is the
    /// function that was called, the last the one whose source line it is. Empty where nothing is known.
    pub functions: Vec<Vec<String>>,
    /// Why names are missing or worse than they could be.
    pub problem: Option<String>,
}

/// Names the code at the file offsets `offsets` of the ELF file at `path`. `progress` is called with the number of
/// offsets done. Never fails: a file that cannot be used leaves all names empty and says why.
pub fn functions(path: &Path, offsets: &[u64], progress: &mut dyn FnMut(usize)) -> Answer {
    let mut problems = Vec::new();
    let debug_information = match vet(path) {
        Verdict::Full => true,
        Verdict::SymbolsOnly(reason) => {
            problems.push(reason);
            false
        }
        Verdict::Refused(reason) => {
            return Answer { functions: vec![Vec::new(); offsets.len()], problem: Some(reason) };
        }
    };
    let mut found = if debug_information {
        match look_up(path, offsets, true, progress) {
            Ok(found) => found,
            Err(reason) => {
                problems.push(format!("debug information not used: {reason}"));
                vec![Found::Error; offsets.len()]
            }
        }
    } else {
        vec![Found::Error; offsets.len()]
    };
    if let Err(reason) = complete(path, offsets, &mut found)
        && found.contains(&Found::Error)
    {
        problems.push(format!("symbols not used: {reason}"));
    }
    Answer { functions: readable(found), problem: (!problems.is_empty()).then(|| problems.join("; ")) }
}

/// What blazesym says about one offset.
#[derive(Clone, PartialEq, Eq)]
enum Found {
    /// Mangled names, outermost first.
    Names(Vec<String>),
    Unknown,
    Error,
}

/// Asks the symbol table what debug information left open: addresses it could not answer, and functions that it names
/// without their namespace, as it does for local functions and in its small form (`-g1`, `line-tables-only`).
fn complete(path: &Path, offsets: &[u64], found: &mut [Found]) -> Result<(), String> {
    let open: Vec<usize> = (0..offsets.len())
        .filter(|index| match &found[*index] {
            Found::Names(names) => names.first().is_some_and(|name| !is_mangled(name)),
            Found::Unknown => false,
            Found::Error => true,
        })
        .collect();
    if open.is_empty() {
        return Ok(());
    }
    let asked: Vec<u64> = open.iter().map(|index| offsets[*index]).collect();
    let answers = look_up(path, &asked, false, &mut |_| {})?;
    for (index, answer) in open.into_iter().zip(answers) {
        match (&mut found[index], answer) {
            (Found::Names(names), Found::Names(symbols)) => {
                if let (Some(name), Some(symbol)) = (names.first_mut(), symbols.into_iter().next())
                    && is_mangled(&symbol)
                {
                    *name = symbol;
                }
            }
            (Found::Names(_), _) => {}
            (other, answer) => *other = answer,
        }
    }
    Ok(())
}

/// Whether a name carries its namespace: C++ and old Rust, or new Rust.
fn is_mangled(name: &str) -> bool {
    name.starts_with("_Z") || name.starts_with("_R")
}

/// A symbolizer of its own for every file, so that the memory it takes ends with the file, and so that nothing of it is
/// used after a panic.
fn look_up(
    path: &Path,
    offsets: &[u64],
    debug_information: bool,
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<Found>, String> {
    let mut file = Elf::new(path);
    file.debug_syms = debug_information;
    let source = Source::Elf(file);
    let symbolizer = Symbolizer::builder()
        .enable_auto_reload(false)
        .enable_code_info(debug_information)
        .enable_inlined_fns(debug_information)
        .enable_demangling(false)
        .build();
    let mut found = Vec::with_capacity(offsets.len());
    for chunk in offsets.chunks(CHUNK) {
        // Damaged files make blazesym panic in places; a report with names missing is better than none.
        let result = catch_unwind(AssertUnwindSafe(|| symbolizer.symbolize(&source, Input::FileOffset(chunk))));
        match result {
            Ok(Ok(symbols)) => found.extend(symbols.iter().map(names)),
            Ok(Err(error)) => return Err(demangle::bounded(&error.to_string()).into_owned()),
            Err(panic) => return Err(format!("its parser failed: {}", message(&*panic))),
        }
        progress(found.len());
    }
    if found.len() != offsets.len() {
        return Err("its parser lost addresses".into());
    }
    Ok(found)
}

fn names(symbolized: &Symbolized<'_>) -> Found {
    match symbolized {
        // Debug information may describe a function without naming it.
        Symbolized::Sym(symbol) if symbol.name.is_empty() => Found::Error,
        Symbolized::Sym(symbol) => Found::Names(
            std::iter::once(&symbol.name)
                .chain(symbol.inlined.iter().map(|inlined| &inlined.name))
                .filter(|name| !name.is_empty())
                .map(|name| demangle::bounded(name).into_owned())
                .collect(),
        ),
        Symbolized::Unknown(Reason::IgnoredError) => Found::Error,
        Symbolized::Unknown(_) => Found::Unknown,
    }
}

/// Demangles, every distinct name once.
fn readable(found: Vec<Found>) -> Vec<Vec<String>> {
    let mut known: HashMap<String, String> = HashMap::new();
    found
        .into_iter()
        .map(|found| match found {
            Found::Names(names) => names
                .into_iter()
                .map(|name| match known.get(&name) {
                    Some(readable) => readable.clone(),
                    None => {
                        let readable = demangle::readable(&name).into_owned();
                        known.insert(name, readable.clone());
                        readable
                    }
                })
                .collect(),
            Found::Unknown | Found::Error => Vec::new(),
        })
        .collect()
}

fn message(panic: &(dyn Any + Send)) -> String {
    let message = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message");
    demangle::bounded(message).into_owned()
}
