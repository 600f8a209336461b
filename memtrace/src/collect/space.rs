//! The target's address space as its system calls change it: which call made each range, and which made its pages
//! resident.

use std::collections::HashMap;

use memtrace_common::{
    call::{Call, CallEvent},
    fault::PAGE,
};

use super::attribution::MappingCall;
use super::inherited::{Inherited, TakenPages};
use super::ranges::{Flags, Lost, Move, Operation, Owner, Ranges, Taken};
use crate::{
    profile::Amount,
    target::{
        Mapping,
        pages::{PageRange, Pages},
    },
};

/// Most ranges kept, of each of the two tables.
const MAX_RANGES: usize = 1 << 20;
/// Most threads that can be in such a call at a time.
const MAX_PENDING: usize = 1 << 16;

/// Flags and advice of the calls (include/uapi/asm-generic/mman-common.h and mman.h, linux/mman.h).
mod flag {
    pub const PROT_EXEC: u64 = 4;
    pub const MAP_LOCKED: u64 = 0x2000;
    pub const MAP_POPULATE: u64 = 0x8000;
    pub const MAP_STACK: u64 = 0x20000;
    pub const MREMAP_DONTUNMAP: u64 = 4;
    pub const MLOCK_ONFAULT: u64 = 1;
    pub const MCL_CURRENT: u64 = 1;
    pub const MCL_ONFAULT: u64 = 4;
    pub const MADV_DONTNEED: u64 = 4;
    pub const MADV_FREE: u64 = 8;
    pub const MADV_REMOVE: u64 = 9;
    pub const MADV_PAGEOUT: u64 = 21;
    pub const MADV_POPULATE_READ: u64 = 22;
    pub const MADV_POPULATE_WRITE: u64 = 23;
    pub const MADV_DONTNEED_LOCKED: u64 = 24;
    pub const MADV_COLLAPSE: u64 = 25;
}

/// Addresses end here on x86-64 with five-level page tables.
const END: u64 = 1 << 56;

/// A call whose exit is awaited.
struct Pending {
    event: CallEvent,
    taken: Taken,
    pages: TakenPages,
}

/// The address space.
pub struct Space {
    /// Ranges mapped during the trace.
    ranges: Ranges,
    /// Ranges whose pages a call made resident by itself.
    populated: Ranges,
    /// By thread.
    pending: HashMap<u32, Pending>,
    /// The program break; 0 if it is not known yet.
    program_break: u64,
    /// All that was mapped, by stack number.
    mapped: HashMap<u32, Amount>,
    inherited: Inherited,
    /// Calls that could not be applied: too many threads in one at a time, or a segment of unknown size.
    unapplied: u64,
}

impl Default for Space {
    fn default() -> Self {
        Self {
            ranges: Ranges::new(MAX_RANGES),
            populated: Ranges::new(MAX_RANGES),
            pending: HashMap::new(),
            program_break: 0,
            mapped: HashMap::new(),
            inherited: Inherited::default(),
            unapplied: 0,
        }
    }
}

/// What an event did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Code was mapped.
    pub code: bool,
}

impl Space {
    /// Takes over what the memory map at the start tells. `heap_start` is where the memory that `brk` makes begins; the map
    /// shows none as long as the break is there.
    pub fn begin(&mut self, mappings: &[Mapping], heap_start: Option<u64>) {
        let heap = mappings.iter().rfind(|mapping| mapping.name.as_os_str() == "[heap]");
        self.program_break = heap.map(|heap| heap.end).or(heap_start).unwrap_or(0);
    }

    /// Takes over which pages are resident at the start.
    pub fn inherit(&mut self, inherited: Inherited) {
        self.inherited = inherited;
    }

    /// The pages that were resident at the start, where their memory is now, ascending; and those that went with their memory.
    pub fn inherited(&self) -> (Vec<PageRange>, Pages) {
        self.inherited.finish()
    }

    /// Applies one event, in the order in which they were sent. `length_of` tells how long a System V segment is that was attached,
    /// from its id and its address.
    pub fn apply(&mut self, event: &CallEvent, length_of: impl FnOnce(u64, u64) -> Option<u64>) -> Applied {
        if event.exit == 0 {
            self.enter(event);
            return Applied::default();
        }
        let Some(pending) = self.pending.remove(&event.tid) else { return Applied::default() };
        if pending.event.call != event.call {
            // The exit of the one was lost, and the entry of the other: what it did is not known.
            return Applied::default();
        }
        self.exit(pending, event, length_of)
    }

