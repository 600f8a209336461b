//! Processes that appear, execute another program, or end while a trace runs.

use std::{
    collections::HashSet,
    fs,
    num::NonZeroU32,
    time::{Duration, Instant},
};

use super::{HOUSEKEEPING, OnExec, Probes, Session, Traced, attach, limits, monotonic_now, traced::State};
use crate::{
    kernel::{Scope, source::uprobe::Reach},
    profile::{self, Amount, NameSources, ProcessState},
    target::Process,
};

/// Longest time for which it is tried again whether a new program has an allocator by now: it has to be loaded first.
const PATIENCE: Duration = Duration::from_secs(5);
/// First pause between two tries; each is half as long again as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// Time after a process's first thread has ended, after which it is looked whether the process has.
const ENDING: Duration = Duration::from_millis(5);
/// How often the processes of a machine are searched for those that belong to the trace and that no message told of.
const SEARCH: Duration = Duration::from_secs(2);
/// Time after which a child still shares its parent's memory that is to be probed: those of vfork have executed a program by then.
const SHARING: Duration = Duration::from_millis(20);
/// Most processes without a stack that are remembered after their end.
const MAX_SHED: usize = 10_000;
/// Command name of a process that has ended before it was looked at.
const UNKNOWN: &str = "[unknown]";
/// Most names of threads that are kept.
const MAX_THREAD_NAMES: usize = 1 << 16;

/// A process that can't be attached yet.
#[derive(Debug)]
pub struct Pending {
    pid: u32,
    /// Number of its image, if the kernel side knows it.
    number: Option<u32>,
    /// When it appeared, nanoseconds of `CLOCK_MONOTONIC`; `None` if it was there before.
    since: Option<u64>,
    parent: Option<u32>,
    /// Its name before it executed the program, if it is known.
    comm: String,
    /// The image whose memory it shares.
    sharing: Option<u32>,
    named: bool,
    first: bool,
    /// When it is tried next.
    pub due: Instant,
    pause: Duration,
    until: Instant,
}

impl Pending {
    fn new(pid: u32, number: Option<u32>, since: Option<u64>) -> Self {
        let now = Instant::now();
        Self {
            pid,
            number,
            since,
            parent: None,
            comm: UNKNOWN.to_owned(),
            sharing: None,
            named: false,
            first: false,
            due: now,
            pause: FIRST_PAUSE,
            until: now + PATIENCE,
        }
    }
}

impl Session {
    /// The process `pid` has forked. `number` is its image, `image` that of the child, 0 if that is not traced.
    pub(super) fn forked(
        &mut self,
        (pid, number): (u32, Option<u32>),
        child: u32,
        image: u32,
        time: u64,
    ) -> anyhow::Result<()> {
        let Some(parent) = number.and_then(|number| self.traced.get_mut(&number)) else {
            // Of one that is not attached yet itself.
            if image != 0 && child != 0 {
                if self.is_image_of(image, pid) || self.pending.iter().any(|pending| pending.number == Some(image)) {
                    self.shares(child, image, time);
                } else {
                    self.pending.push(Pending::new(child, Some(image), Some(time)));
                }
            }
            return Ok(());
        };
        if image == 0 {
            parent.sweeper.forked();
            return Ok(());
        }
        if image == parent.number {
            self.shares(child, image, time);
            return Ok(());
        }
        let parent_number = parent.number;
        let parent_pid = parent.process.pid();
        let comm = parent.process.comm().to_owned();
        let Ok(process) = Process::open(child) else {
            // What was recorded of it happened in its parent's code.
            let modules = parent.modules.forked();
            let (mappings, names) = (modules.mappings().to_vec(), modules.name_sources());
            let missed = profile::Process { parent: Some(parent_pid), mappings, names, ..attach::ended(child, comm) };
            self.miss(missed, image);
            if self.missed_images.contains_key(&image) {
                self.missed_modules.push(modules);
            }
            self.unswept.push(image);
            return Ok(());
        };
        // What it calls meanwhile is not seen: its probes come before everything else. They are where its parent's are.
        let attached = self.attach_forked(child, image, parent_number);
        let unseen = Duration::from_nanos(monotonic_now().saturating_sub(time));
        let Some(parent) = self.traced.get(&parent_number) else { return Ok(()) };
        let mut forked = Traced::forked(process, parent, monotonic_now());
        forked.since = self.since();
        let number = match attached.and_then(|()| self.adopt(forked, Some(image))) {
            Ok(number) => number,
            Err(error) => {
                let missing = attach::missing(child, comm, &error);
                self.miss(profile::Process { parent: Some(parent_pid), ..missing }, image);
                self.forget(NonZeroU32::new(child), image);
                return Ok(());
            }
        };
        if let Some(forked) = self.traced.get_mut(&number) {
            forked.unseen = (!self.options.unfiltered).then_some(unseen);
            if let Some(memory) = &mut forked.memory
                && let Err(error) = memory.begin_forked(&forked.process, || self.tracer.page_records(number))
            {
                tracing::debug!("process {child}: {error}");
            }
            tracing::info!("tracing {:?} (pid {child}) too", forked.process.comm());
        }
        Ok(())
    }

