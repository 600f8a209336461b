//! The end of a trace: its tables and what was seen become a profile.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use anyhow::{Context as _, bail};
use memtrace_common::{
    block::Block,
    call::Call,
    event::Counter,
    loss::{Loss, LossCount},
    settings::Unwind,
    stack::{OVERFLOW_STACK, OVERFLOW_TRACEPOINT_STACK, StackRecord, Totals},
};

use super::{Ask, AttachedLate, Finished, Probes, Session, Traced, monotonic_now, traced::State};
use crate::{
    collect::{blocks::LiveBlock, faults, stacks::Owners},
    kernel::Tracer,
    profile::{self, By, Events, Function, LateCode, ProcessState, Profile, Subject, TraceEnd},
};

/// Growth of anonymous memory without a single probe hit from which on a trace is an error: far more than a program
/// gets from its stack and from copied pages.
const UNSEEN_GROWTH: u64 = 1 << 20;

/// What the tables held at the end.
pub(super) struct Tables {
    /// The stacks by number.
    pub records: HashMap<u32, StackRecord>,
    /// Their totals.
    pub totals: Vec<Totals>,
    /// The live blocks, ascending by process and address; `None` if allocations were not traced.
    pub blocks: Option<Vec<Live>>,
    /// When recording stopped, nanoseconds of `CLOCK_MONOTONIC`.
    pub now: u64,
    /// How long it had lasted.
    pub duration: Duration,
}

/// A live block.
pub(super) struct Live {
    pub address: u64,
    pub process: u32,
    pub block: Block,
}

impl Live {
    pub fn of_reconciliation(&self) -> LiveBlock {
        LiveBlock { address: self.address, size: self.block.size, stack: self.block.stack }
    }
}

impl Session {
    /// Ends recording, detaches, and reads what was found.
    ///
    /// # Errors
    /// The kernel's tables can't be read, or not a single call was seen while a process's memory grew.
    pub fn finish(mut self, end: TraceEnd, ask: &Ask) -> anyhow::Result<Finished> {
        let (started, _) = self.started.context("a trace must be started before it can end")?;
        let alive = end != TraceEnd::TargetExecuted;
        // First, so that the fault of every page that is found has been recorded. What another program has is not this one's.
        for traced in self.traced.values_mut().filter(|traced| alive && traced.runs()) {
            if let Some(memory) = &mut traced.memory {
                memory.end(&traced.process);
            }
        }
        self.tracer.stop()?;
        let now = monotonic_now();
        let duration = started.elapsed();
        for traced in self.traced.values_mut() {
            traced.watch_rss();
        }
        let _ = self.drain();
        self.tracer.detach()?;
        for traced in self.traced.values_mut().filter(|traced| traced.runs()) {
            if alive && traced.process.is_alive() {
                let before = traced.modules.mappings().len();
                let _ = traced.modules.refresh(&traced.process);
                traced.late.too_late(&traced.modules, before);
            }
            let events = self.tracer.loader_events(traced.number);
            traced.note_loader(&self.tracer, events, events);
        }
        self.drain_calls();
        self.note_thread_names();
        self.note_last_ends();
        let mut records = HashMap::new();
        self.tracer.for_each_stack(|number, record| {
            records.insert(number, *record);
        })?;
        let totals = self.tracer.totals(self.tracer.stack_count()?)?;
        let mut tables = Tables { records, totals, blocks: self.live_blocks()?, now, duration };
        let (owners, processes, threads) = self.report(&tables)?;
        // Of others it is not known what the addresses mean.
        tables.records.retain(|_, record| owners.processes.contains_key(&record.process));
        let mut losses = self.losses()?;
        if ask.subject == Subject::Heap {
            // They concern what RSS consists of, and are said there.
            losses.retain(|(loss, _)| !loss.is_of_calls());
        }
        if ask.subject != Subject::Heap && ask.subject != Subject::Exact && !self.options.watch.space {
            bail!("the process's memory was not watched");
        }
        let mut imbalances = Vec::new();
        let stacks = match ask.subject {
            Subject::Heap => self.heap(&tables, ask.older, &owners, &mut imbalances),
            Subject::Touched => self.touched(&tables, &owners)?,
            Subject::Faults => self.faults(&tables, ask.kind, &owners)?,
            Subject::Exact => {
                let memory = self.traced.get(&self.first).and_then(|traced| traced.memory.as_ref());
                let before = memory.and_then(|memory| memory.before.as_ref()).map(|before| before.scan.pages());
                faults::exact(&tables.records, &tables.totals, &self.tracer.resident_changes()?, before, &owners)
            }
            Subject::Mappings => self.mapped(&tables, ask.older, &owners),
        };
        let unwinding = self.unwound(&tables);
        let memory = self.memory(&tables)?;
        let events = self.events()?;
        if ask.subject == Subject::Heap {
            self.refuse_blindness(&events, &tables)?;
        }
        let profile = Profile {
            subject: ask.subject,
            everywhere: self.options.unfiltered && self.probes != Probes::None,
            attached_late: self.late_allocators(&owners),
            processes,
            missed_more: self.missed_more,
            threads,
            by: self.options.by,
            duration,
            end,
            older: ask.older,
            functions: self.probed_functions(ask.subject),
            stacks,
            events,
            losses,
            unwinding,
            memory,
        };
        let modules = self.traced.into_values().map(|traced| traced.modules).chain(self.missed_modules).collect();
        Ok(Finished { profile, modules, imbalances })
    }

