//! The truth matrix: languages, allocators, and the ways that an allocator comes into a process. In every cell each call
//! path has exactly the bytes and the blocks that the program knows of.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::support::{
    cells::{
        Allocator::{Glibc, Jemalloc, Mimalloc, Musl, PrefixedJemalloc, Scudo, Snmalloc, Tcmalloc},
        Cell,
        Language::{C, Cpp, Rust},
        Way::{Dlopened, DlopenedStatic, Dynamic, Preloaded, Static},
    },
    json::Report,
    memtrace::{self, Memtrace},
    process::Ended,
    root::turn,
    start::TRUNCATED,
    target::Target,
    trace::read,
    truth::{Amount, Paths, Truth},
};

macro_rules! cells {
    ($($name:ident: $language:ident $allocator:ident $way:ident;)*) => {
        $(
            #[test]
            fn $name() {
                assert_cell_exact(Cell { language: $language, allocator: $allocator, way: $way });
            }
        )*
    };
}

cells! {
    cell_c_glibc_dynamic: C Glibc Dynamic;
    cell_c_glibc_static: C Glibc Static;
    cell_c_glibc_dlopened: C Glibc Dlopened;
    cell_c_jemalloc_dynamic: C Jemalloc Dynamic;
    cell_c_jemalloc_static: C Jemalloc Static;
    cell_c_jemalloc_preloaded: C Jemalloc Preloaded;
    cell_c_jemalloc_dlopened: C Jemalloc Dlopened;
    cell_c_jemalloc_dlopened_static: C Jemalloc DlopenedStatic;
    cell_c_prefixed_jemalloc_static: C PrefixedJemalloc Static;
    cell_c_prefixed_jemalloc_dlopened_static: C PrefixedJemalloc DlopenedStatic;
    cell_c_tcmalloc_dynamic: C Tcmalloc Dynamic;
    cell_c_tcmalloc_static: C Tcmalloc Static;
    cell_c_tcmalloc_preloaded: C Tcmalloc Preloaded;
    cell_c_tcmalloc_dlopened: C Tcmalloc Dlopened;
    cell_c_mimalloc_dynamic: C Mimalloc Dynamic;
    cell_c_mimalloc_static: C Mimalloc Static;
    cell_c_mimalloc_preloaded: C Mimalloc Preloaded;
    cell_c_mimalloc_dlopened: C Mimalloc Dlopened;
    cell_c_musl_dynamic: C Musl Dynamic;
    cell_c_musl_static: C Musl Static;
    cell_c_scudo_dynamic: C Scudo Dynamic;
    cell_c_scudo_static: C Scudo Static;
    cell_c_scudo_preloaded: C Scudo Preloaded;
    cell_c_scudo_dlopened: C Scudo Dlopened;
    cell_cpp_glibc_dynamic: Cpp Glibc Dynamic;
    cell_cpp_glibc_static: Cpp Glibc Static;
    cell_cpp_glibc_dlopened: Cpp Glibc Dlopened;
    cell_cpp_jemalloc_dynamic: Cpp Jemalloc Dynamic;
    cell_cpp_jemalloc_static: Cpp Jemalloc Static;
    cell_cpp_jemalloc_preloaded: Cpp Jemalloc Preloaded;
    cell_cpp_jemalloc_dlopened: Cpp Jemalloc Dlopened;
    cell_cpp_jemalloc_dlopened_static: Cpp Jemalloc DlopenedStatic;
    cell_cpp_tcmalloc_dynamic: Cpp Tcmalloc Dynamic;
    cell_cpp_tcmalloc_static: Cpp Tcmalloc Static;
    cell_cpp_tcmalloc_preloaded: Cpp Tcmalloc Preloaded;
    cell_cpp_tcmalloc_dlopened: Cpp Tcmalloc Dlopened;
    cell_cpp_mimalloc_dynamic: Cpp Mimalloc Dynamic;
    cell_cpp_mimalloc_static: Cpp Mimalloc Static;
    cell_cpp_mimalloc_preloaded: Cpp Mimalloc Preloaded;
    cell_cpp_mimalloc_dlopened: Cpp Mimalloc Dlopened;
    cell_cpp_scudo_dynamic: Cpp Scudo Dynamic;
    cell_cpp_scudo_static: Cpp Scudo Static;
    cell_cpp_scudo_preloaded: Cpp Scudo Preloaded;
    cell_cpp_scudo_dlopened: Cpp Scudo Dlopened;
    cell_rust_glibc_dynamic: Rust Glibc Dynamic;
    cell_rust_glibc_static: Rust Glibc Static;
    cell_rust_glibc_dlopened: Rust Glibc Dlopened;
    cell_rust_jemalloc_dynamic: Rust Jemalloc Dynamic;
    cell_rust_jemalloc_preloaded: Rust Jemalloc Preloaded;
    cell_rust_jemalloc_dlopened: Rust Jemalloc Dlopened;
    cell_rust_prefixed_jemalloc_static: Rust PrefixedJemalloc Static;
    cell_rust_prefixed_jemalloc_dlopened_static: Rust PrefixedJemalloc DlopenedStatic;
    cell_rust_tcmalloc_dynamic: Rust Tcmalloc Dynamic;
    cell_rust_tcmalloc_static: Rust Tcmalloc Static;
    cell_rust_tcmalloc_preloaded: Rust Tcmalloc Preloaded;
    cell_rust_tcmalloc_dlopened: Rust Tcmalloc Dlopened;
    cell_rust_mimalloc_dynamic: Rust Mimalloc Dynamic;
    cell_rust_mimalloc_static: Rust Mimalloc Static;
    cell_rust_mimalloc_preloaded: Rust Mimalloc Preloaded;
    cell_rust_mimalloc_dlopened: Rust Mimalloc Dlopened;
    cell_rust_musl_dynamic: Rust Musl Dynamic;
    cell_rust_musl_static: Rust Musl Static;
    cell_rust_scudo_dynamic: Rust Scudo Dynamic;
    cell_rust_scudo_static: Rust Scudo Static;
    cell_rust_scudo_preloaded: Rust Scudo Preloaded;
    cell_rust_scudo_dlopened: Rust Scudo Dlopened;
    cell_rust_snmalloc_static: Rust Snmalloc Static;
    cell_rust_snmalloc_dlopened_static: Rust Snmalloc DlopenedStatic;
    cell_rust_mimalloc_dlopened_static: Rust Mimalloc DlopenedStatic;
}

