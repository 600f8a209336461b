//! One trace of one process, from discovery to a profile: what the commands that trace have in common.

mod children;
mod finish;
mod memory;

use std::{
    num::NonZeroU32,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use memtrace_common::{
    event::{Counter, EventKind},
    fault::PAGE,
    settings::Unwind,
};
use tokio::io::{Interest, unix::AsyncFd};

use self::{children::Children, memory::Memory};
use super::{late::Late, launch::Stop, limits, sweeper::Sweeper, unwinding::Unwinding};
use crate::{
    collect::{growth::Growth, modules::Modules, stacks},
    kernel::{
        self, Settings, Tracer,
        budget::Budget,
        hazard::{self, TargetTraits},
        release::Release,
        source::uprobe::{AttachPoint, Role},
        tracer::EventStream,
    },
    profile::{Profile, Subject, TraceEnd},
    target::{
        self, Discovery, Mapping, Module, Process,
        function::Role as FunctionRole,
        pages::PageKind,
        process::{Rss, Seccomp},
    },
};

/// How often the target's resident set and mappings are looked at without a reason.
const HOUSEKEEPING: Duration = Duration::from_secs(1);
/// Shortest time between two reads of the mappings because of addresses that lie in none.
const REFRESH_PAUSE: Duration = Duration::from_millis(50);

/// Room for messages about system calls: about 190,000 of them.
const CALLS_BYTES: u32 = 16 << 20;
/// Room for unwind rows, whatever the budget: enough for the C library and a program of some MiB.
const LEAST_ROWS: u64 = 128 << 10;
/// Room for the tables of modules that are mapped later, beside half of what there is at the start.
const SPARE_ROWS: u64 = 256 << 10;

/// What a trace is asked to be like.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Table sizes.
    pub budget: Budget,
    /// How stacks are walked.
    pub unwind: Unwind,
    /// Bits of the stack hash to ignore: 0, except in tests.
    pub hash_ignore: u64,
    /// Whether every stack is walked from its innermost frame: for measurements.
    pub plain_walks: bool,
    /// Whether forked processes are followed.
    pub follow: bool,
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
            budget,
            unwind: Unwind::FramePointers,
            hash_ignore: 0,
            plain_walks: false,
            follow: false,
            watch: Watch::default(),
        }
    }
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
    process: Process,
    /// Holds the modules' files open, whose paths the probes and the symbolizer use.
    discovery: Discovery,
    tracer: Tracer,
    modules: Modules,
    unwinding: Unwinding,
    events: AsyncFd<EventStream>,
    growth: Growth,
    started: Option<Instant>,
    unwind: Unwind,
    rss: Option<(Rss, Rss)>,
    last_refresh: Instant,
    refresh_wanted: bool,
    late: Late,
    sweeper: Sweeper,
    watch: Watch,
    memory: Option<Memory>,
    /// `None` if children are not followed.
    children: Option<Children>,
    /// Reports of the loader when the memory map was last read.
    loader_seen: u64,
}

/// A finished trace.
pub struct Finished {
    /// What was found.
    pub profile: Profile,
    /// Holds the files open that [`crate::profile::Mapping::open`] names.
    pub modules: Modules,
    /// Stacks whose numbers contradict each other: none, or memtrace has a defect.
    pub imbalances: Vec<stacks::Imbalance>,
}

