//! Allocators that are opened during the trace, and a server whose workers are traced by its name.

use std::collections::BTreeSet;

use crate::{
    allocators::of_functions,
    support::{
        cells::{Allocator, Cell, Language, Way},
        json::Report,
        memtrace::Memtrace,
        root::turn,
        target::Target,
        trace::read,
        truth::{Amount, Paths},
    },
};

/// A library brings an allocator along: from the moment on at which memtrace says so, everything is seen.
fn opened_late(allocator: Allocator, way: Way) {
    let cell = Cell { language: Language::C, allocator, way };
    let mut command = cell.late_command();
    let _turn = turn();
    let mut target = Target::of(&mut command);
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("late.json").display().to_string();
    let pid = target.pid().to_string();
    let mut memtrace = Memtrace::tracing(&["memstacks", "-p", &pid, "--all", "--unfreed", "-o", &output]);
    target.go();
    target.wait_ready();
    let line = memtrace.wait_for_line(&format!("(pid {pid}) has loaded \""));
    let since = line.rsplit_once(" probed from ").and_then(|(_, rest)| rest.strip_suffix(" s on")).unwrap();
    target.go();
    let truth = target.truth();
    memtrace.interrupt().success();
    let functions: BTreeSet<&str> =
        truth.all.keys().flat_map(|path| &path[..path.len() - 1]).map(String::as_str).collect();
    for (view, known) in [("unfreed", &truth.unfreed), ("all", &truth.all)] {
        let text = read(&directory.path().join(format!("late.{view}.json")));
        let report = Report::parse(&text);
        assert!(report.losses.is_empty(), "{cell:?}: {:?}", report.losses);
        let mut own = Paths::new();
        for (path, amount) in &report.paths {
            let frames: Vec<String> = path.iter().filter(|frame| functions.contains(frame.as_str())).cloned().collect();
            // The loader's, and what the libraries do when they are loaded.
            let foreign =
                frames.is_empty() && path.iter().any(|frame| frame.contains("dlopen") || frame.contains("dlsym"));
            if !foreign {
                *own.entry(frames).or_insert(Amount::default()) += *amount;
            }
        }
        assert_eq!(own, of_functions(known), "{cell:?}, {view}");
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let late = json["coverage"]["attached_late"].as_array().unwrap();
        let of_allocator = late
            .iter()
            .find(|late| cell.modules().iter().any(|module| late["module"].as_str().unwrap().starts_with(module)));
        let late = of_allocator.unwrap_or_else(|| panic!("{cell:?}: {late:?}"));
        assert_eq!(late["pid"].to_string(), pid);
        assert!(late["functions"].as_u64().unwrap() >= 3, "{late}");
        let seconds = late["since_ns"].as_u64().unwrap() as f64 / 1e9;
        assert!((seconds - since.parse::<f64>().unwrap()).abs() < 1.0 && seconds > 0.0, "{line}: {late}");
    }
    assert!(target.finish().status.success());
}

#[test]
fn late_jemalloc() {
    opened_late(Allocator::Jemalloc, Way::Dlopened);
}

#[test]
fn late_prefixed_jemalloc_in_a_library() {
    opened_late(Allocator::PrefixedJemalloc, Way::DlopenedStatic);
}

#[test]
fn late_tcmalloc() {
    opened_late(Allocator::Tcmalloc, Way::Dlopened);
}

#[test]
fn late_mimalloc() {
    opened_late(Allocator::Mimalloc, Way::Dlopened);
}

#[test]
fn late_scudo() {
    opened_late(Allocator::Scudo, Way::Dlopened);
}
