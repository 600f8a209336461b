//! Stacks through the dynamic loader: functions that are bound at their first call, and variables of threads.
//!
//! The loader saves all registers before it binds a function, in a frame that it finds again from rbx.

use std::collections::BTreeSet;

use crate::{
    stacks::{TRUNCATED, expected, own, trace},
    support::{
        build::Fixture,
        compare::{Unit, assert_exact},
        folded::Folded,
        root::turn,
        truth::Truth,
    },
};

/// How functions of the loader, and of the C library when it asks the loader for something, are called.
const LOADER: [&str; 24] = [
    // The loader's own, which call the C library's.
    "malloc",
    "calloc",
    "_dl_",
    "__dl",
    "___dl",
    "__GI__dl",
    "dl",
    "do_",
    "elf_",
    "__tls_get_addr",
    "tls_get_addr",
    "update_get_addr",
    "allocate_",
    "add_dependency",
    "call_dl_lookup",
    "init_tls",
    "_rtld",
    "__rtld",
    "resize_",
    "__GI___tls",
    "__GI__dl",
    "_dlerror_run",
    "[unknown] (ld-linux-x86-64.so.2+",
    "[unknown] (libc.so.6+",
];

fn of_loader(frame: &str) -> bool {
    LOADER.iter().any(|start| frame.starts_with(start))
}

/// Paths without the loader's frames between the program's. Panics if frames of anybody else are there.
fn without_loader(folded: &Folded, truth: &Truth) -> Folded {
    let own: BTreeSet<&str> = truth.all.keys().flatten().map(String::as_str).collect();
    let mut paths = Folded::new();
    for (path, value) in folded {
        let root = path.iter().position(|frame| own.contains(frame.as_str())).unwrap_or(path.len());
        let kept = path.iter().enumerate().filter(|(position, frame)| {
            let kept = *position < root || own.contains(frame.as_str()) || frame.starts_with(TRUNCATED);
            assert!(kept || of_loader(frame), "{frame} in {}", path.join(";"));
            kept
        });
        *paths.entry(kept.map(|(_, frame)| frame.clone()).collect()).or_default() += *value;
    }
    paths
}

/// Traces a case with libraries, with frame pointers allowed where there are no rows, and by rows alone.
fn traces(case: &str, libraries: &[Fixture]) -> Vec<(Truth, Folded)> {
    let _turn = turn();
    let paths: Vec<String> = libraries.iter().map(|library| library.path().display().to_string()).collect();
    let arguments: Vec<&str> = [case].into_iter().chain(paths.iter().map(String::as_str)).collect();
    [&[][..], &["--unwind", "dwarf"]].into_iter().map(|options| trace(Fixture::Stacks, &arguments, options)).collect()
}

/// Paths that lead through one of the program's functions.
fn through(folded: &Folded, function: &str) -> Folded {
    let through = |path: &[String]| path.iter().any(|frame| frame == function);
    folded.iter().filter(|(path, _)| through(path)).map(|(path, value)| (path.clone(), *value)).collect()
}

fn assert_resolvers_exact(case: &str, libraries: &[Fixture]) {
    for (truth, folded) in traces(case, libraries) {
        let reported = own(&truth, &without_loader(&through(&folded, "leaf"), &truth), str::to_owned);
        assert_exact(case, &expected(&truth, reported.start_frames), Unit::Bytes, &reported.paths);
        let resolvers = truth.all.keys().filter(|path| path.iter().any(|frame| frame.starts_with("resolve_")));
        assert_eq!(resolvers.count(), 3, "{:#?}", truth.all);
    }
}

#[test]
fn functions_chosen_at_their_first_call() {
    assert_resolvers_exact("binding", &[Fixture::LoaderLibrary]);
}

#[test]
fn functions_chosen_when_a_library_is_opened() {
    assert_resolvers_exact("opening", &[Fixture::LoaderLibrary, Fixture::LoaderUser]);
}

/// What the loader allocates itself, in a case whose paths through `function` end in its code: every path must be whole.
fn assert_loaders_own_whole(folded: &Folded, function: &str, callers: &[&str]) -> Folded {
    let paths = through(folded, function);
    for path in paths.keys() {
        let frames: Vec<&str> = path.iter().map(String::as_str).collect();
        let at = frames.iter().position(|frame| *frame == function).expect("it leads through it");
        assert!(frames[..at].ends_with(callers), "{}", path.join(";"));
        assert!(matches!(frames[0], "_start" | "clone3" | "__clone3" | "clone"), "{}", path.join(";"));
        assert!(frames[at + 1..frames.len() - 1].iter().all(|frame| of_loader(frame)), "{}", path.join(";"));
    }
    paths
}

#[test]
fn variables_of_threads() {
    for library in [Fixture::LoaderLibrary, Fixture::LoaderLibraryNow] {
        for (truth, folded) in traces("variables", &[library]) {
            let paths = assert_loaders_own_whole(&folded, "touch_variables", &["toucher"]);
            // One block for each thread, of 5000 bytes and what it takes to align them.
            let bytes: u64 = paths.values().sum();
            let threads = truth.fact("threads");
            assert!(bytes >= 5000 * threads && bytes < 5100 * threads, "{bytes} bytes: {paths:#?}");
            let reported = own(&truth, &through(&folded, "leaf"), str::to_owned);
            assert_exact("variables", &expected(&truth, 0), Unit::Bytes, &reported.paths);
        }
    }
}

#[test]
fn notes_of_dependencies_at_a_first_call() {
    for (truth, folded) in traces("dependency", &[Fixture::LoaderLibrary, Fixture::StacksLibraryLarge]) {
        let paths = assert_loaders_own_whole(&folded, "call_elsewhere", &["main", "dependency"]);
        assert_eq!(paths.len(), 1, "{folded:#?}");
        let reported = own(&truth, &through(&folded, "leaf"), str::to_owned);
        assert_exact("dependency", &expected(&truth, reported.start_frames), Unit::Bytes, &reported.paths);
    }
}
