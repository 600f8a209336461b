//! The end of a trace: its tables and what was seen become a profile.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use anyhow::{Context as _, bail};
use memtrace_common::{
    block::Block,
    call::Call,
    event::Counter,
    loss::{Loss, LossCount},
    settings::Unwind,
    site::special,
    stack::{StackRecord, Totals},
};

use super::{Ask, Finished, Session, children::Children, memory::Snapshot, monotonic_now};
use crate::{
    collect::{
        attribution::{self, NewPages, PageGrowth},
        blocks::{self, LiveBlock},
        faults, mappings,
        ranges::Audit,
        reconcile,
        space::Space,
        stacks::{self, LiveBlocks},
    },
    profile::{
        self, Events, FaultCounts, Function, GrowthSummary, Memory, Process as Traced, Profile, Resident, Stack,
        Subject, TraceEnd,
    },
    target::{self, Discovery, pages::PageKind, process::Rss},
};

/// Growth of anonymous memory without a single probe hit from which on a trace is an error: far more than a program
/// gets from its stack and from copied pages.
const UNSEEN_GROWTH: u64 = 1 << 20;

/// What was seen of the memory as a whole.
struct Seen {
    space: Space,
    /// Those of followed children.
    children: BTreeMap<u32, Space>,
    before: Option<Snapshot>,
    after: Option<Snapshot>,
    /// Whether the last look was at the end of the trace.
    at_end: bool,
    audit: Option<Audit>,
}

/// A live block.
struct Live {
    address: u64,
    tgid: u32,
    block: Block,
}

impl Live {
    fn of_reconciliation(&self) -> LiveBlock {
        LiveBlock { address: self.address, size: self.block.size, stack: self.block.stack }
    }
}

impl Session {
    /// Ends recording, detaches, and reads what was found.
    ///
    /// # Errors
    /// The kernel's tables can't be read, or not a single call was seen while the target's memory grew.
    pub fn finish(mut self, end: TraceEnd, ask: &Ask) -> anyhow::Result<Finished> {
        let started = self.started.context("a trace must be started before it can end")?;
        // First, so that the fault of every page that is found has been recorded. What another program has is not this one's.
        let at_end =
            end != TraceEnd::TargetExecuted && self.memory.as_mut().is_some_and(|memory| memory.end(&self.process));
        if let Some(children) = &mut self.children {
            children.end();
        }
        self.tracer.stop()?;
        let now = monotonic_now();
        let duration = started.elapsed();
        self.watch_rss();
        let _ = self.drain();
        self.tracer.detach()?;
        if self.process.is_alive() && end != TraceEnd::TargetExecuted {
            let before = self.modules.mappings().len();
            let _ = self.modules.refresh(&self.process);
            self.late.too_late(&self.modules, before);
        }
        let events = self.tracer.loader_events()?;
        self.note_loader(events, events)?;
        let seen = self.memory.take().map(|mut memory| {
            memory.drain(&self.process);
            let (mut space, children, before, after) = memory.finish();
            // Compared with an older map, ranges would be missing that were mapped since.
            let audit = match (&before, &after) {
                (Some(before), Some(after)) if at_end => {
                    Some(space.ranges_mut().audit(&before.scan.areas, &after.scan.areas))
                }
                _ => None,
            };
            Seen { space, children, before, after, at_end, audit }
        });
        let rollups = looks(seen.as_ref()).map(|(before, after)| (before.rollup.rss, after.rollup.rss));
        let mut records = HashMap::new();
        self.tracer.for_each_stack(|number, record| {
            records.insert(number, *record);
        })?;
        let mut losses = self.losses(seen.as_ref())?;
        if ask.subject == Subject::Heap {
            // They concern what RSS consists of, and are said there.
            losses.retain(|(loss, _)| !loss.is_of_calls());
        }
        let functions = functions(&self.discovery, ask.subject);
        let blocks = self.live_blocks()?;
        let mut imbalances = Vec::new();
        let stacks = match (ask.subject, &seen) {
            (Subject::Heap, _) => {
                let live = blocks.as_deref().unwrap_or_default();
                self.heap(&records, live, &seen, now, ask.older, duration, &mut imbalances)?
            }
            (Subject::Touched, Some(seen)) => self.touched(&records, blocks.as_deref().unwrap_or_default(), seen)?,
            (Subject::Faults, Some(seen)) => self.faults(&records, seen, ask.kind)?,
            (Subject::Exact, seen) => {
                let totals = self.tracer.totals(self.tracer.stack_count()?)?;
                let before = seen.as_ref().and_then(|seen| seen.before.as_ref()).map(|before| before.scan.pages());
                faults::exact(&records, &totals, &self.tracer.resident_changes()?, before)
            }
            (Subject::Mappings, Some(seen)) => {
                let resident = seen.after.as_ref().map(|after| after.scan.ranges.as_slice());
                let mut stacks = mappings::assemble(&records, &seen.space, resident, now, ask.older, call_of);
                for (pid, space) in &seen.children {
                    let after = self.looked_at().find(|(child, ..)| child == pid);
                    let resident = after.map(|(.., after)| after.scan.ranges.as_slice());
                    if self.children.as_ref().is_none_or(|children| !children.is_gone(*pid)) {
                        stacks.extend(mappings::assemble(&records, space, resident, now, ask.older, call_of));
                    }
                }
                stacks
            }
            (Subject::Touched | Subject::Faults | Subject::Mappings, None) => {
                bail!("the process's memory was not watched")
            }
        };
        let unwinding = self.unwound(&records, &self.tracer.totals(self.tracer.stack_count()?)?);
        let memory = match &seen {
            Some(seen) => Some(self.memory_of(seen, blocks.as_deref())?),
            None => None,
        };
        let events = self.events()?;
        if ask.subject == Subject::Heap {
            self.refuse_blindness(&events)?;
        }
        let total = |rss: Rss| rss.anonymous + rss.file + rss.shared;
        let rss = rollups.or(self.rss.map(|(before, after)| (total(before), total(after))));
        let profile = Profile {
            subject: ask.subject,
            process: Traced { pid: self.process.pid(), comm: self.process.comm().to_owned() },
            duration,
            end,
            older: ask.older,
            functions,
            stacks,
            mappings: self.modules.mappings().to_vec(),
            names: self.modules.name_sources(),
            events,
            losses,
            unwinding,
            rss,
            memory,
            children: self.children.as_ref().map(Children::report),
        };
        Ok(Finished { profile, modules: self.modules, imbalances })
    }

