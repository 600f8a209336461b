//! Programs that leak in a known way, by many call paths and through every function, while they churn.

use crate::support::{
    build::Fixture,
    compare::Unit,
    root::turn,
    start::{TRUNCATED, Unwind, assert_start},
    trace::{Trace, Traced, assert_exactly_true},
};

/// Who may allocate besides the fixture when it opens a library and starts threads during the trace: functions of
/// glibc's loader, called by dlopen (the library's name, its description, its dependencies, its versions, the table for
/// the unwinder) and by pthread_create (a table of thread-local storage). Nobody else.
const LOADER: [&str; 9] = [
    "__strdup",
    "_dl_new_object",
    "_dl_map_object_deps",
    "_dl_check_map_versions",
    "add_to_global_resize",
    "_dl_find_object_update",
    "_dlfo_mappings_segment_allocate",
    "allocate_dtv",
    // Where glibc's debug information is not installed.
    "[unknown] (ld-linux-x86-64.so.2",
];

/// The loader calls the allocator through functions of the same names, which are inlined.
const WRAPPERS: [&str; 3] = ["malloc", "calloc", "realloc"];

fn library() -> String {
    Fixture::TruthLibrary.path().display().to_string()
}

fn trace(fixture: Fixture, arguments: &[&str], unwind: Unwind, unit: Unit) -> Traced {
    Trace { fixture, arguments, options: &[], unwind }.run(unit)
}

#[test]
fn every_function_path_and_thread_is_counted_exactly() {
    let _turn = turn();
    assert_exactly_true(Fixture::Truth, &["quiet", &library()], Unwind::Auto, Unit::Bytes);
    assert_exactly_true(Fixture::Truth, &["quiet", &library()], Unwind::FramePointers, Unit::Count);
}

#[test]
fn a_library_and_threads_that_come_during_the_trace_are_counted_exactly() {
    let _turn = turn();
    for (unwind, unit) in [(Unwind::Auto, Unit::Count), (Unwind::FramePointers, Unit::Bytes)] {
        assert_exact_with_loader(&trace(Fixture::Truth, &["late", &library()], unwind, unit), unwind);
    }
}

/// The same program and library, compiled as everybody does: frame pointers lead nowhere in them. The library is opened
/// before the trace: one that is opened during it has no unwind rows for a moment, in which its stacks are cut, and marked.
#[test]
fn every_site_of_a_program_without_frame_pointers_is_whole() {
    let _turn = turn();
    let library = Fixture::PlainTruthLibrary.path().display().to_string();
    assert_exactly_true(Fixture::PlainTruth, &["quiet", &library], Unwind::Auto, Unit::Bytes);
    assert_exactly_true(Fixture::PlainTruth, &["quiet", &library], Unwind::Auto, Unit::Count);
}

fn assert_exact_with_loader(traced: &Traced, unwind: Unwind) {
    traced.assert_own_exact();
    traced.assert_no_losses();
    assert_only(traced, &LOADER, &LOADER, unwind);
}

#[test]
fn cpp_names_and_exceptions_are_counted_exactly() {
    let _turn = turn();
    for unwind in [Unwind::Auto, Unwind::FramePointers] {
        assert_exact_with_exceptions(&trace(Fixture::Cpp, &[], unwind, Unit::Bytes), unwind);
    }
}

/// Nothing of this program's is between its functions and the allocator: all of it is the C++ library's, without frame
/// pointers like the program itself.
#[test]
fn what_the_cpp_library_allocates_is_counted_exactly_for_its_callers() {
    let _turn = turn();
    assert_exact_with_exceptions(&trace(Fixture::Strings, &[], Unwind::Auto, Unit::Bytes), Unwind::Auto);
}

fn assert_exact_with_exceptions(traced: &Traced, unwind: Unwind) {
    traced.assert_own_exact();
    traced.assert_no_losses();
    // Exceptions are allocated by the C++ library, and freed when they are caught.
    assert_only(traced, &[], &["__cxa_allocate_exception"], unwind);
    let exceptions: u64 = traced.all.json.foreign.values().map(|amount| amount.count).sum();
    assert_eq!(exceptions, traced.truth.fact("exceptions"), "exceptions thrown");
}

/// Panics unless in every path that is not the fixture's own, the allocator function was called by one of those given for
/// the view, and unless the path is whole, or says that it is not.
fn assert_only(traced: &Traced, unfreed: &[&str], all: &[&str], unwind: Unwind) {
    let roots = traced.truth.roots();
    for (view, callers) in [(&traced.unfreed, unfreed), (&traced.all, all)] {
        for path in view.foreign() {
            let mut frames = path.iter().rev().skip(1).map(String::as_str);
            let caller = frames.find(|frame| !WRAPPERS.contains(frame)).unwrap_or_default();
            let caller = caller.split_once('+').map_or(caller, |(module, _)| module);
            assert!(callers.contains(&caller), "no one was to allocate by {}", path.join(";"));
            if unwind == Unwind::FramePointers && path[0].starts_with(TRUNCATED) {
                continue;
            }
            let root = path.iter().position(|frame| roots.contains(frame.as_str()));
            assert_start(path, root.unwrap_or_else(|| panic!("no root: {}", path.join(";"))), unwind);
        }
    }
}
