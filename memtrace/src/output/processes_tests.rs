//! Tests of what the header says of several processes.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::{
    collect::reconcile::{Line, Part, Reconciliation, RssByKind},
    output::memory,
    profile::{By, GrowthSummary, Memory, NamedProfile},
    view::{self, sample},
};

/// Processes that hold 1, 2, 3, … KiB.
fn profile(states: &[ProcessState]) -> NamedProfile {
    let process = |(number, state): (usize, &ProcessState)| NamedProcess {
        state: state.clone(),
        unfreed: sample::amount((number as u64 + 1) << 10, 1),
        ..sample::process(number as u32 + 1, "app")
    };
    NamedProfile { processes: states.iter().enumerate().map(process).collect(), ..sample::plain() }
}

fn missed_for(reason: &str) -> ProcessState {
    ProcessState::Missed { reason: reason.into() }
}

fn text(profile: &NamedProfile) -> Vec<String> {
    lines(&view::coverage(profile)).into_iter().map(|(label, line)| format!("{label}|{line}")).collect()
}

#[test]
fn one_process_needs_no_table() {
    assert_eq!(text(&sample::plain()), [""; 0]);
    let found = text(&profile(&[missed_for("it is gone")]));
    assert_eq!(
        found,
        ["missed|1 of 1 process was not traced: every total is a lower bound", "|1 × it is gone: app (pid 1)"]
    );
}

#[test]
fn those_that_hold_most_come_first_and_the_rest_is_counted() {
    let mut states = vec![ProcessState::Running; 10];
    states[0] = ProcessState::Ended;
    states[1] = ProcessState::Executed;
    states.extend(vec![ProcessState::Running; 3]);
    let found = text(&profile(&states));
    assert_eq!(found.len(), 11);
    assert_eq!(found[0], "processes|app (pid 13): 13.0 KiB unfreed");
    assert_eq!(found[9], "|app (pid 4): 4.0 KiB unfreed");
    assert_eq!(found[10], "|… and 3 more: 1 running at the end, 1 ended, 1 executed another program; 6.0 KiB unfreed");
}

#[test]
fn one_that_executes_others_is_one_process() {
    let entry = |pid, state| NamedProcess { state, ..sample::process(pid, "app") };
    let (executed, ended) = (ProcessState::Executed, ProcessState::Ended);
    // The process named first comes first, those that recorded nothing after all others.
    let entries = [
        entry(7, ended.clone()),
        entry(7, executed.clone()),
        entry(8, ended.clone()),
        entry(7, executed.clone()),
        entry(8, executed.clone()),
        entry(9, executed.clone()),
        entry(9, missed_for("it is gone")),
        entry(10, executed),
    ];
    assert_eq!(count(&entries), 4);
    // A number that was used again.
    assert_eq!(count(&[entry(7, ended.clone()), entry(7, ended)]), 2);
}

#[test]
fn reasons_are_counted() {
    let mut states: Vec<ProcessState> = (0..12).map(|number| missed_for(&format!("reason {number:02}"))).collect();
    states.extend(vec![missed_for("reason 03"); 5]);
    states.push(ProcessState::Running);
    let found = text(&profile(&states));
    assert_eq!(found[1], "missed|17 of 18 processes were not traced: every total is a lower bound");
    assert_eq!(found[2], "|6 × reason 03: app (pid 4), app (pid 13), app (pid 14), app (pid 15) … and 2 more");
    assert_eq!(found[3], "|1 × reason 00: app (pid 1)");
    assert_eq!(found.last().unwrap(), "|… and 2 more for 2 other reasons");
}

#[test]
fn more_than_can_be_kept_are_counted() {
    let mut profile = profile(&[ProcessState::Running, missed_for("it is gone")]);
    profile.missed_more = 4000;
    let coverage = view::coverage(&profile);
    assert_eq!(subject(&coverage, 4, escape::text), "4002 processes: app (pid 1), app (pid 2) … and 4000 more");
    assert_eq!(coverage.missed_count(), 4001);
    let found = text(&profile);
    assert_eq!(found[1], "missed|4001 of 4002 processes were not traced: every total is a lower bound");
    assert_eq!(found[3], "|… and 4000 more, too many to keep their reasons");
}

/// A process that executes another program is one, with an entry for each program; one that gets its number later is another.
#[test]
fn programs_of_one_process_are_one_process() {
    let mut profile =
        profile(&[ProcessState::Executed, ProcessState::Executed, ProcessState::Ended, ProcessState::Running]);
    profile.processes.iter_mut().for_each(|process| process.pid = 7);
    let found = subject(&view::coverage(&profile), 2, escape::text);
    assert_eq!(found, "2 processes: app (pid 7), app (pid 7) … and 2 more");
}

#[test]
fn names_are_escaped() {
    let coverage = view::coverage(&sample::several(By::None));
    for escape in [escape::text, escape::folded] {
        let text = subject(&coverage, 100, escape);
        assert!(text.ends_with("app (pid 302)") && !text.contains(char::is_control), "{text}");
    }
}

#[test]
fn sums_say_over_how_many() {
    let reconciliation = |processes| Reconciliation {
        processes,
        before: RssByKind { total: 4096, ..RssByKind::default() },
        after: RssByKind { total: 12_288, ..RssByKind::default() },
        heap: None,
        lines: vec![Line { part: Part::Stacks, change: 8192, resident: 8192 }],
        unexplained: 0,
    };
    let memory = |processes, looked_at| Memory {
        processes,
        faults: None,
        growth: Some(GrowthSummary { processes: looked_at, ..GrowthSummary::default() }),
        calls: 0,
        calls_lost: 0,
        audit: None,
        reconciliation: Some(reconciliation(looked_at)),
        looked_before_end: Some(std::time::Duration::from_millis(5)),
    };
    let text = |memory: &Memory| memory::lines(memory, None).into_iter().map(|(_, line)| line).collect::<Vec<_>>();
    let one = text(&memory(1, 1));
    assert_eq!(one[0], "new: none; gone, of those from before: none");
    assert!(one[1].starts_with("the process ended by itself"), "{one:?}");
    assert!(one[2].ends_with("shared ±0 B"), "{one:?}");
    let several = text(&memory(3, 2));
    assert_eq!(several[0], "new: none; gone, of those from before: none (in 2 of 3 processes)");
    assert!(
        several[1].starts_with("processes ended by themselves: their pages are those of up to 5 ms"),
        "{several:?}"
    );
    assert!(several[2].ends_with("sum over 2 of 3 processes: pages that they share count for each"), "{several:?}");
    assert!(text(&memory(3, 3))[2].contains("sum over 3 processes"));
}
