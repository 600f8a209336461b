//! Live blocks at the end of a trace.

use std::time::Duration;

use super::{
    Probes, Session, Traced,
    finish::{Live, Tables},
};
use crate::{
    collect::{
        blocks::{self, LiveBlock},
        stacks::{self, LiveBlocks, Owners},
    },
    profile::{Resident, Stack},
};

impl Session {
    /// The live blocks, ascending; `None` if allocations were not traced.
    pub(super) fn live_blocks(&self) -> anyhow::Result<Option<Vec<Live>>> {
        if self.probes == Probes::None {
            return Ok(None);
        }
        let mut blocks = Vec::new();
        self.tracer.for_each_block(|key, block| {
            blocks.push(Live { address: key.address, process: key.process, block: *block });
        })?;
        blocks.sort_unstable_by_key(|live| (live.process, live.address));
        Ok(Some(blocks))
    }

    /// Stacks of allocations.
    pub(super) fn heap(
        &self,
        tables: &Tables,
        older: Duration,
        owners: &Owners,
        imbalances: &mut Vec<stacks::Imbalance>,
    ) -> Vec<Stack> {
        let blocks = tables.blocks.as_deref().unwrap_or_default();
        let mut live = LiveBlocks::new(tables.now, older);
        for block in blocks {
            // The memory of a process that has ended is no more, whatever it did not free.
            let gone = self.traced.get(&block.process).is_none_or(Traced::is_gone);
            if gone { live.add_gone(&block.block) } else { live.add(&block.block) }
        }
        for (stack, sum) in &self.gone_blocks {
            live.add_gone_sum(*stack, *sum);
        }
        let function_of = |site: u16| self.sites.function_of(site);
        let (mut stacks, unbalanced) = stacks::assemble(
            &tables.records,
            &tables.totals,
            &live,
            &self.growth,
            tables.duration,
            function_of,
            owners,
        );
        for traced in self.traced.values() {
            let Some((before, after)) = traced.memory.as_ref().and_then(|memory| memory.looks()) else { continue };
            let old: Vec<LiveBlock> = blocks_of(blocks, traced.number)
                .iter()
                .filter(|block| live.counts(&block.block))
                .map(Live::of_reconciliation)
                .collect();
            let resident = blocks::residency(&old, &before.scan.ranges, &after.scan.ranges).by_stack;
            for (number, stack) in &mut stacks {
                let own = tables.records.get(number).is_none_or(|record| record.process == traced.number);
                if own {
                    let anonymous = resident.get(number).map_or(0, |bytes| bytes.resident);
                    let sum = stack.resident.unwrap_or_default();
                    stack.resident = Some(sum.plus(Resident { anonymous, ..Resident::default() }));
                }
            }
        }
        *imbalances = unbalanced;
        stacks.into_iter().map(|(_, stack)| stack).collect()
    }
}

/// The blocks of one process, of all of them in order.
pub(super) fn blocks_of(blocks: &[Live], process: u32) -> &[Live] {
    let first = blocks.partition_point(|block| block.process < process);
    let end = blocks.partition_point(|block| block.process <= process);
    &blocks[first..end]
}
