//! What is split by thread, and pages and mappings of several processes.

use std::collections::BTreeMap;

use crate::{
    reconcile::Reconciled,
    support::{
        build::Fixture,
        root::turn,
        told::{Told, Tracing, held},
        truth::{Amount, amount},
    },
};

const PAGE: u64 = 4096;

/// Names that threads give themselves before and after they allocate, equal ones, and none of their own. All have ended when the
/// trace does.
#[test]
fn threads_are_told_apart() {
    let _turn = turn();
    let (mut told, mut other) = (Told::start(Fixture::Targets), Told::start(Fixture::TargetsBeta));
    let (pid, second) = (told.pid(), other.pid());
    let trace = Tracing::of("memstacks", &["--by", "thread", "-p", &format!("{pid},{second}")]);
    told.tell("a 1000 1");
    told.tell("thread b before a 100 2");
    told.tell("thread a after b 7 3");
    told.tell("thread n - c 5 1");
    told.tell("thread b twin a 10 1");
    told.tell("thread b twin a 20 1");
    other.tell("thread b twin b 30 1");
    told.tell("a 1 1");
    let report = trace.interrupt();
    report.assert_no_losses();
    let threads = report.json["threads"].as_array().unwrap();
    let mut found: BTreeMap<(u64, String, Vec<String>), Amount> = BTreeMap::new();
    let mut of_threads = BTreeMap::new();
    for stack in report.json["stacks"].as_array().unwrap() {
        let frames: Vec<&str> =
            stack["frames"].as_array().unwrap().iter().map(|frame| frame.as_str().unwrap()).collect();
        let thread = stack["thread"].as_u64().expect("every call is of a thread") as usize;
        *of_threads.entry(thread).or_insert(Amount::default()) += amount(stack);
        if let Some(function) = frames.iter().find(|frame| frame.contains("leak_")) {
            let process = &report.json["processes"][threads[thread]["process"].as_u64().unwrap() as usize];
            let name = threads[thread]["name"].as_str().unwrap().to_owned();
            let path = vec![(*function).to_owned(), threads[thread]["tid"].to_string()];
            *found.entry((process["pid"].as_u64().unwrap(), name, path)).or_default() += amount(stack);
        }
    }
    // Without the numbers of the threads, of which nobody knows beforehand.
    let mut plain: Vec<_> = found
        .iter()
        .map(|((pid, name, path), held)| (*pid, name.as_str(), path[0].as_str(), held.bytes, held.count))
        .collect();
    plain.sort_unstable();
    let mut expected = vec![
        (u64::from(pid), "targets", "leak_a", 1001, 2),
        (u64::from(pid), "before", "leak_a", 200, 2),
        (u64::from(pid), "after", "leak_b", 21, 3),
        (u64::from(pid), "targets", "leak_c", 5, 1),
        (u64::from(pid), "twin", "leak_a", 10, 1),
        (u64::from(pid), "twin", "leak_a", 20, 1),
        (u64::from(second), "twin", "beta_leak_b", 30, 1),
    ];
    expected.sort_unstable();
    assert_eq!(plain, expected);
    // The first thread has the number of its process.
    let first: Vec<_> = found.keys().filter(|(_, _, path)| path[1] == pid.to_string()).collect();
    assert_eq!(first.len(), 1, "{first:?}");

    // The parts are the whole.
    let groups = report.json["groups"].as_array().unwrap();
    let mut sum = Amount::default();
    for group in groups {
        sum += amount(group);
        let thread = group["thread"].as_u64().unwrap() as usize;
        assert_eq!(of_threads[&thread], amount(group), "{group}");
    }
    assert_eq!(sum, amount(&report.json["total"]));
    let lines: u64 = report.folded.lines().map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum();
    assert_eq!(lines, sum.bytes);
    for thread in threads {
        let start = format!(";{} ({});", thread["name"].as_str().unwrap(), thread["tid"]);
        assert!(report.folded.contains(&start), "no {start} in {}", report.folded);
    }
}

/// Each process has its own pages and mappings, by its own names.
#[test]
fn pages_and_mappings_of_two_processes() {
    let _turn = turn();
    for command in ["pgfaultstacks", "mmapstacks"] {
        let (mut alpha, mut beta) = (Told::start(Fixture::TargetsAlpha), Told::start(Fixture::TargetsBeta));
        let (a, b) = (alpha.pid(), beta.pid());
        alpha.tell("touch a 50");
        let trace = Tracing::of(command, &["--by", "process", "-p", &format!("{a},{b}")]);
        alpha.tell("touch a 300");
        beta.tell("touch a 20");
        alpha.tell("touch b 70");
        beta.tell("touch b 1000");
        let report = trace.interrupt();
        report.assert_no_losses();
        let expected = |pages: u64, calls| (pages * PAGE, if command == "mmapstacks" { calls } else { pages });
        let of = |name, pages, calls| (name, expected(pages, calls).0, expected(pages, calls).1);
        let alphas = [of("alpha_touch_a", 300, 1), of("alpha_touch_b", 70, 1)];
        let betas = [of("beta_touch_a", 20, 1), of("beta_touch_b", 1000, 1)];
        let all = held(&[("targets-alpha", a, &alphas), ("targets-beta", b, &betas)]);
        assert_eq!(report.live, all, "{command}");
        assert_eq!(report.all, all, "{command}");
        let reconciled = Reconciled::of(&report.json);
        assert_eq!(reconciled.unexplained, 0, "{:#}", reconciled.value);
        assert_eq!(reconciled.value["processes"], 2);
        let pages = reconciled.change / PAGE as i64;
        assert!((1390..1490).contains(&pages), "{:#}", reconciled.value);
    }
}

