#![allow(clippy::unwrap_used, clippy::expect_used)]

use super::*;
use crate::collect::random::Random;

/// A call numbered by its stack and time.
fn call(number: u32) -> Owner {
    Owner { stack: number, operation: Operation::Mmap, flags: Flags::default(), time: number.into() }
}

/// First page, page after the last, call.
fn pages(ranges: &Ranges) -> Vec<(u64, u64, u32)> {
    ranges.iter().map(|owned| (owned.start / PAGE, owned.end / PAGE, owned.owner.stack)).collect()
}

fn map(ranges: &mut Ranges, first: u64, end: u64, number: u32) {
    ranges.mapped(first * PAGE, (end - first) * PAGE, call(number));
}

fn to(old: (u64, u64), new: (u64, u64)) -> Move {
    Move { old: old.0 * PAGE, old_length: old.1 * PAGE, new: new.0 * PAGE, new_length: new.1 * PAGE, keeps_old: false }
}

fn area(first: u64, end: u64, role: Role) -> Area {
    Area { start: first * PAGE, end: end * PAGE, role, shared: false }
}

#[test]
fn partial_unmaps_split() {
    let mut ranges = Ranges::new(100);
    map(&mut ranges, 10, 20, 1);
    ranges.take(13 * PAGE, 2 * PAGE);
    assert_eq!(pages(&ranges), [(10, 13, 1), (15, 20, 1)]);
    ranges.take(0, 11 * PAGE);
    ranges.take(19 * PAGE, u64::MAX);
    assert_eq!(pages(&ranges), [(11, 13, 1), (15, 19, 1)]);
    assert_eq!(ranges.at(12 * PAGE + 5), (Some(call(1)), 13 * PAGE));
    assert_eq!(ranges.at(13 * PAGE), (None, 15 * PAGE));
    assert_eq!(ranges.at(19 * PAGE), (None, u64::MAX));
    assert_eq!(ranges.at(u64::MAX), (None, u64::MAX));
}

#[test]
fn fixed_mappings_replace() {
    let mut ranges = Ranges::new(100);
    map(&mut ranges, 10, 20, 1);
    map(&mut ranges, 15, 25, 2);
    map(&mut ranges, 18, 19, 3);
    assert_eq!(pages(&ranges), [(10, 15, 1), (15, 18, 2), (18, 19, 3), (19, 25, 2)]);
    map(&mut ranges, 5, 40, 4);
    assert_eq!(pages(&ranges), [(5, 40, 4)]);
}

#[test]
fn lengths_are_rounded_up_and_nothing_overflows() {
    let mut ranges = Ranges::new(100);
    ranges.mapped(10 * PAGE, 1, call(1));
    ranges.mapped(20 * PAGE, 0, call(2));
    ranges.mapped(u64::MAX - 5, u64::MAX, call(3));
    assert_eq!(pages(&ranges), [(10, 11, 1)]);
    ranges.moved(Taken::default(), to((1, 1), (u64::MAX / PAGE, 9)), call(4));
    ranges.break_moved(u64::MAX, 0, call(5));
    assert!(pages(&ranges).is_empty());
}

#[test]
fn a_failed_unmap_is_taken_back_where_nothing_came_in_between() {
    let mut ranges = Ranges::new(100);
    map(&mut ranges, 10, 14, 1);
    map(&mut ranges, 14, 20, 2);
    let taken = ranges.take(12 * PAGE, 6 * PAGE);
    assert_eq!(pages(&ranges), [(10, 12, 1), (18, 20, 2)]);
    map(&mut ranges, 13, 15, 3);
    ranges.restore(taken);
    assert_eq!(pages(&ranges), [(10, 13, 1), (13, 15, 3), (15, 20, 2)]);
}

#[test]
fn a_moved_range_keeps_its_owners_and_grows_for_the_call() {
    let mut ranges = Ranges::new(100);
    map(&mut ranges, 10, 12, 1);
    map(&mut ranges, 13, 14, 2);
    map(&mut ranges, 31, 33, 3);
    let taken = ranges.take(10 * PAGE, 4 * PAGE);
    // The old range is another thread's before this call returns.
    map(&mut ranges, 10, 11, 4);
    ranges.moved(taken, to((10, 4), (30, 6)), call(5));
    // Page 12, now 32, was mapped before the trace and belongs to nobody.
    assert_eq!(pages(&ranges), [(10, 11, 4), (30, 32, 1), (33, 34, 2), (34, 36, 5)]);

    let taken = ranges.take(30 * PAGE, 6 * PAGE);
    ranges.moved(taken, to((30, 6), (30, 3)), call(6));
    assert_eq!(pages(&ranges), [(10, 11, 4), (30, 32, 1)]);
}

#[test]
fn copies_belong_to_the_call() {
    let mut ranges = Ranges::new(100);
    map(&mut ranges, 10, 14, 1);
    let taken = ranges.take(10 * PAGE, 4 * PAGE);
    ranges.moved(taken, Move { keeps_old: true, ..to((10, 4), (30, 4)) }, call(2));
    ranges.moved(Taken::default(), to((10, 0), (40, 4)), call(3));
    assert_eq!(pages(&ranges), [(10, 14, 1), (30, 34, 2), (40, 44, 3)]);
}

