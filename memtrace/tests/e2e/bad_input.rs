//! What cannot be traced or written: one clear message, the documented status, nothing attached.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf, process::Command};

use crate::support::{
    build::Fixture,
    code::patches,
    memtrace::{self, Memtrace},
    process::{Ended, Process, wait_for},
    root::turn,
    target::Target,
};

const FAILURE: i32 = 1;
const USAGE: i32 = 2;

fn memstacks(arguments: &[&str]) -> Ended {
    let mut all = vec!["memstacks"];
    all.extend(arguments);
    memtrace::run(&all)
}

/// Panics unless memtrace failed before it traced, with a message on standard error that has all of `words`, and
/// nothing on standard output.
fn assert_refused(ended: &Ended, code: i32, words: &[&str]) {
    assert_eq!(ended.code(), code, "another status:\n{}", ended.stderr);
    assert!(!ended.traced(), "traced all the same:\n{}", ended.stderr);
    assert_eq!(ended.stdout, "");
    for word in words {
        assert!(ended.stderr.contains(word), "the message does not say `{word}`:\n{}", ended.stderr);
    }
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
    // One message for people, not a page of causes.
    let lines = ended.stderr.lines().filter(|line| !line.trim().is_empty()).count();
    let most = if code == USAGE { 12 } else { 4 };
    assert!(lines <= most, "{lines} lines are not one clear message:\n{}", ended.stderr);
}

#[test]
fn no_such_process() {
    let _turn = turn();
    // One more than the kernel gives (proc_sys_kernel(5)).
    let most = fs::read_to_string("/proc/sys/kernel/pid_max").unwrap();
    let pid = most.trim();
    assert_refused(&memstacks(&["-p", pid]), FAILURE, &[pid, "process"]);
}

#[test]
fn a_process_that_has_ended() {
    let _turn = turn();
    let mut child = Process::start(&mut Command::new("true"));
    let pid = child.pid().to_string();
    wait_for("the end of `true`", || child.try_status());
    assert_refused(&memstacks(&["-p", &pid]), FAILURE, &[&pid]);
}

#[test]
fn a_zombie() {
    let _turn = turn();
    // Nobody waits for it before the end of this test.
    let zombie = Process::start(&mut Command::new("true"));
    let pid = zombie.pid().to_string();
    wait_for("a zombie", || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.contains(") Z ").then_some(())
    });
    assert_refused(&memstacks(&["-p", &pid]), FAILURE, &[&pid]);
    zombie.end();
}

#[test]
fn numbers_that_are_no_pid() {
    let _turn = turn();
    for pid in ["0", "1,0", "-1", "4294967296", "99999999999999999999", "self", ""] {
        let ended = memstacks(&["-p", pid]);
        assert_refused(&ended, USAGE, &[]);
    }
}

#[test]
fn a_kernel_thread() {
    let _turn = turn();
    let name = fs::read_to_string("/proc/2/comm").unwrap_or_default();
    assert_eq!(name, "kthreadd\n", "process 2 is no kernel thread here: run the tests outside a pid namespace");
    assert_refused(&memstacks(&["-p", "2"]), FAILURE, &["2", "kernel thread"]);
}

#[test]
fn a_thread_that_is_not_its_process() {
    let _turn = turn();
    let target = Target::start(Fixture::Busy, &["2"]);
    let pid = target.pid().to_string();
    let thread = fs::read_dir(format!("/proc/{pid}/task"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .find(|thread| *thread != pid)
        .expect("a second thread");
    // The message names the process to use instead.
    assert_refused(&memstacks(&["-p", &thread]), FAILURE, &[&thread, &pid, "thread"]);
    assert_eq!(patches(target.pid()), []);
    target.finish();
}

#[test]
fn a_process_of_another_user() {
    let _turn = turn();
    let target = Target::start(Fixture::Busy, &["1"]);
    // Where the other user can execute it.
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
    let binary: PathBuf = directory.path().join("memtrace");
    fs::copy(env!("CARGO_BIN_EXE_memtrace"), &binary).unwrap();
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(&binary);
    command.args(["memstacks", "-p", &target.pid().to_string()]);
    let ended = Process::start(&mut command).end();
    assert_refused(&ended, FAILURE, &["root"]);
    assert_eq!(patches(target.pid()), []);
    target.finish();
}

#[test]
fn a_statically_linked_program_without_symbols() {
    let _turn = turn();
    let target = Target::start::<&str>(Fixture::Stripped, &[]);
    let pid = target.pid().to_string();
    assert_refused(&memstacks(&["-p", &pid]), FAILURE, &[&pid, "static", "stripped"]);
    target.finish();
}

#[test]
fn a_32_bit_program() {
    let _turn = turn();
    let mut target = Process::start(&mut Command::new(Fixture::Tiny32.path()));
    assert_eq!(target.line(), "ready");
    let pid = target.pid().to_string();
    assert_refused(&memstacks(&["-p", &pid]), FAILURE, &[&pid, "32-bit"]);
    target.close_input();
    target.end();
}

#[test]
fn outputs_that_cannot_be_written() {
    let _turn = turn();
    let target = Target::start(Fixture::Busy, &["1"]);
    let pid = target.pid().to_string();
    let directory = tempfile::tempdir().unwrap();
    let a_directory = directory.path().join("leak.folded");
    fs::create_dir(&a_directory).unwrap();
    let good = directory.path().join("good.folded").display().to_string();
    for path in ["/nonexistent/leak.folded", "/proc/leak.folded", &a_directory.display().to_string()] {
        let ended = memstacks(&["-p", &pid, "-o", &good, "-o", path]);
        assert_refused(&ended, FAILURE, &[path]);
        assert_eq!(patches(target.pid()), []);
    }
    let names: Vec<_> = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["leak.folded"], "something was left behind");
    target.finish();
}

#[test]
fn flags_that_contradict_each_other() {
    let _turn = turn();
    let target = Target::start(Fixture::Busy, &["1"]);
    let pid = target.pid().to_string();
    for arguments in [
        &["-p", &pid, "--", "/bin/true"][..],
        &[],
        &["-p", &pid, "--unit", "blocks"],
        &["-p", &pid, "--older", "-3"],
        &["-p", &pid, "--older", "1", "--all"],
        &["-p", &pid, "-d", "0"],
        &["-p", &pid, "-d", "soon"],
        &["-p", &pid, "--format", "sculpture"],
        &["-p", &pid, "-o", "leak.unheard-of"],
        &["-p", &pid, "-o", "leak.folded", "-o", "leak.folded"],
        &["-p", &pid, "--memory-budget", "0"],
    ] {
        let ended = memstacks(arguments);
        assert_eq!(ended.code(), USAGE, "{arguments:?}:\n{}", ended.stderr);
        assert_refused(&ended, USAGE, &[]);
    }
    assert_eq!(patches(target.pid()), []);
    target.finish();
}

#[test]
fn a_target_that_ends_right_away_is_a_report_or_a_message() {
    let _turn = turn();
    // Killed at moments that differ from run to run: memtrace must never hang or crash.
    for round in 0..15 {
        let mut target = Process::start(&mut Command::new("cat"));
        let pid = target.pid().to_string();
        let memtrace = Memtrace::start(&["memstacks", "-p", &pid]);
        std::thread::sleep(std::time::Duration::from_millis(round * 20));
        target.signal(libc::SIGKILL);
        let ended = memtrace.end();
        assert!([0, FAILURE].contains(&ended.code()), "{}", ended.stderr);
        assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
        wait_for("the end of the target", || target.try_status());
    }
}
