//! Which call path made the new pages resident.
//!
//! A page is new if it is resident after and was not before; or was as another kind (a private file page that has been
//! written is a new anonymous page, and a file page is gone); or was, and has been given back and faulted in again since: then
//! one page is gone and one is new. So for each kind, new minus gone pages is what the two scans differ by, exactly.
//!
//! Pages that become resident without a fault of their own come from a fault on a neighbour (huge pages, fault-around, large
//! folios) or from a call that populates a mapping. Memory that is given back and comes back without a fault of its own (the
//! other pages of a huge page) counts as never gone.

use std::{collections::HashMap, iter::Peekable};

use memtrace_common::fault::{CHUNK_PAGES, Chunk, PAGE, PageRecord};

use super::{
    change::{Change, changes},
    neighbours::{BLOCK, Neighbours, fault_of},
};
use crate::target::pages::{Area, PageKind, PageRange, Pages};

/// How a page found its call path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// A fault on the page itself.
    OwnFault,
    /// The nearest fault within the huge page.
    HugePage,
    /// The call that populates its mapping.
    Populated,
    /// The nearest fault in the same 64 KiB of the mapping: what the kernel maps around a fault on a file
    /// (`fault_around_bytes`).
    Window,
    /// The nearest fault in the same 2 MiB of the mapping.
    Nearest,
    /// The call that made its mapping.
    Mapping,
    /// Nothing is known.
    Unattributed,
}

impl Source {
    /// All of them, best first.
    pub const ALL: [Self; 7] = [
        Self::OwnFault,
        Self::HugePage,
        Self::Populated,
        Self::Window,
        Self::Nearest,
        Self::Mapping,
        Self::Unattributed,
    ];
}

/// The call behind a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappingCall {
    /// Stack number of its call path.
    pub stack: u32,
    /// Whether the call itself makes pages resident. If so it goes before faults on neighbours, other than those of the same
    /// huge page: such memory has no faults of its own.
    pub populates: bool,
}

/// Consecutive new pages of one kind with one call path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewPages {
    /// Number of the first page.
    pub first: u64,
    /// Number of the page after the last.
    pub end: u64,
    /// What the kernel counts them as.
    pub kind: PageKind,
    /// Stack number of the call path; `None` with [`Source::Unattributed`].
    pub stack: Option<u32>,
    /// How that was found.
    pub source: Source,
}

/// New pages of one call path, or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StackPages {
    /// By kind.
    pub pages: Pages,
    /// By how they were attributed, in the order of [`Source::ALL`].
    pub by_source: [u64; Source::ALL.len()],
}

/// The growth of a process's resident memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageGrowth {
    /// New pages by stack number.
    pub by_stack: HashMap<u32, StackPages>,
    /// New pages of no known call path.
    pub unattributed: Pages,
    /// All new pages: those of all stacks and the unattributed.
    pub new: StackPages,
    /// Pages that were resident before and are not after, or have been given back meanwhile.
    pub gone: Pages,
}

impl PageGrowth {
    /// Adds that of another process.
    pub fn add(&mut self, other: &Self) {
        for (stack, pages) in &other.by_stack {
            self.by_stack.entry(*stack).or_default().merge(pages);
        }
        self.unattributed = self.unattributed + other.unattributed;
        self.new.merge(&other.new);
        self.gone = self.gone + other.gone;
    }
}

impl StackPages {
    /// Both sums.
    #[must_use]
    pub fn plus(mut self, other: Self) -> Self {
        self.merge(&other);
        self
    }

    fn merge(&mut self, other: &Self) {
        self.pages = self.pages + other.pages;
        for (sum, count) in self.by_source.iter_mut().zip(other.by_source) {
            *sum = sum.saturating_add(count);
        }
    }

    fn add(&mut self, pages: &NewPages) {
        let count = pages.end - pages.first;
        self.pages.add(pages.kind, count);
        self.by_source[pages.source as usize] += count;
    }
}

/// What was seen of the process.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// Resident pages at the start, ascending.
    pub before: &'a [PageRange],
    /// Resident pages at the end, ascending.
    pub after: &'a [PageRange],
    /// Mappings at the end, ascending.
    pub areas: &'a [Area],
}

