//! Which pages became resident during a trace, and what the memory of the processes consists of at its end.

use std::time::Duration;

use anyhow::bail;
use memtrace_common::{event::Counter, site::special};

use super::{
    Session, Traced,
    finish::{Live, Tables},
    heap::blocks_of,
};
use crate::{
    collect::{
        attribution::{self, NewPages, PageGrowth},
        blocks::{self, LiveBlock},
        faults, mappings, reconcile,
        stacks::Owners,
    },
    profile::{Amount, FaultCounts, GrowthSummary, Memory, Stack},
    target::pages::PageKind,
};

impl Session {
    /// Which pages of a process became resident, and by whom; `visit` is called for all of them, ascending. `None` if its pages
    /// were not looked at twice.
    fn page_growth(&self, traced: &Traced, visit: impl FnMut(&NewPages)) -> anyhow::Result<Option<PageGrowth>> {
        let Some(memory) = &traced.memory else { return Ok(None) };
        let Some((_, after)) = memory.looks().filter(|_| !traced.is_gone()) else {
            if traced.named && !traced.is_gone() {
                bail!(
                    "process {} ended before its pages could be looked at a second time: what was resident is not known \
                     (start it with `-- CMD`, which holds it at its end)",
                    traced.process.pid()
                );
            }
            return Ok(None);
        };
        let pages = self.tracer.page_records(traced.number)?;
        let (inherited, unmapped) = memory.space.inherited();
        let mut growth = attribution::attribute(
            attribution::Seen { before: &inherited, after: &after.scan.ranges, areas: &after.scan.areas },
            attribution::records(&pages),
            |page| memory.space.owner_of_page(page),
            visit,
        );
        growth.gone = growth.gone + unmapped;
        Ok(Some(growth))
    }

    /// Stacks of page faults.
    pub(super) fn faults(
        &self,
        tables: &Tables,
        kind: Option<PageKind>,
        owners: &Owners,
    ) -> anyhow::Result<Vec<Stack>> {
        let mut growths = Vec::new();
        for traced in self.traced.values() {
            if let Some(growth) = self.page_growth(traced, |_| {})? {
                growths.push((owners.processes.get(&traced.number).copied().unwrap_or(0), growth));
            }
        }
        Ok(faults::assemble(&tables.records, &tables.totals, &growths, kind, call_of, owners))
    }

    /// The resident memory of live blocks, by who allocated and who touched it.
    pub(super) fn touched(&self, tables: &Tables, owners: &Owners) -> anyhow::Result<Vec<Stack>> {
        let mut stacks = Vec::new();
        for traced in self.traced.values() {
            let mut pages = Vec::new();
            if self.page_growth(traced, |new| pages.push(*new))?.is_none() {
                continue;
            }
            let blocks = own_blocks(tables, traced).unwrap_or_default();
            let pairs = blocks::touched(&blocks, &pages);
            let function_of = |site: u16| self.sites.function_of(site);
            stacks.extend(faults::pair(&tables.records, pairs, function_of, owners));
        }
        Ok(stacks)
    }

    /// Stacks of mappings.
    pub(super) fn mapped(&self, tables: &Tables, older: Duration, owners: &Owners) -> Vec<Stack> {
        let mut stacks = Vec::new();
        for traced in self.traced.values() {
            let Some(memory) = &traced.memory else { continue };
            let gone = traced.is_gone();
            let resident = memory.last.as_ref().filter(|_| !gone).map(|after| after.scan.ranges.as_slice());
            let (records, space) = (&tables.records, &memory.space);
            let mut own = mappings::assemble(records, space, resident, tables.now, older, call_of, owners);
            // What it had mapped when its memory went is mapped no more.
            for stack in own.iter_mut().filter(|_| gone) {
                (stack.unfreed, stack.oldest) = (Amount::default(), None);
            }
            stacks.append(&mut own);
        }
        stacks
    }

    /// What was found out about the memory of all processes together.
    pub(super) fn memory(&mut self, tables: &Tables) -> anyhow::Result<Option<Memory>> {
        let mut sum: Option<Memory> = None;
        let audits: Vec<_> = self
            .traced
            .values_mut()
            .map(|traced| {
                let memory = traced.memory.as_mut()?;
                // Compared with an older map, ranges would be missing that were mapped since.
                let (before, after) = memory.before.as_ref().zip(memory.last.as_ref()).filter(|_| memory.at_end)?;
                Some(memory.space.ranges_mut().audit(&before.scan.areas, &after.scan.areas))
            })
            .collect();
        for (traced, audit) in self.traced.values().zip(audits) {
            let Some(memory) = &traced.memory else { continue };
            if traced.is_gone() {
                continue;
            }
            let looks = memory.looks();
            let blocks = own_blocks(tables, traced);
            let reconciliation = looks.map(|(before, after)| {
                let pointers: Vec<u64> =
                    [before, after].iter().flat_map(|look| look.stack_pointers.iter().copied()).collect();
                reconcile::reconcile(
                    before.look(),
                    after.look(),
                    blocks.as_deref(),
                    Some(memory.space.ranges()),
                    &pointers,
                )
            });
            let growth = if self.options.watch.faults { self.page_growth(traced, |_| {})? } else { None };
            let one = Memory {
                processes: 1,
                faults: self.options.watch.faults.then(|| FaultCounts {
                    user: 0,
                    kernel: 0,
                    counted: looks.map(|(before, after)| after.faults.saturating_sub(before.faults)),
                }),
                growth: growth.map(|growth| GrowthSummary {
                    processes: 1,
                    new: growth.new,
                    unattributed: growth.unattributed,
                    gone: growth.gone,
                }),
                calls: 0,
                calls_lost: 0,
                audit,
                reconciliation,
                looked_before_end: looks.map(|(_, after)| after.at.elapsed()).filter(|_| !memory.at_end),
            };
            sum = Some(match sum {
                Some(sum) => sum.plus(one),
                None => one,
            });
        }
        let Some(mut sum) = sum else { return Ok(None) };
        if let Some(faults) = &mut sum.faults {
            faults.user = self.tracer.counter(Counter::UserFaults)?;
            faults.kernel = self.tracer.counter(Counter::KernelFaults)?;
            // The kernel counts each process by itself, and those that were there only for a while not as long as memtrace does.
            let alone = self.traced.len() == 1 && !self.options.follow && self.selection.is_none();
            faults.counted = faults.counted.filter(|_| alone);
        }
        sum.calls = self.tracer.counter(Counter::Calls)?;
        let of_calls = self.losses()?.into_iter().filter(|(loss, _)| loss.is_of_calls());
        sum.calls_lost = of_calls.fold(0, |sum, (_, lost)| sum.saturating_add(lost.count));
        Ok(Some(sum))
    }
}

/// The blocks of a process as the reconciliation takes them; `None` if allocations were not traced.
fn own_blocks(tables: &Tables, traced: &Traced) -> Option<Vec<LiveBlock>> {
    let blocks = tables.blocks.as_deref()?;
    Some(blocks_of(blocks, traced.number).iter().map(Live::of_reconciliation).collect())
}

/// Number in a profile's functions of the system call behind a site.
fn call_of(site: u16) -> Option<usize> {
    special::call(site).map(|call| call as usize)
}
