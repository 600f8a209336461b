#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;

use memtrace_common::fault::Fault;

use super::*;
use crate::{collect::random::Random, target::pages::Role};
use PageKind::{Anon, File, Shmem};

fn range(first: u64, count: u32, kind: PageKind) -> PageRange {
    PageRange { first, count, kind, huge: false }
}

fn huge(first: u64, count: u32) -> PageRange {
    PageRange { huge: true, ..range(first, count, Anon) }
}

fn area(first: u64, end: u64) -> Area {
    Area { start: first * PAGE, end: end * PAGE, role: Role::Anonymous, shared: false }
}

fn read(stack: u32) -> Option<Fault> {
    Some(Fault { stack, write: false, late: true })
}

fn write(stack: u32) -> Option<Fault> {
    Some(Fault { stack, write: true, late: true })
}

fn early(fault: Option<Fault>) -> Option<Fault> {
    fault.map(|fault| Fault { late: false, ..fault })
}

type Record = (u64, Option<Fault>, Option<Fault>);

/// First page, page after the last, kind, stack, source.
type New = (u64, u64, PageKind, Option<u32>, Source);

fn run(
    before: &[PageRange],
    after: &[PageRange],
    areas: &[Area],
    records: &[Record],
    owner: impl FnMut(u64) -> (Option<MappingCall>, u64),
) -> (Vec<New>, PageGrowth) {
    let records = records.iter().map(|(page, absent, copied)| (*page, PageRecord { absent: *absent, copied: *copied }));
    let mut new = Vec::new();
    let growth = attribute(Seen { before, after, areas }, records, owner, |pages| {
        new.push((pages.first, pages.end, pages.kind, pages.stack, pages.source));
    });
    (new, growth)
}

fn nobody(_: u64) -> (Option<MappingCall>, u64) {
    (None, u64::MAX)
}

/// With one mapping over everything and no owner.
fn attributed(before: &[PageRange], after: &[PageRange], records: &[Record]) -> (Vec<New>, PageGrowth) {
    run(before, after, &[area(0, 1 << 30)], records, nobody)
}

#[test]
fn own_faults_of_anonymous_pages() {
    let after = [range(10, 5, Anon)];
    let records = [
        (10, write(1), None),
        (11, read(2), write(3)),
        (12, None, write(4)),
        (13, read(5), None),
        (14, write(6), write(7)),
        (15, write(8), None),
    ];
    let stacks: Vec<_> = attributed(&[], &after, &records).0.iter().map(|new| (new.3, new.4)).collect();
    assert_eq!(stacks, [1, 3, 4, 5, 6].map(|stack| (Some(stack), Source::OwnFault)));
}

#[test]
fn own_faults_of_file_and_shared_pages() {
    let after = [range(10, 2, File), range(12, 1, Shmem)];
    let records = [(10, read(1), write(2)), (11, write(3), None), (12, write(4), write(5))];
    let (new, growth) = attributed(&[], &after, &records);
    let stacks: Vec<_> = new.iter().map(|new| new.3.unwrap()).collect();
    assert_eq!(stacks, [1, 3, 4]);
    assert_eq!(growth.by_stack[&4].pages, Pages { shmem: 1, ..Pages::default() });
    assert_eq!(growth.new.pages, Pages { anon: 0, file: 2, shmem: 1 });
}

#[test]
fn present_pages_are_no_growth_unless_given_back_meanwhile() {
    let pages = [range(10, 6, Anon)];
    let records = [
        (10, early(write(1)), None),
        (11, None, write(2)),
        (12, early(read(3)), write(4)),
        (13, write(5), None),
        (14, read(6), write(7)),
    ];
    let (new, growth) = attributed(&pages, &pages, &records);
    let expected = [(13, 14, Anon, Some(5), Source::OwnFault), (14, 15, Anon, Some(7), Source::OwnFault)];
    assert_eq!(new, expected);
    assert_eq!(growth.gone, Pages { anon: 2, ..Pages::default() });
}

#[test]
fn a_written_file_page_is_a_new_anonymous_one() {
    let records =
        [(10, None, write(1)), (11, early(read(2)), None), (12, early(read(3)), early(write(4))), (40, write(5), None)];
    let (new, growth) = attributed(&[range(10, 3, File)], &[range(10, 3, Anon)], &records);
    let expected = [
        (10, 11, Anon, Some(1), Source::OwnFault),
        (11, 12, Anon, Some(1), Source::Window),
        (12, 13, Anon, Some(4), Source::OwnFault),
    ];
    assert_eq!(new, expected);
    assert_eq!(growth.gone, Pages { file: 3, ..Pages::default() });
    assert_eq!(growth.new.pages, Pages { anon: 3, ..Pages::default() });
}

#[test]
fn pages_gone_need_no_record() {
    let records = [(11, write(1), None), (700, write(2), None)];
    let before = [range(10, 4, Anon), range(512, 1024, Shmem)];
    let (new, growth) = attributed(&before, &[range(513, 10, Shmem)], &records);
    assert!(new.is_empty());
    assert_eq!(growth.gone, Pages { anon: 4, file: 0, shmem: 1014 });
}

