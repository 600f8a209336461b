//! What a run writes, when the trace ends, and which blocks `--older` leaves out.

use std::{path::Path, time::Instant};

use crate::support::{
    build::Fixture,
    compare::{Unit, assert_exact, split},
    folded,
    memtrace::Memtrace,
    root::turn,
    start::Unwind,
    target::Target,
    trace::{Trace, read},
    truth::{Paths, Truth},
};

fn unfreed(path: &Path, truth: &Truth) -> folded::Folded {
    split(&folded::parse(&read(path), Fixture::Rules.name()), truth, Unwind::Auto).own
}

#[test]
fn two_outputs_of_one_run_are_of_one_view() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let mut target = Target::start(Fixture::Rules, &["realloc-moves"]);
    let file = |name: &str| directory.path().join(name).display().to_string();
    let memtrace = Memtrace::tracing(&[
        "memstacks",
        "-p",
        &target.pid().to_string(),
        "-o",
        &file("leak.folded"),
        "-o",
        &file("leak.svg"),
    ]);
    target.go();
    let truth = target.truth();
    let ended = memtrace.interrupt().success();
    target.finish();
    assert_exact("unfreed", &truth.unfreed, Unit::Bytes, &unfreed(&directory.path().join("leak.folded"), &truth));
    let svg = read(&directory.path().join("leak.svg"));
    assert!(svg.contains("<svg") && svg.contains("grow"), "no flame graph with the fixture's functions");
    assert_eq!(ended.stdout, "", "with -o, standard output is the caller's");
    let names: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "more than the two files: {names:?}");
}

#[test]
fn without_outputs_a_table_goes_to_standard_output() {
    let _turn = turn();
    let mut target = Target::start(Fixture::Rules, &["frees"]);
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &target.pid().to_string()]);
    target.go();
    target.truth();
    let ended = memtrace.interrupt().success();
    target.finish();
    assert!(ended.stdout.contains("keep") && ended.stdout.contains("malloc"), "{}", ended.stdout);
    assert!(!ended.stdout.contains("tracing "), "messages belong on standard error:\n{}", ended.stdout);
}

#[test]
fn folded_goes_to_standard_output_on_request() {
    let _turn = turn();
    let mut target = Target::start(Fixture::Rules, &["frees"]);
    let pid = target.pid().to_string();
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid, "-o", "-", "--format", "folded"]);
    target.go();
    let truth = target.truth();
    let ended = memtrace.interrupt().success();
    target.finish();
    let own = split(&folded::parse(&ended.stdout, "rules"), &truth, Unwind::Auto).own;
    assert_exact("unfreed", &truth.unfreed, Unit::Bytes, &own);
}

#[test]
fn a_duration_ends_the_trace() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("leak.folded");
    let target = Target::start(Fixture::Busy, &["2"]);
    let pid = target.pid().to_string();
    let ended = Memtrace::start(&["memstacks", "-p", &pid, "-d", "1", "-o", &path.display().to_string()]).end();
    ended.success();
    assert!(read(&path).contains("work;turn;malloc "), "{}", read(&path));
    target.finish();
}

#[test]
fn names_are_there_after_the_target_has_exited() {
    let _turn = turn();
    let traced = Trace { fixture: Fixture::Rules, arguments: &["realloc-moves"], options: &[], unwind: Unwind::Auto }
        .run_until_exit(Unit::Bytes);
    traced.assert_own_exact();
    traced.assert_nothing_else();
    traced.assert_no_losses();
}

#[test]
fn names_in_a_library_are_there_after_the_target_has_exited() {
    let _turn = turn();
    let library = Fixture::TruthLibrary.path().display().to_string();
    let traced = Trace { fixture: Fixture::Truth, arguments: &["late", &library], options: &[], unwind: Unwind::Auto }
        .run_until_exit(Unit::Count);
    traced.assert_own_exact();
    traced.assert_no_losses();
}

/// The threads that churn until the end leave blocks that no one can count: only what `main` leaked is known.
#[test]
fn an_exit_in_the_middle_of_allocating_threads_leaves_a_true_report() {
    let _turn = turn();
    let traced =
        Trace { fixture: Fixture::Rules, arguments: &["exit-in-the-middle"], options: &[], unwind: Unwind::Auto }
            .run_until_exit(Unit::Bytes);
    traced.assert_own_exact();
    for path in traced.unfreed.foreign().chain(traced.all.foreign()) {
        assert!(path.ends_with(&["forever".into(), "malloc".into()]), "{}", path.join(";"));
    }
}

/// The new program is a process of its own; what the old one held is gone.
#[test]
fn an_exec_is_followed_into_the_new_program() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("leak.folded");
    let mut target = Target::start(Fixture::Rules, &["exec"]);
    let pid = target.pid().to_string();
    let mut memtrace = Memtrace::tracing(&["memstacks", "-p", &pid, "-o", &path.display().to_string()]);
    target.go();
    target.truth();
    target.go();
    target.wait_ready();
    memtrace.wait_until_followed();
    target.go();
    let truth = target.truth();
    memtrace.interrupt().success();
    assert_exact("unfreed", &truth.unfreed, Unit::Bytes, &unfreed(&path, &truth));
    let target = target.finish();
    assert!(target.status.success(), "{:?}", target.status);
}

/// A moment of `CLOCK_MONOTONIC`, nanoseconds.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is writable.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    assert_eq!(result, 0);
    u64::try_from(time.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap()
}

/// The fixture tells when its old blocks had been made and when its young ones began to be; the test tells between
/// which moments the trace ended. Where those leave open what is older than two seconds, the run says nothing, and is
/// made again.
#[test]
fn older_leaves_out_young_blocks() {
    const OLDER: u64 = 2_000_000_000;
    // How coarse the time of a block may be.
    const TICK: u64 = 10_000_000;
    let _turn = turn();
    let start = Instant::now();
    for _ in 0..10 {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("leak.folded");
        let mut target = Target::start(Fixture::Rules, &["ages"]);
        let pid = target.pid().to_string();
        let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid, "--older", "2", "-o", &path.display().to_string()]);
        target.go();
        let truth = target.truth();
        let earliest_end = now();
        memtrace.interrupt().success();
        let latest_end = now();
        target.finish();
        let old = truth.fact("old_until") + OLDER + TICK < earliest_end;
        let young = truth.fact("young_from") + OLDER > latest_end + TICK;
        if old && young {
            let expected: Paths = truth
                .unfreed
                .iter()
                .filter(|(path, _)| path.iter().any(|frame| frame == "old_ones"))
                .map(|(path, amount)| (path.clone(), *amount))
                .collect();
            assert_eq!(expected.len(), 1);
            assert_exact("unfreed for two seconds", &expected, Unit::Bytes, &unfreed(&path, &truth));
            return;
        }
    }
    panic!("this machine was too slow ten times in {:?} to tell old blocks from young ones", start.elapsed());
}