impl Session {
    /// Finds the allocator of `process`, loads the programs and attaches them. Nothing is recorded yet. `mappings`:
    /// the memory map, if it was read already. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// No allocator that can be traced, a kernel hazard, or what the kernel refuses.
    pub fn attach(
        process: Process,
        mappings: Option<&[Mapping]>,
        options: &Options,
        probes: Probes,
    ) -> anyhow::Result<Self> {
        limits::raise_open_files();
        let discovery = match (probes, mappings) {
            (Probes::None, _) => target::discover::modules(&process)?,
            (_, Some(mappings)) => target::discover_in(&process, mappings)?,
            (_, None) => target::discover(&process)?,
        };
        if probes != Probes::None {
            refuse_hazards(&process)?;
        }
        for note in &discovery.notes {
            tracing::info!("{note}");
        }
        let pid = NonZeroU32::new(process.pid()).context("process 0 is the kernel itself")?;
        let mut modules = Modules::default();
        if let Err(error) = modules.refresh(&process)
            && process.is_alive()
        {
            return Err(error.into());
        }
        let mut unwinding = Unwinding::default();
        if options.unwind != Unwind::FramePointers {
            unwinding.prepare(&process, &modules);
        }
        let (rows, blocks) = unwinding.size();
        let settings = Settings {
            tgid: kernel::in_initial_pid_namespace().then_some(pid.get()),
            budget: options.budget,
            unwind: options.unwind,
            rows: room(rows, options.budget),
            blocks: room(blocks, options.budget),
            hash_ignore: options.hash_ignore,
            follow: options.follow,
            calls: if options.watch.space { CALLS_BYTES } else { 0 },
            plain_walks: options.plain_walks,
            oracle: match probes {
                Probes::Oracle { bytes, .. } => bytes,
                Probes::Recording | Probes::Empty | Probes::None => 0,
            },
        };
        let mut tracer = Tracer::load(&settings)?;
        unwinding.hand_over(&mut tracer, &modules)?;
        let points = attach_points(&discovery);
        match probes {
            Probes::Recording => tracer.attach_allocator(&points, pid)?,
            Probes::Empty => tracer.attach_empty(&points, pid)?,
            Probes::None => {}
            Probes::Oracle { every, .. } => tracer.attach_oracle(&points, every, pid)?,
        }
        tracer.attach_process_events()?;
        let memory = attach_memory(&mut tracer, options.watch)?;
        let mut breakpoints = points;
        if let Some(hook) = discovery.loader
            && let Some(module) = discovery.modules.get(hook.module)
        {
            let state = hook.state.and_then(|state| run_time_address(&modules, module, state));
            breakpoints.push(tracer.attach_loader_hook(module.path(), hook.offset, state, pid)?);
        }
        let sweep = tracer.sweep(&breakpoints, pid)?;
        let stream = tracer.take_events()?.context("the message stream was taken before")?;
        // SAFETY: the stream owns its descriptor and moves into the AsyncFd, which closes it after deregistering.
        let events = unsafe { AsyncFd::register_with_interest(stream, Interest::READABLE) }
            .context("messages from the kernel side can't be waited for")?;
        Ok(Self {
            rss: process.rss().ok().map(|rss| (rss, rss)),
            process,
            discovery,
            tracer,
            modules,
            unwinding,
            events,
            unwind: options.unwind,
            growth: Growth::default(),
            started: None,
            last_refresh: Instant::now(),
            refresh_wanted: false,
            late: Late::new(monotonic_now()),
            sweeper: Sweeper::new(sweep),
            watch: options.watch,
            memory,
            children: options.follow.then(Children::default),
            loader_seen: 0,
        })
    }

    /// The traced process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// What was found in it.
    pub fn discovery(&self) -> &Discovery {
        &self.discovery
    }

    /// One phrase on what is probed.
    pub fn probed(&self) -> String {
        if self.discovery.sites.is_empty() {
            return if self.watch.faults { "page faults traced" } else { "system calls traced" }.to_owned();
        }
        let mut modules: Vec<String> = self
            .discovery
            .sites
            .iter()
            .filter_map(|site| Some(format!("{:?}", self.discovery.modules.get(site.module)?.name())))
            .collect();
        modules.dedup();
        format!("{} functions of {} probed", self.discovery.sites.len(), modules.join(", "))
    }

    /// Mappings of code seen so far. Their paths can be used for as long as `self` lives.
    pub fn mappings(&self) -> &[crate::profile::Mapping] {
        self.modules.mappings()
    }

    /// The loaded programs and their tables.
    pub fn tracer(&mut self) -> &mut Tracer {
        &mut self.tracer
    }

    /// Reads the memory map again now, while the target is held: what it has mapped does not count as late.
    pub fn refresh_modules(&mut self) {
        if let Err(error) = self.try_refresh_modules(false) {
            tracing::warn!("stacks through code mapped just now will be cut: {error}");
        }
    }

    fn try_refresh_modules(&mut self, late: bool) -> Result<(), kernel::KernelError> {
        let events = self.tracer.loader_events()?;
        let since = self.late.look(monotonic_now());
        let before = self.modules.mappings().len();
        // A target that has just exited has no map any more: what was seen before stays.
        let Ok(changed) = self.modules.refresh(&self.process) else { return Ok(()) };
        self.note_loader(events, self.tracer.loader_events()?)?;
        if changed {
            if self.unwind != Unwind::FramePointers {
                self.unwinding.prepare(&self.process, &self.modules);
            }
            self.unwinding.hand_over(&mut self.tracer, &self.modules)?;
            if late {
                self.late.in_force(&self.modules, before, since, monotonic_now());
            }
        }
        self.tracer.set_loader_seen(events)
    }

