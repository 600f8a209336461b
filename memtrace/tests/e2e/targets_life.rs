//! Processes that fork, execute other programs, become daemons or end while they are traced.

use std::{fs, path::Path, process::Command};

use crate::support::{
    build::Fixture,
    process::{signal, wait_for},
    root::turn,
    told::{Told, Tracing, held},
};

/// The fixture under another name, which is that of its processes.
fn copied(fixture: Fixture, directory: &Path, name: &str) -> String {
    let path = directory.join(name);
    fs::copy(fixture.path(), &path).unwrap();
    path.display().to_string()
}

/// A child begins with nothing: what it has from its parent is its parent's, freed or not.
#[test]
fn forked_processes_hold_what_they_allocate_themselves() {
    let _turn = turn();
    let mut told = Told::start(Fixture::Targets);
    let parent = told.pid();
    told.tell("a 1000 2");
    let mut trace = Tracing::start(&["--children", "-p", &parent.to_string()]);
    told.tell("a 100 10");
    let child = told.ask("fork");
    trace.wait_until_traced(child);
    told.tell("> b 7 5");
    // Its own five, and two of its parent's.
    told.tell("> free 7");
    // The third of its parent's becomes its own.
    told.tell("> resize 5000");
    told.tell("> c 30 2");
    let grandchild = told.ask("> fork");
    trace.wait_until_traced(grandchild);
    told.tell("> > a 11 3");
    // Two of its own, and one of it is left.
    told.tell("> > free 2");
    told.tell("a 100 1");
    let ended = told.ask("> > fork");
    trace.wait_until_traced(ended);
    told.tell("> > > b 13 4");
    told.tell("> > > end");
    told.tell("> > wait");
    wait_for("the end of a child", || (!Path::new(&format!("/proc/{ended}")).exists()).then_some(()));
    // In the parent, the blocks are where they were.
    told.tell("free 1");
    let report = trace.interrupt();
    report.assert_nothing_else();
    let expected = [
        ("targets", parent, &[("leak_a", 1000, 10)][..]),
        ("targets", child, &[("resize", 5000, 1), ("leak_c", 60, 2)]),
        ("targets", grandchild, &[("leak_a", 11, 1)]),
    ];
    assert_eq!(report.live, held(&expected));
    let expected = [
        ("targets", parent, &[("leak_a", 1100, 11)][..]),
        ("targets", child, &[("leak_b", 35, 5), ("resize", 5000, 1), ("leak_c", 60, 2)]),
        ("targets", grandchild, &[("leak_a", 33, 3)]),
        ("targets", ended, &[("leak_b", 52, 4)]),
    ];
    assert_eq!(report.all, held(&expected));
    // A block that is resized is none that was freed.
    assert_eq!(report.event("frees_inherited"), 2);
    assert_eq!(report.event("frees_unknown"), 0);
    assert_eq!(report.event("frees"), 5 + 2 + 2 + 1, "{:#}", report.json["coverage"]["events"]);
    for (pid, parent, state) in
        [(child, parent, "running"), (grandchild, child, "running"), (ended, grandchild, "ended")]
    {
        let processes = report.processes(pid);
        assert_eq!(processes.len(), 1);
        assert_eq!((&processes[0]["parent"], &processes[0]["state"]), (&parent.into(), &state.into()));
        assert!(processes[0]["unseen_ns"].as_u64().is_some());
    }
    told.end();
}

/// The new program is traced as a process of its own, by its own functions' names; what the old one had is gone.
#[test]
fn a_process_that_executes_another_program() {
    let _turn = turn();
    let mut told = Told::start(Fixture::TargetsAlpha);
    let pid = told.pid();
    let beta = Fixture::TargetsBeta.path().display().to_string();
    let mut trace = Tracing::start(&["-p", &pid.to_string()]);
    told.tell("a 100 10");
    told.execute(&format!("exec {beta}"));
    trace.wait_until_said(&format!("tracing \"targets-beta\" (pid {pid}) too"));
    told.tell("a 7 3");
    told.tell("free 1");
    let report = trace.interrupt();
    report.assert_nothing_else();
    assert_eq!(report.live, held(&[("targets-beta", pid, &[("beta_leak_a", 14, 2)])]));
    let expected =
        [("targets-alpha", pid, &[("alpha_leak_a", 1000, 10)][..]), ("targets-beta", pid, &[("beta_leak_a", 21, 3)])];
    assert_eq!(report.all, held(&expected));
    let states: Vec<_> = report.processes(pid).iter().map(|process| process["state"].clone()).collect();
    assert_eq!(states, ["running", "executed"], "{:#}", report.json["processes"]);
    told.end();
}