/// The records of a process's pages: page numbers with what is known of their faults, ascending if the chunks (number and
/// content) are.
pub fn records(chunks: &[(u64, Chunk)]) -> impl Iterator<Item = (u64, PageRecord)> + '_ {
    chunks.iter().flat_map(|(number, chunk)| {
        let first = number.saturating_mul(CHUNK_PAGES as u64);
        let pages = chunk.pages.into_iter().enumerate().filter(|(_, packed)| *packed != 0);
        pages.filter_map(move |(index, packed)| Some((first.checked_add(index as u64)?, PageRecord::unpack(packed))))
    })
}

/// Attributes new pages. `records` have to ascend by page number (one that does not is ignored). `owner` gives, for a page
/// number, the call behind its mapping, and the first page number after it for which that may no longer be the answer. `visit`
/// is called for all new pages, ascending.
pub fn attribute(
    seen: Seen<'_>,
    records: impl Iterator<Item = (u64, PageRecord)>,
    owner: impl FnMut(u64) -> (Option<MappingCall>, u64),
    visit: impl FnMut(&NewPages),
) -> PageGrowth {
    let mut work = Work {
        areas: seen.areas,
        records: records.peekable(),
        owner,
        owned: None,
        visit,
        pending: None,
        growth: PageGrowth::default(),
        neighbours: Neighbours::default(),
    };
    let mut pieces: Vec<Change> = Vec::new();
    for mut change in changes(seen.before, seen.after) {
        while change.first < change.end {
            let block = change.first / BLOCK;
            if pieces.first().is_some_and(|piece| piece.first / BLOCK != block) {
                work.block(&pieces);
                pieces.clear();
            }
            // Whole blocks without a record are done at once. Inside a block the records before the change are wanted still.
            if pieces.is_empty() && change.first.is_multiple_of(BLOCK) {
                let next = work.next_record(change.first);
                let bulk = change.end.min(next) / BLOCK * BLOCK;
                if bulk > change.first {
                    work.bulk(&Change { end: bulk, ..change });
                    change.first = bulk;
                    continue;
                }
            }
            let end = change.end.min((block + 1).saturating_mul(BLOCK));
            pieces.push(Change { end, ..change });
            change.first = end;
        }
    }
    work.block(&pieces);
    work.finish()
}

struct Work<'a, R: Iterator, O, V> {
    /// Those that do not end before the current page.
    areas: &'a [Area],
    records: Peekable<R>,
    owner: O,
    /// The answer of `owner` for these pages.
    owned: Option<(u64, u64, Option<MappingCall>)>,
    visit: V,
    /// New pages that may still grow by the next.
    pending: Option<NewPages>,
    growth: PageGrowth,
    neighbours: Neighbours,
}

