//! Memory that comes from no allocator: never an empty result.

use std::{path::Path, process::Command};

use crate::support::{build, memtrace::Memtrace, process::Process, root::turn};

const SAID: &str = "but not one call of an allocator was seen";

/// A process that gets memory from the kernel alone, and waits for a line before it does.
fn blind() -> Process {
    let program = build::artifact("blind", |to| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/blind.c");
        let status = Command::new("cc").args(["-O1", "-o"]).arg(to).arg(source).status().expect("a C compiler");
        assert!(status.success());
    });
    Process::start(&mut Command::new(program))
}

#[test]
fn alone_it_is_an_error() {
    let _turn = turn();
    let mut target = blind();
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &target.pid().to_string()]);
    target.send("");
    assert_eq!(target.line(), "grown");
    let ended = memtrace.interrupt();
    assert_eq!(ended.code(), 1, "{}", ended.stderr);
    assert!(ended.stderr.contains(SAID), "{}", ended.stderr);
    target.close_input();
    target.end();
}

#[test]
fn among_others_it_is_named() {
    let _turn = turn();
    let (mut blind, mut other) =
        (blind(), Process::start(Command::new("sh").args(["-c", "while read x; do y=$x$y; done"])));
    let (pid, pids) = (blind.pid(), format!("{},{}", blind.pid(), other.pid()));
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &pids]);
    (0..100).for_each(|_| other.send("allocates"));
    blind.send("");
    assert_eq!(blind.line(), "grown");
    // It has read all of it when it ends.
    other.close_input();
    other.end();
    let ended = memtrace.interrupt().success();
    let sentence = ended.stderr.lines().find(|line| line.contains(SAID)).unwrap_or_else(|| panic!("{}", ended.stderr));
    assert!(sentence.contains(&format!("process {pid} grew")), "{sentence}");
    blind.close_input();
    blind.end();
}