/// So is one that another thread than the first executes, which takes over the process.
#[test]
fn a_thread_that_executes_another_program() {
    let _turn = turn();
    let mut told = Told::start(Fixture::Targets);
    let pid = told.pid();
    let beta = Fixture::TargetsBeta.path().display().to_string();
    let mut trace = Tracing::start(&["-p", &pid.to_string()]);
    told.tell("a 100 10");
    told.execute(&format!("exec-thread {beta}"));
    trace.wait_until_said(&format!("tracing \"targets-beta\" (pid {pid}) too"));
    told.tell("a 7 3");
    told.tell("thread n x b 5 2");
    let child = told.ask("fork");
    told.tell("> a 1 1");
    let report = trace.interrupt();
    report.assert_no_losses();
    let beta = [("beta_leak_a", 21, 3), ("beta_leak_b", 10, 2)];
    assert_eq!(report.live, held(&[("targets-beta", pid, &beta)]));
    assert!(report.processes(child).is_empty());
    told.end();
}

/// Each image is another process; nothing of the last is lost.
#[test]
fn a_process_that_executes_itself_again_and_again() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let last = copied(Fixture::Targets, directory.path(), "last");
    for command in [false, true] {
        let repeats = ["repeat", "50", "100", &last];
        let program = Fixture::Targets.path().display().to_string();
        let mut told;
        let (pid, mut trace);
        if command {
            trace = Tracing::start(&[&["--children", "--", &program][..], &repeats].concat());
            // Those before the first of its own lines.
            assert_eq!(trace.line(), "ready");
            trace.send("pid");
            pid = trace.line().parse().unwrap();
            trace.send("a 7 3");
            assert_eq!(trace.line(), "ok");
            trace.send_last("end");
        } else {
            let shell = format!("echo ready; read line; exec {program} {}", repeats.join(" "));
            told = Told::by(Command::new("sh").args(["-c", &shell]));
            pid = told.pid();
            trace = Tracing::start(&["-p", &pid.to_string()]);
            told.execute("go");
            trace.wait_until_said(&format!("tracing \"last\" (pid {pid}) too"));
            told.tell("a 7 3");
            told.end();
        }
        let report = trace.finish();
        assert_eq!(report.live, held(&[("last", pid, &[("leak_a", 21, 3)])]), "{}", report.memtrace.stderr);
        if command {
            // From its first moment on, each of them.
            let expected = [
                ("exe", pid, &[("leak_a", 5000, 50)][..]),
                ("targets", pid, &[("leak_a", 100, 1)]),
                ("last", pid, &[("leak_a", 21, 3)]),
            ];
            assert_eq!(report.all, held(&expected));
            report.assert_nothing_else();
            assert_eq!(report.processes(pid).len(), 52);
        }
    }
}

/// A child that shares its parent's memory until it executes a program is its parent; then it is a process of its own.
#[test]
fn programs_that_are_started_by_vfork_and_posix_spawn() {
    let _turn = turn();
    let mut told = Told::start(Fixture::TargetsAlpha);
    let (parent, beta) = (told.pid(), Fixture::TargetsBeta.path().display().to_string());
    let mut trace = Tracing::start(&["--children", "-p", &parent.to_string()]);
    told.tell("a 100 10");
    let spawned = told.ask(&format!("spawn {beta}"));
    trace.wait_until_traced(spawned);
    told.tell("> a 7 3");
    let forked = told.ask(&format!("vfork {beta}"));
    trace.wait_until_traced(forked);
    told.tell("> b 5 2");
    told.tell("free 1");
    let report = trace.interrupt();
    report.assert_nothing_else();
    let expected = [
        ("targets-alpha", parent, &[("alpha_leak_a", 900, 9)][..]),
        ("targets-beta", spawned, &[("beta_leak_a", 21, 3)]),
        ("targets-beta", forked, &[("beta_leak_b", 10, 2)]),
    ];
    assert_eq!(report.live, held(&expected));
    assert_eq!(report.event("frees_inherited"), 0);
    told.end();
}

