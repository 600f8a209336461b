//! Page faults and the pages that they made resident, put together per stack.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use memtrace_common::{
    fault::PAGE,
    resident::Member,
    site::special,
    stack::{OVERFLOW_STACK, OVERFLOW_TRACEPOINT_STACK, StackEnd, StackRecord, Totals},
};

use super::{
    attribution::PageGrowth,
    stacks::{self, Owners},
};
use crate::{
    kernel::source::resident::MemberChange,
    profile::{Amount, Leaf, Resident, Stack, Touch},
    target::pages::{PageKind, Pages},
};

/// Bytes of pages by kind.
pub fn resident(pages: Pages) -> Resident {
    let bytes = |pages: u64| pages.saturating_mul(PAGE);
    Resident { anonymous: bytes(pages.anon), file: bytes(pages.file), shared: bytes(pages.shmem) }
}

/// Puts stacks together: all faults of each, and the pages that it made resident; `kind` leaves out all pages of other
/// kinds.
///
/// `records` are the stacks by number, `totals` is indexed by number, `growths` are those of the processes with their positions,
/// `function_of` gives the index of the function that stands for a system call. Stacks of system calls are there for the pages that the call itself made resident.
pub fn assemble(
    records: &HashMap<u32, StackRecord>,
    totals: &[Totals],
    growths: &[(usize, PageGrowth)],
    kind: Option<PageKind>,
    function_of: impl Fn(u16) -> Option<usize>,
    owners: &Owners,
) -> Vec<Stack> {
    let only = |pages: Pages| match kind {
        None => pages,
        Some(kind) => {
            let mut only = Pages::default();
            only.add(kind, pages.of(kind));
            only
        }
    };
    let mut numbers: BTreeMap<u32, (u64, Pages)> = BTreeMap::new();
    for (number, totals) in (0u32..).zip(totals) {
        let faults = number == OVERFLOW_TRACEPOINT_STACK
            || records.get(&number).is_some_and(|record| record.site == special::FAULT);
        if faults && totals.allocated_count > 0 {
            numbers.entry(number).or_default().0 = totals.allocated_count;
        }
    }
    for (_, growth) in growths {
        for (number, sum) in &growth.by_stack {
            // Several processes can have pages of calls whose stacks found no room.
            let pages = &mut numbers.entry(*number).or_default().1;
            *pages = *pages + only(sum.pages);
        }
    }
    let mut stacks: Vec<Stack> = numbers
        .into_iter()
        .map(|(number, (faults, pages))| {
            let record = records.get(&number).filter(|_| number != OVERFLOW_TRACEPOINT_STACK);
            let leaf =
                record.map_or(Leaf::Unknown, |record| function_of(record.site).map_or(Leaf::Frame, Leaf::Function));
            let end = record.and_then(|record| StackEnd::from_raw(record.end)).unwrap_or(StackEnd::Complete);
            let frames = record.map(stacks::frames).unwrap_or_default();
            let (process, thread) = owners.of(record);
            Stack { process, thread, ..stack(leaf, frames, end, faults, pages) }
        })
        .collect();
    for (process, growth) in growths {
        let unattributed = only(growth.unattributed);
        if unattributed.total() > 0 {
            let unattributed = stack(Leaf::Unattributed, Vec::new(), StackEnd::Complete, 0, unattributed);
            stacks.push(Stack { process: *process, ..unattributed });
        }
    }
    stacks
}

fn stack(leaf: Leaf, frames: Vec<u64>, end: StackEnd, faults: u64, pages: Pages) -> Stack {
    let resident = resident(pages);
    let amount = |count: u64| Amount { bytes: count.saturating_mul(PAGE), count };
    Stack {
        process: 0,
        thread: None,
        leaf,
        frames,
        end,
        allocated: amount(faults),
        // Pages that went again are not told from faults that made no page resident.
        freed: Amount::default(),
        unfreed: amount(pages.total()),
        oldest: None,
        growth: Vec::new(),
        resident: Some(resident),
        touch: None,
    }
}

