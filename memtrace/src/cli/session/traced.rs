//! One traced process: what was found in it, and what is kept of it after its end.

use std::{
    collections::{BTreeMap, HashSet, btree_map::Entry},
    num::NonZeroU32,
    path::PathBuf,
    rc::Rc,
    time::{Duration, Instant},
};

use super::{
    Probes,
    memory::Memory,
    sites::{Place, Sites},
};
use crate::{
    cli::{late::Late, sweeper::Sweeper},
    collect::modules::Modules,
    kernel::source::uprobe::AttachPoint,
    profile::{self, ProcessState},
    target::{
        self, Discovery, Mapping, Module, Process,
        custom::{self, CustomError, Spec},
        process::Rss,
        select,
    },
};

/// What became of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It runs.
    Running,
    /// It has ended.
    Ended,
    /// It has executed another program, which is a process of its own here.
    Executed,
}

/// Where the dynamic loader reports its changes: file, offset, and address in the process of the word that says what changes.
pub type Hook = (PathBuf, u64, Option<u64>);

/// A traced process; one that executes another program is another from then on.
pub struct Traced {
    /// Number of its image.
    pub number: u32,
    /// Open handles of it.
    pub process: Process,
    /// What was found in it; shared with the processes that it forked, whose probes lead to the files that this holds open.
    pub discovery: Rc<Discovery>,
    /// What was found there before.
    pub held: Vec<Rc<Discovery>>,
    /// Where its probes are, and in which files.
    pub points: BTreeMap<Place, AttachPoint>,
    /// Where the probe on its loader is.
    pub hook_point: Option<AttachPoint>,
    /// Its code mappings.
    pub modules: Modules,
    /// What is known of code that appears during the trace.
    pub late: Late,
    /// Its memory, if that is watched.
    pub memory: Option<Memory>,
    /// Its resident set when it began to be traced, and now.
    pub rss: Option<(Rss, Rss)>,
    /// What became of it.
    pub state: State,
    /// Whether it was named by the user, by its number or by being the command: then what it had at its end counts.
    pub named: bool,
    /// The process that forked it during the trace.
    pub parent: Option<u32>,
    /// From the start of the trace until it was attached.
    pub since: Duration,
    /// How long it ran before that, if it appeared during the trace.
    pub unseen: Option<Duration>,
    /// Whether a stack of it was recorded.
    pub has_stacks: bool,
    /// Its control group.
    pub cgroup: Option<String>,
    /// Whether its mappings are to be read again.
    pub refresh_wanted: bool,
    /// When they were last read.
    pub last_refresh: Instant,
    /// Reports of the loader when they were last read.
    pub loader_seen: u64,
    /// Files that were searched for an allocator.
    pub searched: HashSet<target::mappings::FileKey>,
    /// Takes breakpoints out of processes that it forks.
    pub sweeper: Sweeper,
}

impl Traced {
    /// Looks into a process; it is not traced yet. `specs` describe functions beside those that are known; `strict`: each of them must
    /// be there.
    ///
    /// # Errors
    /// It can't be looked into, or nothing in it can be probed.
    pub fn look(process: Process, probes: Probes, specs: &[Spec], strict: bool, now: u64) -> anyhow::Result<Self> {
        let mut discovery = match probes {
            Probes::None => target::discover::modules(&process)?,
            _ => match target::discover(&process) {
                Ok(discovery) => discovery,
                // What the user describes may be all there is.
                Err(_) if !specs.is_empty() => target::discover::modules(&process)?,
                Err(error) => return Err(error.into()),
            },
        };
        if probes != Probes::None {
            add_custom(&process, &mut discovery, specs, 0, strict)?;
            if discovery.sites.is_empty() {
                // Tells why.
                target::discover(&process)?;
            }
        }
        for note in &discovery.notes {
            tracing::info!("process {}: {note}", process.pid());
        }
        let mut modules = Modules::default();
        if let Err(error) = modules.refresh(&process)
            && process.is_alive()
        {
            return Err(error.into());
        }
        Ok(Self::with(process, Rc::new(discovery), modules, now))
    }

    /// A process that another one has just forked: what was found there is in it too.
    pub fn forked(process: Process, parent: &Self, now: u64) -> Self {
        let process = process.named_as_forked_by(&parent.process);
        let mut forked = Self::with(process, Rc::clone(&parent.discovery), parent.modules.forked(), now);
        forked.held.clone_from(&parent.held);
        forked.points.clone_from(&parent.points);
        // It may have loaded something by now.
        forked.refresh_wanted = true;
        forked.parent = Some(parent.process.pid());
        forked
    }