    fn enter(&mut self, event: &CallEvent) {
        let [address, length, advice, ..] = event.arguments;
        let call = Call::from_raw(event.call);
        let pages = match call {
            _ if !self.inherited.concerns(event.time) => TakenPages::default(),
            Some(Call::Munmap | Call::Mremap) => self.inherited.take(address, length),
            Some(Call::Brk) if address != 0 && address < self.program_break => {
                let from = address.next_multiple_of(PAGE);
                self.inherited.take(from, self.program_break.saturating_sub(from))
            }
            _ => TakenPages::default(),
        };
        let taken = match call {
            Some(Call::Munmap | Call::Mremap) => self.take(address, length),
            Some(Call::Shmdt) => match self.ranges.at(address) {
                (Some(owner), end) if owner.operation == Operation::Shmat => self.take(address, end - address),
                _ => Taken::default(),
            },
            Some(Call::Brk) if address != 0 && address < self.program_break => {
                let owner = owner(event, event, Operation::Brk);
                self.ranges.break_moved(self.program_break, address, owner)
            }
            Some(Call::Madvise) if gives_back(advice) => {
                self.populated.take(address, length);
                Taken::default()
            }
            _ => Taken::default(),
        };
        if self.pending.len() < MAX_PENDING || self.pending.contains_key(&event.tid) {
            self.pending.insert(event.tid, Pending { event: *event, taken, pages });
        } else {
            self.unapplied += 1;
        }
    }

    fn exit(&mut self, pending: Pending, exit: &CallEvent, length_of: impl FnOnce(u64, u64) -> Option<u64>) -> Applied {
        let Pending { event, taken, pages } = pending;
        let [address, length, third, fourth, _] = event.arguments;
        let failed = (-4095..0).contains(&exit.result);
        let result = exit.result as u64;
        let mut applied = Applied::default();
        match Call::from_raw(event.call) {
            Some(Call::Brk) => {
                let before = self.program_break;
                if before != 0 && result > before {
                    self.ranges.break_moved(before, result, owner(&event, exit, Operation::Brk));
                    self.add(event.stack, result - before);
                } else if result >= before {
                    self.ranges.restore(taken);
                    self.inherited.restore(pages);
                } else {
                    self.inherited.drop_taken(&pages);
                }
                self.program_break = result;
            }
            _ if failed => {
                self.ranges.restore(taken);
                self.inherited.restore(pages);
            }
            Some(Call::Munmap) => self.inherited.drop_taken(&pages),
            Some(Call::Mmap) => {
                let mut owner = owner(&event, exit, Operation::Mmap);
                owner.flags.thread_stack = fourth & flag::MAP_STACK != 0;
                owner.flags.populates = fourth & (flag::MAP_POPULATE | flag::MAP_LOCKED) != 0;
                self.populated.take(result, length);
                if self.inherited.concerns(exit.time) {
                    let replaced = self.inherited.take(result, length);
                    self.inherited.drop_taken(&replaced);
                }
                self.ranges.mapped(result, length, owner);
                self.add(event.stack, length);
                applied.code = third & flag::PROT_EXEC != 0;
            }
            Some(Call::Mremap) => {
                let to = Move {
                    old: address,
                    old_length: length,
                    new: result,
                    new_length: third,
                    keeps_old: fourth & flag::MREMAP_DONTUNMAP != 0,
                };
                let all_new = to.keeps_old || length == 0;
                self.populated.take(result, third);
                if length != 0 {
                    self.inherited.moved(pages, address, result, length.min(third));
                }
                self.ranges.moved(taken, to, owner(&event, exit, Operation::Mremap));
                let grown = if all_new { third } else { third.saturating_sub(length) };
                if grown > 0 {
                    self.add(event.stack, grown);
                }
            }
            Some(Call::Shmat) => match length_of(address, result) {
                Some(length) => {
                    self.populated.take(result, length);
                    self.ranges.mapped(result, length, owner(&event, exit, Operation::Shmat));
                    self.add(event.stack, length);
                }
                None => self.unapplied += 1,
            },
            Some(Call::Madvise) if populates(third) => {
                self.populate(address, length, &event, exit, Operation::Madvise);
            }
            Some(Call::Mlock) => self.populate(address, length, &event, exit, Operation::Mlock),
            Some(Call::Mlock2) if third & flag::MLOCK_ONFAULT == 0 => {
                self.populate(address, length, &event, exit, Operation::Mlock);
            }
            Some(Call::Mlockall) if address & (flag::MCL_CURRENT | flag::MCL_ONFAULT) == flag::MCL_CURRENT => {
                self.populate(0, END, &event, exit, Operation::Mlock);
            }
            _ => {}
        }
        applied
    }