/// What a child makes resident or maps is its own, from its first moment on; what it had from its parent is not.
///
/// The programs' code is at fixed addresses, close together: what it makes resident by being run does not depend on chance. And that
/// of a static program is there from its first moment on.
#[test]
fn pages_and_mappings_of_children() {
    let _turn = turn();
    for (command, at_once) in
        [("pgfaultstacks", true), ("mmapstacks", true), ("pgfaultstacks", false), ("mmapstacks", false)]
    {
        let mut told = Told::start(Fixture::TargetsAlpha);
        let pid = told.pid();
        let mut trace = Tracing::of(command, &["--by", "process", "--children", "-p", &pid.to_string()]);
        told.tell("touch a 300");
        let child = told.ask("fork");
        if at_once {
            told.tell("> touch b 200");
        }
        trace.wait_until_traced(child);
        if !at_once {
            told.tell("> touch b 200");
        }
        told.tell("> touch a 40");
        let ended = told.ask("> fork");
        trace.wait_until_traced(ended);
        told.tell("> > touch b 500");
        told.tell("> > end");
        told.tell("> wait");
        let spawned = told.ask(&format!("spawn {}", Fixture::TargetsStatic.path().display()));
        trace.wait_until_traced(spawned);
        told.tell("> touch a 30");
        told.tell("touch b 100");
        let report = trace.interrupt();
        report.assert_no_losses();
        let pages = |function, pages: u64| (function, pages * PAGE, if command == "mmapstacks" { 1 } else { pages });
        let parent = [pages("alpha_touch_a", 300), pages("alpha_touch_b", 100)];
        let children = [pages("alpha_touch_a", 40), pages("alpha_touch_b", 200)];
        let programs = [pages("touch_a", 30)];
        let mut expected = vec![
            ("targets-alpha", pid, &parent[..]),
            ("targets-alpha", child, &children),
            ("targets-static", spawned, &programs),
        ];
        assert_eq!(report.live, held(&expected), "{command}");
        let last = [pages("alpha_touch_b", 500)];
        expected.push(("targets-alpha", ended, &last));
        assert_eq!(report.all, held(&expected), "{command}");
        let reconciled = Reconciled::of(&report.json);
        // What it touched while it was looked at can't be explained.
        assert!(reconciled.unexplained == 0 || at_once, "{command}: {:#}", reconciled.value);
        let inherited = report.processes(child)[0]["inherited"].as_u64().unwrap();
        assert!(inherited >= 300 * PAGE, "{inherited}");
    }
}

/// What a child did before it executed another program keeps the names of the program that it was, though memtrace looks at it only
/// later, when it has other code at the same addresses.
#[test]
fn a_child_that_becomes_another_before_it_is_looked_at() {
    let _turn = turn();
    for command in ["pgfaultstacks", "mmapstacks"] {
        let mut told = Told::start(Fixture::TargetsAlpha);
        let pid = told.pid();
        let mut trace = Tracing::of(command, &["--by", "process", "--children", "-p", &pid.to_string()]);
        trace.signal(libc::SIGSTOP);
        let child = told.ask("fork");
        told.tell("> touch b 200");
        told.execute(&format!("> exec {}", Fixture::TargetsBeta.path().display()));
        let lost = told.ask("> fork");
        told.tell("> > touch a 30");
        told.tell("> > end");
        told.tell("> wait");
        // One that has become nothing but itself.
        let ended = told.ask("fork");
        told.tell("> touch a 60");
        told.tell("> end");
        told.tell("wait");
        trace.signal(libc::SIGCONT);
        trace.wait_until_said(&format!("tracing \"targets-beta\" (pid {child}) too"));
        told.tell("touch a 50");
        let report = trace.interrupt();
        let pages = |function, pages: u64| (function, pages * PAGE, if command == "mmapstacks" { 1 } else { pages });
        let mut expected = held(&[
            ("targets-alpha", pid, &[pages("alpha_touch_a", 50)]),
            ("targets-alpha", child, &[pages("alpha_touch_b", 200)]),
        ]);
        if command == "pgfaultstacks" {
            expected.extend(held(&[("targets-alpha", ended, &[pages("alpha_touch_a", 60)])]));
        }
        // What another's code is called is not known, and not guessed.
        assert_eq!(report.all, expected, "{command}: {:#?}", report.foreign);
        assert_eq!(report.live, held(&[("targets-alpha", pid, &[pages("alpha_touch_a", 50)])]), "{command}");
        for pid in [ended, lost] {
            assert_eq!(report.processes(pid)[0]["state"], "missed");
        }
        assert_eq!(report.json["lower_bound"], true);
    }
}
