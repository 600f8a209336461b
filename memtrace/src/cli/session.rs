//! One trace, of one process or many, from discovery to a profile: what the commands that trace have in common.
//!
//! - [`traced`]: one process;
//! - [`sites`]: the probed functions of all of them;
//! - `attach`: programs, tables and probes, for the processes that are there at the start;
//! - `follow`: processes that appear, execute another program or end;
//! - `refresh`: code that appears;
//! - [`memory`]: what is recorded of a process's memory as a whole;
//! - `finish`, `heap`, `growth`: the end of a trace.

mod attach;
mod finish;
mod follow;
mod growth;
mod heap;
mod memory;
mod refresh;
mod sites;
mod traced;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    iter,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use memtrace_common::{
    event::{Counter, EventKind},
    fault::PAGE,
    settings::Unwind,
};
use tokio::io::{Interest, unix::AsyncFd};

use self::{
    follow::Pending,
    memory::{CallStream, Unclaimed},
    sites::{Place, Sites},
    traced::Traced,
};
use super::{launch::Stop, limits, unwinding::Unwinding};
use crate::{
    collect::{growth::Growth, modules::Modules, stacks},
    kernel::{Scope, Tracer, budget::Budget, tracer::EventStream},
    profile::{self, Amount, By, Profile, Subject, TraceEnd},
    target::{Discovery, Process, Selection, custom::Spec, pages::PageKind},
};

/// How often the target's resident set and mappings are looked at without a reason.
const HOUSEKEEPING: Duration = Duration::from_secs(1);
/// Shortest time between two reads of the mappings because of addresses that lie in none.
const REFRESH_PAUSE: Duration = Duration::from_millis(50);

/// What a trace is asked to be like.
#[derive(Clone, Debug)]
pub struct Options {
    /// Allocator functions that the user describes.
    pub custom: Vec<Spec>,
    /// Whether the process is just being started, and its libraries are not there yet.
    pub starting: bool,
    /// Table sizes.
    pub budget: Budget,
    /// How stacks are walked.
    pub unwind: Unwind,
    /// Bits of the stack hash to ignore: 0, except in tests.
    pub hash_ignore: u64,
    /// Whether every stack is walked from its innermost frame: for measurements.
    pub plain_walks: bool,
    /// Whether the processes that traced ones fork are traced.
    pub follow: bool,
    /// What happens when the process that was named executes another program.
    pub on_exec: OnExec,
    /// Whether the probes reach every process, so that new programs are traced from their first moment on.
    pub unfiltered: bool,
    /// What results are split by.
    pub by: By,
    /// What is recorded of the target's memory as a whole.
    pub watch: Watch,
}

/// What the profile of a trace is to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// What it is about.
    pub subject: Subject,
    /// Blocks and mappings younger than this are left out of what is still there.
    pub older: Duration,
    /// Only pages of this kind.
    pub kind: Option<PageKind>,
}

impl Ask {
    /// All unfreed blocks.
    pub const HEAP: Self = Self { subject: Subject::Heap, older: Duration::ZERO, kind: None };
}

/// What is recorded of the target's memory as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watch {
    /// Page faults.
    pub faults: bool,
    /// Changes of the resident set as the kernel counts them.
    pub resident: bool,
    /// System calls that change the address space, and which pages are resident before and after.
    pub space: bool,
}

impl Options {
    /// Stacks by frame pointers alone.
    pub fn plain(budget: Budget) -> Self {
        Self {
            custom: Vec::new(),
            starting: false,
            budget,
            unwind: Unwind::FramePointers,
            hash_ignore: 0,
            plain_walks: false,
            follow: false,
            on_exec: OnExec::Follow,
            unfiltered: false,
            by: By::None,
            watch: Watch::default(),
        }
    }
}

/// What happens when a process executes another program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnExec {
    /// The new program is traced, as a process of its own.
    Follow,
    /// The trace ends.
    End,
}

/// Which programs are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probes {
    /// Those that record.
    Recording,
    /// Empty ones on the same sites.
    Empty,
    /// None: allocations are not traced.
    None,
    /// Those of the unwinder's test ([`crate::kernel::source::oracle`]), with a ring buffer of `bytes`.
    Oracle {
        /// Size of the ring buffer, a power of two.
        bytes: u32,
        /// Of how many calls one gives a sample.
        every: u32,
    },
}

