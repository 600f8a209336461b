//! `pgfaultstacks` against programs that know which call path made each of their pages resident.
//!
//! Counts are exact everywhere. Where they are not compared, the test says why.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::support::{
    build::Fixture,
    compare::{Unit, assert_exact},
    growth::{Grown, Growth, Subject, UNATTRIBUTED},
    root::turn,
    start::Unwind,
    target::Target,
    truth::Paths,
};

const BOTH: [Fixture; 2] = [Fixture::Pages, Fixture::PlainPages];
const PAGE: u64 = 4096;

/// All cases that go on to their end.
const CASES: [&str; 35] = [
    "writes",
    "threads",
    "same-pages",
    "zero",
    "given-back",
    "unmapped",
    "moved",
    "moved-old",
    "shrunk",
    "left-behind",
    "trimmed",
    "heap-trimmed",
    "before",
    "kernel",
    "kernel-library",
    "direct",
    "thp",
    "thp-split",
    "populate",
    "populate-later",
    "populate-again",
    "locked",
    "file-read",
    "file-large",
    "file-copied",
    "files-given-back",
    "kinds",
    "stack",
    "thread-stacks",
    "fork-copied",
    "fork-touches",
    "refused",
    "count",
    "dense",
    "sparse",
];

fn trace_as(fixture: Fixture, case: &str, options: &[&str], unwind: Unwind) -> Grown {
    Growth { subject: Subject::Faults, fixture, arguments: &[case], options, unwind }.run()
}

fn trace(fixture: Fixture, case: &str) -> Grown {
    trace_as(fixture, case, &[], Unwind::Auto)
}

/// What became resident by each path is exactly what the fixture says, and nothing is without a path.
fn assert_growth(grown: &Grown) {
    grown.assert_live_exact();
    grown.assert_all_known();
    grown.assert_no_losses();
}

/// Growth and faults are exactly what the fixture says, with frame pointers in it and without.
fn exact(case: &str) {
    let _turn = turn();
    for fixture in BOTH {
        let grown = trace(fixture, case);
        assert_growth(&grown);
        grown.assert_all_exact();
    }
}

/// The same for growth only: how many faults it takes is the kernel's choice.
fn exact_growth(case: &str) {
    let _turn = turn();
    for fixture in BOTH {
        assert_growth(&trace(fixture, case));
    }
}

/// If this fails, nothing that the other tests say counts.
#[test]
fn every_case_runs_untraced() {
    for fixture in BOTH {
        for case in CASES {
            let mut target = Target::start(fixture, &[case]);
            target.go();
            let truth = target.truth();
            assert!(!truth.unfreed.is_empty() || !truth.all.is_empty(), "{case} does nothing");
            let ended = target.finish();
            assert!(ended.status.success(), "{fixture:?} {case}: {:?}\n{}", ended.status, ended.stderr);
        }
    }
}

#[test]
fn writes_by_many_paths_and_recursion() {
    exact("writes");
}

#[test]
fn writes_by_many_paths_along_frame_pointers() {
    let _turn = turn();
    let grown = trace_as(Fixture::Pages, "writes", &[], Unwind::FramePointers);
    assert_growth(&grown);
    grown.assert_all_exact();
}

#[test]
fn writes_by_many_threads() {
    exact("threads");
}

/// The page is resident once, however many threads fault on it at the same time (so faults may be more than pages).
#[test]
fn pages_that_several_threads_fault_on_at_once_count_once() {
    exact_growth("same-pages");
}

#[test]
fn reading_untouched_memory_is_no_growth_and_the_write_after_it_is() {
    exact("zero");
}

#[test]
fn pages_given_back_are_no_growth_and_count_for_who_touches_them_again() {
    exact("given-back");
}

#[test]
fn pages_unmapped_or_mapped_over_are_no_growth() {
    exact("unmapped");
}

#[test]
fn pages_moved_by_mremap_still_count_for_who_touched_them() {
    exact("moved");
}

#[test]
fn pages_from_before_the_trace_that_mremap_moves_are_no_growth() {
    exact("moved-old");
}

#[test]
fn pages_of_a_shrunk_mapping_are_no_growth() {
    exact("shrunk");
}

#[test]
fn pages_moved_out_of_a_mapping_that_stays() {
    exact("left-behind");
}

#[test]
fn pages_below_a_lowered_break_are_no_growth() {
    exact("trimmed");
}

#[test]
fn pages_that_the_allocator_trims_are_no_growth() {
    exact("heap-trimmed");
}

