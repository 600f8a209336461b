//! Targets in unusual places: other namespaces, files that are gone, names that are hostile.

use std::{fs, process::Command};

use crate::support::{
    build::Fixture,
    compare::{Unit, assert_exact, split},
    folded,
    memtrace::Memtrace,
    process::{Process, child_of, signal},
    root::turn,
    start::Unwind,
    target::Target,
    trace::read,
    truth::Truth,
};

/// Panics unless the unfreed blocks in a folded file are what the truth says.
fn assert_unfreed(text: &str, comm: &str, truth: &Truth) {
    let split = split(&folded::parse(text, comm), truth, Unwind::Auto);
    assert_exact("unfreed", &truth.unfreed, Unit::Bytes, &split.own);
}

fn in_namespaces() -> Target {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "--kill-child"]).arg(Fixture::Rules.path()).arg("realloc-moves");
    Target::child_of(&mut command)
}

#[test]
fn a_target_in_namespaces_of_its_own() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("leak.folded");
    let mut target = in_namespaces();
    let pid = target.pid().to_string();
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid, "-o", &path.display().to_string()]);
    target.go();
    let truth = target.truth();
    memtrace.interrupt().success();
    assert_unfreed(&read(&path), Fixture::Rules.name(), &truth);
    assert!(target.finish().status.success());
}

/// memtrace sees the target as process 1 there, and the kernel numbers it otherwise.
#[test]
fn memtrace_in_the_namespaces_of_its_target() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("leak.folded");
    let mut target = in_namespaces();
    let mut command = Command::new("nsenter");
    command.args(["--pid", "--mount", "--target", &target.pid().to_string(), "--", env!("CARGO_BIN_EXE_memtrace")]);
    command.args(["memstacks", "-p", "1", "-o", &path.display().to_string()]);
    let mut nsenter = Process::start(&mut command);
    nsenter.wait_for_error_line("tracing ");
    let memtrace = child_of(nsenter.pid());
    target.go();
    let truth = target.truth();
    signal(memtrace, libc::SIGINT);
    let ended = nsenter.end();
    assert_eq!(ended.code(), 0, "{}", ended.stderr);
    assert_unfreed(&read(&path), Fixture::Rules.name(), &truth);
    assert!(target.finish().status.success());
}

#[test]
fn programs_and_libraries_deleted_while_they_run_have_names() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("leak.folded");
    let (program, library) = (directory.path().join("truth"), directory.path().join("gone.so"));
    fs::copy(Fixture::Truth.path(), &program).unwrap();
    fs::copy(Fixture::TruthLibrary.path(), &library).unwrap();
    let mut target = Target::of(Command::new(&program).arg("quiet").arg(&library));
    fs::remove_file(&program).unwrap();
    // Another file takes the place of the library.
    fs::copy(Fixture::Rules.path(), directory.path().join("new.so")).unwrap();
    fs::rename(directory.path().join("new.so"), &library).unwrap();
    let pid = target.pid().to_string();
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid, "-o", &path.display().to_string()]);
    target.go();
    let truth = target.truth();
    memtrace.interrupt().success();
    assert_unfreed(&read(&path), Fixture::Truth.name(), &truth);
    assert!(target.finish().status.success());
}

/// A command name can hold any byte: it must neither break the folded format nor reach a terminal.
#[test]
fn a_hostile_command_name_does_no_harm() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("a;b 7\n\u{1b}[31m<&\"");
    fs::copy(Fixture::Rules.path(), &program).unwrap();
    let mut target = Target::of(Command::new(&program).arg("frees"));
    let pid = target.pid().to_string();
    let file = |name: &str| directory.path().join(name).display().to_string();
    let memtrace = Memtrace::tracing(&[
        "memstacks",
        "-p",
        &pid,
        "-o",
        "-",
        "-o",
        &file("leak.folded"),
        "-o",
        &file("leak.svg"),
        "-o",
        &file("leak.json"),
    ]);
    target.go();
    target.truth();
    let ended = memtrace.interrupt().success();
    target.finish();
    let folded = read(&directory.path().join("leak.folded"));
    assert_eq!(folded.lines().count(), 1, "{folded:?}");
    assert!(folded.ends_with(";main;frees;keep;malloc 81\n"), "{folded:?}");
    let comm = folded.split(';').next().unwrap_or_default();
    assert!(comm.starts_with('a') && comm.contains("31m"), "another command name: {comm:?}");
    let texts = [folded, ended.stdout, ended.stderr, read(&directory.path().join("leak.svg"))];
    for text in texts.iter().chain([&read(&directory.path().join("leak.json"))]) {
        let harmful = text.chars().find(|c| c.is_control() && *c != '\n');
        assert_eq!(harmful, None, "{text:?}");
    }
    assert!(!texts[3].contains("<&"), "a name is not escaped in the flame graph");
}
