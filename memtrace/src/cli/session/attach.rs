//! The start of a trace: programs, tables, and the processes that are there.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    rc::Rc,
    time::Instant,
};

use anyhow::{Context as _, bail};
use memtrace_common::settings::Unwind;
use tokio::io::{Interest, unix::AsyncFd};

use super::{
    CallStream, HOUSEKEEPING, Options, Probes, Session, Sites, Traced, Watch, limits,
    memory::{Memory, Unclaimed},
    monotonic_now,
    sites::Place,
    traced::State,
};
use crate::{
    cli::{sweeper::Sweeper, unwinding::Unwinding},
    collect::growth::Growth,
    kernel::{
        self, Scope, Settings, Tracer,
        budget::Budget,
        hazard::{self, TargetTraits},
        release::Release,
        source::uprobe::{AttachPoint, Reach},
        tracer::KernelError,
    },
    profile::{self, By, ProcessState},
    target::{Process, Selection, TargetError, custom::Spec, process::Seccomp},
};

/// Room for messages about system calls: about 190,000 of them.
const CALLS_BYTES: u32 = 16 << 20;
/// Room for unwind rows, whatever the budget: enough for the C library and a program of some MiB.
const LEAST_ROWS: u64 = 128 << 10;
/// Room for the tables of modules that are mapped later, beside half of what there is at the start.
const SPARE_ROWS: u64 = 256 << 10;
/// The same if other programs can come.
const SPARE_ROWS_FOR_PROGRAMS: u64 = 2 << 20;
/// Most processes that are remembered as not traced.
const MAX_MISSED: usize = 1000;

impl Session {
    /// Finds the allocators of `processes`, loads the programs and attaches them. Nothing is recorded yet. `selection` tells
    /// which processes belong to it that appear later. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// No allocator that can be traced in a process that was named by its number, a kernel hazard, or what the kernel refuses.
    pub fn attach(
        processes: Vec<Process>,
        selection: Option<Selection>,
        options: &Options,
        probes: Probes,
    ) -> anyhow::Result<Self> {
        limits::raise_open_files();
        let scope = scope(&processes, selection.is_some(), options)?;
        if options.unfiltered && probes != Probes::None {
            refuse_hazards_of_all()?;
        }
        let named = selection.is_none();
        // The libraries of a command are not there yet.
        let strict = named && !options.starting;
        let (mut found, mut missed) = (Vec::new(), Vec::new());
        for process in processes {
            let (pid, comm) = (process.pid(), process.comm().to_owned());
            match look(process, probes, &options.custom, strict) {
                Ok(traced) => found.push(Traced { named, ..traced }),
                Err(error) if named => return Err(error),
                Err(error) => missed.push(missing(pid, comm, &error)),
            }
        }
        let mut unwinding = Unwinding::default();
        if options.unwind != Unwind::FramePointers {
            for traced in &found {
                unwinding.prepare(&traced.process, &traced.modules);
            }
        }
        let (rows, blocks) = unwinding.size();
        let spare = if named && !options.follow { SPARE_ROWS } else { SPARE_ROWS_FOR_PROGRAMS };
        let settings = Settings {
            scope,
            budget: options.budget,
            unwind: options.unwind,
            rows: room(rows, spare, options.budget),
            blocks: room(blocks, spare, options.budget),
            hash_ignore: options.hash_ignore,
            follow: options.follow,
            announce: !named,
            unfiltered: options.unfiltered,
            by_thread: options.by == By::Thread,
            calls: if options.watch.space { CALLS_BYTES } else { 0 },
            plain_walks: options.plain_walks,
            oracle: match probes {
                Probes::Oracle { bytes, .. } => bytes,
                Probes::Recording | Probes::Empty | Probes::None => 0,
            },
        };
        let mut tracer = Tracer::load(&settings).map_err(name_rights)?;
        tracer.attach_process_events()?;
        let calls = attach_memory(&mut tracer, options.watch)?;
        let stream = tracer.take_events()?.context("the message stream was taken before")?;
        // SAFETY: the stream owns its descriptor and moves into the AsyncFd, which closes it after deregistering.
        let events = unsafe { AsyncFd::register_with_interest(stream, Interest::READABLE) }
            .context("messages from the kernel side can't be waited for")?;
        let mut session = Self {
            tracer,
            traced: BTreeMap::new(),
            numbers: HashMap::new(),
            first: 0,
            pending: Vec::new(),
            missed: Vec::new(),
            missed_images: HashMap::new(),
            missed_modules: Vec::new(),
            missed_more: 0,
            selection,
            sites: Sites::default(),
            everywhere: HashSet::new(),
            unwinding,
            gone_blocks: HashMap::new(),
            unswept: Vec::new(),
            thread_names: HashMap::new(),
            attached_late: Vec::new(),
            calls,
            unclaimed: Unclaimed::default(),
            events,
            growth: Growth::default(),
            started: None,
            options: options.clone(),
            probes,
            scope,
            next_search: Instant::now() + HOUSEKEEPING,
            awaits_command: options.starting,
            shed: Vec::new(),
            shed_more: 0,
            next_end: None,
        };
        for process in missed {
            session.miss(process, 0);
        }
        for traced in found {
            let (pid, comm) = (traced.process.pid(), traced.process.comm().to_owned());
            match session.adopt(traced, None) {
                Ok(number) if session.first == 0 => session.first = number,
                Ok(_) => {}
                Err(error) if named => return Err(error),
                Err(error) => session.miss(missing(pid, comm, &error), 0),
            }
        }
        Ok(session)
    }

