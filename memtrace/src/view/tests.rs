//! Tests of the tables.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use memtrace_common::stack::StackEnd;

use super::{
    sample::{amount, empty, hostile, plain},
    *,
};

fn innermost<'a>(row: &LeakRow<'a>) -> &'a str {
    &row.frames[row.frames.len() - 2]
}

#[test]
fn samples_balance() {
    for profile in [plain(), hostile(), empty()] {
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
        coverage.truncated.iter().map(|cut| (cut.reason, cut.stacks, cut.unfreed.bytes)).collect();
    assert_eq!(cut, [(StackEnd::Depth, 1, 50), (StackEnd::BrokenChain, 2, 500)]);
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