/// An attached trace.
pub struct Session {
    tracer: Tracer,
    /// All processes, by the numbers of their images; also those that have ended, as far as something was recorded of them.
    traced: BTreeMap<u32, Traced>,
    /// The images that processes have now, by process id.
    numbers: HashMap<u32, u32>,
    /// Number of the first image.
    first: u32,
    /// Processes that can't be attached yet.
    pending: Vec<Pending>,
    /// Processes that could not be traced.
    missed: Vec<profile::Process>,
    /// Their positions, by the numbers of their images: something may have been recorded of them.
    missed_images: HashMap<u32, usize>,
    /// What their names come from.
    missed_modules: Vec<Modules>,
    /// Those of them that found no room there.
    missed_more: u64,
    /// Which processes belong to it that appear later, if any.
    selection: Option<Selection>,
    sites: Sites,
    /// Where probes are that reach every process.
    everywhere: HashSet<Place>,
    unwinding: Unwinding,
    /// Blocks of processes whose memory is gone, by stack.
    gone_blocks: HashMap<u32, Amount>,
    /// Images whose blocks are still in the table though their memory is gone.
    unswept: Vec<u32>,
    /// Names of threads, by image and number.
    thread_names: HashMap<(u32, u32), String>,
    /// Allocators that were attached to during the trace.
    attached_late: Vec<AttachedLate>,
    calls: Option<CallStream>,
    /// System calls of processes of which no message has told yet, or that are not attached yet.
    unclaimed: Unclaimed,
    events: AsyncFd<EventStream>,
    growth: Growth,
    /// When recording began, and the same in nanoseconds of `CLOCK_MONOTONIC`.
    started: Option<(Instant, u64)>,
    options: Options,
    probes: Probes,
    scope: Scope,
    next_search: Instant,
    /// Whether a command that was started has not ended yet.
    awaits_command: bool,
    /// Processes that have ended and of which no stack was recorded.
    shed: Vec<profile::Process>,
    /// Those of them that found no room there.
    shed_more: u64,
    /// When it is looked whether a process has ended.
    next_end: Option<Instant>,
}

/// An allocator that was attached to during the trace.
#[derive(Clone, Debug)]
pub struct AttachedLate {
    /// Number of the process's image.
    pub number: u32,
    /// Module and the functions in it.
    pub module: String,
    /// How many functions of it were probed then.
    pub functions: u64,
    /// From the start of the trace.
    pub since: Duration,
}

/// A finished trace.
pub struct Finished {
    /// What was found.
    pub profile: Profile,
    /// Holds the files open that [`crate::profile::Mapping::open`] names.
    pub modules: Vec<Modules>,
    /// Stacks whose numbers contradict each other: none, or memtrace has a defect.
    pub imbalances: Vec<stacks::Imbalance>,
}

impl Session {
    /// The process that was named first.
    pub fn process(&self) -> Option<&Process> {
        self.traced.get(&self.first).map(|traced| &traced.process)
    }

    /// One phrase on whom is traced.
    pub fn subject(&self) -> String {
        let mut running = self.traced.values().filter(|traced| traced.runs());
        match (running.next(), running.count()) {
            (Some(only), 0) => format!("{:?} (pid {})", only.process.comm(), only.process.pid()),
            (Some(_), more) => format!("{} processes", more + 1),
            (None, _) => "no process yet".to_owned(),
        }
    }

    /// One phrase on what is probed.
    pub fn probed(&self) -> String {
        if self.probes == Probes::None {
            return if self.options.watch.faults { "page faults traced" } else { "system calls traced" }.to_owned();
        }
        if self.sites.functions().is_empty() {
            return "no function probed yet".to_owned();
        }
        let mut modules: Vec<String> =
            self.sites.functions().iter().map(|function| format!("{:?}", function.module)).collect();
        if modules.is_empty() {
            return "nothing probed yet".to_owned();
        }
        modules.sort();
        modules.dedup();
        const MOST: usize = 4;
        if modules.len() > MOST {
            let more = modules.len() - MOST;
            modules.truncate(MOST);
            modules.push(format!("{more} other files"));
        }
        format!("{} functions of {} probed", self.sites.functions().len(), modules.join(", "))
    }

    /// What was found in it.
    pub fn discovery(&self) -> Option<&Discovery> {
        self.traced.get(&self.first).map(|traced| &*traced.discovery)
    }

    /// The mappings of its code seen so far. Their paths can be used for as long as `self` lives.
    pub fn mappings(&self) -> &[profile::Mapping] {
        self.traced.get(&self.first).map(|traced| traced.modules.mappings()).unwrap_or_default()
    }