    /// A process shares the memory of another one until it executes a program: what it allocates is the other's.
    fn shares(&mut self, child: u32, image: u32, time: u64) {
        self.numbers.insert(child, image);
        if self.probes == Probes::Recording && !self.options.unfiltered {
            let due = Instant::now() + SHARING;
            self.pending.push(Pending { sharing: Some(image), due, ..Pending::new(child, None, Some(time)) });
        }
    }

    /// Puts the probes of a process into one that it has just forked.
    fn attach_forked(&mut self, child: u32, image: u32, parent: u32) -> anyhow::Result<()> {
        limits::check_open_files()?;
        let Some(parent) = self.traced.get(&parent) else { return Ok(()) };
        if self.probes == Probes::Recording && !self.options.unfiltered {
            let points: Vec<_> = parent.points.values().cloned().collect();
            self.tracer.attach_allocator(&points, Reach { pid: NonZeroU32::new(child), image })?;
        }
        self.tracer.set_allocations(image, true);
        Ok(())
    }

    /// Whether a process still has an image: it may have executed another program.
    pub(super) fn is_image_of(&self, number: u32, pid: u32) -> bool {
        let tgid = NonZeroU32::new(pid).filter(|_| self.scope != Scope::Any);
        self.tracer.process_number(tgid).is_ok_and(|found| found == Some(number))
    }

    /// A traced process has executed another program, whose image has `number` (0 if there was no room for it); true if that ends
    /// the trace.
    pub(super) fn executed(&mut self, pid: u32, number: u32, time: u64) -> anyhow::Result<bool> {
        let old = match self.scope {
            Scope::Any => Some(self.first),
            Scope::One(_) | Scope::Several => self.numbers.get(&pid).copied(),
        };
        // Without room for it, it is one that has just appeared.
        let mut pending = Pending::new(pid, Some(number).filter(|number| *number != 0), Some(time));
        let mut unattached = None;
        // One that executes a program before the one that it executed before was attached is still what it was.
        for old in self.pending.extract_if(.., |pending| pending.pid == pid).filter(|old| old.sharing.is_none()) {
            (pending.named, pending.first, pending.parent) = (old.named, old.first, old.parent);
            pending.comm = old.comm;
            unattached = old.number;
        }
        if let Some(old) = old
            && let Some(traced) = self.traced.get_mut(&old)
        {
            // One that shared its parent's memory leaves it to its parent.
            if self.scope == Scope::Any || traced.process.pid() == pid {
                if old == self.first && self.options.on_exec == OnExec::End {
                    self.tracer.stop()?;
                    return Ok(true);
                }
                traced.state = State::Executed;
                pending.comm = traced.process.comm().to_owned();
                pending.named = traced.named;
                pending.parent = traced.parent;
                pending.first = old == self.first;
                pending.pid = traced.process.pid();
                self.tracer.detach_image(old);
                self.unswept.push(old);
            } else {
                pending.parent = Some(traced.process.pid());
                pending.comm = traced.process.comm().to_owned();
                self.tracer.detach_reach(Reach { pid: NonZeroU32::new(pid), image: old });
            }
            self.numbers.remove(&pid);
        }
        if let Some(old) = unattached {
            let reason = "it executed another program before its probes were in place".to_owned();
            let process = profile::Process::new(pid, pending.comm.clone());
            let process =
                profile::Process { state: ProcessState::Missed { reason }, parent: pending.parent, ..process };
            self.miss(process, old);
            self.forget(None, old);
        }
        let belongs = self.selection.as_ref().is_none_or(|selection| selection.matches(pid));
        if !belongs {
            self.forget(NonZeroU32::new(pid), number);
            return Ok(false);
        }
        if pending.first {
            // The trace is of the new program from now on.
            self.first = number;
        }
        self.pending.push(pending);
        Ok(false)
    }

