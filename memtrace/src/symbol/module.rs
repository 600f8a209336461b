//! Frames of one module by file offset: out of its debug information, its symbol tables, and the files that belong to it.

use std::{
    any::Any,
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    time::{Duration, Instant},
};

use super::{
    Names, demangle,
    dwarf::{Found, Sections},
    path::{Frame, NameId},
    separate::{Places, has_debug_information},
    symbols::Symbols,
};
use crate::target::image::{Image, ImageError};

/// Offsets looked up between two reports of progress.
const CHUNK: usize = 256;

/// Longest time that one module's debug information may take: it can be made so that every look-up takes long.
const MOST_TIME: Duration = Duration::from_secs(120);

/// What one module says about a list of offsets.
#[derive(Default)]
pub struct Answer {
    /// For every offset the frames whose code is there, each inlined into the one before it: the first is the
    /// function that was called, the last the one whose source line it is. Empty where nothing is known.
    pub frames: Vec<Vec<Frame>>,
    /// Why names are missing or worse than they could be.
    pub problems: Vec<String>,
}

/// Names the code at the file offsets `offsets` of the module that can be opened at `open` and that the target calls
/// `path`. `progress` is called with the number of offsets done. Never fails: a file that can't be used leaves all
/// frames empty and says why.
pub fn frames(
    open: &Path,
    path: &Path,
    offsets: &[u64],
    places: &Places,
    names: &mut Names,
    progress: &mut dyn FnMut(usize),
) -> Answer {
    // Damaged files may make a parser panic; a report with names missing is better than none.
    let result = catch_unwind(AssertUnwindSafe(|| answer(open, path, offsets, places, names, progress)));
    match result {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => failed(offsets, error.to_string()),
        Err(panic) => failed(offsets, format!("its parser failed: {}", message(&*panic))),
    }
}

fn failed(offsets: &[u64], problem: String) -> Answer {
    let problems = vec![demangle::bounded(&problem).into_owned()];
    Answer { frames: vec![Vec::new(); offsets.len()], problems }
}

fn answer(
    open: &Path,
    path: &Path,
    offsets: &[u64],
    places: &Places,
    names: &mut Names,
    progress: &mut dyn FnMut(usize),
) -> Result<Answer, ImageError> {
    let module = Image::open(open)?;
    let mut separate = places.find(&module, path);
    let mut problems = std::mem::take(&mut separate.problems);
    let mini = match module.mini_debug_info() {
        Ok(mini) => mini,
        Err(error) => {
            problems.push(format!("its small symbol table is not used: {error}"));
            None
        }
    };
    let images: Vec<&Image> = [Some(&module), separate.debug.as_ref(), mini.as_ref()].into_iter().flatten().collect();
    let mut lookup = Lookup { symbols: Symbols::of(&images), names, known: HashMap::new() };
    let addresses: Vec<Option<u64>> = offsets.iter().map(|offset| module.address_of(*offset)).collect();
    let described = separate.debug.as_ref().filter(|debug| has_debug_information(debug)).unwrap_or(&module);
    let mut frames = Vec::with_capacity(offsets.len());
    if has_debug_information(described) {
        let described =
            || described_frames(described, separate.continued.as_ref(), &addresses, &mut lookup, &mut frames, progress);
        match catch_unwind(AssertUnwindSafe(described)) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => problems.push(format!("debug information not used: {error}")),
            Err(panic) => problems.push(format!("debug information not used: its parser failed: {}", message(&*panic))),
        }
    }
    for (index, address) in addresses.iter().enumerate().skip(frames.len()) {
        frames.push(address.map(|address| lookup.frames(address, Found::default())).unwrap_or_default());
        if index % CHUNK == 0 {
            progress(index);
        }
    }
    if images.iter().copied().chain(&separate.continued).any(Image::was_truncated) {
        problems.push("names are missing or wrong: the file was cut off while it was read".into());
    }
    for problem in &mut problems {
        *problem = demangle::bounded(problem).into_owned();
    }
    Ok(Answer { frames, problems })
}

/// Why debug information is not used, or not to its end.
#[derive(Debug, thiserror::Error)]
enum DebugError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("{0}")]
    Format(#[from] addr2line::gimli::Error),
    #[error("it is made to take very much time or memory; {done} of {all} addresses have names of it")]
    Exhausted { done: usize, all: usize },
    #[error("it took more than {} s; {done} of {all} addresses have names of it", MOST_TIME.as_secs())]
    Slow { done: usize, all: usize },
}

