//! What two readings of the resident pages differ by.

use crate::target::pages::{PageKind, PageRange};

/// Consecutive pages that changed, or stayed, alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Number of the first page.
    pub first: u64,
    /// Number of the page after the last.
    pub end: u64,
    /// What they were before; `None`: not resident.
    pub before: Option<PageKind>,
    /// What they are after; `None`: not resident. One of the two is `Some`.
    pub after: Option<PageKind>,
    /// Whether huge page table entries map them after.
    pub huge: bool,
}

impl Change {
    /// What the pages are now that they were not before: a private file page that was written is a new anonymous one.
    pub fn new_kind(&self) -> Option<PageKind> {
        self.after.filter(|_| self.before != self.after)
    }

    /// What the pages were that they are no longer.
    pub fn gone_kind(&self) -> Option<PageKind> {
        self.before.filter(|_| self.before != self.after)
    }

    /// How many pages.
    pub fn pages(&self) -> u64 {
        self.end - self.first
    }
}

/// Every page that is in one of two ascending lists of ranges, as ascending stretches.
pub fn changes<'a>(before: &'a [PageRange], after: &'a [PageRange]) -> impl Iterator<Item = Change> + 'a {
    Changes { before, after, position: 0 }
}

struct Changes<'a> {
    before: &'a [PageRange],
    after: &'a [PageRange],
    /// Pages before this one have been returned.
    position: u64,
}

/// Drops the ranges before `position`, and returns the first that is left with where the rest of it starts and ends.
fn rest(ranges: &mut &[PageRange], position: u64) -> Option<(u64, u64, PageRange)> {
    while let [range, others @ ..] = ranges {
        let start = range.first.max(position);
        if start < range.end() {
            return Some((start, range.end(), *range));
        }
        *ranges = others;
    }
    None
}

impl Iterator for Changes<'_> {
    type Item = Change;

    fn next(&mut self) -> Option<Change> {
        let before = rest(&mut self.before, self.position);
        let after = rest(&mut self.after, self.position);
        let both = || [before, after].into_iter().flatten();
        let first = both().map(|(start, ..)| start).min()?;
        let end = both().map(|(start, end, _)| if start > first { start } else { end }).min()?;
        let here =
            |rest: Option<(u64, u64, PageRange)>| rest.filter(|(start, ..)| *start == first).map(|(.., range)| range);
        self.position = end;
        let (before, after) = (here(before), here(after));
        Some(Change {
            first,
            end,
            before: before.map(|range| range.kind),
            after: after.map(|range| range.kind),
            huge: after.is_some_and(|range| range.huge),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u64, count: u32, kind: PageKind) -> PageRange {
        PageRange { first, count, kind, huge: false }
    }

    fn change(first: u64, end: u64, before: Option<PageKind>, after: Option<PageKind>) -> Change {
        Change { first, end, before, after, huge: false }
    }

    #[test]
    fn stretches_are_cut_where_either_list_changes() {
        use PageKind::{Anon, File};
        let before = [range(10, 10, Anon), range(20, 5, File), range(40, 1, Anon)];
        let after = [range(5, 2, Anon), range(15, 15, Anon), range(40, 1, Anon), range(41, 1, File)];
        let expected = [
            change(5, 7, None, Some(Anon)),
            change(10, 15, Some(Anon), None),
            change(15, 20, Some(Anon), Some(Anon)),
            change(20, 25, Some(File), Some(Anon)),
            change(25, 30, None, Some(Anon)),
            change(40, 41, Some(Anon), Some(Anon)),
            change(41, 42, None, Some(File)),
        ];
        assert_eq!(changes(&before, &after).collect::<Vec<_>>(), expected);
        assert_eq!((expected[3].new_kind(), expected[3].gone_kind()), (Some(Anon), Some(File)));
        assert_eq!((expected[2].new_kind(), expected[2].gone_kind()), (None, None));
    }

    #[test]
    fn empty_lists() {
        assert_eq!(changes(&[], &[]).count(), 0);
        let one = [range(3, 4, PageKind::Shmem)];
        assert_eq!(changes(&one, &[]).collect::<Vec<_>>(), [change(3, 7, Some(PageKind::Shmem), None)]);
        assert_eq!(changes(&[], &one).collect::<Vec<_>>(), [change(3, 7, None, Some(PageKind::Shmem))]);
    }

    #[test]
    fn damaged_lists_end() {
        let most = range(u64::MAX - 3, u32::MAX, PageKind::Anon);
        let overlapping =
            [range(5, 9, PageKind::Anon), range(3, 20, PageKind::File), range(4, 1, PageKind::Anon), most];
        let found: Vec<_> = changes(&overlapping, &overlapping).collect();
        assert!(found.is_sorted_by(|one, next| one.end <= next.first), "{found:?}");
        assert_eq!(found.last().map(|change| change.end), Some(u64::MAX));
    }
}