#[test]
fn tails_of_a_huge_page_belong_to_its_fault() {
    let (new, growth) = attributed(&[], &[huge(512, 1024)], &[(700, write(1), None), (1024, write(2), None)]);
    let expected = [
        (512, 700, Anon, Some(1), Source::HugePage),
        (700, 701, Anon, Some(1), Source::OwnFault),
        (701, 1024, Anon, Some(1), Source::HugePage),
        (1024, 1025, Anon, Some(2), Source::OwnFault),
        (1025, 1536, Anon, Some(2), Source::HugePage),
    ];
    assert_eq!(new, expected);
    assert_eq!(growth.by_stack[&1].by_source, [1, 511, 0, 0, 0, 0, 0]);
}

#[test]
fn neighbours_in_the_window_go_before_nearer_ones() {
    // Windows start at 32 and 48.
    let records = [(30, read(1), None), (40, read(2), None), (60, read(3), None)];
    let (new, _) = attributed(&[], &[range(28, 40, File)], &records);
    let expected = [
        (28, 30, File, Some(1), Source::Window),
        (30, 31, File, Some(1), Source::OwnFault),
        (31, 32, File, Some(1), Source::Window),
        (32, 40, File, Some(2), Source::Window),
        (40, 41, File, Some(2), Source::OwnFault),
        (41, 48, File, Some(2), Source::Window),
        (48, 60, File, Some(3), Source::Window),
        (60, 61, File, Some(3), Source::OwnFault),
        (61, 64, File, Some(3), Source::Window),
        (64, 68, File, Some(3), Source::Nearest),
    ];
    assert_eq!(new, expected);
}

#[test]
fn a_fault_whose_own_page_has_gone_still_has_neighbours() {
    let (new, _) =
        attributed(&[], &[range(515, 5, File), range(700, 2, Anon)], &[(512, read(1), None), (610, write(2), None)]);
    let expected = [(515, 520, File, Some(1), Source::Window), (700, 702, Anon, Some(2), Source::Nearest)];
    assert_eq!(new, expected);
}

#[test]
fn neighbours_end_with_the_mapping_and_with_two_mebibytes() {
    let records = [(500, read(1), None), (1020, read(2), None)];
    let areas = [area(480, 505), area(505, 520)];
    let (new, _) = run(&[], &[range(498, 20, File)], &areas, &records, nobody);
    let expected = [
        (498, 500, File, Some(1), Source::Window),
        (500, 501, File, Some(1), Source::OwnFault),
        (501, 505, File, Some(1), Source::Window),
        (505, 518, File, None, Source::Unattributed),
    ];
    assert_eq!(new, expected);
    let (new, _) = attributed(&[], &[range(498, 20, File)], &records);
    assert_eq!(new[2..], [(501, 512, File, Some(1), Source::Window), (512, 518, File, Some(2), Source::Nearest)]);
}

#[test]
fn a_neighbour_from_before_made_nothing_new() {
    let records = [(32, early(read(1)), None), (34, early(read(2)), None)];
    let (new, _) = attributed(&[range(32, 1, File)], &[range(32, 2, File)], &records);
    assert_eq!(new, [(33, 34, File, Some(2), Source::Window)]);
    let (new, _) = attributed(&[range(32, 1, File)], &[range(32, 2, File)], &records[..1]);
    assert_eq!(new, [(33, 34, File, None, Source::Unattributed)]);
}

#[test]
fn calls_that_map_and_calls_that_populate() {
    let owner = |page: u64| match page {
        ..100 => (Some(MappingCall { stack: 8, populates: false }), 100),
        100..200 => (Some(MappingCall { stack: 9, populates: true }), 200),
        _ => (None, u64::MAX),
    };
    let after = [range(90, 20, Anon), huge(512, 512), range(5000, 5000, Anon)];
    let (new, growth) = run(&[], &after, &[area(0, 1 << 20)], &[(99, write(1), None), (600, write(2), None)], owner);
    let expected = [
        (90, 96, Anon, Some(1), Source::Nearest),
        (96, 99, Anon, Some(1), Source::Window),
        (99, 100, Anon, Some(1), Source::OwnFault),
        (100, 110, Anon, Some(9), Source::Populated),
        (512, 600, Anon, Some(2), Source::HugePage),
        (600, 601, Anon, Some(2), Source::OwnFault),
        (601, 1024, Anon, Some(2), Source::HugePage),
        (5000, 10000, Anon, None, Source::Unattributed),
    ];
    assert_eq!(new, expected);
    assert_eq!(growth.unattributed.anon, 5000);
    let (new, _) = run(&[], &[range(90, 2000, Anon)], &[], &[], owner);
    let expected = [
        (90, 100, Anon, Some(8), Source::Mapping),
        (100, 200, Anon, Some(9), Source::Populated),
        (200, 2090, Anon, None, Source::Unattributed),
    ];
    assert_eq!(new, expected);
}