    fn take(&mut self, address: u64, length: u64) -> Taken {
        self.populated.take(address, length);
        self.ranges.take(address, length)
    }

    fn populate(&mut self, address: u64, length: u64, event: &CallEvent, exit: &CallEvent, operation: Operation) {
        let mut owner = owner(event, exit, operation);
        owner.flags.populates = true;
        self.populated.mapped(address, length, owner);
    }

    fn add(&mut self, stack: u32, bytes: u64) {
        let bytes = bytes.checked_next_multiple_of(PAGE).unwrap_or(bytes);
        let sum = self.mapped.entry(stack).or_default();
        *sum = sum.plus(Amount { bytes, count: 1 });
    }

    /// The ranges that are mapped still.
    pub fn ranges(&self) -> &Ranges {
        &self.ranges
    }

    /// The same, to be compared with the memory map.
    pub fn ranges_mut(&mut self) -> &mut Ranges {
        &mut self.ranges
    }

    /// All that was mapped by each stack.
    pub fn mapped(&self) -> &HashMap<u32, Amount> {
        &self.mapped
    }

    /// The call that made a page resident without a fault, if one did; else the call that mapped it. With the first page
    /// number for which the answer can be another.
    pub fn owner_of_page(&self, page: u64) -> (Option<MappingCall>, u64) {
        let address = page.saturating_mul(PAGE);
        let (populated, until) = self.populated.at(address);
        let (mapped, mapped_until) = self.ranges.at(address);
        let owner = populated.or(mapped);
        let owner = owner.map(|owner| MappingCall { stack: owner.stack, populates: owner.flags.populates });
        (owner, until.min(mapped_until) / PAGE)
    }

    /// What found no room.
    pub fn lost(&self) -> Lost {
        let (ranges, populated) = (self.ranges.lost(), self.populated.lost());
        Lost {
            ranges: ranges.ranges + populated.ranges + self.unapplied,
            bytes: ranges.bytes.saturating_add(populated.bytes),
        }
    }
}

fn owner(entry: &CallEvent, exit: &CallEvent, operation: Operation) -> Owner {
    let in_allocator = entry.flags & CallEvent::IN_ALLOCATOR != 0;
    Owner { stack: entry.stack, operation, flags: Flags { in_allocator, ..Flags::default() }, time: exit.time }
}

/// Whether pages are given back on this advice.
fn gives_back(advice: u64) -> bool {
    matches!(
        advice,
        flag::MADV_DONTNEED | flag::MADV_FREE | flag::MADV_REMOVE | flag::MADV_PAGEOUT | flag::MADV_DONTNEED_LOCKED
    )
}

/// Whether pages become resident on this advice.
fn populates(advice: u64) -> bool {
    matches!(advice, flag::MADV_POPULATE_READ | flag::MADV_POPULATE_WRITE | flag::MADV_COLLAPSE)
}

/// Resident pages between two addresses; `ranges` are ascending, those that end before `start` are dropped.
pub fn resident_between(ranges: &mut &[PageRange], start: u64, end: u64) -> Pages {
    let (first, last) = (start / PAGE, end.div_ceil(PAGE));
    let mut pages = Pages::default();
    while let [range, rest @ ..] = *ranges {
        if range.end() > first {
            break;
        }
        *ranges = rest;
    }
    for range in ranges.iter().take_while(|range| range.first < last) {
        let count = range.end().min(last).saturating_sub(range.first.max(first));
        pages.add(range.kind, count);
    }
    pages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_of_unknown_size_is_a_loss() {
        let mut space = Space::default();
        let entry = CallEvent { call: Call::Shmat as u32, tid: 1, stack: 7, ..CallEvent::default() };
        let exit = CallEvent { exit: 1, result: 0x7000_0000, ..entry };
        space.apply(&entry, |_, _| None);
        space.apply(&exit, |_, _| None);
        assert_eq!((space.lost().ranges, space.ranges().bytes()), (1, 0));
        space.apply(&entry, |_, _| None);
        space.apply(&exit, |_, _| Some(5000));
        assert_eq!((space.lost().ranges, space.ranges().bytes()), (1, 8192));
        assert_eq!(space.mapped()[&7], Amount { bytes: 8192, count: 1 });
    }
}