    /// A process has appeared that is not traced.
    pub(super) fn appeared(&mut self, pid: u32, time: u64) {
        let known = self.numbers.contains_key(&pid) || self.pending.iter().any(|pending| pending.pid == pid);
        if !known && self.selection.as_ref().is_some_and(|selection| selection.matches(pid)) {
            self.pending.push(Pending::new(pid, None, Some(time)));
        }
    }

    /// A process that waits has loaded something.
    pub(super) fn hasten(&mut self, pid: u32) {
        for pending in self.pending.iter_mut().filter(|pending| pending.pid == pid) {
            pending.due = Instant::now();
        }
    }

    /// Tries to attach the processes whose turn it is.
    pub(super) fn try_pending(&mut self) -> anyhow::Result<()> {
        let now = Instant::now();
        let (due, rest) =
            std::mem::take(&mut self.pending).into_iter().partition(|pending: &Pending| pending.due <= now);
        self.pending = rest;
        let due: Vec<Pending> = due;
        for mut pending in due {
            match self.try_one(&pending) {
                Ok(true) => {}
                Ok(false) => {
                    pending.due = Instant::now() + FIRST_PAUSE;
                    if Instant::now() < pending.until {
                        self.pending.push(pending);
                    }
                }
                Err(error) if pending.sharing.is_some() => tracing::debug!("process {}: {error:#}", pending.pid),
                Err(error) if Instant::now() < pending.until && is_alive(pending.pid) => {
                    tracing::debug!("process {} can't be traced yet: {error:#}", pending.pid);
                    pending.due = Instant::now() + pending.pause;
                    pending.pause += pending.pause / 2;
                    self.pending.push(pending);
                }
                Err(error) => {
                    let comm = comm_of(pending.pid).unwrap_or_else(|| pending.comm.clone());
                    let missing = attach::missing(pending.pid, comm, &error);
                    if pending.named {
                        eprintln!("memtrace: process {} is not traced any more: {error:#}", pending.pid);
                    }
                    self.miss(profile::Process { parent: pending.parent, ..missing }, pending.number.unwrap_or(0));
                    self.forget(NonZeroU32::new(pending.pid), pending.number.unwrap_or(0));
                }
            }
        }
        Ok(())
    }

    /// Tries to attach a process; false if it has to wait for a message.
    fn try_one(&mut self, pending: &Pending) -> anyhow::Result<bool> {
        if let Some(image) = pending.sharing {
            return self.attach_sharing(pending.pid, image).map(|()| true);
        }
        limits::check_open_files()?;
        let process = Process::open(pending.pid)?;
        if let Some(number) = pending.number
            && self.traced.contains_key(&number)
        {
            return Ok(true);
        }
        let mut traced = attach::look(process, self.probes, &self.options.custom, false)?;
        if let Some(number) = pending.number
            && !self.is_image_of(number, pending.pid)
        {
            // It has executed yet another program, and the message of that is on its way.
            return Ok(false);
        }
        traced.named = pending.named;
        traced.parent = pending.parent;
        traced.since = self.since();
        let number = self.adopt(traced, pending.number)?;
        if self.first == 0 {
            self.first = number;
        }
        let Some(traced) = self.traced.get_mut(&number) else { return Ok(true) };
        // Probes that reach every process reach a traced one's new program too.
        if let Some(since) = pending.since.filter(|_| !(self.options.unfiltered && pending.number.is_some())) {
            traced.unseen = Some(Duration::from_nanos(monotonic_now().saturating_sub(since)));
        }
        if let Some(memory) = &mut traced.memory {
            // What a new program has touched by now counts, if its faults were recorded.
            if let Err(error) = memory.begin_forked(&traced.process, || self.tracer.page_records(number)) {
                tracing::debug!("process {}: {error}", pending.pid);
            }
            memory.inherited = None;
            self.tracer.set_late(number);
        }
        let (comm, pid, since) = (traced.process.comm(), traced.process.pid(), traced.since.as_secs_f64());
        if pending.named {
            eprintln!("memtrace: process {pid} has executed another program: tracing {comm:?} from {since:.3} s on");
        } else {
            tracing::info!("tracing {comm:?} (pid {pid}) too");
        }
        Ok(true)
    }

