//! More code than the unwind tables can hold: what does not fit is cut, marked, counted and said, and everything else is
//! whole.

use serde_json::Value;

use crate::{
    stacks::{TRUNCATED, own},
    support::{
        build::Fixture,
        code::code_of,
        folded::{self, Folded},
        memtrace::Memtrace,
        root::turn,
        target::Target,
        trace::read,
        truth::Truth,
    },
};

struct Traced {
    truth: Truth,
    folded: Folded,
    coverage: Value,
    text: String,
    stderr: String,
    /// Mappings of code that the target had.
    code: usize,
}

fn trace(arguments: &[&str], options: &[&str]) -> Traced {
    let fixture = Fixture::Stacks;
    let mut target = Target::start(fixture, arguments);
    let code = code_of(target.pid());
    let directory = tempfile::tempdir().expect("a temporary directory");
    let files =
        ["folded", "json", "txt"].map(|name| directory.path().join(format!("all.{name}")).display().to_string());
    let pid = target.pid().to_string();
    let mut command = vec!["memstacks", "-p", &pid, "--all"];
    for file in &files {
        command.extend(["-o", file]);
    }
    command.extend(options);
    let memtrace = Memtrace::tracing(&command);
    target.go();
    let truth = target.truth();
    let ended = memtrace.interrupt().success();
    assert!(target.finish().status.success(), "the fixture came to harm");
    let [folded, json, text] = files.each_ref().map(|file| read(file.as_ref()));
    let report: Value = serde_json::from_str(&json).expect("JSON");
    Traced {
        truth,
        folded: folded::parse(&folded, fixture.name()),
        coverage: report["coverage"].clone(),
        text,
        stderr: ended.stderr,
        code,
    }
}

/// Bytes of the truth's path that leads through a function, and of the paths that are true parts of it, whole and cut.
fn whole_and_cut(traced: &Traced, reported: &Folded, function: &str) -> [u64; 3] {
    let through = |path: &[String]| path.iter().any(|frame| frame == function);
    let (path, amount) = traced.truth.all.iter().find(|(path, _)| through(path)).expect("the truth leads through it");
    let whole = reported.get(path).copied().unwrap_or_default();
    let is_part = |cut: &[String]| cut[0].starts_with(TRUNCATED) && path.ends_with(&cut[1..]);
    let cut = reported.iter().filter(|(cut, _)| is_part(cut)).map(|(_, bytes)| *bytes).sum();
    [amount.bytes, whole, cut]
}

#[test]
fn more_mappings_of_code_than_there_is_room_for() {
    const MOST: usize = 4096;
    let _turn = turn();
    let traced = trace(&["many-pieces"], &[]);
    let left_out = traced.code - MOST;
    assert!(left_out > 900, "{}", traced.code);
    let unknown = |frame: &str| if frame.starts_with("[unknown] (") { "made" } else { frame }.to_owned();
    let reported = own(&traced.truth, &traced.folded, unknown).paths;
    // Code made at run time is left out first, from the highest address down.
    let [truth, whole, _] = whole_and_cut(&traced, &reported, "through_first");
    assert_eq!(whole, truth, "{reported:#?}");
    let [truth, whole, cut] = whole_and_cut(&traced, &reported, "through_last");
    assert_eq!((whole, cut), (0, truth), "{reported:#?}");
    let all: u64 = traced.truth.all.values().map(|amount| amount.bytes).sum();
    assert_eq!(reported.values().sum::<u64>(), all, "{reported:#?}");
    assert_eq!(reported.len(), 3, "{reported:#?}");
    assert_eq!(traced.coverage["unwinding"]["left_out"], left_out);
    let said = format!("{left_out} code mappings");
    assert!(traced.text.contains(&said), "{}", traced.text);
    assert!(traced.stderr.contains(&said), "{}", traced.stderr);
}

/// A library that takes more rows than a small budget has: stacks through it are cut, those around it are whole.
#[test]
fn a_table_larger_than_the_budget() {
    let _turn = turn();
    let library = Fixture::StacksHuge.path().display().to_string();
    let small = trace(&["huge", &library], &["--memory-budget", "1"]);
    let reported = own(&small.truth, &small.folded, str::to_owned).paths;
    let [truth, whole, cut] = whole_and_cut(&small, &reported, "through_huge");
    assert_eq!((whole, cut), (0, truth), "{reported:#?}");
    let [truth, whole, cut] = whole_and_cut(&small, &reported, "beside");
    assert_eq!((whole, cut), (truth, 0), "{reported:#?}");
    let name = Fixture::StacksHuge.name();
    let module = &small.coverage["unwinding"]["without_rows"][0];
    assert_eq!(module["module"], name, "{module}");
    assert!(module["problem"].as_str().is_some_and(|problem| problem.contains("--memory-budget")), "{module}");
    assert_eq!(small.coverage["truncated"][0]["reason"], "no unwind table for this module");
    assert!(small.text.contains(&format!("no rows for {name}")), "{}", small.text);
    assert!(small.stderr.contains(name), "{}", small.stderr);

    let usual = trace(&["huge", &library], &[]);
    let reported = own(&usual.truth, &usual.folded, str::to_owned).paths;
    let [truth, whole, _] = whole_and_cut(&usual, &reported, "through_huge");
    assert_eq!(whole, truth, "{reported:#?}");
    assert_eq!(usual.coverage["unwinding"]["without_rows"], serde_json::json!([]));
}
