//! The fixtures by themselves: if these fail, nothing that the other tests say counts.

use crate::support::{build::Fixture, code::patches, target::Target, truth::Truth};

const RULES: [&str; 27] = [
    "nesting",
    "realloc-failed",
    "realloc-overflow-to-zero",
    "realloc-to-zero",
    "realloc-moves",
    "no-block",
    "zero-size",
    "frees",
    "longjmp-same-frame",
    "longjmp-to-shallower",
    "longjmp-to-deeper",
    "longjmp-over-remains",
    "longjmp-from-free",
    "thread-ends-inside",
    "conflict-unmapped",
    "conflict-vfork",
    "address-reuse",
    "many-threads",
    "many-at-a-time",
    "rate",
    "fork",
    "spawn",
    "leader-leaves",
    "deep-stack",
    "exit-in-the-middle",
    "full-table",
    "ages",
];

fn untraced(fixture: Fixture, arguments: &[&str]) -> Truth {
    let mut target = Target::start(fixture, arguments);
    target.go();
    let truth = target.truth();
    let ended = target.finish();
    assert!(ended.status.success(), "{fixture:?} {arguments:?}: {:?}\n{}", ended.status, ended.stderr);
    truth
}

/// Also what fills the directory of fixtures for a machine without a compiler.
#[test]
fn every_fixture_compiles() {
    for fixture in Fixture::ALL {
        assert!(fixture.path().is_file(), "{fixture:?}");
    }
}

#[test]
fn every_rule_runs_untraced() {
    for rule in RULES {
        let truth = untraced(Fixture::Rules, &[rule]);
        assert!(!truth.all.is_empty(), "{rule} allocates nothing");
    }
}

#[test]
fn the_truth_has_the_breadth_it_promises() {
    let (library, plain) = (Fixture::TruthLibrary.path(), Fixture::PlainTruthLibrary.path());
    for (fixture, mode, library) in
        [(Fixture::Truth, "quiet", &library), (Fixture::Truth, "late", &library), (Fixture::PlainTruth, "late", &plain)]
    {
        let truth = untraced(fixture, &[mode, &library.display().to_string()]);
        assert!(truth.callers().len() >= 96 + 36, "leak sites: {}", truth.callers().len());
        let depths = truth.unfreed.keys().map(Vec::len);
        assert_eq!(depths.max(), Some(44), "main, 40 levels, work, the site and the allocator");
        for function in
            ["malloc", "calloc", "realloc", "reallocarray", "memalign", "posix_memalign", "valloc", "pvalloc"]
        {
            assert!(truth.unfreed.keys().any(|path| path.ends_with(&[function.into()])), "no leak through {function}");
        }
        let calls: u64 = truth.all.values().map(|amount| amount.count).sum();
        let leaks: u64 = truth.unfreed.values().map(|amount| amount.count).sum();
        assert!(calls > 100 * leaks, "{calls} calls are no heavy churn beside {leaks} leaks");
    }
    for fixture in [Fixture::Cpp, Fixture::Strings] {
        assert!(untraced(fixture, &[]).fact("exceptions") > 1000);
    }
}

#[test]
fn code_that_nobody_traces_is_as_its_files_say() {
    let mut target = Target::start(Fixture::Busy, &["1"]);
    assert_eq!(patches(target.pid()), []);
    assert!(target.is_running());
    assert!(target.finish().status.success());
}
