//! The change of RSS, part by part: the parts add up, and are what the programs know of themselves.

use std::{collections::BTreeMap, path::Path};

use serde_json::Value;

use crate::support::{
    build::Fixture,
    growth::{Growth, Subject, parse},
    memtrace::Memtrace,
    root::turn,
    smaps,
    start::Unwind,
    target::Target,
    trace::read,
    truth::Truth,
};

const PAGE: i64 = 4096;

/// What a report says of the memory as a whole.
pub struct Reconciled {
    pub change: i64,
    /// Changes by part.
    pub parts: BTreeMap<String, i64>,
    pub unexplained: i64,
    pub value: Value,
}

impl Reconciled {
    /// Panics unless parts and the unexplained add up to the change, and that is the difference of the two sums.
    pub fn of(report: &Value) -> Self {
        let value = report["coverage"]["memory"]["reconciliation"].clone();
        let number = |value: &Value| value.as_i64().unwrap_or_else(|| panic!("no number: {value}"));
        let parts: BTreeMap<String, i64> = value["lines"]
            .as_array()
            .unwrap_or_else(|| panic!("no reconciliation: {value:#}"))
            .iter()
            .map(|line| (line["part"].as_str().expect("a part").to_owned(), number(&line["change"])))
            .collect();
        let (change, unexplained) = (number(&value["change"]), number(&value["unexplained"]));
        assert_eq!(change, number(&value["after"]["rss"]) - number(&value["before"]["rss"]), "{value:#}");
        assert_eq!(change, parts.values().sum::<i64>() + unexplained, "the lines do not add up: {value:#}");
        Self { change, parts, unexplained, value }
    }

    /// Panics unless everything is explained: the target did nothing while it was looked at.
    fn assert_explained(&self) {
        assert_eq!(self.unexplained, 0, "{:#}", self.value);
        for moment in ["before", "after"] {
            let rss = &self.value[moment];
            let sum: u64 = ["anonymous", "file", "shared"].iter().map(|kind| rss[*kind].as_u64().unwrap()).sum();
            assert_eq!(Some(sum), rss["rss"].as_u64(), "{rss}");
        }
    }

    fn part(&self, name: &str) -> i64 {
        *self.parts.get(name).unwrap_or_else(|| panic!("no line about {name}: {:#}", self.value))
    }

    /// Panics unless a part has changed by so many pages, and at most `more` besides: of the bookkeeping and the library.
    fn assert_pages(&self, name: &str, pages: i64, more: i64) {
        let change = self.part(name);
        assert!(
            (pages * PAGE..=(pages + more) * PAGE).contains(&change),
            "{name}: {change} bytes, not {pages} pages: {:#}",
            self.value
        );
    }
}

fn faults(case: &str) -> Reconciled {
    let grown = Growth {
        subject: Subject::Faults,
        fixture: Fixture::PlainPages,
        arguments: &[case],
        options: &[],
        unwind: Unwind::Auto,
    }
    .run();
    let reconciled = Reconciled::of(&grown.report);
    reconciled.assert_explained();
    // The kernel's own numbers, as this test has read them right before and after the work.
    let (before, after) = grown.rss.unwrap();
    let kernel = i64::try_from(after).unwrap() - i64::try_from(before).unwrap();
    assert!((kernel - reconciled.change).abs() <= 8 * PAGE, "{case}: {kernel} by smaps_rollup: {:#}", reconciled.value);
    reconciled
}

#[test]
fn anonymous_memory_outside_the_allocator() {
    let _turn = turn();
    let reconciled = faults("dense");
    reconciled.assert_pages("outside_mappings", 100_000, 16);
    assert_eq!((reconciled.part("stacks"), reconciled.part("shared_memory")), (0, 0));
}

#[test]
fn stacks() {
    let _turn = turn();
    // The bookkeeping looks at 1020 pages below; the program's own levels take 1000, less what was there.
    let reconciled = faults("stack");
    assert!((850..=1010).contains(&(reconciled.part("stacks") / PAGE)), "{:#}", reconciled.value);
    assert!(reconciled.part("outside_mappings") <= 16 * PAGE, "{:#}", reconciled.value);
}

/// Private copies of a file's pages are the file's line, though they are anonymous.
#[test]
fn files_and_shared_memory() {
    let _turn = turn();
    let reconciled = faults("kinds");
    reconciled.assert_pages("shared_memory", 32 + 20 + 11, 0);
    reconciled.assert_pages("file_backed", 30 + 40 + 16, 64);
    reconciled.assert_pages("outside_mappings", 70, 16);
}