    fn events(&self) -> anyhow::Result<Events> {
        Ok(Events {
            allocations: self.tracer.counter(Counter::Allocations)?,
            frees: self.tracer.counter(Counter::Frees)?,
            frees_unknown: self.tracer.counter(Counter::FreesUnknown)?,
            nested: self.tracer.counter(Counter::Nested)?,
            failed: self.tracer.counter(Counter::Failed)?,
        })
    }

    /// All losses, with those of memtrace's own tables.
    fn losses(&self, seen: Option<&Seen>) -> anyhow::Result<Vec<(Loss, LossCount)>> {
        let mut losses = self.tracer.losses()?;
        if self.unwind == Unwind::FramePointers {
            let hidden = self.tracer.hidden_calls()?;
            match losses.iter_mut().find(|(loss, _)| *loss == Loss::Hidden) {
                Some((_, count)) => {
                    count.count = count.count.saturating_add(hidden.count);
                    count.bytes = count.bytes.saturating_add(hidden.bytes);
                }
                None if hidden.count > 0 => losses.push((Loss::Hidden, hidden)),
                None => {}
            }
        }
        let lost = seen.map(|seen| seen.space.lost()).unwrap_or_default();
        if lost.ranges > 0 {
            losses.push((Loss::RangesFull, LossCount { count: lost.ranges, bytes: lost.bytes }));
        }
        Ok(losses)
    }

    /// What the unwind tables did not cover.
    fn unwound(&self, records: &HashMap<u32, StackRecord>, totals: &[Totals]) -> profile::Unwinding {
        profile::Unwinding {
            problems: if self.unwind == Unwind::FramePointers {
                Vec::new()
            } else {
                self.unwinding.problems(self.unwind)
            },
            left_out: self.unwinding.left_out() as u64,
            late: self.late.code(&self.modules, records, |number| totals.get(number as usize).copied()),
        }
    }

    /// The live blocks, ascending; `None` if allocations were not traced.
    fn live_blocks(&self) -> anyhow::Result<Option<Vec<Live>>> {
        if self.discovery.sites.is_empty() {
            return Ok(None);
        }
        let mut blocks = Vec::new();
        self.tracer
            .for_each_block(|key, block| blocks.push(Live { address: key.address, tgid: key.tgid, block: *block }))?;
        blocks.sort_unstable_by_key(|live| live.address);
        Ok(Some(blocks))
    }

