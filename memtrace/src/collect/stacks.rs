//! The tables at the end of a trace, put together: per stack its totals and its live blocks.

use std::{collections::HashMap, time::Duration};

use memtrace_common::{
    block::Block,
    stack::{OVERFLOW_STACK, OVERFLOW_TRACEPOINT_STACK, StackEnd, StackRecord, Totals},
};

use super::growth::Growth;
use crate::profile::{Amount, Leaf, Stack};

/// Which entries of a profile the recorded numbers of processes and threads stand for.
#[derive(Debug, Default)]
pub struct Owners {
    /// Positions of processes, by the numbers of their images.
    pub processes: HashMap<u32, usize>,
    /// Positions of threads, by the number of the image and of the thread.
    pub threads: HashMap<(u32, u32), usize>,
    /// Position of what stands for a process that is not known.
    pub unknown: usize,
}

impl Owners {
    /// Process and thread of a stack. One whose process is not known (it has no record, for example) is [`Self::unknown`]'s.
    pub fn of(&self, record: Option<&StackRecord>) -> (usize, Option<usize>) {
        let process = record.and_then(|record| self.processes.get(&record.process)).copied().unwrap_or(self.unknown);
        (process, record.and_then(|record| self.threads.get(&(record.process, record.thread))).copied())
    }
}

/// Live blocks of one stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// All of them.
    pub all: Amount,
    /// Those at least as old as asked for.
    pub old: Amount,
    /// Earliest allocation time among the old ones, nanoseconds of `CLOCK_MONOTONIC`.
    pub oldest: Option<u64>,
}

/// Sums up live blocks by stack.
#[derive(Debug)]
pub struct LiveBlocks {
    end: u64,
    older: Duration,
    by_stack: HashMap<u32, Live>,
}

impl LiveBlocks {
    /// For a trace that ended at `end` (nanoseconds of `CLOCK_MONOTONIC`), with blocks younger than `older` left out.
    pub fn new(end: u64, older: Duration) -> Self {
        Self { end, older, by_stack: HashMap::new() }
    }

    /// Adds one block whose process is no more: it counts as allocated, and not as unfreed.
    pub fn add_gone(&mut self, block: &Block) {
        let live = self.by_stack.entry(block.stack).or_default();
        live.all.bytes = live.all.bytes.saturating_add(block.size);
        live.all.count += 1;
    }

    /// The same for all blocks of a stack at once, of processes that ended before.
    pub fn add_gone_sum(&mut self, stack: u32, sum: Amount) {
        let live = self.by_stack.entry(stack).or_default();
        live.all = live.all.plus(sum);
    }

    /// Whether the block is old enough to count.
    pub fn counts(&self, block: &Block) -> bool {
        self.end.saturating_sub(block.time) >= nanoseconds(self.older)
    }

    /// Adds one block.
    pub fn add(&mut self, block: &Block) {
        let old = self.counts(block);
        let live = self.by_stack.entry(block.stack).or_default();
        live.all.bytes = live.all.bytes.saturating_add(block.size);
        live.all.count += 1;
        if old {
            live.old.bytes = live.old.bytes.saturating_add(block.size);
            live.old.count += 1;
            live.oldest = Some(live.oldest.map_or(block.time, |oldest| oldest.min(block.time)));
        }
    }
}

/// A stack whose totals and live blocks do not agree: a defect of memtrace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "stack {stack}: {allocated:?} allocated minus {freed:?} freed is not the {live:?} found live; please report this"
)]
pub struct Imbalance {
    /// Its number.
    pub stack: u32,
    /// Allocated during the trace.
    pub allocated: Amount,
    /// Freed of that.
    pub freed: Amount,
    /// Sum of its live blocks.
    pub live: Amount,
}

/// Puts stacks together, with their numbers, from what was read after the probes were detached, and lists those that do not
/// balance.
///
/// `records` are the stacks by number, `totals` is indexed by number, `function_of` gives the index of the function
/// behind a site: stacks of other sites, and those without a single completed allocation, are left out.
pub fn assemble(
    records: &HashMap<u32, StackRecord>,
    totals: &[Totals],
    live: &LiveBlocks,
    growth: &Growth,
    duration: Duration,
    function_of: impl Fn(u16) -> Option<usize>,
    owners: &Owners,
) -> (Vec<(u32, Stack)>, Vec<Imbalance>) {
    let mut stacks = Vec::new();
    let mut imbalances = Vec::new();
    for (number, totals) in (0u32..).zip(totals) {
        // Stack 0 stands for all calls whose path is unknown; other numbers always have a record.
        let record = records.get(&number).filter(|_| number != OVERFLOW_STACK);
        let function = record.and_then(|record| function_of(record.site));
        if number == OVERFLOW_TRACEPOINT_STACK || record.is_some() && function.is_none() {
            continue;
        }
        let allocated = Amount { bytes: totals.allocated_bytes, count: totals.allocated_count };
        let freed = Amount { bytes: totals.freed_bytes, count: totals.freed_count };
        let found = live.by_stack.get(&number).copied().unwrap_or_default();
        let balance = Amount {
            bytes: allocated.bytes.wrapping_sub(freed.bytes),
            count: allocated.count.wrapping_sub(freed.count),
        };
        if balance != found.all {
            imbalances.push(Imbalance { stack: number, allocated, freed, live: found.all });
        }
        if allocated.count == 0 {
            continue;
        }
        let (process, thread) = owners.of(record);
        let stack = Stack {
            process,
            thread,
            leaf: function.map_or(Leaf::Unknown, Leaf::Function),
            frames: record.map(frames).unwrap_or_default(),
            end: record.and_then(|record| StackEnd::from_raw(record.end)).unwrap_or(StackEnd::Complete),
            allocated,
            freed,
            unfreed: found.old,
            oldest: found.oldest.map(|time| Duration::from_nanos(live.end.saturating_sub(time))),
            growth: growth.series(number, duration, found.all.bytes),
            resident: None,
            touch: None,
        };
        stacks.push((number, stack));
    }
    (stacks, imbalances)
}