    /// Attaches to a process that shares the memory of the image `number`, of another process: probes reach one process.
    fn attach_sharing(&mut self, pid: u32, number: u32) -> anyhow::Result<()> {
        let Some(traced) = self.traced.get(&number).filter(|_| self.numbers.get(&pid) == Some(&number)) else {
            return Ok(());
        };
        let points: Vec<_> = traced.points.values().cloned().collect();
        self.tracer.attach_allocator(&points, Reach { pid: NonZeroU32::new(pid), image: number })?;
        tracing::info!("tracing {:?} (pid {pid}) too, which shares its parent's memory", traced.process.comm());
        Ok(())
    }

    /// Attaches now to what is held for that: a command that has executed another program.
    ///
    /// # Errors
    /// The kernel's tables can't be read.
    pub fn attach_held(&mut self) -> anyhow::Result<()> {
        self.drain()?;
        for pending in &mut self.pending {
            pending.due = Instant::now();
        }
        self.try_pending()?;
        if let Some(traced) = self.traced.get_mut(&self.first) {
            // It was held all the time.
            traced.unseen = None;
        }
        Ok(())
    }

    /// The first thread of a process has ended: the process may have.
    pub(super) fn ending(&mut self, pid: u32) {
        self.next_end = Some(Instant::now() + ENDING);
        // One that shared its parent's memory.
        if let Some(number) = self.numbers.get(&pid)
            && self.traced.get(number).is_some_and(|traced| traced.process.pid() != pid)
        {
            let number = *number;
            self.numbers.remove(&pid);
            self.pending.retain(|pending| pending.pid != pid);
            self.tracer.detach_reach(Reach { pid: NonZeroU32::new(pid), image: number });
            let _ = self.tracer.remove_process(NonZeroU32::new(pid), number);
        }
    }

    /// Takes note of processes that have ended.
    pub(super) fn note_ends(&mut self) -> anyhow::Result<()> {
        self.next_end = None;
        let ended: Vec<u32> = self
            .traced
            .values()
            .filter(|traced| traced.runs() && !traced.process.is_alive())
            .map(|traced| traced.number)
            .collect();
        for number in ended {
            self.end(number)?;
        }
        Ok(())
    }

    /// A process has ended.
    fn end(&mut self, number: u32) -> anyhow::Result<()> {
        let Some(traced) = self.traced.get_mut(&number) else { return Ok(()) };
        traced.state = State::Ended;
        let (pid, gone) = (traced.pid(), traced.is_gone());
        if pid.is_some_and(|pid| self.numbers.get(&pid.get()) == Some(&number)) {
            self.numbers.remove(&pid.map_or(0, NonZeroU32::get));
        }
        let tgid = pid.filter(|_| self.scope != Scope::Any);
        self.tracer.remove_process(tgid, number)?;
        self.tracer.detach_image(number);
        if gone {
            self.unswept.push(number);
        }
        Ok(())
    }

    /// The process named first is held at its end: takes its last look, and counts it as ended.
    ///
    /// # Errors
    /// The kernel's tables can't be written.
    pub fn end_first(&mut self) -> anyhow::Result<()> {
        if let Some(traced) = self.traced.get_mut(&self.first) {
            traced.watch_rss();
            if let Some(memory) = &mut traced.memory {
                memory.end(&traced.process);
            }
        }
        self.awaits_command = false;
        self.end(self.first)
    }

    /// Whether a process runs, or is about to be traced.
    pub fn goes_on(&self) -> bool {
        !self.pending.is_empty() || self.traced.values().any(Traced::runs)
    }

    /// Whether there is nothing left to trace. (The end of a command is told by who started it.)
    pub(super) fn is_over(&self) -> bool {
        self.selection.is_none() && !self.awaits_command && !self.goes_on()
    }

    /// Searches for processes that belong to the trace: one can be renamed or moved without a message.
    pub(super) fn search(&mut self) -> anyhow::Result<()> {
        let Some(selection) = &self.selection else { return Ok(()) };
        if Instant::now() < self.next_search {
            return Ok(());
        }
        let begun = Instant::now();
        let found = selection.find().unwrap_or_default();
        let missed: HashSet<u32> = self.missed.iter().map(|process| process.pid).collect();
        for pid in found {
            let known = self.numbers.contains_key(&pid) || self.pending.iter().any(|pending| pending.pid == pid);
            if !known && !missed.contains(&pid) {
                self.pending.push(Pending::new(pid, None, None));
            }
        }
        // At most one part in fifty of the time.
        self.next_search = Instant::now() + SEARCH.max(begun.elapsed() * 50).max(HOUSEKEEPING);
        Ok(())
    }