    #[expect(clippy::too_many_arguments, reason = "all that a heap profile is made from")]
    fn heap(
        &self,
        records: &HashMap<u32, StackRecord>,
        blocks: &[Live],
        seen: &Option<Seen>,
        now: u64,
        older: Duration,
        duration: Duration,
        imbalances: &mut Vec<stacks::Imbalance>,
    ) -> anyhow::Result<Vec<Stack>> {
        let totals = self.tracer.totals(self.tracer.stack_count()?)?;
        let mut live = LiveBlocks::new(now, older);
        for block in blocks {
            // The memory of a process that has ended is no more, whatever it did not free.
            let gone = self.children.as_ref().is_some_and(|children| children.is_gone(block.tgid));
            if gone { live.add_gone(&block.block) } else { live.add(&block.block) }
        }
        let old: Vec<LiveBlock> =
            self.own(blocks).filter(|block| live.counts(&block.block)).map(Live::of_reconciliation).collect();
        let resident = looks(seen.as_ref())
            .map(|(before, after)| blocks::residency(&old, &before.scan.ranges, &after.scan.ranges).by_stack);
        let functions = self.discovery.sites.len();
        let function_of = |site: u16| Some(usize::from(site)).filter(|site| *site < functions);
        let (mut stacks, unbalanced) = stacks::assemble(records, &totals, &live, &self.growth, duration, function_of);
        if let Some(resident) = resident {
            for (number, stack) in &mut stacks {
                let anonymous = resident.get(number).map_or(0, |bytes| bytes.resident);
                stack.resident = Some(Resident { anonymous, ..Resident::default() });
            }
        }
        *imbalances = unbalanced;
        Ok(stacks.into_iter().map(|(_, stack)| stack).collect())
    }

    /// Which pages became resident, and by whom; `visit` is called for all of them, ascending.
    fn page_growth(&self, seen: &Seen, visit: impl FnMut(&NewPages)) -> anyhow::Result<PageGrowth> {
        let Some((_, after)) = looks(Some(seen)) else {
            bail!(
                "process {} ended before its pages could be looked at a second time: what was resident is not known \
                 (start it with `-- CMD`, which holds it at its end)",
                self.process.pid()
            );
        };
        let pages = self.tracer.page_records(self.process.pid())?;
        let (inherited, unmapped) = seen.space.inherited();
        let mut growth = attribution::attribute(
            attribution::Seen { before: &inherited, after: &after.scan.ranges, areas: &after.scan.areas },
            attribution::records(&pages),
            |page| seen.space.owner_of_page(page),
            visit,
        );
        growth.gone = growth.gone + unmapped;
        Ok(growth)
    }

