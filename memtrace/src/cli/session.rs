//! One trace of one process, from discovery to a profile: what the commands that trace have in common.

use std::{
    collections::HashMap,
    num::NonZeroU32,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use memtrace_common::{
    event::{Counter, EventKind},
    loss::{Loss, LossCount},
    settings::Unwind,
    stack::{StackRecord, Totals},
};
use tokio::io::{Interest, unix::AsyncFd};

use super::{late::Late, limits, sweeper::Sweeper, unwinding::Unwinding};
use crate::{
    collect::{
        growth::Growth,
        modules::Modules,
        stacks::{self, LiveBlocks},
    },
    kernel::{
        self, Settings, Tracer,
        budget::Budget,
        hazard::{self, TargetTraits},
        release::Release,
        source::uprobe::{AttachPoint, Role},
        tracer::EventStream,
    },
    profile::{self, Events, Function, Process as Traced, Profile, TraceEnd},
    target::{
        self, Discovery, Mapping, Module, Process,
        function::Role as FunctionRole,
        process::{Rss, Seccomp},
    },
};

/// How often the target's resident set and mappings are looked at without a reason.
const HOUSEKEEPING: Duration = Duration::from_secs(1);
/// Shortest time between two reads of the mappings because of addresses that lie in none.
const REFRESH_PAUSE: Duration = Duration::from_millis(50);
/// Growth of anonymous memory without a single probe hit from which on a trace is an error: far more than a program
/// gets from its stack and from copied pages.
const UNSEEN_GROWTH: u64 = 1 << 20;

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
}

impl Options {
    /// Stacks by frame pointers alone.
    pub fn plain(budget: Budget) -> Self {
        Self { budget, unwind: Unwind::FramePointers, hash_ignore: 0, plain_walks: false }
    }
}

/// Which programs are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probes {
    /// Those that record.
    Recording,
    /// Empty ones on the same sites.
    Empty,
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
        refuse_hazards(&process)?;
        let discovery = match mappings {
            Some(mappings) => target::discover_in(&process, mappings)?,
            None => target::discover(&process)?,
        };
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
            plain_walks: options.plain_walks,
            oracle: match probes {
                Probes::Oracle { bytes, .. } => bytes,
                Probes::Recording | Probes::Empty => 0,
            },
        };
        let mut tracer = Tracer::load(&settings)?;
        unwinding.hand_over(&mut tracer, &modules)?;
        let points = attach_points(&discovery);
        match probes {
            Probes::Recording => tracer.attach_allocator(&points, pid)?,
            Probes::Empty => tracer.attach_empty(&points, pid)?,
            Probes::Oracle { every, .. } => tracer.attach_oracle(&points, every, pid)?,
        }
        tracer.attach_process_events()?;
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

    /// Begins to record.
    ///
    /// # Errors
    /// The kernel's tables can't be written.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.tracer.start()?;
        self.started = Some(Instant::now());
        Ok(())
    }

    /// Records until `limit` has passed, the target ends or executes another program, or `interrupt` is ready. Calls
    /// `tick` about once a second with the time passed and the number of allocations so far.
    ///
    /// # Errors
    /// The kernel's tables can't be read.
    pub async fn run(
        &mut self,
        limit: Option<Duration>,
        interrupt: impl Future<Output = ()>,
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
        tokio::pin!(end, interrupt);
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
                () = &mut end => return Ok(TraceEnd::Duration),
                _ = housekeeping.tick() => {
                    self.refresh_wanted = true;
                    self.watch_rss();
                    tick(started.elapsed(), self.tracer.counter(Counter::Allocations)?);
                }
                () = tokio::time::sleep_until(next.into()) => {}
            }
            self.sample_growth(started)?;
            self.refresh();
            self.sweeper.step();
        }
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

    /// Ends recording, detaches, and reads what was found. Blocks younger than `older` are left out of the unfreed
    /// ones.
    ///
    /// # Errors
    /// The kernel's tables can't be read, or not a single call was seen while the target's memory grew.
    pub fn finish(mut self, end: TraceEnd, older: Duration) -> anyhow::Result<Finished> {
        let started = self.started.context("a trace must be started before it can end")?;
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
        let functions = functions(&self.discovery);
        let mut records = HashMap::new();
        self.tracer.for_each_stack(|number, record| {
            records.insert(number, *record);
        })?;
        let totals = self.tracer.totals(self.tracer.stack_count()?)?;
        let mut live = LiveBlocks::new(now, older);
        self.tracer.for_each_block(|_, block| live.add(block))?;
        let function_of = |site: u16| Some(usize::from(site)).filter(|site| *site < functions.len());
        let (stacks, imbalances) = stacks::assemble(&records, &totals, &live, &self.growth, duration, function_of);
        let events = Events {
            allocations: self.tracer.counter(Counter::Allocations)?,
            frees: self.tracer.counter(Counter::Frees)?,
            frees_unknown: self.tracer.counter(Counter::FreesUnknown)?,
            nested: self.tracer.counter(Counter::Nested)?,
            failed: self.tracer.counter(Counter::Failed)?,
        };
        self.refuse_blindness(&events)?;
        let unwinding = self.unwound(&records, &totals);
        let total = |rss: Rss| rss.anonymous + rss.file + rss.shared;
        let profile = Profile {
            process: Traced { pid: self.process.pid(), comm: self.process.comm().to_owned() },
            duration,
            end,
            older,
            functions,
            stacks,
            mappings: self.modules.mappings().to_vec(),
            events,
            losses: self.losses()?,
            unwinding,
            rss: self.rss.map(|(before, after)| (total(before), total(after))),
        };
        Ok(Finished { profile, modules: self.modules, imbalances })
    }

    /// All losses, with those that only the end of the trace shows.
    fn losses(&self) -> anyhow::Result<Vec<(Loss, LossCount)>> {
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

/// Where a virtual address of a module's file is in the target.
fn run_time_address(modules: &Modules, module: &Module, address: u64) -> Option<u64> {
    modules.code().find(|code| code.mapping.file == module.key()).and_then(|code| {
        let code_address = module.code_address(code.mapping)?;
        Some(code.mapping.start.wrapping_sub(code_address).wrapping_add(address))
    })
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

fn functions(discovery: &Discovery) -> Vec<Function> {
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
fn monotonic_now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure outlives the call, which can't fail: Linux always has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    let nanoseconds = |value: i64| u64::try_from(value).unwrap_or(0);
    nanoseconds(time.tv_sec) * 1_000_000_000 + nanoseconds(time.tv_nsec)
}