#[test]
fn chunks_to_records() {
    let mut chunk = Chunk { pages: [0; CHUNK_PAGES] };
    chunk.pages[3] = write(4).unwrap().pack().into();
    let expected = [(7 * 64 + 3, PageRecord { absent: write(4), copied: None })];
    assert_eq!(records(&[(7, chunk)]).collect::<Vec<_>>(), expected);
    assert_eq!(records(&[(u64::MAX, chunk)]).count(), 0);
}

/// Random ascending ranges below `space`.
fn ranges(random: &mut Random, space: u64) -> Vec<PageRange> {
    let mut ranges = Vec::new();
    let mut page = random.below(50);
    while page < space {
        let count = match random.below(10) {
            0 => 600 + random.below(2000),
            _ => 1 + random.below(40),
        } as u32;
        let kind = PageKind::ALL[random.below(3) as usize];
        ranges.push(PageRange { first: page, count, kind, huge: random.below(4) == 0 });
        page += u64::from(count) + if random.below(2) == 0 { 0 } else { random.below(300) };
    }
    ranges
}

fn by_page(ranges: &[PageRange]) -> BTreeMap<u64, PageKind> {
    ranges.iter().flat_map(|range| (range.first..range.end()).map(|page| (page, range.kind))).collect()
}

fn sum(ranges: &[PageRange]) -> Pages {
    let mut pages = Pages::default();
    ranges.iter().for_each(|range| pages.add(range.kind, u64::from(range.count)));
    pages
}

#[test]
fn new_minus_gone_is_the_difference() {
    const SPACE: u64 = 6000;
    for seed in 0..100 {
        let mut random = Random::new(seed);
        let (before, after) = (ranges(&mut random, SPACE), ranges(&mut random, SPACE));
        let areas = [area(0, 1000), area(1000, 1700), area(2000, SPACE * 2)];
        let fault = |random: &mut Random| {
            let fault = Fault { stack: random.below(5) as u32, write: random.below(2) == 0, late: random.below(3) > 0 };
            (random.below(2) == 0).then_some(fault)
        };
        let mut records = Vec::new();
        let mut page = 0;
        while page < SPACE {
            records.push((page, fault(&mut random), fault(&mut random)));
            let most = if random.below(2) == 0 { 3 } else { 700 };
            page += 1 + random.below(most);
        }
        let owner = |page: u64| match page / 77 % 3 {
            0 => (None, page + 1),
            owner => (Some(MappingCall { stack: 10 + owner as u32, populates: owner == 1 }), page / 77 * 77 + 77),
        };
        let (new, growth) = run(&before, &after, &areas, &records, owner);
        assert_eq!(growth.new.pages - growth.gone, sum(&after) - sum(&before), "seed {seed}");

        // Each new page once, of the kind that it has, by its own fault if it has one.
        let (were, are) = (by_page(&before), by_page(&after));
        let records: BTreeMap<_, _> =
            records.into_iter().map(|(page, absent, copied)| (page, (absent, copied))).collect();
        let expected: Vec<_> = are
            .iter()
            .filter(|(page, kind)| {
                let again = records.get(page).is_some_and(|(absent, _)| absent.is_some_and(|fault| fault.late));
                were.get(page) != Some(kind) || again
            })
            .map(|(page, kind)| (*page, *kind))
            .collect();
        let found: Vec<_> = new.iter().flat_map(|new| (new.0..new.1).map(|page| (page, new.2))).collect();
        assert_eq!(found, expected, "seed {seed}");

        let mut total = StackPages { pages: growth.unattributed, ..StackPages::default() };
        total.by_source[Source::Unattributed as usize] = growth.unattributed.total();
        for pages in growth.by_stack.values() {
            total.pages = total.pages + pages.pages;
            (0..total.by_source.len()).for_each(|source| total.by_source[source] += pages.by_source[source]);
        }
        assert_eq!(total, growth.new, "seed {seed}");
    }
}

#[test]
fn records_out_of_order_and_damaged_areas_are_survived() {
    let records = [(900, write(1), None), (20, write(2), None), (u64::MAX, write(3), None), (901, write(4), None)];
    let areas = [area(500, 100), area(50, 60), area(0, 1)];
    let after = [range(10, 2000, Anon), range(u64::MAX - 9, u32::MAX, Anon)];
    let (_, growth) = run(&[], &after, &areas, &records, |_| (None, 0));
    assert_eq!(growth.new.pages.anon, 2009);
}

#[test]
fn many_pages() {
    const PAGES: u64 = 1 << 19;
    for density in [1, 64, 100_000_000] {
        let after = [range(0, PAGES as u32, Anon)];
        let fault = |page: u64| Fault { stack: (page / 1000 % 50) as u32, write: true, late: true };
        let records = (0..PAGES / density + 1).map(|number| {
            let page = number * density;
            (page, PageRecord { absent: Some(fault(page)), copied: None })
        });
        let seen = Seen { before: &[], after: &after, areas: &[area(0, PAGES)] };
        let growth = attribute(seen, records, nobody, |_| {});
        assert_eq!(growth.new.pages.anon, PAGES);
        assert_eq!(growth.new.by_source[Source::OwnFault as usize], PAGES.div_ceil(density));
    }
}
