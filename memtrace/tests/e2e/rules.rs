//! The rules that decide whether the numbers are true, one program each.

use crate::support::{
    build::Fixture,
    compare::Unit,
    kernel,
    root::turn,
    start::Unwind,
    trace::{Trace, Traced, assert_exactly_true},
    truth::Paths,
};

const BOTH: [Unwind; 2] = [Unwind::Auto, Unwind::FramePointers];

fn exact(rule: &str) {
    let _turn = turn();
    for unwind in BOTH {
        assert_exactly_true(Fixture::Rules, &[rule], unwind, Unit::Bytes);
    }
}

fn trace(rule: &str, unwind: Unwind) -> Traced {
    Trace { fixture: Fixture::Rules, arguments: &[rule], options: &[], unwind }.run(Unit::Bytes)
}

#[test]
fn a_call_inside_another_counts_once_under_the_outer_name() {
    exact("nesting");
}

#[test]
fn a_failed_realloc_leaves_the_old_block_on_its_path() {
    exact("realloc-failed");
}

#[test]
fn an_array_size_that_wraps_to_zero_is_a_failure_and_no_free() {
    exact("realloc-overflow-to-zero");
}

#[test]
fn realloc_to_zero_frees() {
    exact("realloc-to-zero");
}

#[test]
fn realloc_in_place_smaller_of_null_and_of_old_blocks() {
    exact("realloc-moves");
}

#[test]
fn calls_that_give_no_block_do_not_count() {
    exact("no-block");
}

#[test]
fn blocks_of_zero_bytes_count() {
    exact("zero-size");
}

#[test]
fn free_of_null_and_cfree() {
    exact("frees");
}

/// Rules about calls that never return: everything else stays exact, and the calls themselves are losses with a
/// reason, not silence.
fn exact_with_abandoned_calls(rule: &str, unwinds: &[Unwind]) {
    let _turn = turn();
    for unwind in unwinds {
        let traced = trace(rule, *unwind);
        traced.assert_own_exact();
        assert_calls_abandoned(&traced);
    }
}

fn assert_calls_abandoned(traced: &Traced) {
    assert!(traced.losses.contains_key("abandoned"), "calls that never returned are not mentioned");
    assert_eq!(traced.losses.len(), 1, "other losses: {:#?}", traced.losses);
    assert!(traced.lower_bound);
    assert!(traced.memtrace.stderr.contains("without a return"), "{}", traced.memtrace.stderr);
}

#[test]
fn a_longjmp_out_of_realloc_does_not_blind_the_frame() {
    exact_with_abandoned_calls("longjmp-same-frame", &BOTH);
}

#[test]
fn a_longjmp_out_of_realloc_does_not_blind_shallower_calls() {
    exact_with_abandoned_calls("longjmp-to-shallower", &BOTH);
}

#[test]
fn a_longjmp_out_of_realloc_does_not_blind_deeper_calls() {
    exact_with_abandoned_calls("longjmp-to-deeper", &BOTH);
}

#[test]
fn a_longjmp_whose_frame_remains_on_the_stack_does_not_blind_deeper_calls() {
    exact_with_abandoned_calls("longjmp-over-remains", &[Unwind::Auto]);
}

/// What was pushed above the call that was left cannot be told from the call itself by frame pointers, which the
/// allocator's own functions lack: calls are taken for nested ones. Exactly those are said to be lost, the last of them
/// too, after which the thread makes no call that would show it.
#[test]
fn a_longjmp_whose_frame_remains_on_the_stack_is_a_counted_loss_by_frame_pointers() {
    let _turn = turn();
    let traced = trace("longjmp-over-remains", Unwind::FramePointers);
    assert!(traced.lower_bound);
    assert!(traced.memtrace.stderr.contains("never returned"), "{}", traced.memtrace.stderr);
    let reasons: Vec<&str> = traced.losses.keys().map(String::as_str).collect();
    assert_eq!(reasons, ["abandoned", "hidden"]);
    let sum = |paths: &Paths| paths.values().fold((0, 0), |sum, held| (sum.0 + held.bytes, sum.1 + held.count));
    let (truth, reported) = (sum(&traced.truth.all), sum(&traced.all.json.own));
    let hidden = traced.losses["hidden"];
    assert_eq!((truth.0 - reported.0, truth.1 - reported.1), (hidden.bytes, hidden.count));
    traced.assert_nothing_else();
    assert_not_too_much(&traced);
}

fn assert_not_too_much(traced: &Traced) {
    for (view, truth) in [(&traced.unfreed, &traced.truth.unfreed), (&traced.all, &traced.truth.all)] {
        for (path, held) in &view.json.own {
            let most = truth.get(path).copied().unwrap_or_default();
            assert!(held.bytes <= most.bytes && held.count <= most.count, "too much by {}", path.join(";"));
        }
    }
}

#[test]
fn a_thread_that_ends_inside_realloc_is_mentioned_and_harms_nothing() {
    exact_with_abandoned_calls("thread-ends-inside", &BOTH);
}

#[test]
fn a_longjmp_out_of_free_does_not_matter() {
    exact("longjmp-from-free");
}

#[test]
fn an_address_freed_by_one_thread_and_given_to_another_is_right() {
    exact("address-reuse");
}

#[test]
fn thousands_of_short_threads_are_counted_exactly() {
    exact("many-threads");
}

/// Frees that nobody saw: the old block is replaced, its path settled, and each is counted.
fn conflict(rule: &str) {
    let _turn = turn();
    for unwind in BOTH {
        let traced = trace(rule, unwind);
        traced.assert_own_exact();
        traced.assert_nothing_else();
        let missed = traced.losses.get("conflict").copied().unwrap_or_default();
        assert_eq!(missed.count, traced.truth.fact("conflicts"), "{:#?}", traced.losses);
        let freed: u64 = traced.truth.all.values().map(|amount| amount.bytes).sum::<u64>()
            - traced.truth.unfreed.values().map(|amount| amount.bytes).sum::<u64>();
        assert_eq!(missed.bytes, freed, "{:#?}", traced.losses);
        assert_eq!(traced.losses.len(), 1, "{:#?}", traced.losses);
    }
}

#[test]
fn a_block_unmapped_behind_the_allocator_is_a_conflict() {
    conflict("conflict-unmapped");
}

#[test]
fn a_block_freed_by_a_vfork_child_is_a_conflict() {
    conflict("conflict-vfork");
}

#[test]
fn as_many_calls_as_the_machine_gives_lose_nothing() {
    let _turn = turn();
    for unwind in BOTH {
        let traced = trace("rate", unwind);
        traced.assert_own_exact();
        traced.assert_nothing_else();
        traced.assert_no_losses();
        // For people only: how fast the machine is decides nothing.
        let rate = traced.truth.fact("pairs_per_second");
        println!("{rate} malloc/free pairs a second, traced, --unwind {}", unwind.name());
    }
}

#[test]
fn a_forked_child_runs_right_and_is_not_counted() {
    exact("fork");
}

#[test]
fn children_that_execute_other_programs_do_not_end_the_trace() {
    exact("spawn");
}

/// Single probes are asked for with the first thread's number, and the kernel takes them out of a process whose first thread
/// has ended (`__uprobe_perf_filter` in kernel/trace/trace_uprobe.c compares with its memory, which it has left).
#[test]
fn a_process_whose_first_thread_has_ended_is_traced_on() {
    if kernel::has(kernel::MANY_SITES) {
        exact("leader-leaves");
    } else {
        let _turn = turn();
        let traced = trace("leader-leaves", Unwind::Auto);
        traced.assert_nothing_else();
        assert_not_too_much(&traced);
    }
}
