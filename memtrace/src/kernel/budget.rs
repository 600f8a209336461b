//! Memory budget to table sizes.

use memtrace_common::{
    block::{Block, BlockKey, ThreadState},
    fault::{Chunk, ChunkKey},
    stack::{StackRecord, Totals},
};

/// Smallest budget that leaves useful tables, MiB.
pub const MIN_MIB: u32 = 1;
/// Largest budget: the tables' entry counts stay far below 2³¹. MiB.
pub const MAX_MIB: u32 = 65_536;
/// What is used when nothing else is asked for, MiB.
pub const DEFAULT_MIB: u32 = 256;

/// Bytes the kernel adds to an entry of a preallocated hash table: its `struct htab_elem` (48) and its share of the
/// buckets (16 bytes each, as many as entries rounded up to a power of two, so up to twice as many).
const HASH_OVERHEAD: u64 = 48 + 32;

/// Number of entries of each table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Live blocks.
    pub blocks: u32,
    /// Distinct call stacks.
    pub stacks: u32,
    /// Threads that allocate at the same time.
    pub threads: u32,
    /// Chunks of pages.
    pub chunks: u32,
    /// Unwind rows, beside the tables above.
    pub rows: u64,
}

/// What the tables are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uses {
    /// Live blocks.
    pub blocks: bool,
    /// Pages and the faults on them.
    pub pages: bool,
    /// Threads in system calls and page faults, whose state is kept apart from that of allocating calls.
    pub tracepoints: bool,
}

impl Budget {
    /// For live blocks alone; see [`Self::for_uses`].
    pub fn from_mebibytes(mebibytes: u32) -> Self {
        Self::for_uses(mebibytes, Uses { blocks: true, pages: false, tracepoints: false })
    }

    /// Divides `mebibytes` between the tables: an eighth for stacks, an eighth for threads (at most 8192; twice as much if they
    /// have two states), the rest
    /// for live blocks, or pages, or half of it for each of both. Unwind rows may take a quarter of it more, as far as the
    /// target's code needs them. Values outside [`MIN_MIB`] to [`MAX_MIB`] are taken as the nearest of them.
    pub fn for_uses(mebibytes: u32, uses: Uses) -> Self {
        let bytes = u64::from(mebibytes.clamp(MIN_MIB, MAX_MIB)) << 20;
        let stack = (size_of::<StackRecord>() + size_of::<Totals>() + size_of::<u64>() + size_of::<u64>()) as u64
            + HASH_OVERHEAD;
        let thread = (size_of::<u64>() + size_of::<ThreadState>()) as u64 + HASH_OVERHEAD;
        let block = (size_of::<BlockKey>() + size_of::<Block>()) as u64 + HASH_OVERHEAD;
        let stacks = bytes / 8 / stack;
        let states = 1 + u64::from(uses.tracepoints);
        let threads = (bytes / 8 / thread).min(8192) * states;
        let chunk = (size_of::<ChunkKey>() + size_of::<Chunk>()) as u64 + HASH_OVERHEAD;
        let rest = (bytes - stacks * stack - threads * thread) / u64::from(uses.blocks && uses.pages).saturating_add(1);
        let entries = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let share = |used: bool, entry: u64| if used { entries(rest / entry) } else { 1 };
        Self {
            blocks: share(uses.blocks, block),
            stacks: entries(stacks),
            threads: entries(threads),
            chunks: share(uses.pages, chunk),
            rows: bytes / 4 / size_of::<u64>() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_fit_the_budget() {
        for mebibytes in [1, 2, 64, DEFAULT_MIB, MAX_MIB] {
            for (blocks, pages) in [(true, false), (false, true), (true, true)] {
                let budget = Budget::for_uses(mebibytes, Uses { blocks, pages, tracepoints: pages });
                let thread = size_of::<ThreadState>() as u64 + 88;
                let used = u64::from(budget.blocks) * 120
                    + u64::from(budget.stacks) * 1152
                    + u64::from(budget.threads) * thread
                    + u64::from(budget.chunks) * 608;
                let bytes = u64::from(mebibytes) << 20;
                assert!(used <= bytes + 608, "{mebibytes} MiB: {budget:?} take {used}");
                assert!(used > bytes * 9 / 10, "{mebibytes} MiB: {budget:?} waste {}", bytes.abs_diff(used));
            }
        }
    }

    #[test]
    fn out_of_range_is_clamped() {
        assert_eq!(Budget::from_mebibytes(0), Budget::from_mebibytes(MIN_MIB));
        assert_eq!(Budget::from_mebibytes(u32::MAX), Budget::from_mebibytes(MAX_MIB));
    }
}
