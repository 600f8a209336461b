//! `memtrace memstacks … -- CMD ARGS…`: a command traced from its first allocation to its end.

use std::path::Path;

use crate::support::{
    build::Fixture,
    compare::{Unit, assert_exact, split},
    folded, memtrace,
    process::Ended,
    root::turn,
    start::Unwind,
    trace::read,
    truth::Truth,
};

struct Ran {
    truth: Truth,
    memtrace: Ended,
}

/// Traces `start FILE STATUS` in both views and compares them.
fn run(fixture: Fixture, status: &str) -> Ran {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name).display().to_string();
    let program = fixture.path().display().to_string();
    let ended = memtrace::run(&[
        "memstacks",
        "--all",
        "--unfreed",
        "-o",
        &file("leak.folded"),
        "--",
        &program,
        &file("truth.json"),
        status,
    ]);
    assert!(ended.traced(), "{}", ended.stderr);
    let truth = Truth::parse(read(Path::new(&file("truth.json"))).trim_end());
    for (view, expected) in [("unfreed", &truth.unfreed), ("all", &truth.all)] {
        let text = read(Path::new(&file(&format!("leak.{view}.folded"))));
        let split = split(&folded::parse(&text, fixture.name()), &truth, Unwind::Auto);
        assert_exact(view, expected, Unit::Bytes, &split.own);
        // In a static program glibc's start code allocates.
        assert!(split.foreign.is_empty() || fixture == Fixture::StartStatic, "{view}: {:#?}", split.foreign);
    }
    Ran { truth, memtrace: ended }
}

#[test]
fn a_command_is_traced_from_its_first_allocation_and_its_status_is_passed_on() {
    let _turn = turn();
    let ran = run(Fixture::Start, "7");
    assert_eq!(ran.memtrace.code(), 7, "{}", ran.memtrace.stderr);
    assert!(ran.truth.unfreed.keys().any(|path| path[0] == "before_main"), "the constructor is in the truth");
    assert!(ran.truth.unfreed.keys().any(|path| path[0] == "after_main"), "the destructor is in the truth");
    // One line says what leaked: bytes, blocks, call paths.
    let (bytes, blocks) = ran
        .truth
        .unfreed
        .values()
        .fold((0, 0), |(bytes, blocks), amount| (bytes + amount.bytes, blocks + amount.count));
    let line = ran.memtrace.stderr.lines().find(|line| line.contains("call paths"));
    let line = line.unwrap_or_else(|| panic!("no line about what leaked:\n{}", ran.memtrace.stderr));
    for number in [blocks, ran.truth.unfreed.len() as u64] {
        assert!(line.contains(&number.to_string()), "{number} is not in: {line}");
    }
    assert!(bytes > 0);
}

#[test]
fn a_command_that_succeeds_gives_status_0() {
    let _turn = turn();
    assert_eq!(run(Fixture::Start, "0").memtrace.code(), 0);
}

#[test]
fn a_command_that_a_signal_ends_gives_128_and_its_number() {
    let _turn = turn();
    let ran = run(Fixture::Start, "term");
    assert_eq!(ran.memtrace.code(), 128 + libc::SIGTERM, "{}", ran.memtrace.stderr);
}

#[test]
fn a_static_command() {
    let _turn = turn();
    assert_eq!(run(Fixture::StartStatic, "3").memtrace.code(), 3);
}

#[test]
fn a_command_that_is_not_there_is_a_failure() {
    let _turn = turn();
    let ended = memtrace::run(&["memstacks", "--", "/nonexistent/program"]);
    assert_ne!(ended.code(), 0);
    assert!(ended.stderr.contains("/nonexistent/program"), "{}", ended.stderr);
    assert!(!ended.traced(), "{}", ended.stderr);
}

#[test]
fn a_command_keeps_its_own_output() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("leak.folded");
    let ended = memtrace::run(&["memstacks", "-o", &path.display().to_string(), "--", "/bin/echo", "hello"]);
    assert_eq!(ended.stdout, "hello\n");
    assert_eq!(ended.code(), 0, "{}", ended.stderr);
}