#[test]
fn the_break() {
    let mut ranges = Ranges::new(100);
    ranges.break_moved(10 * PAGE + 8, 12 * PAGE + 8, call(1));
    ranges.break_moved(12 * PAGE + 8, 13 * PAGE - 8, call(2));
    ranges.break_moved(13 * PAGE - 8, 15 * PAGE, call(3));
    assert_eq!(pages(&ranges), [(11, 13, 1), (13, 15, 3)]);
    let taken = ranges.break_moved(15 * PAGE, 11 * PAGE + 1, call(4));
    assert_eq!(pages(&ranges), [(11, 12, 1)]);
    ranges.restore(taken);
    assert_eq!(pages(&ranges), [(11, 13, 1), (13, 15, 3)]);
}

#[test]
fn a_full_table_counts_what_it_loses() {
    let mut ranges = Ranges::new(2);
    map(&mut ranges, 10, 20, 1);
    map(&mut ranges, 30, 40, 2);
    map(&mut ranges, 50, 53, 3);
    assert_eq!(ranges.lost(), Lost { ranges: 1, bytes: 3 * PAGE });
    ranges.take(12 * PAGE, PAGE);
    assert_eq!(ranges.iter().count(), 2);
    assert_eq!(ranges.lost().ranges, 2);
    let sum = ranges.bytes() + ranges.lost().bytes;
    assert_eq!(sum, (10 + 10 + 3 - 1) * PAGE);
}

#[test]
fn the_audit_finds_what_was_missed() {
    let mut ranges = Ranges::new(100);
    map(&mut ranges, 10, 20, 1);
    map(&mut ranges, 30, 40, 2);
    map(&mut ranges, 60, 61, 3);
    let before = [area(1, 5, Role::File), area(18, 33, Role::Anonymous), area(90, 95, Role::MainStack)];
    let now = [
        area(1, 6, Role::File),
        area(8, 15, Role::Anonymous),
        area(17, 35, Role::Anonymous),
        area(38, 39, Role::Anonymous),
        area(80, 95, Role::MainStack),
    ];
    // Missed removals: 15–17, 35–38, 39–40, 60. Missed mappings: 5, 8–10.
    let expected = Audit { not_mapped: 7 * PAGE, unowned: 3 * PAGE };
    assert_eq!(ranges.audit(&before, &now), expected);
    assert_eq!(pages(&ranges), [(10, 15, 1), (17, 20, 1), (30, 35, 2), (38, 39, 2)]);
    assert_eq!(ranges.audit(&before, &[]).not_mapped, 14 * PAGE);
    assert!(pages(&ranges).is_empty());
}

/// The calls of every page, one by one.
#[derive(Clone, Debug, Default, PartialEq)]
struct Model(BTreeMap<u64, u32>);

impl Model {
    fn take(&mut self, first: u64, count: u64) -> Vec<(u64, u32)> {
        (first..first + count).filter_map(|page| self.0.remove(&page).map(|owner| (page, owner))).collect()
    }

    fn map(&mut self, first: u64, count: u64, owner: u32) {
        self.0.extend((first..first + count).map(|page| (page, owner)));
    }
}

#[test]
fn random_calls_against_single_pages() {
    const SPACE: u64 = 64;
    for seed in 0..50 {
        let mut random = Random::new(seed);
        let (mut ranges, mut model) = (Ranges::new(usize::MAX), Model::default());
        let mut pending = Vec::new();
        for number in 0..200u32 {
            let (first, count) = (random.below(SPACE), 1 + random.below(20));
            match random.below(8) {
                0..3 => {
                    map(&mut ranges, first, first + count, number);
                    model.map(first, count, number);
                }
                3 => {
                    ranges.take(first * PAGE, count * PAGE);
                    model.take(first, count);
                }
                4 => pending.push((ranges.take(first * PAGE, count * PAGE), model.take(first, count), first, count)),
                5 if !pending.is_empty() => {
                    let (taken, pages, ..) = pending.swap_remove(random.below(pending.len() as u64) as usize);
                    ranges.restore(taken);
                    for (page, owner) in pages {
                        model.0.entry(page).or_insert(owner);
                    }
                }
                6 if !pending.is_empty() => {
                    let (taken, pages, old, length) = pending.pop().unwrap();
                    let keeps_old = random.below(4) == 0;
                    ranges.moved(taken, Move { keeps_old, ..to((old, length), (first, count)) }, call(number));
                    if keeps_old {
                        for (page, owner) in pages {
                            model.0.entry(page).or_insert(owner);
                        }
                        model.map(first, count, number);
                        continue;
                    }
                    model.take(first, count);
                    let kept = pages.into_iter().filter(|(page, _)| page - old < count);
                    model.0.extend(kept.map(|(page, owner)| (page - old + first, owner)));
                    for page in length..count {
                        model.0.insert(first + page, number);
                    }
                }
                _ => {
                    ranges.break_moved(first * PAGE, (first + count) * PAGE - 7, call(number));
                    model.map(first, count, number);
                }
            }
            let found: Vec<_> = pages(&ranges)
                .iter()
                .flat_map(|(first, end, owner)| (*first..*end).map(|page| (page, *owner)))
                .collect();
            assert_eq!(found, model.0.clone().into_iter().collect::<Vec<_>>(), "seed {seed}, call {number}");
            for page in 0..SPACE + 40 {
                let (owner, until) = ranges.at(page * PAGE);
                assert_eq!(owner.map(|owner| owner.stack), model.0.get(&page).copied());
                assert!(until > page * PAGE);
            }
        }
        assert_eq!(ranges.lost(), Lost::default());
    }
}