    /// Stops tracing a process.
    pub(super) fn forget(&mut self, tgid: Option<NonZeroU32>, number: u32) {
        let tgid = tgid.filter(|_| self.scope != Scope::Any);
        if let Err(error) = self.tracer.remove_process(tgid, number) {
            tracing::debug!("{error}");
        }
        self.tracer.detach_image(number);
        if number != 0 {
            self.unswept.push(number);
        }
    }

    /// Takes what is recorded of memory that is gone out of the tables, so that there is room for others.
    pub(super) fn sweep_blocks(&mut self) -> anyhow::Result<()> {
        if self.unswept.is_empty() {
            return Ok(());
        }
        let gone: HashSet<u32> = self.unswept.drain(..).collect();
        self.unclaimed.forget(&gone);
        if self.probes != Probes::None {
            for (stack, bytes) in self.tracer.remove_blocks(&gone)? {
                let sum = self.gone_blocks.entry(stack).or_default();
                *sum = sum.plus(Amount { bytes, count: 1 });
            }
        }
        if self.options.watch.faults {
            self.tracer.remove_pages(&gone)?;
        }
        for number in gone {
            self.tracer.free_image(number);
            // Of one that recorded nothing, nothing has to be named.
            if self.traced.get(&number).is_some_and(|traced| !traced.has_stacks && !traced.named)
                && let Some(traced) = self.traced.remove(&number)
            {
                self.shed(&traced);
            }
        }
        Ok(())
    }

    /// Keeps of a process that has ended that it was there.
    fn shed(&mut self, traced: &Traced) {
        if self.shed.len() < MAX_SHED {
            let report = profile::Process { mappings: Vec::new(), names: NameSources::default(), ..traced.report() };
            self.shed.push(report);
        } else {
            self.shed_more += 1;
        }
    }

    /// A stack was recorded for the first time: its code has to be known, and its thread's name if that is asked for.
    pub(super) fn note_stack(&mut self, stack: u64, time: u64) -> anyhow::Result<()> {
        let record = self.tracer.stack(u32::try_from(stack).unwrap_or(u32::MAX))?;
        let Some(traced) = self.traced.get_mut(&record.process) else { return Ok(()) };
        traced.has_stacks = true;
        if !traced.refresh_wanted {
            let mut frames = record.frames.iter().take(usize::from(record.len));
            if frames.any(|address| !traced.modules.contains(*address)) {
                traced.want_refresh(time);
            }
        }
        let key = (record.process, record.thread);
        if record.thread != 0 && !self.thread_names.contains_key(&key) && self.thread_names.len() < MAX_THREAD_NAMES {
            let name = thread_name(traced.process.pid(), record.thread).unwrap_or_default();
            self.thread_names.insert(key, name);
        }
        Ok(())
    }

    /// Reads the names of threads again: they can be given late.
    pub(super) fn note_thread_names(&mut self) {
        for ((number, thread), name) in &mut self.thread_names {
            let traced = self.traced.get(number).filter(|traced| traced.runs());
            if let Some(new) = traced.and_then(|traced| thread_name(traced.process.pid(), *thread)) {
                *name = new;
            }
        }
    }

    /// Time since recording began.
    pub(super) fn since(&self) -> Duration {
        self.started.map_or(Duration::ZERO, |(started, _)| started.elapsed())
    }
}

fn thread_name(pid: u32, thread: u32) -> Option<String> {
    let name = fs::read(format!("/proc/{pid}/task/{thread}/comm")).ok()?;
    Some(String::from_utf8_lossy(name.strip_suffix(b"\n").unwrap_or(&name)).into_owned())
}

fn comm_of(pid: u32) -> Option<String> {
    let comm = fs::read(format!("/proc/{pid}/comm")).ok()?;
    let comm = String::from_utf8_lossy(comm.strip_suffix(b"\n").unwrap_or(&comm)).into_owned();
    (!comm.is_empty()).then_some(comm)
}

fn is_alive(pid: u32) -> bool {
    Process::open(pid).is_ok_and(|process| process.is_alive())
}
