//! Probes are in the traced processes and in no other, and go when the trace does.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::support::{
    build::Fixture,
    code::patches,
    memtrace,
    process::wait_for,
    root::turn,
    told::{Told, Tracing},
};

/// Places in the C library where there is a probe, as offsets in its file.
fn probed(pid: u32) -> BTreeSet<u64> {
    patches(pid).iter().filter(|patch| patch.file.contains("libc.so")).map(|patch| patch.offset).collect()
}

/// Where the doctor says that probes go.
fn sites(pid: u32) -> BTreeSet<u64> {
    let ended = memtrace::run(&["doctor", "--probes", "-p", &pid.to_string(), "--json"]).success();
    let report: Value = serde_json::from_str(&ended.stdout).expect("the doctor's JSON");
    let number = |site: &Value, name: &str| site[name].as_u64().expect("an offset");
    let sites = report["sites"].as_array().expect("sites").iter();
    sites.map(|site| number(site, "function_offset") + number(site, "offset")).collect()
}

fn wait_until_clean(pid: u32) {
    wait_for(&format!("process {pid} without probes"), || patches(pid).is_empty().then_some(()));
}

#[test]
fn only_traced_processes_have_probes() {
    let _turn = turn();
    let (mut told, mut neighbour, mut second) =
        (Told::start(Fixture::Targets), Told::start(Fixture::Targets), Told::start(Fixture::TargetsBeta));
    let before = told.ask("fork");
    let (pid, other) = (told.pid(), second.pid());
    let sites = sites(pid);
    assert!(sites.len() >= 9, "{sites:?}");
    let mut trace = Tracing::start(&["-p", &format!("{pid},{other}")]);
    assert_eq!(probed(pid), sites);
    assert_eq!(probed(other), sites);
    for untouched in [neighbour.pid(), before] {
        assert_eq!(patches(untouched), []);
    }
    // They run over the places of the probes.
    neighbour.tell("a 100 3");
    neighbour.tell("free 1");
    told.tell("> a 100 3");
    told.tell("> free 1");
    let started = Told::start(Fixture::Targets);
    for untouched in [neighbour.pid(), before, started.pid()] {
        assert_eq!(patches(untouched), []);
    }
    // A forked child has copies of them, which are taken out.
    let mut last = 0;
    for _ in 0..3 {
        last = second.ask("fork");
        wait_until_clean(last);
        second.tell("> a 10 1");
        assert_eq!(patches(last), []);
    }
    assert_eq!(probed(other), sites);
    trace.wait_until_said("tracing ");
    let report = trace.interrupt();
    assert!(report.live.is_empty(), "{:?}", report.live);
    for pid in [pid, other, neighbour.pid(), before, last] {
        assert_eq!(patches(pid), [], "after the trace");
    }
}

/// Children that are traced have them, and lose them with the trace, however it ends.
#[test]
fn traced_children_have_probes_until_the_end() {
    let _turn = turn();
    let mut told = Told::start(Fixture::Targets);
    let (pid, sites) = (told.pid(), sites(told.pid()));
    for killed in [false, true] {
        let mut trace = Tracing::start(&["--children", "-p", &pid.to_string()]);
        let child = told.ask("fork");
        trace.wait_until_traced(child);
        let grandchild = told.ask("> fork");
        trace.wait_until_traced(grandchild);
        for pid in [pid, child, grandchild] {
            assert_eq!(probed(pid), sites);
        }
        told.tell("> a 1 1");
        if killed {
            trace.signal(libc::SIGKILL);
            wait_for("the end of memtrace", || trace.try_status());
            for pid in [pid, child, grandchild] {
                wait_until_clean(pid);
            }
        } else {
            trace.interrupt();
            for pid in [pid, child, grandchild] {
                assert_eq!(patches(pid), []);
            }
        }
        // They go on.
        told.tell("a 1 1");
        told.tell("> a 1 1");
        told.tell("> > a 1 1");
    }
}

/// With all processes, probes reach every one that maps a traced file, and go from every one.
#[test]
fn probes_in_all_processes_go_with_the_trace() {
    let _turn = turn();
    let (mut told, mut other) = (Told::start(Fixture::Targets), Told::start(Fixture::Targets));
    let mut trace = Tracing::start(&["--all-processes"]);
    let child = told.ask("fork");
    trace.wait_until_traced(child);
    for pid in [told.pid(), other.pid(), child] {
        assert!(!probed(pid).is_empty());
    }
    trace.signal(libc::SIGKILL);
    wait_for("the end of memtrace", || trace.try_status());
    for pid in [told.pid(), other.pid(), child] {
        wait_until_clean(pid);
    }
    told.tell("a 1 1");
    other.tell("a 1 1");
}