    fn with(process: Process, discovery: Rc<Discovery>, modules: Modules, now: u64) -> Self {
        Self {
            number: 0,
            cgroup: select::cgroup_of(process.pid()),
            rss: process.rss().ok().map(|rss| (rss, rss)),
            searched: discovery.modules.iter().map(Module::key).collect(),
            process,
            discovery,
            held: Vec::new(),
            points: BTreeMap::new(),
            hook_point: None,
            modules,
            late: Late::new(now),
            memory: None,
            state: State::Running,
            named: false,
            parent: None,
            since: Duration::ZERO,
            unseen: None,
            has_stacks: false,
            refresh_wanted: false,
            last_refresh: Instant::now(),
            loader_seen: 0,
            sweeper: Sweeper::new(None),
        }
    }

    /// Its number, which is never that of the kernel itself.
    pub fn pid(&self) -> Option<NonZeroU32> {
        NonZeroU32::new(self.process.pid())
    }

    /// Whether it runs, as far as is known.
    pub fn runs(&self) -> bool {
        self.state == State::Running
    }

    /// Where its loader reports changes.
    pub fn hook(&self) -> Option<Hook> {
        let hook = self.discovery.loader?;
        let module = self.discovery.modules.get(hook.module)?;
        let state = hook.state.and_then(|state| run_time_address(&self.modules, module, state));
        Some((module.path(), hook.offset, state))
    }

    /// The probes that `discovery` asks for and that are not there yet; they count as there from now on.
    pub fn new_points(&mut self, sites: &mut Sites, discovery: &Discovery, from: usize) -> Vec<(Place, AttachPoint)> {
        let mut new = Vec::new();
        for (place, point) in sites.points(discovery, from) {
            if let Entry::Vacant(free) = self.points.entry(place) {
                new.push((place, free.insert(point).clone()));
            }
        }
        new
    }

    /// Whether its memory is gone, so that what it did not free is held by nobody. What a process that was named still had at its
    /// end is what it leaked.
    pub fn is_gone(&self) -> bool {
        match self.state {
            State::Running => false,
            State::Ended => !self.named,
            State::Executed => true,
        }
    }

    /// Notes how large it is.
    pub fn watch_rss(&mut self) {
        if self.runs()
            && let (Ok(now), Some((_, last))) = (self.process.rss(), &mut self.rss)
        {
            *last = now;
        }
    }

    /// Whether a mapping of code leads to a file that was not searched for an allocator.
    pub fn has_new_files(&self) -> bool {
        self.modules.code().any(|code| code.module.is_some() && !self.searched.contains(&code.mapping.file))
    }

    /// Says that all its files were searched.
    pub fn note_searched(&mut self, mappings: &[Mapping]) {
        self.searched.extend(mappings.iter().filter(|mapping| mapping.executable).map(|mapping| mapping.file));
    }

    /// For the profile.
    pub fn report(&self) -> profile::Process {
        let total = |rss: Rss| rss.anonymous + rss.file + rss.shared;
        let looks = self.memory.as_ref().and_then(Memory::looks);
        let inherited = self.memory.as_ref().and_then(|memory| memory.inherited);
        // It was looked at first when it had touched more than it had inherited.
        let rollups = looks.map(|(before, after)| (inherited.unwrap_or(before.rollup.rss), after.rollup.rss));
        profile::Process {
            cgroup: self.cgroup.clone(),
            parent: self.parent,
            state: match self.state {
                State::Running => ProcessState::Running,
                State::Ended => ProcessState::Ended,
                State::Executed => ProcessState::Executed,
            },
            since: self.since,
            unseen: self.unseen,
            mappings: self.modules.mappings().to_vec(),
            names: self.modules.name_sources(),
            // What it had before it executed another program is not there any more, and the other is another entry.
            rss: if self.state == State::Executed {
                None
            } else {
                rollups.or(self.rss.map(|(before, after)| (total(before), total(after))))
            },
            inherited,
            ..profile::Process::new(self.process.pid(), self.process.comm())
        }
    }
}

/// Adds the functions that the user describes, in the modules from position `from` on.
pub fn add_custom(
    process: &Process,
    discovery: &mut Discovery,
    specs: &[Spec],
    from: usize,
    strict: bool,
) -> Result<(), CustomError> {
    if specs.is_empty() {
        return Ok(());
    }
    let found = custom::resolve(process, specs, &discovery.modules, from)?;
    if strict {
        for waiting in custom::check(process, specs, &found, &discovery.modules)? {
            if let Some(spec) = specs.get(waiting) {
                eprintln!("memtrace: {:?} waits for its module to be loaded", spec.text());
            }
        }
    }
    custom::overrule(&mut discovery.sites, &found.sites);
    discovery.notes.extend(found.notes.into_iter().map(|(_, note)| note));
    discovery.sites.extend(found.sites.into_iter().map(|custom| custom.site));
    Ok(())
}

/// Where a virtual address of a module's file is in the process.
fn run_time_address(modules: &Modules, module: &Module, address: u64) -> Option<u64> {
    modules.code().find(|code| code.mapping.file == module.key()).and_then(|code| {
        let code_address = module.code_address(code.mapping)?;
        Some(code.mapping.start.wrapping_sub(code_address).wrapping_add(address))
    })
}