#[test]
fn memory_that_went_is_a_negative_change() {
    let _turn = turn();
    // 200 pages were there, 60 of them have gone, 16 + 4 have come again, 10 are new.
    let reconciled = faults("before");
    assert!((-30..=-14).contains(&(reconciled.part("outside_mappings") / PAGE)), "{:#}", reconciled.value);
}

#[test]
fn mappings_are_reconciled_too() {
    let _turn = turn();
    let grown = Growth {
        subject: Subject::Mappings,
        fixture: Fixture::PlainSpace,
        arguments: &["resident"],
        options: &[],
        unwind: Unwind::Auto,
    }
    .run();
    let reconciled = Reconciled::of(&grown.report);
    reconciled.assert_explained();
    reconciled.assert_pages("outside_mappings", 45, 16);
}

/// Traces a fixture's heap: its truth, the report, and RSS before and after as the kernel gave it to this test.
fn heap(fixture: Fixture, arguments: &[&str], options: &[&str]) -> (Truth, Value, i64) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("heap.json").display().to_string();
    let mut target = Target::start(fixture, arguments);
    let pid = target.pid().to_string();
    let mut line = vec!["memstacks", "-p", &pid, "-o", &file];
    line.extend(options);
    let memtrace = Memtrace::tracing(&line);
    let rss = |pid| i64::try_from(smaps::rss(pid).expect("the target runs")).expect("a size");
    let before = rss(target.pid());
    target.go();
    let truth = target.truth();
    let after = rss(target.pid());
    memtrace.interrupt().success();
    target.finish();
    (truth, parse(&read(Path::new(&file))), after - before)
}

#[test]
fn the_heap_s_lines_add_up_to_the_change_of_rss() {
    let _turn = turn();
    let library = Fixture::PlainTruthLibrary.path().display().to_string();
    let cases: [(Fixture, &[&str]); 4] = [
        (Fixture::PlainTruth, &["quiet", &library]),
        (Fixture::Rules, &["address-reuse"]),
        (Fixture::Rules, &["realloc-moves"]),
        (Fixture::Strings, &[]),
    ];
    for (fixture, arguments) in cases {
        let (truth, report, kernel) = heap(fixture, arguments, &[]);
        let reconciled = Reconciled::of(&report);
        reconciled.assert_explained();
        let heap = &reconciled.value["heap"];
        let number = |name: &str| heap[name].as_u64().unwrap_or_else(|| panic!("no {name}: {heap}"));
        let total = report["total"]["bytes"].as_u64().unwrap();
        assert_eq!(number("requested"), total, "{fixture:?}: {heap}");
        let unfreed: u64 = truth.unfreed.values().map(|held| held.bytes).sum();
        assert!(total >= unfreed, "{fixture:?}: {total} bytes live, the fixture has {unfreed}");
        assert!(number("resident") <= number("requested"), "{heap}");
        // Probes take a page each of the program's and the library's code.
        let most = (kernel.abs() / 100).max(32 * PAGE);
        assert!(
            (kernel - reconciled.change).abs() <= most,
            "{fixture:?}: {kernel} by smaps_rollup: {:#}",
            reconciled.value
        );
    }
}

#[test]
fn without_reconciliation_there_is_none() {
    let _turn = turn();
    let (_, report, _) = heap(Fixture::Rules, &["frees"], &["--no-reconcile"]);
    assert_eq!(report["coverage"]["memory"]["reconciliation"], Value::Null);
}

/// Who allocated a block and who made its pages resident: the allocator itself its first, a function a part of it.
#[test]
fn memory_of_blocks_by_who_touched_it() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("touched.json");
    let mut target = Target::start::<&str>(Fixture::Touched, &[]);
    let pid = target.pid().to_string();
    let memtrace = Memtrace::tracing(&["memstacks", "--touched", "-p", &pid, "-o", &path.display().to_string()]);
    target.go();
    target.truth();
    memtrace.interrupt().success();
    target.finish();
    let report = parse(&read(&path));
    let by = |toucher: &str| -> u64 {
        let stacks = report["stacks"].as_array().unwrap().iter();
        let matching = stacks.filter(|stack| {
            let frames: Vec<&str> =
                stack["frames"].as_array().unwrap().iter().map(|frame| frame.as_str().unwrap()).collect();
            let mark = frames.iter().position(|frame| *frame == "[touched by]").unwrap();
            frames[..mark].ends_with(&["make_block", "malloc"]) && frames[mark..].contains(&toucher)
        });
        matching.map(|stack| stack["bytes"].as_u64().unwrap()).sum()
    };
    assert_eq!(by("fill_part"), 32 * 4096, "{report:#}");
    // Its bookkeeping takes the first 16 bytes of the page.
    assert_eq!(by("make_block"), 4096 - 16, "{report:#}");
    assert_eq!(report["subject"], "touched");
}
