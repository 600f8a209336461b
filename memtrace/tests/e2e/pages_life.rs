//! Targets of `pgfaultstacks` and `mmapstacks` that start, end, fork and become others during the trace.

use std::{path::Path, process::Command, thread, time::Duration};

use crate::support::{
    build::Fixture,
    growth::{Growth, Subject, UNATTRIBUTED, parse},
    memtrace::Memtrace,
    process::{Process, wait_for},
    root::turn,
    start::Unwind,
    target::Target,
    trace::read,
};

const SUBJECTS: [Subject; 2] = [Subject::Faults, Subject::Mappings];

/// Without frame pointers a stack is whole from the first instruction on, or marked: the loader's are whole, too.
#[test]
fn a_command_is_traced_from_its_first_fault_to_its_end() {
    let _turn = turn();
    for fixture in [Fixture::Pages, Fixture::PlainPages] {
        for case in ["writes", "threads", "given-back", "kernel", "thp", "populate", "stack", "heap-trimmed"] {
            let grown =
                Growth { subject: Subject::Faults, fixture, arguments: &[case], options: &[], unwind: Unwind::Auto }
                    .run_command();
            grown.assert_live_exact();
            grown.assert_all_exact();
            grown.assert_no_losses();
            assert_eq!(grown.report["coverage"]["end"], "target exited");
            // What the kernel sets up for a program before its first instruction (its arguments, what is around them and the
            // beginning of its files) is nobody's, and little.
            assert!(grown.live.pseudo(UNATTRIBUTED) <= 128 << 10, "{case}: {:#?}", grown.live.foreign);
            assert_eq!(grown.report["coverage"]["memory"]["looked_before_end_ns"], serde_json::Value::Null);
        }
    }
}

/// A process that was not started by memtrace is gone before its pages can be looked at: what is reported is of the last
/// look, and says so. It never is more than there was.
fn until_end(case: &str, end: &str) {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("growth.json");
    let mut target = Target::start(Fixture::PlainPages, &[case]);
    let pid = target.pid().to_string();
    let memtrace = Memtrace::tracing(&["pgfaultstacks", "-p", &pid, "-o", &file.display().to_string()]);
    target.go();
    let truth = target.truth();
    // So that there has been a look. If there was none yet on a very slow machine, that is an error with a message.
    thread::sleep(Duration::from_secs(5));
    target.end_line();
    let ended = memtrace.end();
    if ended.code() == 1 {
        assert!(ended.stderr.contains("looked at a second time"), "{}", ended.stderr);
        return;
    }
    let ended = ended.success();
    let report = parse(&read(&file));
    assert_eq!(report["coverage"]["end"], end, "{}", ended.stderr);
    let looked = &report["coverage"]["memory"]["looked_before_end_ns"];
    assert!(looked.as_u64().is_some(), "it is not said that the pages are from before the end: {looked}");
    let most: u64 = truth.unfreed.values().map(|held| held.bytes).sum();
    let by_work: u64 = report["stacks"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|stack| stack["frames"].as_array().unwrap().ends_with(&["work".into(), "touch".into()]))
        .map(|stack| stack["bytes"].as_u64().unwrap())
        .sum();
    println!("{case}: {by_work} of {most} bytes, {looked} ns before the end");
    assert!(by_work <= most, "{by_work} bytes, there were {most}");
    // Nothing of the program that it has become, or of its children.
    let total = report["total"]["bytes"].as_u64().unwrap();
    assert!(total <= most + (1 << 20), "{total} bytes in all, the program made {most}: {report:#}");
}

#[test]
fn a_target_that_exits_leaves_a_report_of_the_last_look() {
    until_end("exit", "target exited");
}

