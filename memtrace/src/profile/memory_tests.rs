//! Sums over processes are exact, line by line.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::collect::{
    attribution::Source,
    blocks::BlockBytes,
    reconcile::{Line, Part, RssByKind},
};

fn pages(anon: u64, file: u64, shmem: u64) -> Pages {
    Pages { anon, file, shmem }
}

fn stack_pages(first: u64) -> StackPages {
    StackPages { pages: pages(first, first + 1, first + 2), by_source: std::array::from_fn(|at| first + at as u64) }
}

/// One that adds up, with a heap that was traced or not.
fn reconciliation(seed: u64, heap: bool) -> Reconciliation {
    let parts: &[Part] = if heap {
        &[Part::TracedHeap, Part::AllocatorRetained, Part::Stacks, Part::FileBacked]
    } else {
        &[Part::UntracedAllocator, Part::Stacks, Part::SharedMemory]
    };
    let line = |(at, part): (usize, &Part)| Line {
        part: *part,
        change: seed as i64 * 1000 - at as i64 * 4096,
        resident: seed + at as u64,
    };
    let lines: Vec<Line> = parts.iter().enumerate().map(line).collect();
    let explained: i64 = lines.iter().map(|line| line.change).sum();
    let (before, after) = (1 << 30, (1 << 30) + seed * 777);
    Reconciliation {
        processes: 1,
        before: RssByKind { total: before, scanned: pages(seed, 2, 3) },
        after: RssByKind { total: after, scanned: pages(seed + 7, 5, 6) },
        heap: heap.then_some(BlockBytes { requested: seed, resident: seed / 2, new: seed / 3 }),
        lines,
        unexplained: after as i64 - before as i64 - explained,
    }
}

fn memory(seed: u64, heap: bool) -> Memory {
    Memory {
        processes: 1,
        faults: Some(FaultCounts { user: seed, kernel: seed + 1, counted: Some(seed * 2 + 1) }),
        growth: Some(GrowthSummary {
            processes: 1,
            new: stack_pages(seed),
            unattributed: pages(seed, 1, 2),
            gone: pages(3, seed, 4),
        }),
        calls: seed * 10,
        calls_lost: seed,
        audit: Some(Audit { not_mapped: seed * 4096, unowned: 8192 }),
        reconciliation: Some(reconciliation(seed, heap)),
        looked_before_end: Some(Duration::from_millis(seed)),
    }
}

#[test]
fn every_number_is_the_sum() {
    let sum = memory(5, true).plus(memory(70, true));
    assert_eq!(sum.processes, 2);
    assert_eq!(sum.faults, Some(FaultCounts { user: 75, kernel: 77, counted: Some(152) }));
    let growth = sum.growth.unwrap();
    assert_eq!((growth.processes, growth.new.pages), (2, pages(75, 77, 79)));
    assert_eq!(growth.new.by_source, std::array::from_fn::<u64, { Source::ALL.len() }, _>(|at| 75 + 2 * at as u64));
    assert_eq!((growth.unattributed, growth.gone), (pages(75, 2, 4), pages(6, 75, 8)));
    assert_eq!((sum.calls, sum.calls_lost), (750, 75));
    assert_eq!(sum.audit, Some(Audit { not_mapped: 75 * 4096, unowned: 16_384 }));
    assert_eq!(sum.looked_before_end, Some(Duration::from_millis(70)));
    let (one, other, all) = (reconciliation(5, true), reconciliation(70, true), sum.reconciliation.unwrap());
    assert_eq!(all.processes, 2);
    assert_eq!(all.heap, Some(BlockBytes { requested: 75, resident: 37, new: 24 }));
    assert_eq!(all.before, RssByKind { total: 2 << 30, scanned: pages(75, 4, 6) });
    assert_eq!(all.after, RssByKind { total: (2 << 30) + 75 * 777, scanned: pages(89, 10, 12) });
    assert_eq!(all.unexplained, one.unexplained + other.unexplained);
    for ((one, other), all) in one.lines.iter().zip(&other.lines).zip(&all.lines) {
        assert_eq!((all.part, all.change), (one.part, one.change + other.change));
        assert_eq!(all.resident, one.resident + other.resident);
    }
}

/// Of processes with other lines too, and in any order.
#[test]
fn sums_add_up_as_their_parts_do() {
    let all = [(1, true), (22, false), (333, true), (4444, false)].map(|(seed, heap)| reconciliation(seed, heap));
    let sum = |all: &mut dyn Iterator<Item = &Reconciliation>| all.cloned().reduce(Reconciliation::plus).unwrap();
    let forwards = sum(&mut all.iter());
    assert_eq!(forwards, sum(&mut all.iter().rev()));
    assert_eq!(forwards.processes, 4);
    let parts: Vec<Part> = forwards.lines.iter().map(|line| line.part).collect();
    let expected = [
        Part::TracedHeap,
        Part::AllocatorRetained,
        Part::UntracedAllocator,
        Part::Stacks,
        Part::FileBacked,
        Part::SharedMemory,
    ];
    assert_eq!(parts, expected);
    let explained: i64 = forwards.lines.iter().map(|line| line.change).sum();
    assert_eq!(explained + forwards.unexplained, forwards.change());
    assert_eq!(forwards.change(), all.iter().map(Reconciliation::change).sum::<i64>());
    assert_eq!(forwards.heap.unwrap().requested, 334);
}

#[test]
fn what_is_known_of_some_says_of_how_many() {
    let unknown = Memory {
        faults: None,
        growth: None,
        audit: None,
        reconciliation: None,
        looked_before_end: None,
        ..memory(9, true)
    };
    let sum = unknown.clone().plus(memory(5, true)).plus(unknown);
    assert_eq!(sum.processes, 3);
    assert_eq!(sum.reconciliation, Some(reconciliation(5, true)));
    assert_eq!(sum.growth.unwrap().processes, 1);
    assert_eq!(sum.calls, 230);
    // The kernel's count of some of them can't be held against all faults seen.
    let uncounted = FaultCounts { user: 1, kernel: 1, counted: None };
    assert_eq!(memory(5, true).faults.unwrap().plus(uncounted).counted, None);
}
