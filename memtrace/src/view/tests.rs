//! Tests of the tables.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use memtrace_common::stack::StackEnd;

use crate::profile::{By, GroupKind, ProcessState};

use super::{
    sample::{amount, empty, hostile, plain, several},
    *,
};

fn innermost<'a>(row: &LeakRow<'a>) -> &'a str {
    &row.frames[row.frames.len() - 2]
}

#[test]
fn samples_balance() {
    for profile in [plain(), hostile(), empty()].into_iter().chain(By::ALL.map(several)) {
        profile.check().unwrap();
    }
}

#[test]
fn unfreed_ranked_by_bytes() {
    let profile = plain();
    let table = leaks(&profile, Unit::Bytes, Which::Unfreed);
    assert_eq!(table.total, amount(15 << 20, 1237));
    // The path that freed everything is gone, the one with blocks of 0 bytes is not.
    let names: Vec<&str> = table.rows.iter().map(innermost).collect();
    assert_eq!(names, ["operator new(unsigned long)", "load_config", "touch"]);
    let first = &table.rows[0];
    assert_eq!(first.amount, amount(12 << 20, 1200));
    assert!((first.share - 0.8).abs() < 1e-12);
    // From 6 MiB at 30 s to 12 MiB at 60 s.
    let rate = (6 << 20) as f64 / 30.0;
    assert!((first.growth.per_second.unwrap() - rate).abs() < 1e-6);
    assert_eq!(table.rows[1].oldest, Some(Duration::from_secs(59)));
    assert_eq!(table.rows[2].share, 0.0);
    assert_eq!(table.rows[2].growth.per_second, None);
}

#[test]
fn all_ranked_by_count() {
    let profile = plain();
    let table = leaks(&profile, Unit::Count, Which::All);
    let counts: Vec<u64> = table.rows.iter().map(|row| row.amount.count).collect();
    assert_eq!(counts, [700_000, 2_000, 40, 7]);
    let shares: f64 = table.rows.iter().map(|row| row.share).sum();
    assert!((shares - 1.0).abs() < 1e-12);
}

#[test]
fn equal_rows_keep_one_order() {
    let mut profile = plain();
    profile.stacks = ["b", "a", "c"].map(|name| sample::stack(&[name, "malloc"], amount(5, 1), amount(5, 1))).into();
    let table = leaks(&profile, Unit::Bytes, Which::Unfreed);
    let names: Vec<&str> = table.rows.iter().map(innermost).collect();
    assert_eq!(names, ["a", "b", "c"]);
}

#[test]
fn flame_leaves_out_zeros() {
    let profile = plain();
    assert_eq!(flame(&profile, Which::Unfreed, Unit::Bytes).len(), 2);
    assert_eq!(flame(&profile, Which::Unfreed, Unit::Count).len(), 3);
    let all = flame(&profile, Which::All, Unit::Count);
    assert_eq!(all.len(), 4);
    assert_eq!(all[0].1, 700_000);
    assert_eq!(all[0].0.frames[0].as_ref(), "_start");
}

#[test]
fn coverage_of_a_clean_trace() {
    let coverage = coverage(&plain());
    assert_eq!(coverage.losses, []);
    assert!(!coverage.lower_bound);
    assert_eq!(coverage.truncated, []);
    assert_eq!(coverage.stacks, 6);
    assert_eq!(coverage.allocated, amount(723 << 20, 702_047));
    assert_eq!(coverage.unfreed, amount(15 << 20, 1237));
    assert_eq!(coverage.younger, amount(0, 0));
    assert_eq!(coverage.missed_growth(), None);
    assert_eq!(coverage.rss.unwrap().difference(), (118 << 20) + (1 << 19));
    let modules: Vec<(&str, usize)> =
        coverage.probed.iter().map(|module| (module.module.as_str(), module.functions.len())).collect();
    assert_eq!(modules, [("libc.so.6", 4), ("libother.so", 1)]);
}

#[test]
fn coverage_of_a_bad_trace() {
    let coverage = coverage(&hostile());
    assert!(coverage.lower_bound);
    assert_eq!(coverage.losses.len(), 3);
    assert_eq!(coverage.losses[0].name, "blocks_full");
    assert_eq!(coverage.younger, amount(300, 3));
    let cut: Vec<(StackEnd, u64, u64)> =
        coverage.truncated.iter().map(|cut| (cut.reason, cut.share.stacks, cut.share.unfreed.bytes)).collect();
    assert_eq!(cut, [(StackEnd::Depth, 1, 50), (StackEnd::BrokenChain, 2, 500)]);
    // The seventh is the one whose call path is unknown.
    assert_eq!((coverage.whole.stacks, coverage.whole.unfreed.bytes), (3, 72));
    assert_eq!(coverage.rss.unwrap().difference(), -(1 << 20));
}