/// Appends to `frames` what debug information says about `addresses`, and symbols where it says nothing.
fn described_frames(
    image: &Image,
    continued: Option<&Image>,
    addresses: &[Option<u64>],
    lookup: &mut Lookup<'_, '_>,
    frames: &mut Vec<Vec<Frame>>,
    progress: &mut dyn FnMut(usize),
) -> Result<(), DebugError> {
    let start = Instant::now();
    let sections = Sections::read(image, continued)?;
    let mut exhausted = None;
    let information = match sections.index() {
        Err(_) if sections.are_exhausted() => return Err(DebugError::Exhausted { done: 0, all: addresses.len() }),
        information => information?,
    };
    for (index, address) in addresses.iter().enumerate() {
        // What is damaged in one place may be whole elsewhere.
        let found = address.and_then(|address| information.find(address).ok()).unwrap_or_default();
        frames.push(address.map(|address| lookup.frames(address, found)).unwrap_or_default());
        if exhausted.is_none() && sections.are_exhausted() {
            exhausted = Some(index);
        }
        if index % CHUNK == 0 {
            progress(index);
            if start.elapsed() > MOST_TIME {
                return Err(DebugError::Slow { done: frames.len(), all: addresses.len() });
            }
        }
    }
    match exhausted {
        Some(done) => Err(DebugError::Exhausted { done, all: addresses.len() }),
        None => Ok(()),
    }
}

/// Symbols, and the names made so far.
struct Lookup<'a, 'n> {
    symbols: Symbols<'a>,
    names: &'n mut Names,
    /// Readable names by mangled ones.
    known: HashMap<Vec<u8>, NameId>,
}

impl Lookup<'_, '_> {
    /// The frames at an address: what debug information found there, and the symbol's name where that has none, or one
    /// without a namespace, as it does for local functions and in its small form (`-g1`, `line-tables-only`).
    fn frames(&mut self, address: u64, found: Found<'_>) -> Vec<Frame> {
        let symbol = self.symbols.find(address);
        let mut functions = found.functions;
        if functions.is_empty() {
            functions.push(None);
        }
        if let (Some(symbol), Some(first)) = (symbol, functions.first_mut())
            && first.is_none_or(|name| !is_mangled(name) && is_mangled(symbol))
        {
            *first = Some(symbol);
        }
        let mut frames = Vec::with_capacity(functions.len());
        for (index, name) in functions.into_iter().enumerate() {
            let Some(name) = name else { continue };
            let line = found.lines.get(index).copied().flatten();
            let line = line.map(|(file, line)| (self.names.id(&demangle::bounded(file)), line));
            frames.push(Frame { name: self.name(name), line });
        }
        frames
    }

    fn name(&mut self, mangled: &[u8]) -> NameId {
        if let Some(name) = self.known.get(mangled) {
            return *name;
        }
        let name = self.names.id(&demangle::readable(&String::from_utf8_lossy(mangled)));
        self.known.insert(mangled.to_vec(), name);
        name
    }
}

/// Whether a name carries its namespace: C++ and old Rust, or new Rust.
fn is_mangled(name: &[u8]) -> bool {
    name.starts_with(b"_Z") || name.starts_with(b"_R")
}

fn message(panic: &(dyn Any + Send)) -> String {
    let message = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message");
    demangle::bounded(message).into_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::target::test_program::Workshop;

    const SOURCE: &str = "
static inline __attribute__((always_inline)) int inlined(int x) { __asm__ volatile(\"nop; nop; nop\"); return x * 3; }
__attribute__((noinline)) static int local(int x) { return inlined(x) + 1; }
int main(int argc, char **argv) { (void)argv; return local(argc); }
";

    /// Any damage gives some answer for every offset, in bounded time and without a panic that leaves.
    #[test]
    fn damaged_files_do_no_harm() {
        let workshop = Workshop::new();
        let program = workshop.compile("program", SOURCE, &["-O1", "-g"]);
        let whole = std::fs::read(&program).unwrap();
        let places = Places::new(None, None);
        let offsets: Vec<u64> = (0x1000..0x1400).collect();
        let answer = |path: &Path| {
            let mut names = Names::default();
            let answer = frames(path, path, &offsets, &places, &mut names, &mut |_| {});
            assert_eq!(answer.frames.len(), offsets.len());
            answer.frames.iter().flatten().map(|frame| names.get(frame.name).to_string()).collect::<Vec<_>>()
        };
        let good = answer(&program);
        for name in ["main", "local", "inlined"] {
            assert!(good.iter().any(|found| found == name), "{good:?}");
        }
        let damaged = workshop.0.path().join("damaged");
        let mut random = 1u64;
        let mut next = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % below
        };
        for round in 0..150 {
            let mut bytes = whole.clone();
            for _ in 0..=round % 40 {
                let position = next(bytes.len());
                bytes[position] = next(256) as u8;
            }
            std::fs::write(&damaged, &bytes).unwrap();
            answer(&damaged);
            std::fs::write(&damaged, &whole[..next(whole.len())]).unwrap();
            answer(&damaged);
        }
    }
}