    /// Attaches to a process that was looked into. `number`: that of its image, if the kernel side knows it already.
    pub(super) fn adopt(&mut self, mut traced: Traced, number: Option<u32>) -> anyhow::Result<u32> {
        let pid = traced.pid().context("process 0 is the kernel itself")?;
        let tgid = if self.scope == Scope::Any { None } else { Some(pid) };
        let number = match number {
            Some(number) => number,
            // Its calls are recorded only once all of its probes are there.
            None => self.tracer.add_process(tgid, false)?.context("there are too many processes at a time")?,
        };
        traced.number = number;
        if self.options.unwind != Unwind::FramePointers {
            self.unwinding.prepare(&traced.process, &traced.modules);
        }
        let handed = self.unwinding.hand_over(&mut self.tracer, number, &traced.modules);
        let attached = handed.map_err(Into::into).and_then(|()| self.attach_probes(&mut traced));
        if let Err(error) = attached {
            self.forget(tgid, number);
            return Err(error);
        }
        if self.options.watch.space {
            traced.memory = Some(Memory::default());
        }
        self.tracer.set_allocations(number, true);
        self.numbers.insert(pid.get(), number);
        traced.state = State::Running;
        self.traced.insert(number, traced);
        self.renew_sweep(number)?;
        Ok(number)
    }

    /// Puts the probes of a process in place.
    fn attach_probes(&mut self, traced: &mut Traced) -> anyhow::Result<()> {
        let discovery = Rc::clone(&traced.discovery);
        let points = traced.new_points(&mut self.sites, &discovery, 0);
        let pid = traced.pid();
        let own = Reach { pid, image: traced.number };
        match self.probes {
            Probes::Recording if self.options.unfiltered => {
                let new: Vec<_> = points.into_iter().filter(|(place, _)| self.everywhere.insert(*place)).collect();
                self.tracer.attach_allocator(&bare(new), Reach::EVERYWHERE)?;
            }
            Probes::Recording => self.tracer.attach_allocator(&bare(points), own)?,
            Probes::Empty => self.tracer.attach_empty(&bare(points), own)?,
            Probes::None => {}
            Probes::Oracle { every, .. } => self.tracer.attach_oracle(&bare(points), every, own)?,
        }
        if let Some((path, offset, state)) = traced.hook() {
            traced.hook_point = Some(self.tracer.attach_loader_hook(path, offset, state, own)?);
        }
        Ok(())
    }

    /// Makes the sweep of a process's probes anew, which takes breakpoints out of the processes that it forks.
    pub(super) fn renew_sweep(&mut self, number: u32) -> anyhow::Result<()> {
        let Some(traced) = self.traced.get_mut(&number) else { return Ok(()) };
        let Some(pid) = traced.pid().filter(|_| !self.options.unfiltered) else { return Ok(()) };
        let points: Vec<_> = traced.points.values().chain(&traced.hook_point).cloned().collect();
        traced.sweeper = Sweeper::new(self.tracer.sweep(&points, pid)?);
        Ok(())
    }