/// A record's frames, innermost first.
pub fn frames(record: &StackRecord) -> Vec<u64> {
    let mut frames: Vec<u64> = record.frames.iter().take(usize::from(record.len)).copied().collect();
    frames.reverse();
    frames
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use super::*;
    use memtrace_common::{site::special, stack::MAX_FRAMES};

    const SECOND: u64 = 1_000_000_000;

    fn block(size: u64, time: u64, stack: u32) -> Block {
        Block { size, time, stack, zero: 0 }
    }

    fn record(site: u16, addresses: &[u64]) -> StackRecord {
        let mut frames = [0; MAX_FRAMES];
        frames[..addresses.len()].copy_from_slice(addresses);
        StackRecord { process: 1, thread: 0, zero: 0, site, len: addresses.len() as u8, end: 1, frames }
    }

    fn totals(allocated: (u64, u64), freed: (u64, u64)) -> Totals {
        Totals {
            allocated_bytes: allocated.0,
            allocated_count: allocated.1,
            freed_bytes: freed.0,
            freed_count: freed.1,
        }
    }

    #[test]
    fn young_blocks_are_left_out_of_unfreed_only() {
        let mut live = LiveBlocks::new(100 * SECOND, Duration::from_secs(10));
        live.add(&block(5, 89 * SECOND, 2));
        live.add(&block(7, 90 * SECOND, 2));
        live.add(&block(11, 91 * SECOND, 2));
        // The last is not of an allocator function.
        let records = HashMap::from([(2, record(3, &[8, 9])), (3, record(special::FAULT, &[8]))]);
        let owners = Owners { processes: HashMap::from([(1, 4)]), threads: HashMap::from([((1, 0), 2)]), unknown: 0 };
        let (stacks, imbalances) = assemble(
            &records,
            &[Totals::default(), totals((4096, 1), (0, 0)), totals((30, 4), (7, 1)), totals((4096, 1), (0, 0))],
            &live,
            &Growth::default(),
            Duration::from_secs(50),
            |site| (site < 9).then_some(usize::from(site)),
            &owners,
        );
        assert!(imbalances.is_empty(), "{imbalances:?}");
        assert_eq!(stacks.len(), 1);
        assert_eq!(stacks[0].1.leaf, Leaf::Function(3));
        assert_eq!((stacks[0].1.process, stacks[0].1.thread), (4, Some(2)));
        assert_eq!(stacks[0].1.frames, vec![9, 8], "innermost first");
        assert_eq!(stacks[0].1.end, StackEnd::Depth);
        assert_eq!(stacks[0].1.unfreed, Amount { bytes: 12, count: 2 });
        assert_eq!(stacks[0].1.oldest, Some(Duration::from_secs(11)));
        assert_eq!(stacks[0].1.allocated, Amount { bytes: 30, count: 4 });
    }

    #[test]
    fn imbalance_is_reported() {
        let mut live = LiveBlocks::new(SECOND, Duration::ZERO);
        live.add(&block(5, 0, 2));
        let (_, imbalances) = assemble(
            &HashMap::new(),
            &[Totals::default(), Totals::default(), totals((5, 2), (0, 0)), totals((0, 0), (4, 1))],
            &live,
            &Growth::default(),
            Duration::from_secs(1),
            |_| None,
            &Owners::default(),
        );
        assert_eq!(imbalances.iter().map(|i| i.stack).collect::<Vec<_>>(), vec![2, 3]);
    }

    #[test]
    fn calls_without_a_stack_keep_their_bytes() {
        let mut live = LiveBlocks::new(SECOND, Duration::ZERO);
        live.add(&block(64, 0, OVERFLOW_STACK));
        let (stacks, imbalances) = assemble(
            &HashMap::new(),
            &[totals((64, 1), (0, 0))],
            &live,
            &Growth::default(),
            Duration::from_secs(1),
            |_| Some(0),
            &Owners::default(),
        );
        assert!(imbalances.is_empty());
        assert_eq!(stacks[0].1.leaf, Leaf::Unknown);
        assert_eq!(stacks[0].1.unfreed, Amount { bytes: 64, count: 1 });
    }
}