/// Puts stacks together from changes of the resident set: `changes` are in the order of [`Member::ALL`], `before` is the
/// resident set at the start, by kind.
///
/// What each counter's size changed by is the sum over all its stacks, those of others than the process's own threads (the
/// kernel's, other processes) and the very first change, whose call path is not known.
pub fn exact(
    records: &HashMap<u32, StackRecord>,
    totals: &[Totals],
    changes: &[MemberChange; Member::ALL.len()],
    before: Option<Pages>,
    owners: &Owners,
) -> Vec<Stack> {
    let mut stacks: Vec<Stack> = Vec::new();
    for (number, totals) in (0u32..).zip(totals) {
        let record = records.get(&number);
        let Some(member) = record.and_then(|record| special::member(record.site)) else { continue };
        let end = record.and_then(|record| StackEnd::from_raw(record.end)).unwrap_or(StackEnd::Complete);
        let frames = record.map(stacks::frames).unwrap_or_default();
        let (process, thread) = owners.of(record);
        stacks.push(Stack { process, thread, ..change(Leaf::Frame, frames, end, member, *totals) });
    }
    for (member, change_of) in Member::ALL.into_iter().zip(changes) {
        let others = Totals {
            allocated_bytes: change_of.others_added,
            allocated_count: u64::from(change_of.others_added > 0),
            freed_bytes: change_of.others_removed,
            freed_count: u64::from(change_of.others_removed > 0),
        };
        if others != Totals::default() {
            stacks.push(change(Leaf::Others, Vec::new(), StackEnd::Complete, member as u32, others));
        }
        let start = before.map(|pages| pages.of(kind_of(member as u32)).saturating_mul(PAGE));
        if let (Some(start), Some((first, _))) = (start, change_of.sizes) {
            let first = Totals {
                allocated_bytes: first.saturating_sub(start),
                allocated_count: u64::from(first > start),
                freed_bytes: start.saturating_sub(first),
                freed_count: u64::from(first < start),
            };
            if first != Totals::default() {
                stacks.push(change(Leaf::Unattributed, Vec::new(), StackEnd::Complete, member as u32, first));
            }
        }
    }
    stacks
}

fn kind_of(member: u32) -> PageKind {
    if member == Member::File as u32 {
        PageKind::File
    } else if member == Member::Shared as u32 {
        PageKind::Shmem
    } else {
        PageKind::Anon
    }
}

fn change(leaf: Leaf, frames: Vec<u64>, end: StackEnd, member: u32, totals: Totals) -> Stack {
    let net = totals.allocated_bytes.saturating_sub(totals.freed_bytes);
    let mut pages = Pages::default();
    pages.add(kind_of(member), net / PAGE);
    Stack {
        process: 0,
        thread: None,
        leaf,
        frames,
        end,
        allocated: Amount { bytes: totals.allocated_bytes, count: totals.allocated_count },
        freed: Amount { bytes: totals.freed_bytes, count: totals.freed_count },
        unfreed: Amount { bytes: net, count: if net > 0 { totals.allocated_count } else { 0 } },
        oldest: None,
        growth: Vec::new(),
        resident: Some(resident(pages)),
        touch: None,
    }
}

/// Puts pairs together: bytes on resident pages of live blocks, by the stack that allocated the block and the one that made
/// the page resident (`None`: not known). `function_of` gives the index of the allocator function behind a site.
pub fn pair(
    records: &HashMap<u32, StackRecord>,
    pairs: HashMap<(u32, Option<u32>), u64>,
    function_of: impl Fn(u16) -> Option<usize>,
    owners: &Owners,
) -> Vec<Stack> {
    let mut pairs: Vec<_> = pairs.into_iter().collect();
    pairs.sort_unstable();
    let end = |record: Option<&StackRecord>| {
        record.and_then(|record| StackEnd::from_raw(record.end)).unwrap_or(StackEnd::Complete)
    };
    pairs
        .into_iter()
        .map(|((allocated, touched), bytes)| {
            let record = records.get(&allocated).filter(|_| allocated != OVERFLOW_STACK);
            let toucher = touched.and_then(|touched| records.get(&touched));
            let amount = Amount { bytes, count: bytes.div_ceil(PAGE) };
            let (process, thread) = owners.of(record);
            Stack {
                process,
                thread,
                leaf: record.and_then(|record| function_of(record.site)).map_or(Leaf::Unknown, Leaf::Function),
                frames: record.map(stacks::frames).unwrap_or_default(),
                end: end(record),
                allocated: amount,
                freed: Amount::default(),
                unfreed: amount,
                oldest: None,
                growth: Vec::new(),
                resident: Some(Resident { anonymous: bytes, ..Resident::default() }),
                touch: Some(Touch {
                    frames: toucher.map(stacks::frames).unwrap_or_default(),
                    end: end(toucher),
                    call: toucher.and_then(|toucher| special::call(toucher.site)),
                    known: toucher.is_some(),
                }),
            }
        })
        .collect()
}

/// How long ago something happened, of two times in nanoseconds of one clock.
pub fn age(now: u64, time: u64) -> Duration {
    Duration::from_nanos(now.saturating_sub(time))
}
