//! The change of a process's RSS as lines that add up to it.
//!
//! Every page that is in either scan belongs to one line: pages of files and of shared memory by their kind, anonymous pages by
//! the [`Place`] they are in. The lines' changes add up to the difference of the two scans, exactly; the kernel's own sums are
//! the truth, and what the lines differ from them by is shown as unexplained.

use memtrace_common::fault::PAGE;

use super::{
    blocks::{BlockBytes, LiveBlock, bytes, overlay, residency},
    change::changes,
    place::{Place, Placed, Stretch, places},
    ranges::Ranges,
};
use crate::target::pages::{PageKind, Pages, Rollup, Scan};

/// What a line of the reconciliation is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// Live blocks that were allocated during the trace.
    TracedHeap,
    /// The allocator's memory that no such block covers: free, or handed out before the trace, or the allocator's own.
    AllocatorRetained,
    /// The allocator's memory where the heap was not traced.
    UntracedAllocator,
    /// Anonymous memory that is neither the allocator's nor a stack.
    OutsideMappings,
    /// Stacks of all threads.
    Stacks,
    /// Pages of files, and private copies of them.
    FileBacked,
    /// tmpfs: shared anonymous memory, memfd, System V shared memory.
    SharedMemory,
}

/// One line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// What it is about.
    pub part: Part,
    /// Change of its resident bytes from the first scan to the second. Of [`Part::TracedHeap`]: bytes of live blocks on new
    /// pages.
    pub change: i64,
    /// Its resident bytes at the second scan.
    pub resident: u64,
}

/// RSS at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RssByKind {
    /// Bytes, as the kernel sums them up (`smaps_rollup`): the truth.
    pub total: u64,
    /// Pages by kind, as the scan found them. The process runs while it is looked at, so their sum can differ from the total.
    pub scanned: Pages,
}

/// Where the change of RSS went, of one process or in the sum over several.
#[derive(Clone, Debug, PartialEq)]
pub struct Reconciliation {
    /// Over how many processes this is the sum: those that could be looked at.
    pub processes: u32,
    /// RSS before.
    pub before: RssByKind,
    /// RSS after.
    pub after: RssByKind,
    /// Bytes of all live blocks; `None` if the heap was not traced.
    pub heap: Option<BlockBytes>,
    /// In the order of [`Part`]. All that apply to the trace, those without change too.
    pub lines: Vec<Line>,
    /// What the lines do not explain of the change of RSS, bytes.
    pub unexplained: i64,
}

impl Reconciliation {
    /// Change of RSS, bytes.
    pub fn change(&self) -> i64 {
        difference(self.after.total, self.before.total)
    }

    /// The unexplained part of the change, from 0 (all is explained); `None` if RSS has not changed.
    pub fn unexplained_share(&self) -> Option<f64> {
        let change = self.change();
        (change != 0).then(|| self.unexplained.unsigned_abs() as f64 / change.unsigned_abs() as f64)
    }
}

impl Reconciliation {
    /// The sum of both, line by line. It adds up as both do: the changes of the lines and what is unexplained are the change of
    /// the sum of RSS.
    #[must_use]
    pub fn plus(mut self, other: Self) -> Self {
        for line in &other.lines {
            match self.lines.iter_mut().find(|own| own.part == line.part) {
                Some(own) => {
                    own.change = own.change.saturating_add(line.change);
                    own.resident = own.resident.saturating_add(line.resident);
                }
                None => self.lines.push(*line),
            }
        }
        self.lines.sort_by_key(|line| line.part);
        Self {
            processes: self.processes.saturating_add(other.processes),
            before: self.before.plus(other.before),
            after: self.after.plus(other.after),
            heap: match (self.heap, other.heap) {
                (Some(one), Some(other)) => Some(one.plus(other)),
                (one, other) => one.or(other),
            },
            lines: self.lines,
            unexplained: self.unexplained.saturating_add(other.unexplained),
        }
    }
}

impl RssByKind {
    /// Both sums.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self { total: self.total.saturating_add(other.total), scanned: self.scanned + other.scanned }
    }
}

/// A look at the process's memory.
#[derive(Clone, Copy, Debug)]
pub struct Look<'a> {
    /// Its resident pages.
    pub scan: &'a Scan,
    /// The kernel's sums, read right before or after.
    pub rollup: Rollup,
}

