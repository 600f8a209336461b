//! Which call made each range of mapped address space.

use std::{collections::BTreeMap, ops::Range};

use memtrace_common::fault::PAGE;

use crate::target::pages::{Area, Role};

/// The system call that made a range, or populated it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operation {
    /// `mmap`.
    Mmap,
    /// `brk` with a higher break.
    Brk,
    /// `mremap` to a larger size, or of a copy.
    Mremap,
    /// `shmat`.
    Shmat,
    /// `madvise`.
    Madvise,
    /// `mlock` and its like.
    Mlock,
}

/// What else is known of the call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// `MAP_STACK`: the range is a thread's stack.
    pub thread_stack: bool,
    /// Made inside an allocating or freeing function: the range is the allocator's.
    pub in_allocator: bool,
    /// The call itself made pages resident (`MAP_POPULATE`, `MAP_LOCKED`, `MADV_POPULATE_WRITE`, `mlock`).
    pub populates: bool,
}

/// The call that a range belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Stack number of its call path.
    pub stack: u32,
    /// The system call.
    pub operation: Operation,
    /// What else is known of it.
    pub flags: Flags,
    /// When it returned, nanoseconds of `CLOCK_MONOTONIC`.
    pub time: u64,
}

/// A range and the call that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owned {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// The call.
    pub owner: Owner,
}

/// What a system call is about to remove, kept until it is known whether it succeeded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken(Vec<Owned>);

/// A successful `mremap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Old address.
    pub old: u64,
    /// Old length, bytes; 0: the call made a second mapping of shared memory.
    pub old_length: u64,
    /// The address that the call returned.
    pub new: u64,
    /// New length, bytes.
    pub new_length: u64,
    /// `MREMAP_DONTUNMAP`: the old range stays mapped, without its pages.
    pub keeps_old: bool,
}

/// What a full table could not take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    /// How often.
    pub ranges: u64,
    /// Bytes that belong to nobody for that.
    pub bytes: u64,
}

/// What the process's memory map says of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// Bytes that the table had and the process has not mapped: their removal was missed.
    pub not_mapped: u64,
    /// Bytes mapped now and not before the trace that are in no range: their mapping was missed. The main thread's stack,
    /// which grows by itself, and the kernel's own mappings are not counted.
    pub unowned: u64,
}

impl Audit {
    /// Both sums.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            not_mapped: self.not_mapped.saturating_add(other.not_mapped),
            unowned: self.unowned.saturating_add(other.unowned),
        }
    }
}

/// Ranges mapped during the trace, each with the call that made it. What was mapped before belongs to nobody.
///
/// Addresses are cut down to pages, lengths rounded up, as the kernel does. The removals of a call have to be applied at its
/// entry ([`Self::take`]), before the kernel can hand the range to another thread, and put back if it fails
/// ([`Self::restore`]); additions at its exit.
#[derive(Clone, Debug)]
pub struct Ranges {
    by_start: BTreeMap<u64, (u64, Owner)>,
    max: usize,
    lost: Lost,
}

impl Ranges {
    /// For at most `max` ranges.
    pub fn new(max: usize) -> Self {
        Self { by_start: BTreeMap::new(), max, lost: Lost::default() }
    }