/// The pages of the old program are gone with it; those of the new one are counted from its first on.
#[test]
fn a_target_that_executes_another_program_is_followed() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("growth.json");
    let mut target = Target::start(Fixture::PlainPages, &["execute"]);
    let pid = target.pid().to_string();
    let mut memtrace = Memtrace::tracing(&["pgfaultstacks", "-p", &pid, "-o", &file.display().to_string()]);
    target.go();
    target.truth();
    target.end_line();
    target.wait_ready();
    memtrace.wait_until_followed();
    target.go();
    let truth = target.truth();
    memtrace.interrupt().success();
    let report = parse(&read(&file));
    let most: u64 = truth.unfreed.values().map(|held| held.bytes).sum();
    let by_work: u64 = report["stacks"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|stack| stack["frames"].as_array().unwrap().ends_with(&["work".into(), "touch".into()]))
        .map(|stack| stack["bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(by_work, most, "{report:#}");
    let states: Vec<_> = report["processes"].as_array().unwrap().iter().map(|process| &process["state"]).collect();
    assert_eq!(states, ["running", "executed"], "the new program comes first");
}

#[test]
fn a_target_that_becomes_a_daemon_leaves_a_report_of_the_last_look() {
    until_end("daemonize", "target exited");
}

/// Its mappings are known from its calls, up to the last.
#[test]
fn mappings_of_a_target_that_exits() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("space.json");
    let mut target = Process::start(Command::new("cat").arg("-"));
    target.send("x");
    assert_eq!(target.line(), "x");
    let pid = target.pid().to_string();
    let memtrace = Memtrace::tracing(&["mmapstacks", "-p", &pid, "-o", &file.display().to_string()]);
    target.close_input();
    let ended = memtrace.end().success();
    let report = parse(&read(&file));
    assert_eq!(report["coverage"]["end"], "target exited", "{}", ended.stderr);
}

/// Killed at moments that differ from run to run: a report, or a message, and never a crash.
#[test]
fn a_target_that_is_killed_at_any_moment() {
    let _turn = turn();
    for subject in SUBJECTS {
        for round in 0..10 {
            let mut target = Process::start(&mut Command::new("cat"));
            let pid = target.pid().to_string();
            let memtrace = Memtrace::start(&[subject.command(), "-p", &pid]);
            thread::sleep(Duration::from_millis(round * 40));
            target.signal(libc::SIGKILL);
            let ended = memtrace.end();
            assert!([0, 1].contains(&ended.code()), "{}", ended.stderr);
            if ended.code() == 1 {
                assert!(ended.stderr.contains(&pid), "no word of the process:\n{}", ended.stderr);
            }
            assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
            wait_for("the end of the target", || target.try_status());
        }
    }
}

/// A command that starts a daemon and ends: the trace ends with the command, its status is passed on, the daemon lives.
#[test]
fn a_command_that_daemonizes() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let pid_file = directory.path().join("pid").display().to_string();
    for subject in SUBJECTS {
        let file = directory.path().join("growth.json").display().to_string();
        let script = format!("sleep 1000 <&- >&- 2>&- & echo $! >{pid_file}; exit 4");
        let ended = crate::support::memtrace::run(&[subject.command(), "-o", &file, "--", "sh", "-c", &script]);
        let daemon: i32 = read(Path::new(&pid_file)).trim().parse().unwrap();
        // SAFETY: a system call without pointers, to a process that this test has started.
        let alive = unsafe { libc::kill(daemon, libc::SIGKILL) };
        assert_eq!(ended.code(), 4, "{}", ended.stderr);
        assert_eq!(alive, 0, "the daemon has ended");
        assert_eq!(parse(&read(Path::new(&file)))["coverage"]["end"], "target exited");
    }
}

/// Programs that execute the next one: what is traced in the end is the last.
#[test]
fn a_command_that_executes_others() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    for subject in SUBJECTS {
        let file = directory.path().join("growth.json").display().to_string();
        let script = "exec sh -c 'exec sh -c \"exec cat /proc/self/comm\"'";
        let ended = crate::support::memtrace::run(&[subject.command(), "-o", &file, "--", "sh", "-c", script]);
        assert_eq!((ended.code(), ended.stdout.as_str()), (0, "cat\n"), "{}", ended.stderr);
        assert!(ended.stderr.contains("another program"), "not said:\n{}", ended.stderr);
        let report = parse(&read(Path::new(&file)));
        assert_eq!(report["coverage"]["comm"], "cat");
        assert!(report["total"]["bytes"].as_u64().unwrap() > 0);
    }
}

/// The pages that a forked process makes resident are its growth; those that it only copies are not.
#[test]
fn children_are_followed_on_request() {
    const PAGES: u64 = 3000;
    let _turn = turn();
    for fixture in [Fixture::Pages, Fixture::PlainPages] {
        let trace = |options: &[&str]| {
            Growth { subject: Subject::Faults, fixture, arguments: &["fork-touches"], options, unwind: Unwind::Auto }
                .run()
        };
        let grown = trace(&["--children"]);
        let is_child = |path: &Vec<String>| path.ends_with(&["child_touches".into(), "touch".into()]);
        // The fixture's own account is that of its first process.
        let by_child: Vec<_> = grown.live.foreign.iter().filter(|(path, _)| is_child(path)).collect();
        let [(path, amount)] = by_child[..] else { panic!("{by_child:#?}") };
        assert!(path.contains(&"fork_child".to_owned()), "{path:?}");
        assert_eq!((amount.bytes, amount.count), (PAGES * 4096, PAGES));
        grown.assert_live_exact();
        grown.assert_no_losses();
        let children = grown.report["coverage"]["children"].as_array().unwrap();
        assert_eq!(children.len(), 1, "{children:?}");
        assert_eq!(children[0]["state"], "running");
        assert!(children[0]["rss"]["difference"].as_i64().unwrap() >= (PAGES * 4096) as i64, "{children:?}");
        // Not asked for, they are left out.
        let grown = trace(&[]);
        assert!(!grown.live.foreign.keys().any(is_child));
        assert_eq!(grown.report["coverage"]["children"], serde_json::Value::Null);
    }
}