    /// The loaded programs and their tables.
    pub fn tracer(&mut self) -> &mut Tracer {
        &mut self.tracer
    }

    /// Begins to record.
    ///
    /// # Errors
    /// The kernel's tables can't be written.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.tracer.start()?;
        for traced in self.traced.values_mut() {
            let Some(memory) = &mut traced.memory else { continue };
            // Faults that come meanwhile are recorded, and told apart from later ones.
            if let Err(error) = memory.begin(&traced.process) {
                if traced.named {
                    return Err(error.into());
                }
                tracing::info!("process {} was not looked at: {error}", traced.process.pid());
            }
            self.tracer.set_late(traced.number);
            if self.options.watch.resident
                && let Some(pages) = memory.pages()
            {
                self.tracer
                    .set_resident([pages.file, pages.anon, pages.shmem].map(|pages| pages.saturating_mul(PAGE)))?;
            }
        }
        self.started = Some((Instant::now(), monotonic_now()));
        Ok(())
    }

    /// Records until `limit` has passed, all processes have ended, `interrupt` is ready, or `stops` is, which tells that the
    /// process named first is held. Calls `tick` about once a second with the time passed and the number of events so far.
    ///
    /// # Errors
    /// The kernel's tables can't be read.
    pub async fn run(
        &mut self,
        limit: Option<Duration>,
        interrupt: impl Future<Output = ()>,
        stops: impl Future<Output = anyhow::Result<Stop>>,
        mut tick: impl FnMut(Duration, u64),
    ) -> anyhow::Result<TraceEnd> {
        let (started, _) = self.started.context("a trace must be started before it can run")?;
        let pidfd = self.process().map(|process| process.pidfd().try_clone_to_owned()).transpose().context("pidfd")?;
        let exit = pidfd.map(|pidfd| {
            // SAFETY: the descriptor is owned by the AsyncFd, which closes it after deregistering.
            unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }
        });
        let exit = exit.transpose().context("the end of the target can't be waited for")?;
        let mut housekeeping = tokio::time::interval(HOUSEKEEPING);
        housekeeping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let end = async {
            match limit.and_then(|limit| started.checked_add(limit)) {
                Some(moment) => tokio::time::sleep_until(moment.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(end, interrupt, stops);
        loop {
            let next = self.next_wake(started);
            let first_runs = self.traced.get(&self.first).is_some_and(Traced::runs);
            tokio::select! {
                biased;
                () = &mut interrupt => return Ok(TraceEnd::Interrupted),
                guard = self.events.readable_mut() => {
                    let mut guard = guard.context("messages from the kernel side")?;
                    guard.clear_ready();
                    if self.drain()? {
                        return Ok(TraceEnd::TargetExecuted);
                    }
                }
                guard = exited(exit.as_ref(), first_runs) => {
                    guard?;
                    // What it did last may still be in the buffer.
                    if self.drain()? {
                        return Ok(TraceEnd::TargetExecuted);
                    }
                    self.note_ends()?;
                }
                stop = &mut stops => {
                    let executed = stop? == Stop::Exec || self.drain()?;
                    return Ok(if executed { TraceEnd::TargetExecuted } else { TraceEnd::TargetExited });
                }
                readable = calls(&mut self.calls) => readable?,
                () = &mut end => return Ok(TraceEnd::Duration),
                _ = housekeeping.tick() => {
                    self.keep_house()?;
                    tick(started.elapsed(), self.events_seen()?);
                }
                () = tokio::time::sleep_until(next.into()) => {}
            }
            self.drain_calls();
            self.sample_growth(started)?;
            self.refresh()?;
            self.try_pending()?;
            if self.next_end.is_some_and(|due| due <= Instant::now()) {
                self.note_ends()?;
            }
            for traced in self.traced.values_mut() {
                traced.sweeper.step();
            }
            if self.is_over() {
                return Ok(TraceEnd::TargetExited);
            }
        }
    }

    /// What is done about once a second.
    fn keep_house(&mut self) -> anyhow::Result<()> {
        // Before those that ended just now are noted: what they sent last has not been read yet.
        self.sweep_blocks()?;
        self.note_ends()?;
        for traced in self.traced.values_mut().filter(|traced| traced.runs()) {
            traced.refresh_wanted = true;
            traced.watch_rss();
            if let Some(memory) = &mut traced.memory {
                memory.watch(&traced.process);
            }
        }
        self.search()?;
        self.note_thread_names();
        Ok(())
    }

    /// Takes all system calls there are.
    fn drain_calls(&mut self) {
        let Some(calls) = &mut self.calls else { return };
        let waiting = self.unclaimed.take();
        for event in waiting.into_iter().chain(iter::from_fn(|| calls.next())) {
            let Some(traced) = self.traced.get_mut(&event.process) else {
                self.unclaimed.keep(event);
                continue;
            };
            if let Some(memory) = &mut traced.memory
                && memory.apply(&event, &traced.process)
                && traced.discovery.loader.is_none()
            {
                traced.refresh_wanted = true;
            }
        }
    }

    /// Events of the trace's kind so far.
    fn events_seen(&self) -> anyhow::Result<u64> {
        if self.options.watch.faults {
            return Ok(self.tracer.counter(Counter::UserFaults)? + self.tracer.counter(Counter::KernelFaults)?);
        }
        let heap = self.probes != Probes::None;
        Ok(self.tracer.counter(if heap { Counter::Allocations } else { Counter::Calls })?)
    }

    /// When something is due next.
    fn next_wake(&self, started: Instant) -> Instant {
        let mut next = started + self.growth.next_due();
        for traced in self.traced.values() {
            if traced.refresh_wanted && traced.runs() {
                next = next.min(traced.last_refresh + REFRESH_PAUSE);
            }
            if let Some(due) = traced.sweeper.due {
                next = next.min(due);
            }
        }
        if let Some(due) = self.pending.iter().map(|pending| pending.due).chain(self.next_end).min() {
            next = next.min(due);
        }
        next.max(Instant::now() + Duration::from_millis(1))
    }

    /// Takes all messages; true if the process that was named has executed another program and that is the end.
    fn drain(&mut self) -> anyhow::Result<bool> {
        while let Some(event) = self.events.get_mut().next_event() {
            let number = match self.scope {
                Scope::Any => Some(self.first),
                Scope::One(_) | Scope::Several => self.numbers.get(&event.tgid).copied(),
            };
            match EventKind::from_raw(event.kind) {
                Some(EventKind::Mappings) => {
                    if let Some(traced) = number.and_then(|number| self.traced.get_mut(&number)) {
                        // While the process is in its loader: it may be gone before long.
                        traced.want_refresh(event.time);
                        traced.last_refresh = Instant::now() - REFRESH_PAUSE;
                        self.refresh()?;
                    } else {
                        self.hasten(event.tgid);
                    }
                }
                Some(EventKind::NewStack) => self.note_stack(event.value, event.time)?,
                Some(EventKind::Fork) => {
                    self.forked((event.tgid, number), event.value as u32, (event.value >> 32) as u32, event.time)?
                }
                Some(EventKind::Exec) if self.executed(event.tgid, event.value as u32, event.time)? => return Ok(true),
                Some(EventKind::Exec) => {}
                Some(EventKind::Exit) => self.ending(event.tgid),
                Some(EventKind::Appeared) => self.appeared(event.tgid, event.time),
                None => {}
            }
        }
        Ok(false)
    }

    fn sample_growth(&mut self, started: Instant) -> anyhow::Result<()> {
        while started.elapsed() >= self.growth.next_due() {
            // Late by more than one sample: those between are not made up.
            let late = started.elapsed() - self.growth.next_due();
            if late >= HOUSEKEEPING {
                self.growth.skip();
            } else {
                let totals = self.tracer.totals(self.tracer.stack_count()?)?;
                self.growth.push(&totals);
            }
        }
        Ok(())
    }
}

/// Ready when the process named first has ended.
async fn exited(exit: Option<&AsyncFd<std::os::fd::OwnedFd>>, awaited: bool) -> anyhow::Result<()> {
    match exit.filter(|_| awaited) {
        Some(exit) => {
            exit.readable().await.context("the end of the target")?.retain_ready();
            Ok(())
        }
        None => std::future::pending().await,
    }
}

/// Ready when there are system calls to be taken.
async fn calls(calls: &mut Option<CallStream>) -> anyhow::Result<()> {
    match calls {
        Some(calls) => calls.readable().await,
        None => std::future::pending().await,
    }
}

/// `CLOCK_MONOTONIC` in nanoseconds, the clock of `bpf_ktime_get_ns`.
fn monotonic_now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure outlives the call, which can't fail: Linux always has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    let nanoseconds = |value: i64| u64::try_from(value).unwrap_or(0);
    nanoseconds(time.tv_sec) * 1_000_000_000 + nanoseconds(time.tv_nsec)
}