/// Changes of protection make faults on pages that are there; whether they do is the kernel's choice.
#[test]
fn pages_from_before_the_trace_are_no_growth_unless_they_come_again() {
    exact_growth("before");
}

#[test]
fn pages_that_the_kernel_writes_first() {
    exact("kernel");
}

#[test]
fn pages_that_the_kernel_writes_first_for_the_library() {
    exact("kernel-library");
}

#[test]
fn pages_that_a_device_writes_first_belong_to_the_mapping() {
    exact_growth("direct");
}

fn huge_pages(case: &str) {
    let _turn = turn();
    for fixture in BOTH {
        let grown = trace(fixture, case);
        assert_growth(&grown);
        grown.assert_all_exact();
        let whole = grown.truth.fact("huge_pages");
        let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        if whole == 0 {
            // The pages were small, and right: but nothing has been said of huge ones.
            assert!(
                !enabled.contains("[madvise]") && !enabled.contains("[always]"),
                "the kernel gave no huge page although they are enabled: {enabled}"
            );
            eprintln!("NOT TESTED: this kernel has huge pages switched off ({enabled:?})");
        }
    }
}

#[test]
fn huge_pages_count_whole_for_who_touched_them() {
    huge_pages("thp");
}

#[test]
fn what_is_left_of_a_huge_page_counts_for_who_touched_it() {
    huge_pages("thp-split");
}

#[test]
fn populated_mappings_belong_to_mmap() {
    exact("populate");
}

#[test]
fn populated_ranges_belong_to_madvise() {
    exact("populate-later");
}

#[test]
fn populated_ranges_that_are_given_back_and_touched() {
    exact("populate-again");
}

#[test]
fn locked_ranges_belong_to_mlock() {
    exact("locked");
}

#[test]
fn pages_around_a_fault_on_a_file_count_for_the_reader() {
    exact("file-read");
}

#[test]
fn large_folios_of_a_file_count_for_the_reader() {
    exact("file-large");
}

#[test]
fn private_pages_of_a_file_that_are_written_become_the_writer_s() {
    exact("file-copied");
}

#[test]
fn pages_of_files_and_shared_memory_that_are_given_back() {
    exact("files-given-back");
}

/// The stack pages are those that the program found absent before it touched them.
#[test]
fn a_stack_that_grows_by_recursion() {
    exact("stack");
}

#[test]
fn stacks_of_threads() {
    exact("thread-stacks");
}

/// Copying for a child's sake is no growth; how many faults it takes is not looked at.
#[test]
fn pages_copied_after_a_fork_are_no_growth() {
    exact_growth("fork-copied");
}

#[test]
fn pages_that_a_child_touches_are_not_its_parent_s() {
    exact("fork-touches");
}

#[test]
fn a_refused_access_that_is_allowed_later_counts_once() {
    exact_growth("refused");
}

#[test]
fn many_pages() {
    exact("dense");
}

#[test]
fn twenty_gigabytes_with_a_page_here_and_there() {
    exact("sparse");
}

/// Kinds of pages as the names of the fixture's functions tell them: private pages of a file that were written are
/// anonymous.
fn kind_of(function: &str) -> &'static str {
    match function {
        "write_anonymous" | "write_private_file" => "anonymous",
        "write_shared_file" | "read_private_file" => "file",
        "write_memory_file" | "write_shared" | "write_segment" => "shared",
        _ => panic!("no kind is known of {function}"),
    }
}

#[test]
fn kinds_of_pages_are_told_apart() {
    let _turn = turn();
    for fixture in BOTH {
        let grown = trace(fixture, "kinds");
        assert_growth(&grown);
        let mut checked = 0;
        for stack in grown.report["stacks"].as_array().unwrap() {
            let frames = stack["frames"].as_array().unwrap();
            let Some(function) = frames.iter().rev().nth(2).and_then(|frame| frame.as_str()) else { continue };
            if !["peek", "touch"].map(Some).contains(&frames.last().unwrap().as_str()) {
                continue;
            }
            for kind in ["anonymous", "file", "shared"] {
                let expected = if kind == kind_of(function) { stack["bytes"].as_u64().unwrap() } else { 0 };
                assert_eq!(stack["resident"][kind].as_u64(), Some(expected), "{kind} of {stack}");
            }
            checked += 1;
        }
        assert_eq!(checked, 7, "stacks of the fixture's own");
    }
}

