//! `mmapstacks` against programs that know which call made each range of their address space.

use std::path::Path;

use crate::support::{
    build::Fixture,
    growth::{Grown, Growth, Subject, frames, parse},
    memtrace,
    root::turn,
    start::Unwind,
    trace::read,
};

const BOTH: [Fixture; 2] = [Fixture::Space, Fixture::PlainSpace];

fn trace(fixture: Fixture, case: &str) -> Grown {
    Growth { subject: Subject::Mappings, fixture, arguments: &[case], options: &[], unwind: Unwind::Auto }.run()
}

/// What is mapped still, and all that was mapped, is exactly what the fixture says.
fn exact(case: &str) {
    let _turn = turn();
    for fixture in BOTH {
        let grown = trace(fixture, case);
        grown.assert_live_exact();
        grown.assert_all_exact();
        grown.assert_all_known();
        grown.assert_no_losses();
    }
}

#[test]
fn ranges_unmapped_whole_and_in_parts() {
    exact("unmap");
}

#[test]
fn ranges_mapped_over_others() {
    exact("fixed");
}

#[test]
fn ranges_resized_and_moved() {
    exact("remap");
}

#[test]
fn ranges_moved_away_from_one_that_stays_and_mapped_twice() {
    exact("keep-old");
}

#[test]
fn the_break_raised_and_lowered() {
    exact("breaks");
}

#[test]
fn a_break_lowered_below_where_it_was_before_the_trace() {
    exact("break-below");
}

#[test]
fn shared_memory_attached_and_detached() {
    exact("segments");
}

#[test]
fn calls_that_fail_change_nothing() {
    exact("failing");
}

#[test]
fn many_threads_that_map_and_unmap_at_once() {
    exact("threads");
}

/// More calls than can be kept while memtrace is busy: whether it keeps up is up to the machine, but it must say so.
#[test]
fn a_flood_of_calls_is_exact_or_said_to_be_lossy() {
    let _turn = turn();
    let grown = trace(Fixture::PlainSpace, "flood");
    let losses = grown.losses();
    println!("lost: {losses:#?}");
    if losses.is_empty() {
        grown.assert_live_exact();
        grown.assert_all_exact();
        assert!(!grown.lower_bound());
    } else {
        assert_eq!(losses.keys().collect::<Vec<_>>(), ["calls_lost"], "{losses:#?}");
        assert!(grown.lower_bound());
        assert!(grown.memtrace.stderr.contains("lower bound"), "{}", grown.memtrace.stderr);
    }
}

#[test]
fn the_resident_part_of_a_range() {
    let _turn = turn();
    for fixture in BOTH {
        let grown = trace(fixture, "resident");
        grown.assert_live_exact();
        let mut parts = Vec::new();
        for stack in grown.report["stacks"].as_array().unwrap() {
            let frames = frames(stack);
            for (function, pages) in [("by_a", 40), ("by_b", 5)] {
                if frames.iter().any(|frame| frame == function) {
                    assert_eq!(stack["resident"]["anonymous"].as_u64(), Some(pages * 4096), "{stack}");
                    assert_eq!(stack["resident"]["file"].as_u64(), Some(0), "{stack}");
                    parts.push(function);
                }
            }
        }
        parts.sort_unstable();
        assert_eq!(parts, ["by_a", "by_b"]);
    }
}

/// The reason for this view: a library maps memory for itself and never gives it back, while the allocator's own statistics
/// stay as they are. One trace names it, in the first row.
#[test]
fn a_library_that_leaks_behind_the_allocator_is_the_first_row() {
    let _turn = turn();
    let library = Fixture::SpaceLeakLibrary.path().display().to_string();
    let grown = Growth {
        subject: Subject::Mappings,
        fixture: Fixture::SpaceLeak,
        arguments: &[&library],
        options: &["-o", "-"],
        unwind: Unwind::Auto,
    }
    .run();
    assert_eq!((grown.truth.fact("heap_grown"), grown.truth.fact("heap_mapped")), (0, 0), "the heap is not flat");
    grown.assert_live_exact();
    grown.assert_all_exact();
    let first = frames(&grown.report["stacks"][0]);
    assert_eq!(first.last().map(String::as_str), Some("mmap"), "{first:?}");
    assert!(first.contains(&"grow_store".to_owned()) && first.contains(&"record_stack".to_owned()), "{first:?}");
    let share = grown.report["stacks"][0]["share"].as_f64().unwrap();
    assert!(share > 0.99, "{share}");
}

/// From the first call to the end: the sum of what a program has mapped at its end is in the report, its loader's calls
/// included.
#[test]
fn a_command_is_traced_from_its_first_call_to_its_end() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("space.json").display().to_string();
    let script = "
import mmap
kept = [mmap.mmap(-1, 1 << 20) for _ in range(30)]
gone = [mmap.mmap(-1, 1 << 20) for _ in range(20)]
for mapping in gone: mapping.close()
mapped = [line.split() for line in open('/proc/self/maps')]
import os
os._exit(3)
";
    let ended = memtrace::run(&["mmapstacks", "-o", &file, "--", "python3", "-c", script]);
    assert_eq!(ended.code(), 3, "{}", ended.stderr);
    let report = parse(&read(Path::new(&file)));
    let by = |name: &str| -> u64 {
        let stacks = report["stacks"].as_array().unwrap().iter();
        let of = stacks.filter(|stack| frames(stack).iter().any(|frame| frame.contains(name)));
        of.map(|stack| stack["bytes"].as_u64().unwrap()).sum()
    };
    // One line of Python, one path: thirty mappings are left of fifty.
    assert_eq!(by("new_mmap_object"), 30 << 20, "{report:#}");
    // The loader's own calls, before main.
    assert!(by("_dl_map_object") > 1 << 20, "{report:#}");
}