    /// Tells how many reports of the loader came between the last two reads of the memory map, of which the latter began after
    /// `begun` of them and ended after `ended`: what came while one was read may have come before it, or after.
    fn note_loader(&mut self, begun: u64, ended: u64) -> Result<(), kernel::KernelError> {
        let removed = self.tracer.last_removal()? > self.loader_seen;
        self.modules.note_loader(ended.saturating_sub(self.loader_seen), removed);
        self.loader_seen = begun;
        Ok(())
    }

    /// Begins to record.
    ///
    /// # Errors
    /// The kernel's tables can't be written.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.tracer.start()?;
        if let Some(memory) = &mut self.memory {
            // Faults that come meanwhile are recorded, and told apart from later ones.
            memory.begin(&self.process)?;
            self.tracer.set_late()?;
            if self.watch.resident
                && let Some(pages) = memory.pages()
            {
                self.tracer
                    .set_resident([pages.file, pages.anon, pages.shmem].map(|pages| pages.saturating_mul(PAGE)))?;
            }
        }
        self.started = Some(Instant::now());
        Ok(())
    }

    /// Records until `limit` has passed, the target ends or executes another program, `interrupt` is ready, or
    /// `stops` is, which tells that the target is held. Calls `tick` about once a second with the time passed and the number
    /// of events so far.
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
        let started = self.started.context("a trace must be started before it can run")?;
        let pidfd = self.process.pidfd().try_clone_to_owned().context("pidfd")?;
        // SAFETY: the descriptor is owned by the AsyncFd, which closes it after deregistering.
        let exit = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }
            .context("the end of the target can't be waited for")?;
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
                guard = exit.readable() => {
                    guard.context("the end of the target")?.retain_ready();
                    // What it did last may still be in the buffer.
                    let executed = self.drain()?;
                    return Ok(if executed { TraceEnd::TargetExecuted } else { TraceEnd::TargetExited });
                }
                stop = &mut stops => {
                    let executed = stop? == Stop::Exec || self.drain()?;
                    return Ok(if executed { TraceEnd::TargetExecuted } else { TraceEnd::TargetExited });
                }
                readable = calls(&mut self.memory) => readable?,
                () = &mut end => return Ok(TraceEnd::Duration),
                _ = housekeeping.tick() => {
                    self.refresh_wanted = true;
                    self.watch_rss();
                    if let Some(memory) = &mut self.memory {
                        memory.watch(&self.process);
                    }
                    tick(started.elapsed(), self.events_seen()?);
                }
                () = tokio::time::sleep_until(next.into()) => {}
            }
            if let Some(memory) = &mut self.memory
                && memory.drain(&self.process)
                && self.discovery.loader.is_none()
            {
                self.refresh_wanted = true;
            }
            self.sample_growth(started)?;
            self.refresh();
            self.sweeper.step();
        }
    }

    /// Events of the trace's kind so far.
    fn events_seen(&self) -> anyhow::Result<u64> {
        if self.watch.faults {
            return Ok(self.tracer.counter(Counter::UserFaults)? + self.tracer.counter(Counter::KernelFaults)?);
        }
        let heap = !self.discovery.sites.is_empty();
        Ok(self.tracer.counter(if heap { Counter::Allocations } else { Counter::Calls })?)
    }

    /// When something is due next.
    fn next_wake(&self, started: Instant) -> Instant {
        let mut next = started + self.growth.next_due();
        if self.refresh_wanted {
            next = next.min(self.last_refresh + REFRESH_PAUSE);
        }
        if let Some(due) = self.sweeper.due {
            next = next.min(due);
        }
        next.max(Instant::now() + Duration::from_millis(1))
    }

    /// Takes all messages; true if the target has executed another program.
    fn drain(&mut self) -> anyhow::Result<bool> {
        while let Some(event) = self.events.get_mut().next_event() {
            match EventKind::from_raw(event.kind) {
                Some(EventKind::Mappings) => {
                    // While the target is in its loader: it may be gone before long.
                    self.want_refresh(event.time);
                    self.last_refresh = Instant::now() - REFRESH_PAUSE;
                    self.refresh();
                }
                Some(EventKind::NewStack) if !self.refresh_wanted => {
                    let number = u32::try_from(event.value).unwrap_or(u32::MAX);
                    let record = self.tracer.stack(number)?;
                    let frames = record.frames.iter().take(usize::from(record.len));
                    if frames.into_iter().any(|address| !self.modules.contains(*address)) {
                        self.want_refresh(event.time);
                    }
                }
                Some(EventKind::Fork) if self.children.is_some() => self.follow(event.value as u32)?,
                Some(EventKind::ChildExec) => {
                    if let Some(children) = &mut self.children {
                        children.executed(event.tgid);
                    }
                }
                Some(EventKind::Fork) => self.sweeper.forked(),
                Some(EventKind::Exec) => return Ok(true),
                Some(EventKind::NewStack) | None => {}
            }
        }
        Ok(false)
    }

    fn want_refresh(&mut self, since: u64) {
        self.refresh_wanted = true;
        self.late.want(since);
    }

    fn refresh(&mut self) {
        if self.refresh_wanted && self.last_refresh.elapsed() >= REFRESH_PAUSE {
            if let Err(error) = self.try_refresh_modules(true) {
                tracing::warn!("stacks through code mapped just now will be cut: {error}");
            }
            self.refresh_wanted = false;
            self.last_refresh = Instant::now();
        }
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

    fn watch_rss(&mut self) {
        if let (Ok(now), Some((_, last))) = (self.process.rss(), &mut self.rss) {
            *last = now;
        }
    }
}

