#![allow(clippy::unwrap_used, clippy::expect_used)]

use super::*;
use crate::{
    collect::{
        random::Random,
        ranges::{Flags, Operation, Owner},
    },
    target::pages::{Area, Method, PageRange, Role},
};
use PageKind::{Anon, File, Shmem};

fn scan(areas: &[(u64, u64, Role)], ranges: &[(u64, u32, PageKind)]) -> Scan {
    let area = |(first, end, role): &(u64, u64, Role)| Area {
        start: first * PAGE,
        end: end * PAGE,
        role: *role,
        shared: *role == Role::Shmem,
    };
    let range = |(first, count, kind): &(u64, u32, PageKind)| PageRange {
        first: *first,
        count: *count,
        kind: *kind,
        huge: false,
    };
    Scan {
        ranges: ranges.iter().map(range).collect(),
        areas: areas.iter().map(area).collect(),
        swapped: 0,
        hugetlb: 0,
        method: Method::PagemapScan,
        zero_in_doubt: 0,
        unknown_file_systems: 0,
    }
}

/// With the sums that the kernel gives for exactly these pages.
fn look(scan: &Scan) -> Look<'_> {
    Look { scan, rollup: Rollup { rss: scan.pages().total() * PAGE, ..Rollup::default() } }
}

fn block(first: u64, bytes: u64, stack: u32) -> LiveBlock {
    LiveBlock { address: first * PAGE + 16, size: bytes, stack }
}

/// Changes in pages and resident pages, by part.
fn lines(reconciliation: &Reconciliation) -> Vec<(Part, i64, u64)> {
    let page = PAGE as i64;
    reconciliation.lines.iter().map(|line| (line.part, line.change / page, line.resident / PAGE)).collect()
}

fn mapped(ranges: &mut Ranges, first: u64, end: u64, flags: Flags) {
    let owner = Owner { stack: 1, operation: Operation::Mmap, flags, time: first };
    ranges.mapped(first * PAGE, (end - first) * PAGE, owner);
}

const AREAS: [(u64, u64, Role); 8] = [
    (10, 20, Role::File),
    (30, 60, Role::Heap),
    (100, 200, Role::Anonymous),
    (200, 300, Role::Anonymous),
    (300, 400, Role::Anonymous),
    (400, 410, Role::Shmem),
    (500, 550, Role::MainStack),
    (600, 602, Role::Special),
];

#[test]
fn every_page_has_a_line() {
    let before = scan(&AREAS, &[(10, 2, File), (12, 1, Anon), (30, 4, Anon), (540, 3, Anon), (601, 1, File)]);
    let after = scan(
        &AREAS,
        &[
            (10, 1, File),
            (11, 3, Anon),
            (30, 10, Anon),
            (110, 7, Anon),
            (210, 20, Anon),
            (390, 5, Anon),
            (400, 6, Shmem),
            (539, 4, Anon),
            (601, 1, File),
        ],
    );
    // In the mapping at 100 there is a block, at 300 a thread's stack.
    let blocks = [block(33, 2 * PAGE, 1), block(110, 5 * PAGE - 16, 2), block(150, 100, 3)];
    let found = reconcile(look(&before), look(&after), Some(&blocks), None, &[394 * PAGE + 8, 541 * PAGE]);
    assert_eq!(found.unexplained, 0);
    assert_eq!(found.unexplained_share(), Some(0.0));
    assert_eq!(found.change(), 46 * PAGE as i64);
    let heap = found.heap.unwrap();
    assert_eq!(heap, BlockBytes { requested: 7 * PAGE + 84, resident: 7 * PAGE - 16, new: 6 * PAGE });
    // The first block begins on page 33, which was resident before.
    let expected = [
        (Part::TracedHeap, 6, 6),
        (Part::AllocatorRetained, 7, 10),
        (Part::OutsideMappings, 20, 20),
        (Part::Stacks, 6, 9),
        (Part::FileBacked, 1, 5),
        (Part::SharedMemory, 6, 6),
    ];
    assert_eq!(lines(&found), expected);
    assert_eq!(found.before.scanned, Pages { anon: 8, file: 3, shmem: 0 });
    assert_eq!(found.lines.iter().map(|line| line.resident).sum::<u64>(), found.after.total);
}

#[test]
fn an_untraced_heap_is_one_line() {
    let before = scan(&AREAS, &[(30, 4, Anon)]);
    let after = scan(&AREAS, &[(30, 10, Anon), (110, 7, Anon), (210, 3, Anon)]);
    let mut ranges = Ranges::new(10);
    mapped(&mut ranges, 100, 112, Flags { in_allocator: true, ..Flags::default() });
    let found = reconcile(look(&before), look(&after), None, Some(&ranges), &[]);
    assert_eq!(found.heap, None);
    let expected = [
        (Part::UntracedAllocator, 8, 12),
        (Part::OutsideMappings, 8, 8),
        (Part::Stacks, 0, 0),
        (Part::FileBacked, 0, 0),
        (Part::SharedMemory, 0, 0),
    ];
    assert_eq!(lines(&found), expected);
}