    /// Remembers a process that could not be traced; its image has `number`, or 0 if nothing can have been recorded of it.
    pub(super) fn miss(&mut self, process: profile::Process, number: u32) {
        if let ProcessState::Missed { reason } = &process.state {
            tracing::info!("process {} ({:?}) is not traced: {reason}", process.pid, process.comm);
        }
        // One that was missed when it was forked, and then as the program that it executed.
        if let Some(known) = self.missed.iter_mut().rev().take(64).find(|known| known.pid == process.pid) {
            known.comm = process.comm;
            return;
        }
        if self.missed.len() < MAX_MISSED {
            if number != 0 {
                self.missed_images.insert(number, self.missed.len());
            }
            self.missed.push(process);
        } else {
            self.missed_more += 1;
        }
    }
}

/// Says first what a user who is not root lacks, most likely.
fn name_rights(error: KernelError) -> anyhow::Error {
    // SAFETY: takes nothing, changes nothing.
    let user = unsafe { libc::geteuid() };
    let error = anyhow::Error::from(error);
    if user == 0 {
        return error;
    }
    error.context(format!(
        "user {user} can't trace: run memtrace as root, or with the capabilities CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE"
    ))
}

/// Points without their places.
pub(super) fn bare(points: Vec<(Place, AttachPoint)>) -> Vec<AttachPoint> {
    points.into_iter().map(|(_, point)| point).collect()
}

/// Looks into a process and refuses what would harm it.
pub(super) fn look(process: Process, probes: Probes, specs: &[Spec], strict: bool) -> anyhow::Result<Traced> {
    let traced = Traced::look(process, probes, specs, strict, monotonic_now())?;
    if probes != Probes::None {
        refuse_hazards(&traced.process)?;
    }
    Ok(traced)
}

/// A process that could not be traced.
pub(super) fn missing(pid: u32, comm: String, error: &anyhow::Error) -> profile::Process {
    if !Process::open(pid).is_ok_and(|process| process.is_alive()) {
        return ended(pid, comm);
    }
    let reason = match error.downcast_ref::<TargetError>() {
        Some(error) => error.to_string(),
        None => format!("{error:#}"),
    };
    profile::Process { state: ProcessState::Missed { reason }, ..profile::Process::new(pid, comm) }
}

/// A process that was gone before it could be traced.
pub(super) fn ended(pid: u32, comm: String) -> profile::Process {
    let reason = "it ended before its probes were in place".to_owned();
    profile::Process { state: ProcessState::Missed { reason }, ..profile::Process::new(pid, comm) }
}

/// Which processes the kernel side has to tell apart.
fn scope(processes: &[Process], open: bool, options: &Options) -> anyhow::Result<Scope> {
    let several = open || options.follow || processes.len() != 1;
    if !kernel::in_initial_pid_namespace() {
        if several || options.watch != Watch::default() {
            bail!(
                "several processes, page faults and system calls can be traced from the initial pid namespace only: run \
                 memtrace on the host"
            );
        }
        return Ok(Scope::Any);
    }
    let only = processes.first().and_then(|process| std::num::NonZeroU32::new(process.pid()));
    match only {
        Some(pid) if !several => Ok(Scope::One(pid)),
        _ if options.watch.resident => bail!(
            "--exact follows the resident set of one process: name one with -p, without --children (without --exact, \
             pgfaultstacks traces any number)"
        ),
        _ => Ok(Scope::Several),
    }
}

/// Attaches what `watch` asks for.
fn attach_memory(tracer: &mut Tracer, watch: Watch) -> anyhow::Result<Option<CallStream>> {
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
    Ok(Some(CallStream::new(tracer)?))
}

/// Room to reserve for `used` entries of unwind tables and those to come: at most what the budget allows.
fn room(used: u64, spare: u64, budget: Budget) -> u32 {
    (used + used / 2 + spare).min(budget.rows.max(LEAST_ROWS)) as u32
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

/// Probes in every process would harm one that is not looked at.
fn refuse_hazards_of_all() -> anyhow::Result<()> {
    let Some(release) = Release::running() else { return Ok(()) };
    match hazard::of_return_probes(
        release,
        TargetTraits { seccomp: true, shadow_stack: release >= hazard::SHADOW_STACKS },
    ) {
        Some(hazard) => bail!("not every process can be traced on this kernel: {}", hazard.sentence()),
        None => Ok(()),
    }
}