/// Functions that a process whose `malloc` is not the C library's does not call there.
const SHADOWED: [&str; 4] = ["malloc", "calloc", "realloc", "free"];

fn assert_cell_exact(cell: Cell) {
    let mut command = cell.command();
    let _turn = turn();
    let mut target = Target::of(&mut command);
    let traced = trace(cell, &mut target);
    let ended = target.finish();
    assert!(ended.status.success(), "{cell:?}: the program came to harm: {:?}\n{}", ended.status, ended.stderr);
    traced.assert_exact(cell);
}

/// A cell's own account, and what memtrace reported: the views by their names.
pub struct Traced {
    truth: Truth,
    views: Vec<(&'static str, Report)>,
    memtrace: Ended,
}

/// Looks where the probes go, and traces a cell's program from its `ready` to its `done`.
pub fn trace(cell: Cell, target: &mut Target) -> Traced {
    assert_probes(cell, target.pid());
    let directory = tempfile::tempdir().expect("a temporary directory");
    let output = directory.path().join("cell.json").display().to_string();
    let pid = target.pid().to_string();
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid, "--all", "--unfreed", "-o", &output]);
    target.go();
    let truth = target.truth();
    let memtrace = memtrace.interrupt().success();
    let view = |view| (view, Report::parse(&read(&directory.path().join(format!("cell.{view}.json")))));
    Traced { truth, views: ["unfreed", "all"].map(view).into(), memtrace }
}