    /// The ranges, ascending.
    pub fn iter(&self) -> impl Iterator<Item = Owned> + '_ {
        self.by_start.iter().map(|(start, (end, owner))| Owned { start: *start, end: *end, owner: *owner })
    }

    /// What did not fit.
    pub fn lost(&self) -> Lost {
        self.lost
    }

    /// The call behind an address, and the address up to which that is the answer.
    pub fn at(&self, address: u64) -> (Option<Owner>, u64) {
        match self.by_start.range(..=address).next_back() {
            Some((_, (end, owner))) if *end > address => (Some(*owner), *end),
            _ => {
                let next = address.checked_add(1).and_then(|after| self.by_start.range(after..).next());
                (None, next.map_or(u64::MAX, |(start, _)| *start))
            }
        }
    }

    /// A range was mapped, in place of whatever was there.
    pub fn mapped(&mut self, address: u64, length: u64, owner: Owner) {
        let span = span(address, length);
        self.take_span(&span);
        self.insert(Owned { start: span.start, end: span.end, owner });
    }

    /// A range is about to be unmapped, or moved.
    pub fn take(&mut self, address: u64, length: u64) -> Taken {
        self.take_span(&span(address, length))
    }

    /// The call failed: what was taken is mapped still, except where another thread has mapped something since.
    pub fn restore(&mut self, taken: Taken) {
        for owned in taken.0 {
            let mut start = owned.start;
            while start < owned.end {
                let (owner, until) = self.at(start);
                let end = until.min(owned.end);
                if owner.is_none() {
                    self.insert(Owned { start, end, ..owned });
                }
                start = end;
            }
        }
    }

    /// A `mremap` succeeded of which `taken` was taken at its entry. What is moved keeps its owner; what the range has grown by
    /// belongs to the call, and so does the whole new range if the old one stays.
    pub fn moved(&mut self, mut taken: Taken, to: Move, owner: Owner) {
        if to.keeps_old || to.old_length == 0 {
            self.restore(taken);
            self.mapped(to.new, to.new_length, owner);
            return;
        }
        let (old, new) = (span(to.old, to.old_length), span(to.new, to.new_length));
        self.take_span(&new);
        let kept = (old.end - old.start).min(new.end - new.start);
        taken.0.sort_unstable_by_key(|owned| owned.start);
        for owned in taken.0 {
            let (start, end) = (owned.start.max(old.start), owned.end.min(old.start + kept));
            if start < end {
                let (start, end) = (new.start + (start - old.start), new.start + (end - old.start));
                self.insert(Owned { start, end, ..owned });
            }
        }
        if new.start + kept < new.end {
            self.insert(Owned { start: new.start + kept, end: new.end, owner });
        }
    }

    /// `brk` moved the break between two addresses. Where it went up, the memory belongs to the call; where it went down
    /// (which has to be said at its entry), it is taken.
    pub fn break_moved(&mut self, from: u64, to: u64, owner: Owner) -> Taken {
        let (from, to) = (round_up(from), round_up(to));
        if from < to {
            self.mapped(from, to - from, owner);
            return Taken::default();
        }
        self.take_span(&(to..from))
    }

    /// Compares with the process's mappings, before the trace and now, and removes what is not mapped.
    pub fn audit(&mut self, before: &[Area], now: &[Area]) -> Audit {
        let had = self.bytes();
        let old = std::mem::take(&mut self.by_start);
        let mut audit = Audit::default();
        let mut mapped_before = before.iter().peekable();
        for area in now {
            let mut start = area.start;
            let mut kept = Vec::new();
            if let Some((_, (end, owner))) = old.range(..start).next_back()
                && *end > start
            {
                kept.push((start, (*end).min(area.end), *owner));
            }
            kept.extend(old.range(start..area.end).map(|(start, (end, owner))| (*start, (*end).min(area.end), *owner)));
            let grows = matches!(area.role, Role::MainStack | Role::Special);
            // The gaps between them, and that behind the last.
            for (from, to) in kept.iter().map(|(start, end, _)| (*start, *end)).chain([(area.end, area.end)]) {
                if !grows {
                    audit.unowned += (from - start) - overlap(&mut mapped_before, start..from);
                }
                start = to;
            }
            self.by_start.extend(kept.into_iter().map(|(start, end, owner)| (start, (end, owner))));
        }
        audit.not_mapped = had - self.bytes();
        audit
    }

    /// Sum of all ranges.
    pub fn bytes(&self) -> u64 {
        self.iter().map(|owned| owned.end - owned.start).sum()
    }

    fn take_span(&mut self, span: &Range<u64>) -> Taken {
        let mut taken = Vec::new();
        if span.is_empty() {
            return Taken(taken);
        }
        while let Some((&start, &(end, owner))) = self.by_start.range(..span.end).next_back()
            && end > span.start
        {
            self.by_start.remove(&start);
            if end > span.end {
                self.insert(Owned { start: span.end, end, owner });
            }
            taken.push(Owned { start: start.max(span.start), end: end.min(span.end), owner });
            if start < span.start {
                self.insert(Owned { start, end: span.start, owner });
                break;
            }
        }
        taken.reverse();
        Taken(taken)
    }

    /// Adds a range where there is none, as one with a neighbour made by the same call.
    fn insert(&mut self, mut owned: Owned) {
        if owned.start >= owned.end {
            return;
        }
        if let Some((&start, &(end, owner))) = self.by_start.range(..owned.start).next_back()
            && (end, owner) == (owned.start, owned.owner)
        {
            owned.start = start;
        }
        if let Some(&(end, owner)) = self.by_start.get(&owned.end)
            && owner == owned.owner
        {
            self.by_start.remove(&owned.end);
            owned.end = end;
        }
        if self.by_start.len() >= self.max && !self.by_start.contains_key(&owned.start) {
            self.lost.ranges += 1;
            self.lost.bytes = self.lost.bytes.saturating_add(owned.end - owned.start);
            return;
        }
        self.by_start.insert(owned.start, (owned.end, owned.owner));
    }
}

/// Bytes of `span` in ascending areas, of which those before it are dropped.
fn overlap<'a>(areas: &mut std::iter::Peekable<impl Iterator<Item = &'a Area>>, span: Range<u64>) -> u64 {
    let mut bytes = 0;
    while let Some(area) = areas.peek() {
        bytes += area.end.min(span.end).saturating_sub(area.start.max(span.start));
        if area.end > span.end {
            break;
        }
        areas.next();
    }
    bytes
}

/// Last address at which a page can end; what a hostile process asks for beyond fails.
const LAST: u64 = 1 << 63;

fn span(address: u64, length: u64) -> Range<u64> {
    let start = (address & !(PAGE - 1)).min(LAST);
    start..round_up(address.saturating_add(length)).max(start)
}

fn round_up(address: u64) -> u64 {
    address.min(LAST).next_multiple_of(PAGE)
}

#[cfg(test)]
#[path = "ranges_tests.rs"]
mod tests;