    /// What is about processes and threads in the profile, the process named first before all others.
    fn report(&self, tables: &Tables) -> anyhow::Result<(Owners, Vec<profile::Process>, Vec<profile::Thread>)> {
        let mut owners = Owners::default();
        let mut processes = Vec::new();
        let first = self.traced.get(&self.first);
        let others = self.traced.values().filter(|traced| traced.number != self.first);
        for traced in first.into_iter().chain(others) {
            owners.processes.insert(traced.number, processes.len());
            processes.push(traced.report());
        }
        processes.extend(self.shed.iter().cloned());
        if self.shed_more > 0 {
            tracing::warn!(
                "{} more processes ended of which no stack was recorded; they are not listed",
                self.shed_more
            );
        }
        for (number, position) in &self.missed_images {
            owners.processes.insert(*number, processes.len() + position);
        }
        processes.extend(self.missed.iter().cloned());
        // Calls whose stacks found no room are of nobody in particular.
        let unknown = |stack: u32| tables.totals.get(stack as usize).is_some_and(|totals| totals.allocated_count > 0);
        if self.options.by != By::None
            && processes.len() > 1
            && (unknown(OVERFLOW_STACK) || unknown(OVERFLOW_TRACEPOINT_STACK))
        {
            owners.unknown = processes.len();
            processes
                .push(profile::Process { state: ProcessState::Ended, ..profile::Process::new(0, "[any of them]") });
        }
        if processes.is_empty() {
            bail!("no process was there to be traced");
        }
        let mut threads = Vec::new();
        if self.options.by == By::Thread {
            let last_names = self.tracer.thread_names()?;
            let mut keys: Vec<(u32, u32)> =
                tables.records.values().map(|record| (record.process, record.thread)).collect();
            keys.sort_unstable();
            keys.dedup();
            for key in keys {
                let Some(process) = owners.processes.get(&key.0).copied().filter(|_| key.1 != 0) else { continue };
                let name = last_names.get(&key).or(self.thread_names.get(&key)).cloned().unwrap_or_default();
                owners.threads.insert(key, threads.len());
                threads.push(profile::Thread { process, tid: key.1, name });
            }
        }
        Ok((owners, processes, threads))
    }

    /// Allocators that were attached to late, as the profile has them.
    fn late_allocators(&self, owners: &Owners) -> Vec<profile::AttachedLate> {
        let late = |late: &AttachedLate| {
            let process = owners.processes.get(&late.number).copied()?;
            Some(profile::AttachedLate {
                process,
                module: late.module.clone(),
                functions: late.functions,
                since: late.since,
            })
        };
        self.attached_late.iter().filter_map(late).collect()
    }

    fn events(&self) -> anyhow::Result<Events> {
        Ok(Events {
            allocations: self.tracer.counter(Counter::Allocations)?,
            frees: self.tracer.counter(Counter::Frees)?,
            frees_unknown: self.tracer.counter(Counter::FreesUnknown)?,
            frees_inherited: self.tracer.counter(Counter::FreesInherited)?,
            nested: self.tracer.counter(Counter::Nested)?,
            failed: self.tracer.counter(Counter::Failed)?,
        })
    }