impl<R, O, V> Work<'_, R, O, V>
where
    R: Iterator<Item = (u64, PageRecord)>,
    O: FnMut(u64) -> (Option<MappingCall>, u64),
    V: FnMut(&NewPages),
{
    /// Number of the first page from `page` on that has a record.
    fn next_record(&mut self, page: u64) -> u64 {
        while self.records.next_if(|(number, _)| *number < page).is_some() {}
        self.records.peek().map_or(u64::MAX, |(number, _)| *number)
    }

    /// Pages without a record in their block.
    fn bulk(&mut self, change: &Change) {
        if let Some(kind) = change.gone_kind() {
            self.growth.gone.add(kind, change.pages());
        }
        let Some(kind) = change.new_kind() else { return };
        let mut page = change.first;
        while page < change.end {
            let (call, until) = self.call(page);
            let end = until.min(change.end);
            self.push_call(page, end, kind, call);
            page = end;
        }
    }

    /// The pages of one block that are in either scan.
    fn block(&mut self, pieces: &[Change]) {
        let Some(first) = pieces.first().map(|piece| piece.first / BLOCK * BLOCK) else { return };
        self.next_record(first);
        self.neighbours.clear(first);
        while let Some((page, record)) = self.records.next_if(|(page, _)| *page < first.saturating_add(BLOCK)) {
            self.neighbours.set(page, record);
        }
        for piece in pieces.iter().filter(|piece| piece.before.is_some()) {
            self.neighbours.set_before(piece.first, piece.end);
        }
        for piece in pieces {
            for page in piece.first..piece.end {
                self.page(page, piece);
            }
        }
    }

    fn page(&mut self, page: u64, piece: &Change) {
        let Some(after) = piece.after else {
            if let Some(kind) = piece.gone_kind() {
                self.growth.gone.add(kind, 1);
            }
            return;
        };
        let record = self.neighbours.record(page);
        // Given back and faulted in again.
        let again = record.absent.is_some_and(|fault| fault.late);
        if piece.before == Some(after) && !again {
            return;
        }
        if let Some(kind) = piece.before {
            self.growth.gone.add(kind, 1);
        }
        // A read from before the first scan did not make of a file page the anonymous one that it is now.
        let own = fault_of(after, record).filter(|fault| piece.before.is_none() || fault.late || fault.write);
        if let Some(fault) = own {
            self.push(NewPages {
                first: page,
                end: page + 1,
                kind: after,
                stack: Some(fault.stack),
                source: Source::OwnFault,
            });
            return;
        }
        let span = self.mapping(page, piece);
        let (stack, source) = match self.neighbours.nearest(page, after, span) {
            Some((fault, _)) if piece.huge => (fault.stack, Source::HugePage),
            near => {
                let (call, _) = self.call(page);
                match near {
                    _ if call.is_some_and(|call| call.populates) => return self.push_call(page, page + 1, after, call),
                    Some((fault, true)) => (fault.stack, Source::Window),
                    Some((fault, false)) => (fault.stack, Source::Nearest),
                    None => return self.push_call(page, page + 1, after, call),
                }
            }
        };
        self.push(NewPages { first: page, end: page + 1, kind: after, stack: Some(stack), source });
    }

    /// First page of the mapping around a page, and the page after its last.
    fn mapping(&mut self, page: u64, piece: &Change) -> (u64, u64) {
        while let [area, rest @ ..] = self.areas
            && area.end / PAGE <= page
        {
            self.areas = rest;
        }
        match self.areas.first() {
            Some(area) if area.start / PAGE <= page => (area.start / PAGE, area.end / PAGE),
            // Mapped after the memory map was read.
            _ => (piece.first, piece.end),
        }
    }

    fn call(&mut self, page: u64) -> (Option<MappingCall>, u64) {
        match self.owned {
            Some((first, end, call)) if (first..end).contains(&page) => (call, end),
            _ => {
                let (call, end) = (self.owner)(page);
                let end = end.max(page + 1);
                self.owned = Some((page, end, call));
                (call, end)
            }
        }
    }

    fn push_call(&mut self, first: u64, end: u64, kind: PageKind, call: Option<MappingCall>) {
        let source = match call {
            Some(MappingCall { populates: true, .. }) => Source::Populated,
            Some(_) => Source::Mapping,
            None => Source::Unattributed,
        };
        self.push(NewPages { first, end, kind, stack: call.map(|call| call.stack), source });
    }

    fn push(&mut self, pages: NewPages) {
        if let Some(pending) = &mut self.pending
            && pending.end == pages.first
            && (pending.kind, pending.stack, pending.source) == (pages.kind, pages.stack, pages.source)
        {
            pending.end = pages.end;
            return;
        }
        if let Some(complete) = self.pending.replace(pages) {
            self.count(&complete);
        }
    }

    fn count(&mut self, pages: &NewPages) {
        self.growth.new.add(pages);
        match pages.stack {
            Some(stack) => self.growth.by_stack.entry(stack).or_default().add(pages),
            None => self.growth.unattributed.add(pages.kind, pages.end - pages.first),
        }
        (self.visit)(pages);
    }

    fn finish(mut self) -> PageGrowth {
        if let Some(last) = self.pending.take() {
            self.count(&last);
        }
        self.growth
    }
}

#[cfg(test)]
#[path = "attribution_tests.rs"]
mod tests;
