//! Which resident pages the live blocks lie on.

use std::{collections::HashMap, ops::Range};

use memtrace_common::fault::PAGE;

use super::{attribution::NewPages, change::changes};
use crate::target::pages::PageRange;

/// A block that was allocated during the trace and has not been freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// Address that the allocator returned.
    pub address: u64,
    /// Bytes that the caller asked for.
    pub size: u64,
    /// Stack number of the call path.
    pub stack: u32,
}

impl LiveBlock {
    /// Address after its last byte.
    pub fn end(&self) -> u64 {
        self.address.saturating_add(self.size)
    }
}

/// Bytes of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockBytes {
    /// All of them.
    pub requested: u64,
    /// Those on pages that are resident at the end.
    pub resident: u64,
    /// Those on pages that are resident at the end and were not, as the same kind of page, at the start.
    pub new: u64,
}

impl BlockBytes {
    /// All three sums.
    #[must_use]
    pub fn plus(mut self, other: Self) -> Self {
        self.add(other);
        self
    }

    fn add(&mut self, other: Self) {
        self.requested = self.requested.saturating_add(other.requested);
        self.resident = self.resident.saturating_add(other.resident);
        self.new = self.new.saturating_add(other.new);
    }
}

/// What is resident of the live blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockResidency {
    /// By stack number.
    pub by_stack: HashMap<u32, BlockBytes>,
    /// Sum of all stacks.
    pub total: BlockBytes,
}

/// Finds what is resident of `blocks`, which have to ascend by address. Where blocks overlap, which those of a sound allocator
/// do not, resident bytes are the first one's.
pub fn residency(blocks: &[LiveBlock], before: &[PageRange], after: &[PageRange]) -> BlockResidency {
    let mut residency = BlockResidency::default();
    let mut add = |stack, bytes| {
        residency.by_stack.entry(stack).or_default().add(bytes);
        residency.total.add(bytes);
    };
    for block in blocks {
        add(block.stack, BlockBytes { requested: block.size, ..BlockBytes::default() });
    }
    let pages = changes(before, after).filter(|change| change.after.is_some());
    overlay(
        blocks,
        pages.map(|change| (bytes(change.first, change.end), change.new_kind().is_some())),
        |stack, span, is_new| {
            let resident = span.end - span.start;
            add(stack, BlockBytes { resident, new: if is_new { resident } else { 0 }, ..BlockBytes::default() });
        },
    );
    residency
}

/// Bytes of live blocks on new pages, by the stack that allocated them and the stack that made the page resident (`None`: not
/// known). Both have to ascend.
pub fn touched(blocks: &[LiveBlock], pages: &[NewPages]) -> HashMap<(u32, Option<u32>), u64> {
    let mut touched = HashMap::new();
    let pages = pages.iter().map(|pages| (bytes(pages.first, pages.end), pages.stack));
    overlay(blocks, pages, |stack, span, by| {
        let bytes: &mut u64 = touched.entry((stack, by)).or_default();
        *bytes = bytes.saturating_add(span.end - span.start);
    });
    touched
}

/// Addresses of pages.
pub fn bytes(first: u64, end: u64) -> Range<u64> {
    first.saturating_mul(PAGE)..end.saturating_mul(PAGE)
}

/// Calls `visit` with every stretch of addresses that lies in a block and in a span: the block's stack, the stretch, and what
/// comes with the span. Both have to ascend; no address is visited twice.
pub fn overlay<T: Copy>(
    blocks: &[LiveBlock],
    spans: impl Iterator<Item = (Range<u64>, T)>,
    mut visit: impl FnMut(u32, Range<u64>, T),
) {
    let mut blocks = blocks.iter();
    let mut block = blocks.next();
    // All before this address has been visited or is in no block.
    let mut position = 0;
    for (span, with) in spans {
        while let Some(current) = block {
            let start = current.address.max(span.start).max(position);
            let end = current.end().min(span.end);
            if start < end {
                visit(current.stack, start..end, with);
                position = end;
            }
            if current.end() > span.end {
                break;
            }
            block = blocks.next();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        collect::{attribution::Source, random::Random},
        target::pages::PageKind,
    };

    fn block(address: u64, size: u64, stack: u32) -> LiveBlock {
        LiveBlock { address, size, stack }
    }

    fn range(first: u64, count: u32, kind: PageKind) -> PageRange {
        PageRange { first, count, kind, huge: false }
    }

    #[test]
    fn bytes_on_resident_and_on_new_pages() {
        let before = [range(10, 2, PageKind::Anon), range(30, 1, PageKind::File)];
        let after = [range(11, 3, PageKind::Anon), range(30, 1, PageKind::Anon)];
        let blocks = [
            block(10 * PAGE, PAGE + 100, 1),
            block(11 * PAGE + 100, 50, 2),
            block(12 * PAGE - 10, 30, 1),
            block(13 * PAGE, 10 * PAGE, 3),
            block(30 * PAGE, 5, 2),
            block(50 * PAGE, 77, 4),
        ];
        let found = residency(&blocks, &before, &after);
        let bytes = |requested, resident, new| BlockBytes { requested, resident, new };
        assert_eq!(found.by_stack[&1], bytes(PAGE + 130, 130, 20));
        assert_eq!(found.by_stack[&2], bytes(55, 55, 5));
        assert_eq!(found.by_stack[&3], bytes(10 * PAGE, PAGE, PAGE));
        assert_eq!(found.by_stack[&4], bytes(77, 0, 0));
        assert_eq!(found.total, bytes(11 * PAGE + 262, PAGE + 185, PAGE + 25));
    }

    #[test]
    fn empty_inputs() {
        assert_eq!(residency(&[], &[], &[range(1, 1, PageKind::Anon)]), BlockResidency::default());
        assert_eq!(residency(&[block(1, 2, 3)], &[], &[]).total, BlockBytes { requested: 2, ..BlockBytes::default() });
        assert!(touched(&[], &[]).is_empty());
    }

    #[test]
    fn who_allocated_and_who_touched() {
        let pages = |first, end, stack| NewPages {
            first,
            end,
            kind: PageKind::Anon,
            stack,
            source: if stack.is_some() { Source::OwnFault } else { Source::Unattributed },
        };
        let blocks = [block(10 * PAGE, 2 * PAGE, 1), block(12 * PAGE, 100, 2)];
        let found = touched(&blocks, &[pages(11, 12, Some(7)), pages(12, 13, None), pages(13, 14, Some(8))]);
        assert_eq!(found, HashMap::from([((1, Some(7)), PAGE), ((2, None), 100)]));
    }

    /// Blocks that ascend but overlap as they like, against single bytes.
    #[test]
    fn overlapping_blocks_count_no_byte_twice() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let mut blocks: Vec<_> =
                (0..20).map(|stack| block(random.below(300), random.below(60), stack % 4)).collect();
            blocks.sort_by_key(|block| block.address);
            let mut spans = Vec::new();
            let mut start = 0;
            while start < 400 {
                let end = start + 1 + random.below(30);
                spans.push((start..end, spans.len()));
                start = end + random.below(10);
            }
            let mut found = HashMap::new();
            overlay(&blocks, spans.iter().cloned(), |_, stretch, span| {
                for byte in stretch {
                    assert_eq!(found.insert(byte, span), None, "seed {seed}: byte {byte} twice");
                }
            });
            let covered = |byte| blocks.iter().any(|block| (block.address..block.end()).contains(&byte));
            for (span, number) in spans {
                for byte in span {
                    assert_eq!(found.get(&byte).copied(), covered(byte).then_some(number), "seed {seed}: byte {byte}");
                }
            }
        }
    }
}
