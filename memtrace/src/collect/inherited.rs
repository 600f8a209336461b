//! The pages that were resident at the start, as the target's calls move and unmap them.

use std::collections::BTreeMap;

use memtrace_common::fault::PAGE;

use crate::target::pages::{PageRange, Pages};

/// Pages taken out, kept until it is known whether the call succeeded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TakenPages(Vec<PageRange>);

/// Pages that were resident at the start, at the addresses where their memory is now.
#[derive(Clone, Debug, Default)]
pub struct Inherited {
    /// By their first page.
    ranges: BTreeMap<u64, PageRange>,
    gone: Pages,
    /// When they were looked at, nanoseconds of `CLOCK_MONOTONIC`: what happened before does not concern them.
    since: u64,
}

impl Inherited {
    /// From a scan that was made at the time `since`, nanoseconds of `CLOCK_MONOTONIC`.
    pub fn new(ranges: &[PageRange], since: u64) -> Self {
        Self { ranges: ranges.iter().map(|range| (range.first, *range)).collect(), gone: Pages::default(), since }
    }

    /// Whether something that happened at this time concerns them.
    pub fn concerns(&self, time: u64) -> bool {
        time >= self.since
    }

    /// Their memory is about to be unmapped, or moved.
    pub fn take(&mut self, address: u64, length: u64) -> TakenPages {
        let (first, end) = (address / PAGE, address.saturating_add(length).div_ceil(PAGE));
        let mut taken = Vec::new();
        while let Some((_, &range)) = self.ranges.range(..end).next_back()
            && range.end() > first
        {
            self.ranges.remove(&range.first);
            self.put(range, end, range.end());
            let (from, to) = (range.first.max(first), range.end().min(end));
            taken.push(part(range, from, to));
            if range.first < first {
                self.put(range, range.first, first);
                break;
            }
        }
        TakenPages(taken)
    }

    /// The call failed.
    pub fn restore(&mut self, taken: TakenPages) {
        for range in taken.0 {
            self.put(range, range.first, range.end());
        }
    }

    /// The call succeeded: the pages are no more.
    pub fn drop_taken(&mut self, taken: &TakenPages) {
        for range in &taken.0 {
            self.gone.add(range.kind, u64::from(range.count));
        }
    }

    /// The call moved the memory from one address to another, `length` bytes of it; what was at the new address is no more.
    pub fn moved(&mut self, taken: TakenPages, from: u64, to: u64, length: u64) {
        let replaced = self.take(to, length);
        self.drop_taken(&replaced);
        let (from, to, pages) = (from / PAGE, to / PAGE, length.div_ceil(PAGE));
        for range in taken.0 {
            let kept = range.end().min(from.saturating_add(pages));
            if range.first < kept {
                let first = range.first.wrapping_sub(from).wrapping_add(to);
                let moved = part(range, range.first, kept);
                self.ranges.insert(first, PageRange { first, ..moved });
            }
            let rest = range.end().saturating_sub(kept.max(range.first));
            self.gone.add(range.kind, rest);
        }
    }

    /// The pages where they are now, ascending, and those that are gone.
    pub fn finish(&self) -> (Vec<PageRange>, Pages) {
        (self.ranges.values().copied().collect(), self.gone)
    }

    /// Adds the part of a range between two pages.
    fn put(&mut self, range: PageRange, first: u64, end: u64) {
        let first = first.max(range.first);
        if first < end {
            self.ranges.insert(first, part(range, first, end));
        }
    }
}

/// The part of a range between two of its pages.
fn part(range: PageRange, first: u64, end: u64) -> PageRange {
    PageRange { first, count: u32::try_from(end - first).unwrap_or(u32::MAX), ..range }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{collect::random::Random, target::pages::PageKind};

    fn range(first: u64, count: u32) -> PageRange {
        PageRange { first, count, kind: PageKind::Anon, huge: false }
    }

    fn pages(inherited: &Inherited) -> Vec<(u64, u64)> {
        inherited.finish().0.iter().map(|range| (range.first, range.end())).collect()
    }

    #[test]
    fn what_is_unmapped_is_gone_and_what_is_moved_is_elsewhere() {
        let mut inherited = Inherited::new(&[range(10, 10), range(30, 5)], 7);
        assert!(!inherited.concerns(6) && inherited.concerns(7));
        let taken = inherited.take(12 * PAGE, 3 * PAGE);
        inherited.drop_taken(&taken);
        assert_eq!(pages(&inherited), [(10, 12), (15, 20), (30, 35)]);
        let taken = inherited.take(15 * PAGE, 20 * PAGE);
        inherited.moved(taken, 15 * PAGE, 100 * PAGE, 17 * PAGE);
        assert_eq!(pages(&inherited), [(10, 12), (100, 105), (115, 117)]);
        assert_eq!(inherited.finish().1.anon, 3 + 3);
        let taken = inherited.take(0, 200 * PAGE);
        assert_eq!(pages(&inherited), []);
        inherited.restore(taken);
        assert_eq!(pages(&inherited), [(10, 12), (100, 105), (115, 117)]);
    }

    #[test]
    fn the_same_as_page_by_page() {
        let mut random = Random::new(11);
        let mut below = move |end: u64| random.below(end);
        let mut inherited = Inherited::new(&[range(0, 20), range(40, 30)], 0);
        let mut model: BTreeMap<u64, u64> = (0..20).chain(40..70).map(|page| (page, page)).collect();
        let whole = model.len() as u64;
        for _ in 0..2000 {
            let (from, length, to) = (below(90), 1 + below(12), 100 + below(90));
            let here: Vec<u64> = model.range(from..from + length).map(|(page, _)| *page).collect();
            let taken = inherited.take(from * PAGE, length * PAGE);
            match below(3) {
                0 => inherited.restore(taken),
                1 if below(8) == 0 => {
                    inherited.drop_taken(&taken);
                    for page in &here {
                        model.remove(page);
                    }
                }
                _ => {
                    let (from, to) =
                        if below(2) == 0 { (from, to) } else { (from, to - 100 + if from < 45 { 45 } else { 0 }) };
                    let overlaps = to < from + length && from < to + length;
                    if overlaps {
                        inherited.restore(taken);
                        continue;
                    }
                    inherited.moved(taken, from * PAGE, to * PAGE, length * PAGE);
                    let moved: Vec<(u64, u64)> =
                        here.iter().map(|page| (*page, model.remove(page).unwrap_or(0))).collect();
                    let replaced: Vec<u64> = model.range(to..to + length).map(|(page, _)| *page).collect();
                    for page in &replaced {
                        model.remove(page);
                    }
                    model.extend(moved.into_iter().map(|(page, origin)| (page - from + to, origin)));
                }
            }
            let (ranges, gone) = inherited.finish();
            let there: Vec<u64> = ranges.iter().flat_map(|range| range.first..range.end()).collect();
            assert_eq!(there, model.keys().copied().collect::<Vec<_>>());
            assert_eq!(gone.anon, whole - model.len() as u64);
        }
    }
}