#[test]
fn one_kind_of_pages_is_shown_alone() {
    let _turn = turn();
    for (option, kind) in [("anon", "anonymous"), ("file", "file"), ("shmem", "shared")] {
        let grown = trace_as(Fixture::Pages, "kinds", &["--kind", option], Unwind::Auto);
        let of_kind = |(path, _): &(&Vec<String>, _)| kind_of(&path[2]) == kind;
        let expected: Paths =
            grown.truth.unfreed.iter().filter(of_kind).map(|(path, held)| (path.clone(), *held)).collect();
        let reported = grown.live.json.iter().map(|(path, amount)| (path.clone(), amount.count)).collect();
        assert_exact(option, &expected, Unit::Count, &reported);
        assert_exact(option, &expected, Unit::Count, &grown.live.folded);
        grown.assert_no_losses();
    }
}

/// The kernel's own count of the process's faults. The difference is what happens at the ends of the trace, outside the
/// stretch that the program counts.
#[test]
fn all_faults_are_as_many_as_the_kernel_counts() {
    let _turn = turn();
    for fixture in BOTH {
        let grown = trace(fixture, "count");
        grown.assert_all_exact();
        grown.assert_no_losses();
        let counted = grown.truth.fact("faults");
        let seen = grown.all.as_ref().unwrap().total() / PAGE;
        assert!(seen.abs_diff(counted) * 1000 <= counted, "{seen} faults seen, {counted} counted by the kernel");
        let faults = &grown.report["coverage"]["memory"]["faults"];
        let number = |name: &str| faults[name].as_u64().unwrap_or_else(|| panic!("no {name} in {faults}"));
        assert_eq!(number("user") + number("kernel"), seen, "{faults}");
        assert!(number("counted").abs_diff(seen) * 1000 <= seen, "{seen} seen: {faults}");
    }
}

/// What has come less what has gone is what the kernel says that RSS has changed by: exactly what memtrace read itself, and
/// but for some pages of the program's own and the library's what this test has read.
#[test]
fn all_growth_together_is_what_the_kernel_says() {
    let _turn = turn();
    for case in CASES {
        let grown = trace(Fixture::PlainPages, case);
        let memory = &grown.report["coverage"]["memory"];
        let number = |value: &Value| value.as_i64().unwrap_or_else(|| panic!("no number in {memory}"));
        let gone: i64 =
            ["anonymous", "file", "shared"].iter().map(|kind| number(&memory["growth"]["gone"][*kind])).sum();
        let seen = i64::try_from(grown.live.total()).unwrap() - gone * PAGE as i64;
        let change = number(&memory["reconciliation"]["change"]);
        assert_eq!(seen, change, "{case}: growth less what has gone, and the change of RSS: {memory:#}");
        let (before, after) = grown.rss.unwrap();
        let kernel = i64::try_from(after).unwrap() - i64::try_from(before).unwrap();
        let most = (kernel.abs() / 100).max(8 * PAGE as i64);
        println!("{case}: {seen} bytes attributed, {kernel} by smaps_rollup");
        assert!((seen - kernel).abs() <= most, "{case}: {seen} bytes attributed, RSS has changed by {kernel}");
    }
}

/// What finds no room is counted, and what is there is not wrong: pages without a record may be given to the call that
/// mapped them, to a neighbour, or to nobody, but the sum stays.
#[test]
fn a_full_table_of_pages_is_a_lower_bound_and_says_so() {
    let _turn = turn();
    let grown = trace_as(Fixture::Pages, "sparse", &["--memory-budget", "1"], Unwind::Auto);
    let losses = grown.losses();
    assert_eq!(losses.keys().collect::<Vec<_>>(), ["pages_full"], "{losses:#?}");
    assert!(losses["pages_full"].count > 0);
    assert!(grown.lower_bound());
    let said = &grown.memtrace.stderr;
    assert!(said.contains("lower bound") && said.contains("--memory-budget"), "not said on standard error:\n{said}");
    let own: BTreeMap<_, _> = grown.live.json.iter().map(|(path, amount)| (path.clone(), amount.count)).collect();
    let truth: u64 = grown.truth.unfreed.values().map(|amount| amount.count).sum();
    let found: u64 = own.values().sum();
    assert!(found <= truth, "too much: {own:#?}");
    assert!(grown.live.pseudo(UNATTRIBUTED) / PAGE >= truth - found, "pages are missing: {:#?}", grown.live.foreign);
    // The faults themselves are all counted.
    grown.assert_all_exact();
}