/// Sets up the reconciliation.
///
/// `blocks` are the live blocks, ascending by address; `None` if the heap was not traced. `ranges` are those mapped during the
/// trace; `None` if that was not traced. `stack_pointers` are those of the process's threads at the end.
pub fn reconcile(
    before: Look<'_>,
    after: Look<'_>,
    blocks: Option<&[LiveBlock]>,
    ranges: Option<&Ranges>,
    stack_pointers: &[u64],
) -> Reconciliation {
    let stretches = places(&before.scan.areas, &after.scan.areas, ranges, blocks.unwrap_or(&[]), stack_pointers);
    let mut lines = Lines::new(blocks.is_some());
    let mut allocator = Vec::new();
    for piece in pieces(&before.scan.ranges, &after.scan.ranges, &stretches) {
        let length = ((piece.end - piece.first) * PAGE) as i64;
        let from = piece.before.map(|(kind, place)| lines.part(kind, place));
        let to = piece.after.map(|(kind, place)| lines.part(kind, place));
        if let Some(part) = from {
            lines.add(part, -length, 0);
        }
        if let Some(part) = to {
            lines.add(part, length, length as u64);
            if part == Part::AllocatorRetained {
                let is_new = piece.before.map(|(kind, _)| kind) != piece.after.map(|(kind, _)| kind);
                allocator.push((bytes(piece.first, piece.end), is_new));
            }
        }
    }
    // What blocks cover of the allocator's memory is the heap's line instead.
    overlay(blocks.unwrap_or(&[]), allocator.into_iter(), |_, span, is_new| {
        let length = span.end - span.start;
        let change = if is_new { length as i64 } else { 0 };
        lines.add(Part::TracedHeap, change, length);
        lines.take(Part::AllocatorRetained, change, length);
    });
    let rss = |look: Look<'_>| RssByKind { total: look.rollup.rss, scanned: look.scan.pages() };
    let (rss_before, rss_after) = (rss(before), rss(after));
    let explained: i64 = lines.0.iter().map(|line| line.change).sum();
    Reconciliation {
        processes: 1,
        before: rss_before,
        after: rss_after,
        heap: blocks.map(|blocks| residency(blocks, &before.scan.ranges, &after.scan.ranges).total),
        lines: lines.0,
        unexplained: difference(rss_after.total, rss_before.total).wrapping_sub(explained),
    }
}

/// Pages that are alike in both scans and lie in one stretch.
struct Piece {
    first: u64,
    end: u64,
    before: Option<(PageKind, Place)>,
    after: Option<(PageKind, Place)>,
}

/// Cuts the pages of both scans at the borders of the stretches.
fn pieces<'a>(
    before: &'a [crate::target::PageRange],
    after: &'a [crate::target::PageRange],
    mut stretches: &'a [Stretch],
) -> impl Iterator<Item = Piece> + 'a {
    // Resident but not mapped: there is no such page, unless the scan and its mappings contradict each other.
    const NOWHERE: Placed = Placed { before: Place::Outside, after: Place::Outside };
    let mut all = changes(before, after);
    let mut current = all.next();
    std::iter::from_fn(move || {
        let change = current?;
        while let [stretch, rest @ ..] = stretches
            && stretch.end <= change.first
        {
            stretches = rest;
        }
        let (end, placed) = match stretches.first() {
            Some(stretch) if stretch.first <= change.first => (stretch.end.min(change.end), stretch.placed),
            Some(stretch) => (stretch.first.min(change.end), NOWHERE),
            None => (change.end, NOWHERE),
        };
        current = if end < change.end { Some(super::change::Change { first: end, ..change }) } else { all.next() };
        Some(Piece {
            first: change.first,
            end,
            before: change.before.map(|kind| (kind, placed.before)),
            after: change.after.map(|kind| (kind, placed.after)),
        })
    })
}

/// The lines, in order.
struct Lines(Vec<Line>);

impl Lines {
    fn new(heap: bool) -> Self {
        let allocator: &[Part] =
            if heap { &[Part::TracedHeap, Part::AllocatorRetained] } else { &[Part::UntracedAllocator] };
        let others = [Part::OutsideMappings, Part::Stacks, Part::FileBacked, Part::SharedMemory];
        let parts = allocator.iter().chain(&others);
        Self(parts.map(|part| Line { part: *part, change: 0, resident: 0 }).collect())
    }

    /// The line that a page belongs to.
    fn part(&self, kind: PageKind, place: Place) -> Part {
        match (kind, place) {
            (PageKind::File, _) | (PageKind::Anon, Place::File) => Part::FileBacked,
            (PageKind::Shmem, _) | (PageKind::Anon, Place::Shmem) => Part::SharedMemory,
            (PageKind::Anon, Place::Stack) => Part::Stacks,
            (PageKind::Anon, Place::Outside) => Part::OutsideMappings,
            (PageKind::Anon, Place::Allocator) if self.0[0].part == Part::TracedHeap => Part::AllocatorRetained,
            (PageKind::Anon, Place::Allocator) => Part::UntracedAllocator,
        }
    }

    fn add(&mut self, part: Part, change: i64, resident: u64) {
        if let Some(line) = self.0.iter_mut().find(|line| line.part == part) {
            line.change = line.change.wrapping_add(change);
            line.resident = line.resident.saturating_add(resident);
        }
    }

    fn take(&mut self, part: Part, change: i64, resident: u64) {
        if let Some(line) = self.0.iter_mut().find(|line| line.part == part) {
            line.change = line.change.wrapping_sub(change);
            line.resident = line.resident.saturating_sub(resident);
        }
    }
}

fn difference(after: u64, before: u64) -> i64 {
    after.wrapping_sub(before) as i64
}

#[cfg(test)]
#[path = "reconcile_tests.rs"]
mod tests;
