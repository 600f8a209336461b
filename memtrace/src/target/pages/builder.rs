//! Puts what a page table says of single stretches together to ranges, cut at the borders of mappings.

use memtrace_common::fault::PAGE;

use super::{Area, Method, PageKind, PageRange, Role, Scan};

/// What a page table entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// No page, or one that is no RSS.
    Nothing,
    /// A swapped-out page.
    Swapped,
    /// A page.
    Present {
        /// Whether it belongs to a file or shared memory.
        file: bool,
        /// Whether the entry is a huge one.
        huge: bool,
    },
}

/// Takes stretches in ascending order.
#[derive(Debug)]
pub struct Builder<'a> {
    areas: &'a [Area],
    /// First area that the next stretch can lie in.
    next: usize,
    ranges: Vec<PageRange>,
    swapped: u64,
    hugetlb: u64,
}

impl<'a> Builder<'a> {
    /// For these mappings, ascending.
    pub fn new(areas: &'a [Area]) -> Self {
        Self { areas, next: 0, ranges: Vec::new(), swapped: 0, hugetlb: 0 }
    }

    /// Adds the pages from `start` to `end`, addresses. What lies outside of the mappings is left out.
    pub fn push(&mut self, start: u64, end: u64, entry: Entry) {
        while let Some(area) = self.areas.get(self.next) {
            if area.start >= end {
                return;
            }
            let (from, to) = (start.max(area.start), end.min(area.end));
            if from < to {
                self.push_in(*area, from / PAGE, to / PAGE, entry);
            }
            if area.end > end {
                return;
            }
            self.next += 1;
        }
    }

    fn push_in(&mut self, area: Area, first: u64, end: u64, entry: Entry) {
        match entry {
            Entry::Nothing => {}
            Entry::Swapped => self.swapped += end - first,
            Entry::Present { .. } if area.role == Role::Hugetlb => self.hugetlb += (end - first) * PAGE,
            // In a shared mapping nothing is anonymous: these are pages of a device, which the kernel neither counts nor
            // calls file.
            Entry::Present { file: false, .. } if area.shared => {}
            Entry::Present { file, huge } => {
                let kind = match (file, area.role) {
                    (false, _) => PageKind::Anon,
                    (true, Role::Shmem) => PageKind::Shmem,
                    (true, _) => PageKind::File,
                };
                self.push_pages(area, first, end, kind, huge);
            }
        }
    }

    fn push_pages(&mut self, area: Area, mut first: u64, end: u64, kind: PageKind, huge: bool) {
        if let Some(last) = self.ranges.last_mut()
            && last.end() == first
            && last.first >= area.start / PAGE
            && (last.kind, last.huge) == (kind, huge)
        {
            let room = u64::from(u32::MAX - last.count);
            let added = room.min(end - first);
            last.count += added as u32;
            first += added;
        }
        while first < end {
            let count = (end - first).min(u64::from(u32::MAX)) as u32;
            self.ranges.push(PageRange { first, count, kind, huge });
            first += u64::from(count);
        }
    }

    /// The scan.
    pub fn finish(mut self, method: Method, zero_in_doubt: u64, unknown_file_systems: usize) -> Scan {
        self.ranges.shrink_to_fit();
        Scan {
            ranges: self.ranges,
            areas: self.areas.to_vec(),
            swapped: self.swapped,
            hugetlb: self.hugetlb,
            method,
            zero_in_doubt,
            unknown_file_systems,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: Entry = Entry::Present { file: true, huge: false };
    const ANON: Entry = Entry::Present { file: false, huge: false };

    fn area(first: u64, end: u64, role: Role, shared: bool) -> Area {
        Area { start: first * PAGE, end: end * PAGE, role, shared }
    }

    fn range(first: u64, count: u32, kind: PageKind) -> PageRange {
        PageRange { first, count, kind, huge: false }
    }

    #[test]
    fn ranges_are_merged_and_end_with_their_mapping() {
        let areas = [
            area(1, 4, Role::File, false),
            area(4, 8, Role::Shmem, true),
            area(9, 10, Role::Anonymous, false),
            area(10, 12, Role::Hugetlb, false),
        ];
        let mut builder = Builder::new(&areas);
        builder.push(0, 2 * PAGE, FILE);
        builder.push(2 * PAGE, 6 * PAGE, FILE);
        builder.push(6 * PAGE, 7 * PAGE, ANON);
        builder.push(7 * PAGE, 8 * PAGE, Entry::Swapped);
        builder.push(8 * PAGE, 11 * PAGE, ANON);
        builder.push(11 * PAGE, 99 * PAGE, Entry::Nothing);
        let scan = builder.finish(Method::Pagemap, 0, 0);
        assert_eq!(
            scan.ranges,
            [range(1, 3, PageKind::File), range(4, 2, PageKind::Shmem), range(9, 1, PageKind::Anon)]
        );
        assert_eq!((scan.swapped, scan.hugetlb), (1, PAGE));
    }

    #[test]
    fn neighbouring_mappings_stay_apart() {
        let areas = [area(1, 4, Role::Anonymous, false), area(4, 8, Role::Heap, false)];
        let mut builder = Builder::new(&areas);
        builder.push(3 * PAGE, 5 * PAGE, ANON);
        builder.push(5 * PAGE, 6 * PAGE, ANON);
        let expected = [range(3, 1, PageKind::Anon), range(4, 2, PageKind::Anon)];
        assert_eq!(builder.finish(Method::Pagemap, 0, 0).ranges, expected);
    }

    #[test]
    fn ranges_longer_than_their_count() {
        let most = u64::from(u32::MAX);
        let areas = [area(0, 3 * most, Role::Anonymous, false)];
        let mut builder = Builder::new(&areas);
        builder.push(0, 5 * PAGE, ANON);
        builder.push(5 * PAGE, (2 * most + 7) * PAGE, ANON);
        let expected = [
            range(0, u32::MAX, PageKind::Anon),
            range(most, u32::MAX, PageKind::Anon),
            range(2 * most, 7, PageKind::Anon),
        ];
        assert_eq!(builder.finish(Method::Pagemap, 0, 0).ranges, expected);
    }
}