#[test]
fn losses_that_keep_totals_are_no_lower_bound() {
    let mut profile = hostile();
    profile.losses.remove(0);
    assert!(!coverage(&profile).lower_bound);
}

#[test]
fn growth_without_events_is_noticed() {
    assert_eq!(coverage(&empty()).missed_growth(), Some((118 << 20) + (1 << 19)));
}

/// Whatever a profile is split by, nothing is added, lost or counted twice.
#[test]
fn groups_add_up_to_the_whole() {
    let whole = several(By::None);
    for by in [By::Thread, By::Process, By::Cgroup] {
        let profile = several(by);
        for which in Which::ALL {
            for unit in Unit::ALL {
                let table = groups(&profile, unit, which);
                assert_eq!(table.rows.len(), profile.groups.len());
                let sum = table.rows.iter().fold(amount(0, 0), |sum, row| sum.plus(row.amount));
                assert_eq!((sum, table.total), (table.total, leaks(&whole, unit, which).total));
                let shares: f64 = table.rows.iter().map(|row| row.share).sum();
                assert!((shares - 1.0).abs() < 0.001 || unit == Unit::Pages, "{shares}");
                assert!(table.rows.is_sorted_by_key(|row| std::cmp::Reverse(unit.of(row.amount))));
            }
        }
        let of_processes = profile.processes.iter().fold(amount(0, 0), |sum, process| sum.plus(process.unfreed));
        assert_eq!(of_processes, groups(&profile, Unit::Bytes, Which::Unfreed).total);
    }
    assert_eq!(groups(&whole, Unit::Bytes, Which::All).rows, []);
}

#[test]
fn groups_ranked_by_what_they_hold() {
    let profile = several(By::Process);
    let table = groups(&profile, Unit::Bytes, Which::Unfreed);
    let kinds: Vec<&GroupKind> = table.rows.iter().map(|row| &row.group.kind).collect();
    assert_eq!(kinds, [1, 0, 4, 3, 2].map(GroupKind::Process).iter().collect::<Vec<_>>());
    assert_eq!(table.rows[0].amount, amount((20 << 20) + 4096 + 100, 1211));
    // The one that ended holds nothing any more, but has allocated.
    assert_eq!(table.rows[4].amount, amount(0, 0));
    assert_eq!(groups(&profile, Unit::Count, Which::All).rows[1].amount, amount(30 << 20, 3000));
}

#[test]
fn roots_and_owners() {
    let of = |by| {
        let profile = several(by);
        let owners = Owners::new(&profile);
        let text =
            |stack| (groups::roots(&profile, stack).join("|"), owners.of(stack).unwrap_or_default().into_owned());
        let found: Vec<(String, String)> = profile.stacks.iter().map(text).collect();
        found
    };
    let is =
        |found: &(String, String), root: &str, owner: &str| assert_eq!(*found, (root.to_owned(), owner.to_owned()));
    // The configuration of two processes and the serving of three are one path each.
    let paths = of(By::None);
    assert_eq!(paths.len(), 6);
    is(&paths[0], "nginx", "nginx");
    is(&of(By::Process)[0], "nginx (100)", "nginx (pid 100)");
    is(&of(By::Thread)[3], "nginx (101)|# a;\u{7}<b>& (105)", "nginx (pid 101), # a;\u{7}<b>& (tid 105)");
    is(&of(By::Thread)[4], "nginx (101)|[unknown thread]", "nginx (pid 101), [unknown thread]");
    is(&of(By::Thread)[5], "nginx (102)|[no name] (102)", "nginx (pid 102), [no name] (tid 102)");
    is(&of(By::Cgroup)[0], "[cgroup] /system.slice/nginx.service|nginx", "/system.slice/nginx.service, nginx");
    is(of(By::Cgroup).last().unwrap(), "[unknown cgroup]|", "[unknown cgroup], [no name]");
    // Where all is of one program, that is not said of every path.
    let plain = plain();
    assert!(Owners::new(&plain).of(&plain.stacks[0]).is_none());
}

#[test]
fn processes_that_were_missed_make_totals_lower_bounds() {
    let mut profile = several(By::None);
    let found = coverage(&profile);
    assert_eq!(found.missed().count(), 3);
    assert!(found.lower_bound && found.losses.is_empty());
    let rss = found.rss.unwrap();
    assert_eq!((rss.before, rss.after, rss.processes), (15 << 20, 40 << 20, 3));
    profile.processes.retain(|process| !matches!(process.state, ProcessState::Missed { .. }));
    // The first calls of some were not seen.
    assert!(coverage(&profile).lower_bound && coverage(&profile).unseen.is_some());
    profile.processes.iter_mut().for_each(|process| process.unseen = None);
    assert!(!coverage(&profile).lower_bound);
}
