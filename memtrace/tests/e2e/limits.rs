//! What happens at the bounds of the tables: what is not recorded is counted, what was recorded stays.

use std::collections::BTreeMap;

use crate::support::{
    build::Fixture,
    compare::Unit,
    folded,
    memtrace::Memtrace,
    root::turn,
    start::{TRUNCATED, Unwind},
    target::Target,
    trace::{Trace, Traced, View, read},
    truth::{Amount, Path, Paths},
};

/// What stands for call paths that are not known.
const UNKNOWN: &str = "[unknown call path]";

fn trace(rule: &str, options: &[&str]) -> Traced {
    Trace { fixture: Fixture::Rules, arguments: &[rule], options, unwind: Unwind::Auto }.run(Unit::Bytes)
}

/// What `view` lacks of `truth` on known call paths. Panics if it has too much of anything.
fn missing(truth: &Paths, view: &View) -> Amount {
    let mut missing = Amount::default();
    for path in view.json.own.keys() {
        assert!(truth.contains_key(path), "no one allocated by {}", path.join(";"));
    }
    for (path, amount) in truth {
        let held = view.json.own.get(path).copied().unwrap_or_default();
        assert!(held.count <= amount.count && held.bytes <= amount.bytes, "too much by {}", path.join(";"));
        missing += Amount { bytes: amount.bytes - held.bytes, count: amount.count - held.count };
    }
    missing
}

/// The only loss of a trace.
fn only_loss(traced: &Traced, name: &str) -> Amount {
    assert_eq!(traced.losses.keys().collect::<Vec<_>>(), [name], "{:#?}", traced.losses);
    traced.losses[name]
}

/// Panics unless what is missing on known paths is there under an unknown one, so that totals are exact.
fn assert_only_names_are_lost(traced: &Traced, lost: Amount) {
    assert!(!traced.lower_bound, "everything is counted");
    for (truth, view) in [(&traced.truth.unfreed, &traced.unfreed), (&traced.truth.all, &traced.all)] {
        let unknown: BTreeMap<Path, Amount> =
            [(vec![UNKNOWN.to_owned()], missing(truth, view))].into_iter().filter(|(_, held)| held.count > 0).collect();
        assert_eq!(view.json.foreign, unknown);
    }
    assert_eq!(missing(&traced.truth.all, &traced.all), lost);
}

/// All three stacks under one hash: they are told apart by their frames.
#[test]
fn stacks_with_one_hash_are_told_apart() {
    let _turn = turn();
    // System calls have stacks, too.
    let traced = trace("frees", &["--no-reconcile", "--hash-ignore", &u64::MAX.to_string()]);
    traced.assert_own_exact();
    traced.assert_nothing_else();
    traced.assert_no_losses();
}

/// More stacks under one hash than it has room for: what is not told apart is counted, under an unknown call path.
#[test]
fn too_many_stacks_with_one_hash_are_counted_under_an_unknown_path() {
    let _turn = turn();
    let traced = trace("nesting", &["--no-reconcile", "--hash-ignore", &u64::MAX.to_string()]);
    let lost = only_loss(&traced, "hash_collision");
    assert!(traced.all.json.own.len() >= 3, "hardly any stack is named: {:#?}", traced.all.json.own);
    assert_only_names_are_lost(&traced, lost);
}

#[test]
fn a_full_stack_table_loses_names_only() {
    let _turn = turn();
    let library = Fixture::TruthLibrary.path().display().to_string();
    let arguments = ["quiet", library.as_str()];
    let options = ["--memory-budget", "1"];
    let traced = Trace { fixture: Fixture::Truth, arguments: &arguments, options: &options, unwind: Unwind::Auto }
        .run(Unit::Bytes);
    let lost = only_loss(&traced, "stacks_full");
    assert!(traced.all.json.own.len() >= 50, "hardly any stack is named: {:#?}", traced.all.json.own);
    assert_only_names_are_lost(&traced, lost);
}

/// Panics unless exactly what is missing is said to be lost, in the files and on standard error.
fn assert_lower_bound(traced: &Traced, lost: Amount) {
    assert!(lost.count > 0);
    for (truth, view) in [(&traced.truth.unfreed, &traced.unfreed), (&traced.truth.all, &traced.all)] {
        assert_eq!(missing(truth, view), lost, "what is missing is not what is said to be lost");
        assert_eq!(view.foreign().count(), 0);
    }
    assert!(traced.lower_bound);
    let said = &traced.memtrace.stderr;
    assert!(said.contains("lower bound") && said.contains("--memory-budget"), "not said on standard error:\n{said}");
}

#[test]
fn a_full_block_table_is_a_lower_bound_and_keeps_what_it_has() {
    let _turn = turn();
    let traced = trace("full-table", &["--memory-budget", "1"]);
    let lost = only_loss(&traced, "blocks_full");
    let early = |paths: &Paths| -> Paths {
        paths
            .iter()
            .filter(|(path, _)| path.iter().any(|frame| frame == "early"))
            .map(|(path, amount)| (path.clone(), *amount))
            .collect()
    };
    assert_eq!(early(&traced.unfreed.json.own), early(&traced.truth.unfreed), "what came first is damaged");
    assert_eq!(traced.unfreed.json.own.len(), traced.truth.unfreed.len());
    assert_lower_bound(&traced, lost);
}

#[test]
fn a_full_thread_table_is_a_lower_bound_and_keeps_what_it_has() {
    let _turn = turn();
    let traced = trace("many-at-a-time", &["--memory-budget", "2"]);
    let lost = only_loss(&traced, "threads_full");
    assert!(traced.unfreed.json.own.values().any(|amount| amount.count >= 100), "{:#?}", traced.unfreed.json.own);
    assert_lower_bound(&traced, lost);
}

#[test]
fn more_threads_than_a_small_table_holds_fit_into_the_usual_one() {
    let _turn = turn();
    let traced = trace("many-at-a-time", &[]);
    traced.assert_own_exact();
    traced.assert_nothing_else();
    traced.assert_no_losses();
}

#[test]
fn a_stack_deeper_than_127_frames_keeps_the_innermost_and_says_so() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("leak.folded");
    let mut target = Target::start(Fixture::Rules, &["deep-stack"]);
    let pid = target.pid().to_string();
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid, "-o", &path.display().to_string()]);
    target.go();
    target.truth();
    memtrace.interrupt().success();
    target.finish();
    let folded = folded::parse(&read(&path), Fixture::Rules.name());
    let (path, value) = folded.first_key_value().unwrap();
    assert_eq!((folded.len(), *value), (1, 84), "{folded:?}");
    assert!(path[0].starts_with(TRUNCATED) && path[0].contains("127"), "{}", path[0]);
    assert_eq!(path[1..127], vec!["dive".to_owned(); 126]);
    assert_eq!(path[127..], ["keep".to_owned(), "malloc".to_owned()]);
}