    /// The blocks of the target itself, without its children's.
    fn own<'a>(&self, blocks: &'a [Live]) -> impl Iterator<Item = &'a Live> + use<'a> {
        let (follows, pid) = (self.children.is_some(), self.process.pid());
        blocks.iter().filter(move |block| !follows || block.tgid == pid)
    }

    /// The followed children that run at the end, with what was resident in them after the fork and is now.
    fn looked_at(&self) -> impl Iterator<Item = (u32, &Snapshot, &Snapshot)> {
        self.children.iter().flat_map(Children::looked_at)
    }

    /// The same as [`Self::page_growth`] for all followed children together.
    fn growth_of_children(&self, seen: &Seen) -> anyhow::Result<PageGrowth> {
        let mut sum = PageGrowth::default();
        for (pid, _, after) in self.looked_at() {
            let Some(space) = seen.children.get(&pid) else { continue };
            let (inherited, unmapped) = space.inherited();
            let pages = self.tracer.page_records(pid)?;
            let growth = attribution::attribute(
                attribution::Seen { before: &inherited, after: &after.scan.ranges, areas: &after.scan.areas },
                attribution::records(&pages),
                |page| space.owner_of_page(page),
                |_| {},
            );
            sum.add(&growth);
            sum.gone = sum.gone + unmapped;
        }
        Ok(sum)
    }

    fn faults(
        &self,
        records: &HashMap<u32, StackRecord>,
        seen: &Seen,
        kind: Option<PageKind>,
    ) -> anyhow::Result<Vec<Stack>> {
        let totals = self.tracer.totals(self.tracer.stack_count()?)?;
        let mut growth = self.page_growth(seen, |_| {})?;
        growth.add(&self.growth_of_children(seen)?);
        Ok(faults::assemble(records, &totals, &growth, kind, call_of))
    }

    /// The resident memory of live blocks, by who allocated and who touched it.
    fn touched(&self, records: &HashMap<u32, StackRecord>, blocks: &[Live], seen: &Seen) -> anyhow::Result<Vec<Stack>> {
        let mut pages = Vec::new();
        self.page_growth(seen, |new| pages.push(*new))?;
        let blocks: Vec<LiveBlock> = self.own(blocks).map(Live::of_reconciliation).collect();
        let pairs = blocks::touched(&blocks, &pages);
        let functions = self.discovery.sites.len();
        let function_of = |site: u16| Some(usize::from(site)).filter(|site| *site < functions);
        Ok(faults::pair(records, pairs, function_of))
    }

    fn memory_of(&self, seen: &Seen, blocks: Option<&[Live]>) -> anyhow::Result<Memory> {
        let looks = looks(Some(seen));
        let blocks: Option<Vec<LiveBlock>> =
            blocks.map(|blocks| self.own(blocks).map(Live::of_reconciliation).collect());
        let reconciliation = looks.map(|(before, after)| {
            let pointers: Vec<u64> =
                [before, after].iter().flat_map(|look| look.stack_pointers.iter().copied()).collect();
            reconcile::reconcile(before.look(), after.look(), blocks.as_deref(), Some(seen.space.ranges()), &pointers)
        });
        let faults = if self.watch.faults {
            Some(FaultCounts {
                user: self.tracer.counter(Counter::UserFaults)?,
                kernel: self.tracer.counter(Counter::KernelFaults)?,
                // The kernel counts each process by itself, and those that have ended not at all.
                counted: looks
                    .filter(|_| self.children.is_none())
                    .map(|(before, after)| after.faults.saturating_sub(before.faults)),
            })
        } else {
            None
        };
        let growth = match looks {
            Some(_) if self.watch.faults => {
                let mut growth = self.page_growth(seen, |_| {})?;
                growth.add(&self.growth_of_children(seen)?);
                Some(growth)
            }
            _ => None,
        };
        Ok(Memory {
            faults,
            growth: growth.map(|growth| GrowthSummary {
                new: growth.new,
                unattributed: growth.unattributed,
                gone: growth.gone,
            }),
            calls: self.tracer.counter(Counter::Calls)?,
            calls_lost: self
                .losses(Some(seen))?
                .iter()
                .filter(|(loss, _)| loss.is_of_calls())
                .fold(0, |sum, (_, lost)| sum.saturating_add(lost.count)),
            audit: seen.audit,
            reconciliation,
            looked_before_end: looks.map(|(_, after)| after.at.elapsed()).filter(|_| !seen.at_end),
        })
    }

    /// Zero probe hits while anonymous memory grows is an error, never an empty result.
    fn refuse_blindness(&self, events: &Events) -> anyhow::Result<()> {
        let Some((before, after)) = self.rss else { return Ok(()) };
        let grown = after.anonymous.saturating_sub(before.anonymous);
        if events.allocations > 0 || events.frees > 0 || grown < UNSEEN_GROWTH {
            return Ok(());
        }
        let others: Vec<String> = self
            .discovery
            .notes
            .iter()
            .filter(|note| matches!(note, target::Note::OtherAllocator { .. }))
            .map(ToString::to_string)
            .collect();
        let why = if others.is_empty() {
            "it gets its memory from the kernel directly, or from an allocator inside one of its modules".to_owned()
        } else {
            others.join("; ")
        };
        bail!(
            "anonymous memory of process {} grew by {} KiB, but not one call of glibc's allocator was seen: {why} \
             (`memtrace pgfaultstacks` and `memtrace mmapstacks` show who makes it grow)",
            self.process.pid(),
            grown >> 10
        );
    }
}

/// Number in a profile's functions of the system call behind a site.
fn call_of(site: u16) -> Option<usize> {
    special::call(site).map(|call| call as usize)
}

/// The first and the last look, if there are both.
fn looks(seen: Option<&Seen>) -> Option<(&Snapshot, &Snapshot)> {
    seen.and_then(|seen| Some((seen.before.as_ref()?, seen.after.as_ref()?)))
}

/// What can be at the leaf end of a stack.
fn functions(discovery: &Discovery, subject: Subject) -> Vec<Function> {
    if matches!(subject, Subject::Faults | Subject::Mappings) {
        let call = |call: Call| Function { name: call.name().to_owned(), module: "system calls".into() };
        return Call::ALL.map(call).to_vec();
    }
    discovery
        .sites
        .iter()
        .map(|site| Function {
            name: site.function.clone().into_owned(),
            module: discovery.modules.get(site.module).map_or_else(String::new, |module| module.name().to_owned()),
        })
        .collect()
}
