//! The mappings made during a trace, put together per stack.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use memtrace_common::stack::{OVERFLOW_TRACEPOINT_STACK, StackEnd, StackRecord};

use super::{
    faults,
    space::{Space, resident_between},
    stacks::{self, Owners},
};
use crate::{
    profile::{Amount, Leaf, Resident, Stack},
    target::pages::PageRange,
};

#[derive(Default)]
struct Sum {
    live: Amount,
    oldest: Option<u64>,
    resident: Resident,
}

/// Puts stacks together: all that each mapped, and what of it is still mapped, with its resident part. Ranges younger than
/// `older` at the time `now` (nanoseconds of `CLOCK_MONOTONIC`) are left out of what is still mapped.
///
/// `records` are the stacks by number, `resident` the resident pages if they were looked at, `function_of` gives the index
/// of the function that stands for a system call.
pub fn assemble(
    records: &HashMap<u32, StackRecord>,
    space: &Space,
    resident: Option<&[PageRange]>,
    now: u64,
    older: Duration,
    function_of: impl Fn(u16) -> Option<usize>,
    owners: &Owners,
) -> Vec<Stack> {
    let mut sums: BTreeMap<u32, Sum> = BTreeMap::new();
    let mut pages = resident.unwrap_or_default();
    for owned in space.ranges().iter() {
        let part = resident_between(&mut pages, owned.start, owned.end);
        let sum = sums.entry(owned.owner.stack).or_default();
        if faults::age(now, owned.owner.time) < older {
            continue;
        }
        sum.live = sum.live.plus(Amount { bytes: owned.end - owned.start, count: 1 });
        sum.oldest = Some(sum.oldest.map_or(owned.owner.time, |oldest| oldest.min(owned.owner.time)));
        sum.resident = sum.resident.plus(faults::resident(part));
    }
    for stack in space.mapped().keys() {
        sums.entry(*stack).or_default();
    }
    sums.into_iter()
        .map(|(number, sum)| {
            let record = records.get(&number).filter(|_| number != OVERFLOW_TRACEPOINT_STACK);
            let function = record.and_then(|record| function_of(record.site));
            let (process, thread) = owners.of(record);
            Stack {
                process,
                thread,
                leaf: function.map_or(Leaf::Unknown, Leaf::Function),
                frames: record.map(stacks::frames).unwrap_or_default(),
                end: record.and_then(|record| StackEnd::from_raw(record.end)).unwrap_or(StackEnd::Complete),
                allocated: space.mapped().get(&number).copied().unwrap_or_default(),
                // Parts can be unmapped many times, by any call.
                freed: Amount::default(),
                unfreed: sum.live,
                oldest: sum.oldest.map(|time| faults::age(now, time)),
                growth: Vec::new(),
                resident: resident.map(|_| sum.resident),
                touch: None,
            }
        })
        .collect()
}
