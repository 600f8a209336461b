//! The end of a trace: its tables and what was seen become a profile.

use std::{collections::HashMap, time::Duration};

use anyhow::{Context as _, bail};
use memtrace_common::{
    call::Call,
    event::Counter,
    loss::{Loss, LossCount},
    site::special,
    stack::StackRecord,
};

use super::{Ask, Finished, Session, memory::Snapshot};
use crate::{
    collect::{
        attribution, faults, mappings,
        space::Space,
        stacks::{self, LiveBlocks},
    },
    profile::{Events, FaultCounts, Function, Memory, Process as Traced, Profile, Stack, Subject, TraceEnd},
    target::{self, Discovery, process::Rss},
};

/// Growth of anonymous memory without a single probe hit from which on a trace is an error: far more than a program
/// gets from its stack and from copied pages.
const UNSEEN_GROWTH: u64 = 1 << 20;

/// What was seen of the memory as a whole.
struct Seen {
    space: Space,
    before: Option<Snapshot>,
    after: Option<Snapshot>,
}

impl Session {
    /// Ends recording, detaches, and reads what was found.
    ///
    /// # Errors
    /// The kernel's tables can't be read, or not a single call was seen while the target's memory grew.
    pub fn finish(mut self, end: TraceEnd, ask: &Ask) -> anyhow::Result<Finished> {
        let started = self.started.context("a trace must be started before it can end")?;
        if let Some(memory) = &mut self.memory {
            // First, so that the fault of every page that is found has been recorded.
            memory.end(&self.process);
        }
        self.tracer.stop()?;
        let now = monotonic_now()?;
        let duration = started.elapsed();
        self.watch_rss();
        let _ = self.drain();
        self.tracer.detach()?;
        if self.process.is_alive() && end != TraceEnd::TargetExecuted {
            let _ = self.modules.refresh(&self.process);
        }
        let seen = self.memory.take().map(|mut memory| {
            memory.drain(&self.process);
            let (space, before, after) = memory.finish();
            Seen { space, before, after }
        });
        let rollups =
            seen.as_ref().and_then(|seen| Some((seen.before.as_ref()?.rollup.rss, seen.after.as_ref()?.rollup.rss)));
        let mut records = HashMap::new();
        self.tracer.for_each_stack(|number, record| {
            records.insert(number, *record);
        })?;
        let mut losses = self.tracer.losses()?;
        let functions = functions(&self.discovery, ask.subject);
        let mut imbalances = Vec::new();
        let (stacks, memory) = match (ask.subject, seen) {
            (Subject::Heap, _) => {
                let stacks = self.heap(&records, now, ask.older, duration, functions.len(), &mut imbalances)?;
                (stacks, None)
            }
            (Subject::Faults, Some(seen)) => self.faults(&records, seen, ask)?,
            (Subject::Mappings, Some(seen)) => self.address_space(&records, seen, now, ask, &mut losses)?,
            (Subject::Faults | Subject::Mappings, None) => bail!("the address space was not watched"),
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
            events,
            losses,
            rss,
            memory,
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

    fn heap(
        &self,
        records: &HashMap<u32, StackRecord>,
        now: u64,
        older: Duration,
        duration: Duration,
        functions: usize,
        imbalances: &mut Vec<stacks::Imbalance>,
    ) -> anyhow::Result<Vec<Stack>> {
        let totals = self.tracer.totals(self.tracer.stack_count()?)?;
        let mut live = LiveBlocks::new(now, older);
        self.tracer.for_each_block(|_, block| live.add(block))?;
        let function_of = |site: u16| Some(usize::from(site)).filter(|site| *site < functions);
        let (stacks, unbalanced) = stacks::assemble(records, &totals, &live, &self.growth, duration, function_of);
        *imbalances = unbalanced;
        Ok(stacks)
    }

    fn faults(
        &self,
        records: &HashMap<u32, StackRecord>,
        seen: Seen,
        ask: &Ask,
    ) -> anyhow::Result<(Vec<Stack>, Option<Memory>)> {
        let totals = self.tracer.totals(self.tracer.stack_count()?)?;
        let pages = self.tracer.page_records()?;
        let growth = match (&seen.before, &seen.after) {
            (Some(before), Some(after)) => attribution::attribute(
                attribution::Seen { before: &before.scan.ranges, after: &after.scan.ranges, areas: &after.scan.areas },
                attribution::records(&pages),
                |page| seen.space.owner_of_page(page),
                |_| {},
            ),
            _ => bail!(
                "process {} ended before its pages could be looked at a second time: what was resident is not known \
                 (start it with `-- CMD`, which holds it at its end)",
                self.process.pid()
            ),
        };
        let stacks = faults::assemble(records, &totals, &growth, ask.kind, call_of);
        let counts = FaultCounts {
            user: self.tracer.counter(Counter::UserFaults)?,
            kernel: self.tracer.counter(Counter::KernelFaults)?,
            counted: counted(&seen),
        };
        Ok((stacks, Some(self.memory_of(Some(counts))?)))
    }

    fn address_space(
        &self,
        records: &HashMap<u32, StackRecord>,
        mut seen: Seen,
        now: u64,
        ask: &Ask,
        losses: &mut Vec<(Loss, LossCount)>,
    ) -> anyhow::Result<(Vec<Stack>, Option<Memory>)> {
        if let (Some(before), Some(after)) = (&seen.before, &seen.after) {
            seen.space.ranges_mut().audit(&before.scan.areas, &after.scan.areas);
        }
        let resident = seen.after.as_ref().map(|after| after.scan.ranges.as_slice());
        let stacks = mappings::assemble(records, &seen.space, resident, now, ask.older, call_of);
        let _ = losses;
        Ok((stacks, Some(self.memory_of(None)?)))
    }

    fn memory_of(&self, faults: Option<FaultCounts>) -> anyhow::Result<Memory> {
        Ok(Memory { faults, calls: self.tracer.counter(Counter::Calls)?, reconciliation: None })
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
            "anonymous memory of process {} grew by {} KiB, but not one call of glibc's allocator was seen: {why}",
            self.process.pid(),
            grown >> 10
        );
    }
}

/// Number in a profile's functions of the system call behind a site.
fn call_of(site: u16) -> Option<usize> {
    special::call(site).map(|call| call as usize)
}

/// By how much the kernel's own count of page faults grew.
fn counted(seen: &Seen) -> Option<u64> {
    let (before, after) = (seen.before.as_ref()?, seen.after.as_ref()?);
    Some(after.faults.saturating_sub(before.faults))
}

/// What can be at the leaf end of a stack.
fn functions(discovery: &Discovery, subject: Subject) -> Vec<Function> {
    if subject != Subject::Heap {
        let call = |call: Call| Function { name: call.name().to_owned(), module: "system calls".into() };
        return Call::ALL.map(call).to_vec();
    }
    discovery
        .sites
        .iter()
        .map(|site| Function {
            name: site.function.to_owned(),
            module: discovery.modules.get(site.module).map_or_else(String::new, |module| module.name().to_owned()),
        })
        .collect()
}

/// `CLOCK_MONOTONIC` in nanoseconds, the clock of `bpf_ktime_get_ns`.
fn monotonic_now() -> anyhow::Result<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure outlives the call.
    if unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) } != 0 {
        return Err(std::io::Error::last_os_error()).context("clock_gettime");
    }
    let nanoseconds = |value: i64| u64::try_from(value).unwrap_or(0);
    Ok(nanoseconds(time.tv_sec) * 1_000_000_000 + nanoseconds(time.tv_nsec))
}
