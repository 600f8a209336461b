//! Several processes in one trace, and wrong words about which.

use std::{os::unix::process::CommandExt as _, process::Command};

use crate::support::{
    build::Fixture,
    memtrace,
    process::Process,
    root::turn,
    told::{Told, Tracing, held},
};

/// The same instructions at the same addresses, under other names.
#[test]
fn code_of_two_programs_at_the_same_addresses() {
    let _turn = turn();
    let (mut alpha, mut beta) = (Told::start(Fixture::TargetsAlpha), Told::start(Fixture::TargetsBeta));
    let (a, b) = (alpha.pid(), beta.pid());
    alpha.tell("a 1000 3");
    for by in ["process", "thread"] {
        let trace = Tracing::of("memstacks", &["--by", by, "-p", &format!("{a},{b}")]);
        alpha.tell("a 100 3");
        beta.tell("a 7 5");
        alpha.tell("b 11 2");
        beta.tell("c 13 1");
        alpha.tell("free 1");
        alpha.tell("thread n x c 50 2");
        beta.tell("resize 17");
        let report = trace.interrupt();
        report.assert_no_losses();
        let alphas = [("alpha_leak_a", 300, 3), ("alpha_leak_b", 11, 1), ("alpha_leak_c", 100, 2)];
        let betas = [("beta_leak_a", 35, 5), ("beta_resize", 17, 1)];
        assert_eq!(report.live, held(&[("targets-alpha", a, &alphas), ("targets-beta", b, &betas)]));
        let alphas = [("alpha_leak_a", 300, 3), ("alpha_leak_b", 22, 2), ("alpha_leak_c", 100, 2)];
        let betas = [("beta_leak_a", 35, 5), ("beta_leak_c", 13, 1), ("beta_resize", 17, 1)];
        assert_eq!(report.all, held(&[("targets-alpha", a, &alphas), ("targets-beta", b, &betas)]));
        // A thread's own.
        assert!(report.foreign.iter().all(|path| path.contains("pthread_create")), "{:?}", report.foreign);
        if by == "process" {
            let of = |root: String, function: &str| report.folded().get(&(root, function.to_owned())).copied();
            assert_eq!(of(format!("targets-alpha ({a})"), "alpha_leak_a"), Some(300));
            assert_eq!(of(format!("targets-beta ({b})"), "beta_leak_a"), Some(35));
            assert_eq!(report.folded().len(), 5);
        }
        for (pid, allocated) in [(a, 300 + 22 + 100), (b, 35 + 13 + 17)] {
            let processes = report.processes(pid);
            assert_eq!(processes.len(), 1);
            assert_eq!(processes[0]["state"], "running");
            // A thread's own comes on top.
            let bytes = processes[0]["allocated"]["bytes"].as_u64().unwrap();
            assert!(bytes == allocated || pid == a && bytes > allocated, "{bytes}, told {allocated}");
        }
    }
    // One process named twice is one process.
    let trace = Tracing::start(&["-p", &format!("{a},{a}"), "-p", &a.to_string()]);
    alpha.tell("a 100 1");
    let report = trace.interrupt();
    report.assert_nothing_else();
    assert_eq!(report.live, held(&[("targets-alpha", a, &[("alpha_leak_a", 100, 1)])]));
    // The trace of two goes on when one of them ends, which still holds what it leaked.
    let trace = Tracing::start(&["-p", &format!("{a},{b}")]);
    alpha.tell("a 100 1");
    alpha.end();
    beta.tell("a 1 1");
    beta.end();
    let report = trace.finish();
    report.assert_nothing_else();
    assert_eq!(report.json["coverage"]["end"], "target exited");
    let expected =
        [("targets-alpha", a, &[("alpha_leak_a", 100, 1)][..]), ("targets-beta", b, &[("beta_leak_a", 1, 1)])];
    assert_eq!(report.live, held(&expected));
}

fn refused(arguments: &[&str], code: i32) -> String {
    let ended = memtrace::run(arguments);
    assert_eq!(ended.code(), code, "{arguments:?}: {}", ended.stderr);
    assert!(!ended.traced(), "{}", ended.stderr);
    ended.stderr
}

#[test]
fn what_is_not_there_is_named() {
    let _turn = turn();
    let mut told = Told::start(Fixture::Targets);
    let gone = {
        let mut process = Process::start(&mut Command::new("true"));
        let pid = process.pid();
        crate::support::process::wait_for("an end", || process.try_status());
        pid
    };
    let pid = told.pid();
    let error = refused(&["memstacks", "-p", &format!("{pid},{gone}")], 1);
    assert!(error.contains(&gone.to_string()) && !error.contains(&format!("process {pid}")), "{error}");
    let other = Told::start(Fixture::Targets);
    let error = refused(&["pgfaultstacks", "--exact", "-p", &format!("{pid},{}", other.pid())], 1);
    assert!(error.contains("--exact") && error.contains("one process"), "{error}");
    let error = refused(&["pgfaultstacks", "--exact", "--comm", "targets"], 1);
    assert!(error.contains("--exact") && error.contains("one process"), "{error}");
    let error = refused(&["memstacks", "--pid-ns", "1"], 2);
    assert!(error.contains("--pid"), "{error}");
    let error = refused(&["memstacks", "-p", "9", "--pid-ns", &gone.to_string()], 1);
    assert!(error.contains(&gone.to_string()), "{error}");
    let error = refused(&["memstacks", "-p", &pid.to_string(), "--comm", "x"], 2);
    assert!(error.contains("cannot be used with"), "{error}");
    let error = refused(&["memstacks", "--cgroup", "/sys/fs/cgroup/unified/not-there"], 1);
    assert!(error.contains("not-there") && error.contains("no cgroup"), "{error}");
    let error = refused(&["memstacks", "--container", "0123456789ab"], 1);
    assert!(error.contains("0123456789ab"), "{error}");
    told.tell("a 1 1");
    told.end();
}

/// Says what is missing, and what to do.
#[test]
fn without_rights_there_is_a_message() {
    let _turn = turn();
    let told = Told::start(Fixture::Targets);
    let pid = told.pid().to_string();
    let directory = tempfile::tempdir().unwrap();
    // Where anybody can read it.
    let program = directory.path().join("memtrace");
    std::fs::copy(env!("CARGO_BIN_EXE_memtrace"), &program).unwrap();
    std::fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    for target in [&["-p", &pid][..], &["--comm", "targets"], &["--all-processes"]] {
        let mut command = Command::new(&program);
        command.arg("memstacks").args(target).uid(65534).gid(65534).current_dir("/");
        let ended = Process::start(&mut command).end();
        assert_eq!(ended.code(), 1, "{}", ended.stderr);
        assert!(ended.stderr.contains("root"), "{target:?}: {}", ended.stderr);
        assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
    }
    told.end();
}