/// So it is while its parent itself is not attached yet; what it executes and its end are its own.
#[test]
fn a_program_that_starts_another_one_before_it_is_attached() {
    let _turn = turn();
    let (program, beta) = (Fixture::Targets.path().display().to_string(), Fixture::TargetsBeta.path());
    let shell = format!("echo ready; read line; exec {program} early /bin/true");
    let mut told = Told::by(Command::new("sh").args(["-c", &shell]));
    let parent = told.pid();
    let mut trace = Tracing::start(&["--children", "-p", &parent.to_string()]);
    told.execute("go");
    trace.wait_until_said(&format!("process {parent} has executed another program: tracing \"targets\" from "));
    told.tell("a 100 10");
    let child = told.ask(&format!("vfork {}", beta.display()));
    trace.wait_until_traced(child);
    told.tell("> b 5 2");
    told.tell("free 1");
    let report = trace.interrupt();
    let losses = &report.json["coverage"]["losses"];
    assert!(losses.as_array().unwrap().is_empty(), "{losses:#}");
    let beta = [("beta_leak_b", 10, 2)];
    assert_eq!(report.live, held(&[("targets", parent, &[("leak_a", 900, 9)]), ("targets-beta", child, &beta)]));
    assert_eq!(report.all, held(&[("targets", parent, &[("leak_a", 1000, 10)]), ("targets-beta", child, &beta)]));
    told.end();
}

/// What a child does that goes on sharing its parent's memory is done to its parent's memory.
#[test]
fn a_child_that_shares_its_parents_memory() {
    let _turn = turn();
    let mut told = Told::start(Fixture::Targets);
    let parent = told.pid();
    let mut trace = Tracing::start(&["--children", "-p", &parent.to_string()]);
    let child = told.ask("share 9 4");
    trace.wait_until_traced(child);
    told.tell("unshare");
    told.tell("free 1");
    let report = trace.interrupt();
    report.assert_nothing_else();
    assert_eq!(report.live, held(&[("targets", parent, &[("leak_c", 27, 3)])]));
    assert!(report.processes(child).is_empty());
    told.end();
}

/// The trace goes on with the daemon when the command that it came from has ended.
#[test]
fn a_command_that_goes_on_as_a_daemon() {
    let _turn = turn();
    let program = Fixture::Targets.path().display().to_string();
    let mut trace = Tracing::start(&["--children", "--", &program]);
    let tell = |trace: &mut Tracing, line: &str| {
        trace.send(line);
        trace.line()
    };
    assert_eq!(trace.line(), "ready");
    assert_eq!(tell(&mut trace, "a 100 3"), "ok");
    let command: u32 = tell(&mut trace, "pid").parse().unwrap();
    let daemon: u32 = tell(&mut trace, "daemon").parse().unwrap();
    trace.wait_until_traced(daemon);
    // The command is gone.
    wait_for("the end of the command", || (!Path::new(&format!("/proc/{command}/exe")).exists()).then_some(()));
    assert_eq!(tell(&mut trace, "b 10 5"), "ok");
    assert_eq!(tell(&mut trace, "free 1"), "ok");
    trace.signal(libc::SIGINT);
    wait_for("the end of memtrace", || trace.try_status());
    // It was left running, and has memtrace's output open.
    signal(daemon, libc::SIGKILL);
    let report = trace.finish();
    // The process between the two may have ended before it could be traced, which is said, but that is all.
    let processes = report.json["processes"].as_array().unwrap().iter();
    let missed: Vec<_> = processes.filter(|process| process["state"] == "missed").collect();
    assert!(missed.iter().all(|process| process["parent"] == command) && missed.len() <= 1, "{missed:?}");
    assert!(report.foreign.is_empty() && report.json["coverage"]["losses"].as_array().unwrap().is_empty());
    let expected = [("targets", command, &[("leak_a", 300, 3)][..]), ("targets", daemon, &[("leak_b", 40, 4)])];
    assert_eq!(report.live, held(&expected));
    assert_eq!(report.json["coverage"]["end"], "interrupted");
}