/// Where a virtual address of a module's file is in the target.
fn run_time_address(modules: &Modules, module: &Module, address: u64) -> Option<u64> {
    modules.code().find(|code| code.mapping.file == module.key()).and_then(|code| {
        let code_address = module.code_address(code.mapping)?;
        Some(code.mapping.start.wrapping_sub(code_address).wrapping_add(address))
    })
}

/// Attaches what `watch` asks for.
fn attach_memory(tracer: &mut Tracer, watch: Watch) -> anyhow::Result<Option<Memory>> {
    if watch != Watch::default() {
        anyhow::ensure!(
            kernel::in_initial_pid_namespace(),
            "page faults and system calls can be traced from the initial pid namespace only: run memtrace on the host"
        );
    }
    if watch.faults {
        tracer.attach_faults()?;
    }
    if watch.resident {
        tracer.attach_resident()?;
    }
    if !watch.space {
        return Ok(None);
    }
    tracer.attach_calls()?;
    Ok(Some(Memory::new(tracer)?))
}

/// Ready when there are system calls to be taken.
async fn calls(memory: &mut Option<Memory>) -> anyhow::Result<()> {
    match memory {
        Some(memory) => memory.readable().await,
        None => std::future::pending().await,
    }
}

/// Room to reserve for `used` entries of unwind tables and those to come: at most what the budget allows.
fn room(used: u64, budget: Budget) -> u32 {
    (used + used / 2 + SPARE_ROWS).min(budget.rows.max(LEAST_ROWS)) as u32
}

fn refuse_hazards(process: &Process) -> anyhow::Result<()> {
    let Some(release) = Release::running() else { return Ok(()) };
    let inputs = process.hazard_inputs()?;
    let traits = TargetTraits { seccomp: inputs.seccomp != Seccomp::Disabled, shadow_stack: inputs.shadow_stack };
    match hazard::of_return_probes(release, traits) {
        Some(hazard) => bail!("process {} is not traced: {}", process.pid(), hazard.sentence()),
        None => Ok(()),
    }
}

/// The sites as the kernel side takes them; the number of a site is its position.
pub fn attach_points(discovery: &Discovery) -> Vec<AttachPoint> {
    (0u16..)
        .zip(&discovery.sites)
        .filter_map(|(index, site)| {
            let module = discovery.modules.get(site.module)?;
            Some(AttachPoint {
                role: match site.role {
                    FunctionRole::Allocate => Role::Allocate,
                    FunctionRole::Free => Role::Free,
                },
                path: module.path(),
                offset: site.probe_offset,
                cookie: site.site(index).cookie(),
                name: format!("{} in {:?}", site.function, module.name()),
            })
        })
        .collect()
}

/// `CLOCK_MONOTONIC` in nanoseconds, the clock of `bpf_ktime_get_ns`.
fn monotonic_now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure outlives the call, which can't fail: Linux always has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    let nanoseconds = |value: i64| u64::try_from(value).unwrap_or(0);
    nanoseconds(time.tv_sec) * 1_000_000_000 + nanoseconds(time.tv_nsec)
}