impl Traced {
    /// Panics unless both views say exactly what the program says, of nobody else, and nothing was lost.
    pub fn assert_exact(&self, cell: Cell) {
        assert!(self.truth.unfreed.len() >= 12, "{cell:?} leaks by {} paths", self.truth.unfreed.len());
        for (view, report) in &self.views {
            let known = if *view == "all" { &self.truth.all } else { &self.truth.unfreed };
            assert!(report.losses.is_empty(), "{cell:?}: losses: {:#?}\n{}", report.losses, self.memtrace.stderr);
            assert!(!report.lower_bound, "{cell:?}");
            assert_same(cell, view, &of_functions(known), &own(cell, &report.paths, &self.truth));
        }
    }
}

/// Amounts by the functions of the program on the way, whatever the allocator's function is called.
pub fn of_functions(known: &Paths) -> Paths {
    let mut paths = Paths::new();
    for (path, amount) in known {
        *paths.entry(path[..path.len() - 1].to_vec()).or_default() += *amount;
    }
    paths.retain(|_, amount| *amount != Amount::default());
    paths
}

/// The same of what was reported. What is between the program's functions, and between those and the allocator, is the
/// C++ library's and the Rust library's. Panics at a path that does not lead through the program's work, or is cut.
fn own(cell: Cell, reported: &Paths, truth: &Truth) -> Paths {
    let functions: BTreeSet<&str> =
        truth.all.keys().flat_map(|path| &path[..path.len() - 1]).map(String::as_str).collect();
    let mut paths = Paths::new();
    for (path, amount) in reported {
        // What is outside `main` in musl has no unwind tables.
        let whole = cell.allocator == Musl || !path[0].starts_with(TRUNCATED);
        assert!(whole, "{cell:?}: a cut path: {}", path.join(";"));
        let mut own: Vec<String> = path.iter().filter(|frame| functions.contains(frame.as_str())).cloned().collect();
        // Nor has its strdup, which is therefore the first function that is known on its path.
        if cell.allocator == Musl && own.is_empty() && path.iter().any(|frame| frame == "strdup") {
            own = ["work", "leak_strdup"].map(str::to_owned).to_vec();
        }
        assert!(!own.is_empty(), "{cell:?}: nobody else was to allocate: {amount:?} by {}", path.join(";"));
        *paths.entry(own).or_default() += *amount;
    }
    paths
}

fn assert_same(cell: Cell, view: &str, truth: &Paths, reported: &Paths) {
    let all: BTreeSet<_> = truth.keys().chain(reported.keys()).collect();
    let differences: Vec<String> = all
        .into_iter()
        .filter(|path| truth.get(*path) != reported.get(*path))
        .map(|path| format!("{}: truth {:?}, reported {:?}", path.join(";"), truth.get(path), reported.get(path)))
        .collect();
    assert!(
        differences.is_empty(),
        "{cell:?}, {view}, {} paths differ:\n{}",
        differences.len(),
        differences.join("\n")
    );
}

/// Panics unless probes go into the allocator that is used, and into no other.
fn assert_probes(cell: Cell, pid: u32) {
    let ended = memtrace::run(&["doctor", "--probes", "-p", &pid.to_string(), "--json"]).success();
    let document: Value = serde_json::from_str(&ended.stdout).expect("the doctor's JSON");
    let mut functions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for site in document["sites"].as_array().expect("sites") {
        let module = site["module"].as_str().expect("a module");
        let name = module.rsplit('/').next().unwrap_or(module);
        functions.entry(name).or_default().insert(site["function"].as_str().expect("a function"));
    }
    let is_allocator = |name: &&str| cell.modules().iter().any(|module| name.starts_with(module));
    assert!(functions.keys().any(is_allocator), "{cell:?}: no probe in {:?}: {functions:#?}", cell.modules());
    if !cell.uses_libc() {
        for (name, functions) in &functions {
            let is_libc = name.starts_with("libc.so.6");
            let dead: Vec<_> = SHADOWED.iter().filter(|function| is_libc && functions.contains(**function)).collect();
            assert!(dead.is_empty(), "{cell:?}: probes that nobody reaches, in {name}: {dead:?}");
        }
    }
    let of_cpp = functions.keys().find(|name| name.starts_with("libstdc++"));
    assert_eq!(of_cpp, None, "{cell:?}: the C++ library's operators call the allocator that is probed anyway");
}
