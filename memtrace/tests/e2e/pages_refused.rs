//! What `pgfaultstacks` and `mmapstacks` cannot trace or write: one clear message, the documented status.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf, process::Command};

use crate::support::{
    build::Fixture,
    memtrace,
    process::{Ended, Process, wait_for},
    root::turn,
    target::Target,
};

const COMMANDS: [&str; 2] = ["pgfaultstacks", "mmapstacks"];
const FAILURE: i32 = 1;
const USAGE: i32 = 2;

fn run(command: &str, arguments: &[&str]) -> Ended {
    let mut all = vec![command];
    all.extend(arguments);
    memtrace::run(&all)
}

/// Panics unless memtrace failed before it traced, with one message on standard error that has all of `words`.
fn assert_refused(ended: &Ended, code: i32, words: &[&str]) {
    assert_eq!(ended.code(), code, "another status:\n{}", ended.stderr);
    assert!(!ended.traced(), "traced all the same:\n{}", ended.stderr);
    assert_eq!(ended.stdout, "");
    for word in words {
        assert!(ended.stderr.contains(word), "the message does not say `{word}`:\n{}", ended.stderr);
    }
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
    let lines = ended.stderr.lines().filter(|line| !line.trim().is_empty()).count();
    let most = if code == USAGE { 12 } else { 4 };
    assert!(lines <= most, "{lines} lines are not one clear message:\n{}", ended.stderr);
}

#[test]
fn no_such_process() {
    let _turn = turn();
    let most = fs::read_to_string("/proc/sys/kernel/pid_max").unwrap();
    let pid = most.trim();
    for command in COMMANDS {
        assert_refused(&run(command, &["-p", pid]), FAILURE, &[pid, "process"]);
        assert_refused(&run(command, &["-p", "0"]), USAGE, &[]);
        assert_refused(&run(command, &["-p", "-1"]), USAGE, &[]);
    }
}

#[test]
fn a_zombie_and_a_kernel_thread() {
    let _turn = turn();
    let zombie = Process::start(&mut Command::new("true"));
    let pid = zombie.pid().to_string();
    wait_for("a zombie", || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.contains(") Z ").then_some(())
    });
    for command in COMMANDS {
        assert_refused(&run(command, &["-p", &pid]), FAILURE, &[&pid]);
        assert_refused(&run(command, &["-p", "2"]), FAILURE, &["2", "kernel thread"]);
    }
    zombie.end();
}

#[test]
fn another_user() {
    let _turn = turn();
    let target = Target::start(Fixture::Busy, &["1"]);
    // Where the other user can execute it.
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
    let binary: PathBuf = directory.path().join("memtrace");
    fs::copy(env!("CARGO_BIN_EXE_memtrace"), &binary).unwrap();
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
    for name in COMMANDS {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(&binary);
        command.args([name, "-p", &target.pid().to_string()]);
        assert_refused(&Process::start(&mut command).end(), FAILURE, &["root"]);
    }
    target.finish();
}

/// They need nothing of the allocator, unlike `memstacks`.
#[test]
fn a_statically_linked_program_can_be_traced() {
    let _turn = turn();
    let target = Target::start::<&str>(Fixture::Stripped, &[]);
    let pid = target.pid().to_string();
    for command in COMMANDS {
        memtrace::run(&[command, "-p", &pid, "-d", "0.2"]).success();
    }
    target.finish();
}

#[test]
fn a_command_that_is_not_there() {
    let _turn = turn();
    for command in COMMANDS {
        let ended = run(command, &["--", "/nonexistent/program"]);
        assert_refused(&ended, FAILURE, &["/nonexistent/program"]);
    }
}

#[test]
fn outputs_that_cannot_be_written() {
    let _turn = turn();
    let target = Target::start(Fixture::Busy, &["1"]);
    let pid = target.pid().to_string();
    let directory = tempfile::tempdir().unwrap();
    let good = directory.path().join("good.folded").display().to_string();
    for command in COMMANDS {
        for path in ["/nonexistent/growth.folded", "/proc/growth.folded"] {
            assert_refused(&run(command, &["-p", &pid, "-o", &good, "-o", path]), FAILURE, &[path]);
        }
    }
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 0, "something was left behind");
    target.finish();
}

#[test]
fn flags_that_are_wrong_or_contradict_each_other() {
    let _turn = turn();
    let target = Target::start(Fixture::Busy, &["1"]);
    let pid = target.pid().to_string();
    let both: [&[&str]; 8] = [
        &["-p", &pid, "--", "/bin/true"],
        &[],
        &["-p", &pid, "--unit", "furlongs"],
        &["-p", &pid, "-d", "0"],
        &["-p", &pid, "-d", "soon"],
        &["-p", &pid, "-o", "growth.unheard-of"],
        &["-p", &pid, "--memory-budget", "0"],
        &["-p", &pid, "--unwind", "guess"],
    ];
    let faults: [&[&str]; 6] = [
        &["-p", &pid, "--kind", "heap"],
        &["-p", &pid, "--kind", "anon,file"],
        &["-p", &pid, "--kind", "anon", "--all"],
        &["-p", &pid, "--kind", "shmem", "--all", "--resident"],
        &["-p", &pid, "--mapped"],
        &["-p", &pid, "--older", "3"],
    ];
    let mappings: [&[&str]; 4] = [
        &["-p", &pid, "--kind", "anon"],
        &["-p", &pid, "--resident"],
        &["-p", &pid, "--older", "-3"],
        &["-p", &pid, "--older", "1", "--all"],
    ];
    let cases = both.iter().flat_map(|arguments| COMMANDS.map(|command| (command, *arguments)));
    let cases = cases.chain(faults.map(|arguments| (COMMANDS[0], arguments)));
    for (command, arguments) in cases.chain(mappings.map(|arguments| (COMMANDS[1], arguments))) {
        let ended = run(command, arguments);
        assert_eq!(ended.code(), USAGE, "{command} {arguments:?}:\n{}", ended.stderr);
        assert_refused(&ended, USAGE, &[]);
    }
    target.finish();
}