    /// All losses, with those of memtrace's own tables.
    pub(super) fn losses(&self) -> anyhow::Result<Vec<(Loss, LossCount)>> {
        let mut losses = self.tracer.losses()?;
        if self.options.unwind == Unwind::FramePointers {
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
        let mut sum = LossCount { count: self.unclaimed.lost, ..LossCount::default() };
        for memory in self.traced.values().filter_map(|traced| traced.memory.as_ref()) {
            let lost = memory.space.lost();
            sum.count = sum.count.saturating_add(lost.ranges);
            sum.bytes = sum.bytes.saturating_add(lost.bytes);
        }
        if sum.count > 0 {
            losses.push((Loss::RangesFull, sum));
        }
        Ok(losses)
    }

    /// What the unwind tables did not cover.
    fn unwound(&self, tables: &Tables) -> profile::Unwinding {
        let mut sum = LateCode::default();
        for traced in self.traced.values() {
            let records = tables.records.iter().filter(|(_, record)| record.process == traced.number);
            let records: HashMap<u32, StackRecord> = records.map(|(number, record)| (*number, *record)).collect();
            let late =
                traced.late.code(&traced.modules, &records, |number| tables.totals.get(number as usize).copied());
            sum.mappings += late.mappings;
            sum.longest = sum.longest.max(late.longest);
            sum.stacks += late.stacks;
            sum.allocated = sum.allocated.plus(late.allocated);
        }
        profile::Unwinding {
            problems: if self.options.unwind == Unwind::FramePointers {
                Vec::new()
            } else {
                self.unwinding.problems(self.options.unwind)
            },
            left_out: self.unwinding.left_out() as u64,
            late: sum,
        }
    }

    /// Takes note of processes that ended without a message, for the report.
    fn note_last_ends(&mut self) {
        for traced in self.traced.values_mut() {
            if traced.runs() && !traced.process.is_alive() {
                traced.state = State::Ended;
            }
        }
    }

    /// Zero probe hits while anonymous memory grows is an error, never an empty result; of one process among others it is a
    /// warning.
    fn refuse_blindness(&self, events: &Events, tables: &Tables) -> anyhow::Result<()> {
        let allocated = |record: &&StackRecord| self.sites.function_of(record.site).is_some();
        let seen: HashSet<u32> = tables.records.values().filter(allocated).map(|record| record.process).collect();
        // Whose stacks found no room is not known.
        let all_known = tables.totals.first().is_none_or(|unknown| unknown.allocated_count == 0);
        let blind = self.traced.values().filter(|traced| all_known && !seen.contains(&traced.number));
        let none = events.allocations == 0 && events.frees == 0;
        for sentence in blind.filter_map(|traced| self.blindness(traced)) {
            if none {
                bail!("{sentence}");
            }
            eprintln!("memtrace: {sentence}");
        }
        Ok(())
    }

    /// What is to be said of a process of which not one call was seen; `None` if its memory did not grow.
    fn blindness(&self, traced: &Traced) -> Option<String> {
        let (before, after) = traced.rss?;
        let grown = after.anonymous.saturating_sub(before.anonymous);
        if grown < UNSEEN_GROWTH {
            return None;
        }
        let notes: Vec<String> = traced.discovery.notes.iter().map(ToString::to_string).collect();
        let why = if notes.is_empty() {
            "it gets its memory from the kernel directly, or from an allocator inside one of its modules that memtrace does \
             not know (--alloc and --free tell it which functions that has)"
                .to_owned()
        } else {
            notes.join("; ")
        };
        Some(format!(
            "anonymous memory of process {} grew by {} KiB, but not one call of an allocator was seen ({}): {why} \
             (`memtrace pgfaultstacks` and `memtrace mmapstacks` show who makes it grow)",
            traced.process.pid(),
            grown >> 10,
            self.probed()
        ))
    }

    /// What can be at the leaf end of a stack.
    fn probed_functions(&self, subject: Subject) -> Vec<Function> {
        if matches!(subject, Subject::Faults | Subject::Mappings) {
            let call = |call: Call| Function { name: call.name().to_owned(), module: "system calls".into() };
            return Call::ALL.map(call).to_vec();
        }
        self.sites.functions().to_vec()
    }
}

impl Traced {
    /// Tells how many reports of the loader came between the last two reads of the memory map, of which the latter began after
    /// `begun` of them and ended after `ended`: what came while one was read may have come before it, or after.
    pub(super) fn note_loader(&mut self, tracer: &Tracer, begun: u64, ended: u64) {
        let removed = tracer.last_removal(self.number) > self.loader_seen;
        self.modules.note_loader(ended.saturating_sub(self.loader_seen), removed);
        self.loader_seen = begun;
    }
}