#[test]
fn ranges_tell_merged_mappings_apart() {
    let mut ranges = Ranges::new(10);
    mapped(&mut ranges, 110, 120, Flags { thread_stack: true, ..Flags::default() });
    mapped(&mut ranges, 120, 130, Flags { in_allocator: true, ..Flags::default() });
    mapped(&mut ranges, 130, 140, Flags::default());
    mapped(&mut ranges, 140, 150, Flags::default());
    let areas = [(100, 200, Role::Anonymous)];
    let after = scan(&areas, &[(100, 100, Anon)]);
    // The block at 131 makes its range the allocator's; the one at 111 lies on a thread's stack, which stays one.
    let blocks = [block(111, 1, 1), block(131, 1, 1)];
    let found = reconcile(look(&scan(&areas, &[])), look(&after), Some(&blocks), Some(&ranges), &[]);
    let outside = found.lines.iter().find(|line| line.part == Part::OutsideMappings).unwrap();
    assert_eq!(outside.resident, (10 + 10 + 50) * PAGE);
    let stacks = found.lines.iter().find(|line| line.part == Part::Stacks).unwrap();
    assert_eq!(stacks.change, 10 * PAGE as i64);
    let retained = found.lines.iter().find(|line| line.part == Part::AllocatorRetained).unwrap();
    assert_eq!(retained.change, 20 * PAGE as i64 - 1);
    assert_eq!(found.lines[0], Line { part: Part::TracedHeap, change: 1, resident: 1 });
}

#[test]
fn shrinking_memory() {
    let before = scan(&AREAS, &[(30, 10, Anon), (120, 50, Anon), (210, 20, Anon), (300, 8, Anon), (400, 3, Shmem)]);
    // Trimmed; part of the mapping with a block given back; one unmapped, another replaced by a file.
    let areas =
        [(30, 35, Role::Heap), (100, 200, Role::Anonymous), (300, 400, Role::File), (500, 550, Role::MainStack)];
    let after = scan(&areas, &[(30, 5, Anon), (120, 30, Anon), (301, 2, File)]);
    let found = reconcile(look(&before), look(&after), Some(&[block(121, 64, 1)]), None, &[]);
    assert_eq!(found.change(), -54 * PAGE as i64);
    assert_eq!(found.unexplained, 0);
    let expected = [
        (Part::TracedHeap, 0, 0),
        (Part::AllocatorRetained, -25, 34),
        (Part::OutsideMappings, -28, 0),
        (Part::Stacks, 0, 0),
        (Part::FileBacked, 2, 2),
        (Part::SharedMemory, -3, 0),
    ];
    assert_eq!(lines(&found), expected);
    assert_eq!(found.heap.unwrap().resident, 64);
}

#[test]
fn what_does_not_add_up_is_shown() {
    let before = scan(&AREAS, &[]);
    let after = scan(&AREAS, &[(30, 90, Anon)]);
    let rollup = Rollup { rss: 100 * PAGE, ..Rollup::default() };
    let found = reconcile(look(&before), Look { scan: &after, rollup }, Some(&[]), None, &[]);
    assert_eq!(found.unexplained, 10 * PAGE as i64);
    assert_eq!(found.unexplained_share(), Some(0.1));
    // The pages from 60 on are in no mapping.
    assert_eq!(lines(&found)[1..3], [(Part::AllocatorRetained, 30, 30), (Part::OutsideMappings, 60, 60)]);
}

#[test]
fn empty_inputs() {
    let nothing = scan(&[], &[]);
    let found = reconcile(look(&nothing), look(&nothing), None, None, &[]);
    assert_eq!((found.change(), found.unexplained, found.unexplained_share()), (0, 0, None));
    assert!(found.lines.iter().all(|line| line.change == 0 && line.resident == 0));
    let found =
        reconcile(look(&nothing), look(&nothing), Some(&[block(1, 8, 1)]), Some(&Ranges::new(1)), &[0, u64::MAX]);
    assert_eq!(found.heap, Some(BlockBytes { requested: 8, ..BlockBytes::default() }));
}

#[test]
fn lines_add_up_whatever_comes_in() {
    const SPACE: u64 = 400;
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let roles =
            [Role::Heap, Role::MainStack, Role::Anonymous, Role::Anonymous, Role::File, Role::Shmem, Role::Special];
        let mut any = || {
            let (mut areas, mut pages) = (Vec::new(), Vec::new());
            let mut page = 0;
            while page < SPACE {
                let end = page + 1 + random.below(40);
                areas.push((page, end, roles[random.below(7) as usize]));
                page = end + random.below(3) * random.below(20);
            }
            page = 0;
            while page < SPACE {
                let count = 1 + random.below(15);
                pages.push((page, count as u32, PageKind::ALL[random.below(3) as usize]));
                page += count + random.below(3) * random.below(10);
            }
            scan(&areas, &pages)
        };
        let (before, after) = (any(), any());
        let mut ranges = Ranges::new(usize::MAX);
        for _ in 0..20 {
            let first = random.below(SPACE);
            let flags =
                Flags { thread_stack: random.below(4) == 0, in_allocator: random.below(4) == 0, populates: false };
            mapped(&mut ranges, first, first + random.below(30), flags);
        }
        let mut blocks: Vec<_> = (0..40)
            .map(|stack| LiveBlock { address: random.below(SPACE * PAGE), size: random.below(5 * PAGE), stack })
            .collect();
        blocks.sort_by_key(|block| block.address);
        for blocks in [None, Some(&blocks[..])] {
            let found = reconcile(look(&before), look(&after), blocks, Some(&ranges), &[random.below(SPACE) * PAGE]);
            assert_eq!(found.unexplained, 0, "seed {seed}");
            assert_eq!(found.lines.iter().map(|line| line.resident).sum::<u64>(), found.after.total, "seed {seed}");
        }
    }
}
