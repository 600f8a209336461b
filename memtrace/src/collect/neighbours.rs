//! The records of 2 MiB, and which fault is nearest to a page.

use memtrace_common::fault::{Fault, PageRecord};

use crate::target::pages::PageKind;

/// Pages that are looked at together: those of a huge page.
pub const BLOCK: u64 = 512;
const PAGES: usize = BLOCK as usize;

/// Pages that the kernel maps around a fault on a file, aligned: `fault_around_pages` (mm/memory.c), 64 KiB.
const WINDOW: u64 = 16;

/// No page of the block.
const NONE: u16 = u16::MAX;

/// The fault that made a page resident as what it is now.
///
/// An anonymous page came with the fault that found none, if that was a write; a read mapped the zero page or a file's, and the
/// write after it made the page. (A read alone can bring one too, from swap.) Pages of files and shared memory came with the
/// fault that found none; later writes to them are no growth.
pub fn fault_of(kind: PageKind, record: PageRecord) -> Option<Fault> {
    match kind {
        PageKind::Anon => record.absent.filter(|fault| fault.write).or(record.copied).or(record.absent),
        PageKind::File | PageKind::Shmem => record.absent,
    }
}

/// The records of one block.
#[derive(Debug)]
pub struct Neighbours {
    /// Number of its first page.
    first: u64,
    records: Box<[PageRecord; PAGES]>,
    /// Whether the page was resident in the first scan.
    before: Box<[bool; PAGES]>,
    /// Whether there is any record.
    any: bool,
    /// For anonymous pages and for others, what [`Nearest`] was worked out last.
    nearest: [Option<Nearest>; 2],
}

/// Of each page of a mapping's part of the block, the faults next to it.
#[derive(Debug)]
struct Nearest {
    /// The mapping.
    span: (u64, u64),
    /// Index of the last page up to this one that has a fault.
    previous: Box<[u16; PAGES]>,
    /// Index of the first page from this one on that has a fault.
    next: Box<[u16; PAGES]>,
}

impl Default for Neighbours {
    fn default() -> Self {
        Self {
            first: 0,
            records: Box::new([PageRecord::default(); PAGES]),
            before: Box::new([false; PAGES]),
            any: false,
            nearest: [None, None],
        }
    }
}

impl Neighbours {
    /// Starts with the block whose first page is `first`.
    pub fn clear(&mut self, first: u64) {
        if self.any {
            self.records.fill(PageRecord::default());
        }
        self.before.fill(false);
        (self.first, self.any, self.nearest) = (first, false, [None, None]);
    }

    /// Notes the record of a page of the block.
    pub fn set(&mut self, page: u64, record: PageRecord) {
        if let Some(slot) = self.records.get_mut(page.wrapping_sub(self.first) as usize) {
            *slot = record;
            self.any = true;
        }
    }

    /// Notes that pages of the block were resident in the first scan.
    pub fn set_before(&mut self, first: u64, end: u64) {
        self.before[(first - self.first) as usize..(end - self.first) as usize].fill(true);
    }

    /// The record of a page of the block.
    pub fn record(&self, page: u64) -> PageRecord {
        self.records[(page - self.first) as usize]
    }

    /// The fault nearest to a page of the block within `span`, pages of its mapping, that can have made a page of this kind;
    /// and whether it is in the same window, where it is preferred.
    pub fn nearest(&mut self, page: u64, kind: PageKind, span: (u64, u64)) -> Option<(Fault, bool)> {
        if !self.any {
            return None;
        }
        let class = usize::from(kind == PageKind::Anon);
        let found = match self.nearest[class].take() {
            Some(found) if found.span == span => found,
            _ => self.find(kind, span),
        };
        let index = (page - self.first) as usize;
        let window = |other: u16| (self.first + u64::from(other)) / WINDOW == page / WINDOW;
        let nearest = [found.previous[index], found.next[index]]
            .into_iter()
            .filter(|other| *other != NONE)
            .min_by_key(|other| (!window(*other), usize::from(*other).abs_diff(index)));
        self.nearest[class] = Some(found);
        let nearest = nearest?;
        Some((self.usable(usize::from(nearest), kind)?, window(nearest)))
    }

    fn find(&self, kind: PageKind, span: (u64, u64)) -> Nearest {
        let index = |page: u64| page.saturating_sub(self.first).min(BLOCK) as usize;
        let (start, end) = (index(span.0), index(span.1));
        let (mut previous, mut next) = (Box::new([NONE; PAGES]), Box::new([NONE; PAGES]));
        let mut last = NONE;
        for index in start..end {
            if self.usable(index, kind).is_some() {
                last = index as u16;
            }
            previous[index] = last;
        }
        last = NONE;
        for index in (start..end).rev() {
            if self.usable(index, kind).is_some() {
                last = index as u16;
            }
            next[index] = last;
        }
        Nearest { span, previous, next }
    }

    /// The fault of a page, unless it was made before the first scan: what came with it was resident then, too.
    fn usable(&self, index: usize, kind: PageKind) -> Option<Fault> {
        fault_of(kind, self.records[index]).filter(|fault| fault.late || !self.before[index])
    }
}
