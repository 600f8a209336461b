//! Stacks through code that appears during the trace.
//!
//! What is called at once comes before memtrace knows the code, or after: such a stack is whole, or cut there and marked,
//! and the report says how many were cut. Once memtrace has said that it knows the code, every stack is whole.

use serde_json::Value;

use crate::{
    stacks::{self, TRUNCATED, expected, own},
    support::{
        build::Fixture,
        compare::{Unit, assert_exact},
        folded::{self, Folded},
        memtrace::Memtrace,
        root::turn,
        target::Target,
        trace::read,
        truth::{Path, Paths, Truth},
    },
};

/// Traces a case that waits before it uses the code again, until memtrace has said that it knows code of that name.
fn trace(arguments: &[&str], code: &str, options: &[&str]) -> (Truth, Folded, Value) {
    let fixture = Fixture::Stacks;
    let mut target = Target::start(fixture, arguments);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let files = ["all.folded", "all.json"].map(|name| directory.path().join(name).display().to_string());
    let pid = target.pid().to_string();
    let mut command = vec!["-v", "memstacks", "-p", &pid, "--all", "-o", &files[0], "-o", &files[1]];
    command.extend(options);
    let mut memtrace = Memtrace::tracing(&command);
    target.go();
    target.wait_for("mapped");
    memtrace.wait_for_code(code);
    target.go();
    let truth = target.truth();
    memtrace.interrupt().success();
    let ended = target.finish();
    assert!(ended.status.success(), "the fixture came to harm: {:?}\n{}", ended.status, ended.stderr);
    let report: Value = serde_json::from_str(&read(files[1].as_ref())).expect("JSON");
    (truth, folded::parse(&read(files[0].as_ref()), fixture.name()), report)
}

/// Panics unless the paths through `later` are exact, and each of those through `at_once` is true as far as it goes.
fn assert_whole_or_marked(what: &str, truth: &Truth, reported: &Folded, report: &Value) {
    let part = |paths: &Folded, function: &str| -> Folded {
        let through = |path: &Path| path.iter().any(|frame| frame == function);
        paths.iter().filter(|(path, _)| through(path)).map(|(path, bytes)| (path.clone(), *bytes)).collect()
    };
    let truth_of = |function: &str| -> Paths {
        let through = |path: &Path| path.iter().any(|frame| frame == function);
        truth.all.iter().filter(|(path, _)| through(path)).map(|(path, amount)| (path.clone(), *amount)).collect()
    };
    assert_exact(what, &truth_of("later"), Unit::Bytes, &part(reported, "later"));

    let (early, _) = truth_of("at_once").pop_first().expect("a path");
    let expected = truth.all[&early].bytes;
    let whole = reported.get(&early).copied().unwrap_or_default();
    let cut: Vec<(&Path, u64)> = reported
        .iter()
        .filter(|(path, _)| path[0].starts_with(TRUNCATED))
        .map(|(path, bytes)| (path, *bytes))
        .collect();
    for (path, _) in &cut {
        assert!(early.ends_with(&path[1..]) && path.len() >= 4, "{what}: {path:?} is no part of {early:?}");
        assert!(path[0].contains("unknown code"), "{what}: {path:?}");
    }
    let cut_bytes: u64 = cut.iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(whole + cut_bytes, expected, "{what}: {reported:#?}");
    let known = cut.len() + part(reported, "later").len() + usize::from(whole > 0);
    assert_eq!(reported.len(), known, "{what}: other paths: {reported:#?}");

    let late = &report["coverage"]["unwinding"]["late_code"];
    assert_eq!(late["allocated"]["bytes"], cut_bytes, "{what}: {late}");
    assert!(late["mappings"].as_u64() >= Some(1) && late["longest_ns"].as_u64() > Some(0), "{what}: {late}");
    let marked: u64 = array(&report["coverage"]["truncated"]).iter().filter_map(|cut| cut["stacks"].as_u64()).sum();
    assert_eq!(late["stacks"], marked, "{what}: {late}");
    let whole = &report["coverage"]["whole"];
    assert_eq!(whole["stacks"].as_u64().map(|whole| whole + marked), report["coverage"]["stacks"].as_u64());
}

fn array(value: &Value) -> &[Value] {
    value.as_array().expect("an array")
}

#[test]
fn a_library() {
    let _turn = turn();
    for library in [Fixture::StacksLibrary, Fixture::StacksLibraryLarge] {
        let path = library.path().display().to_string();
        for options in [&[][..], &["--unwind", "dwarf"]] {
            let (truth, folded, report) = trace(&["late-library", &path], library.name(), options);
            let reported = own(&truth, &folded, str::to_owned);
            assert_whole_or_marked(library.name(), &truth, &reported.paths, &report);
        }
    }
}

#[test]
fn code_made_at_run_time() {
    let _turn = turn();
    let (truth, folded, report) = trace(&["late-code"], "", &[]);
    let reported =
        own(&truth, &folded, |frame| if frame.starts_with("[unknown] (") { "made" } else { frame }.to_owned());
    assert_whole_or_marked("made", &truth, &reported.paths, &report);
}

/// Without a pause some calls come before memtrace has seen the library: stacks through it may be cut, and then say so;
/// nothing may be wrong.
#[test]
fn libraries_used_at_once() {
    let _turn = turn();
    let libraries = [Fixture::StacksLibrary, Fixture::StacksLibraryLarge].map(|fixture| fixture.path());
    let [small, large] = libraries.each_ref().map(|path| path.to_str().expect("a path"));
    let (truth, folded) = stacks::trace(Fixture::Stacks, &["libraries", small, large, "0"], &[]);
    let reported = own(&truth, &folded, |frame| frame.to_owned());
    let bytes: u64 = truth.all.values().map(|amount| amount.bytes).sum();
    assert_eq!(reported.paths.values().sum::<u64>(), bytes);
    for path in reported.paths.keys().filter(|path| !path[0].starts_with(TRUNCATED)) {
        let shape: Vec<&str> = path.iter().map(String::as_str).collect();
        assert!(
            matches!(shape[..], ["main", "libraries", _, "leaf", "malloc"])
                || matches!(shape[..], ["main", "libraries", "down", "down", "down", "down", "leaf", "malloc"]),
            "a path that was not: {shape:?}"
        );
    }
    for path in reported.paths.keys().filter(|path| path[0].starts_with(TRUNCATED)) {
        assert!(path.ends_with(&["leaf".to_owned(), "malloc".to_owned()]) && path.len() <= 5, "{path:?}");
    }
}

/// Two libraries in turn at one address. Names of functions in there can't be told apart by address, so they count as
/// one; everything around them must be right.
#[test]
fn libraries_that_take_each_others_place() {
    let _turn = turn();
    let libraries = [Fixture::StacksLibrary, Fixture::StacksLibraryLarge].map(|fixture| fixture.path());
    let [small, large] = libraries.each_ref().map(|path| path.to_str().expect("a path"));
    let (truth, folded) = stacks::trace(Fixture::Stacks, &["libraries", small, large, "500"], &[]);
    assert!(truth.fact("same_place") >= 10, "the loader does not put one library into the other's place");
    let reported = own(&truth, &folded, |frame| {
        // How often memtrace got to read the map decides which of them it has seen there.
        let unnamed = ["[unknown] (stacks_", "[ambiguous] (stacks_"];
        let library = frame == "in_front" || unnamed.iter().any(|unnamed| frame.starts_with(unnamed));
        if library { "through_library".to_owned() } else { frame.to_owned() }
    });
    assert_exact("libraries", &expected(&truth, reported.start_frames), Unit::Bytes, &reported.paths);
}
