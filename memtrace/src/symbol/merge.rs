//! Named stacks put together: those that show the same are one.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
};

use crate::profile::{By, Group, GroupKind, NamedProcess, NamedStack, Process, Profile, SourceLine, Stack, numbered};

use super::{
    Names,
    path::{NameId, NamedPath},
};

/// What two stacks have to have in common to be one.
#[derive(PartialEq, Eq, Hash)]
struct Shown {
    comm: NameId,
    group: Option<usize>,
    path: NamedPath,
}

/// The stacks so far, merged by what is shown of them.
#[derive(Default)]
pub struct Merged {
    positions: HashMap<Shown, usize>,
    stacks: Vec<NamedStack>,
}

impl Merged {
    /// Adds a stack of a process called `comm`.
    pub fn add(&mut self, comm: NameId, group: Option<usize>, path: NamedPath, stack: &Stack, names: &Names) {
        let truncated = path.truncated;
        let position = match self.positions.entry(Shown { comm, group, path }) {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(entry) => {
                self.stacks.push(NamedStack {
                    comm: Arc::clone(names.get(comm)),
                    group,
                    process: Some(stack.process),
                    thread: stack.thread,
                    frames: Vec::new(),
                    lines: Vec::new(),
                    truncated,
                    recorded: 0,
                    allocated: Default::default(),
                    freed: Default::default(),
                    unfreed: Default::default(),
                    oldest: None,
                    growth: Vec::new(),
                    resident: None,
                });
                *entry.insert(self.stacks.len() - 1)
            }
        };
        let sum = &mut self.stacks[position];
        sum.process = sum.process.filter(|process| *process == stack.process);
        sum.thread = sum.thread.filter(|thread| Some(*thread) == stack.thread);
        sum.recorded += 1;
        sum.allocated = sum.allocated.plus(stack.allocated);
        sum.freed = sum.freed.plus(stack.freed);
        sum.unfreed = sum.unfreed.plus(stack.unfreed);
        sum.oldest = sum.oldest.max(stack.oldest);
        add_growth(&mut sum.growth, &stack.growth);
        if let Some(resident) = stack.resident {
            sum.resident = Some(sum.resident.unwrap_or_default().plus(resident));
        }
    }

    /// The stacks in the order in which they were first added.
    pub fn finish(self, names: &Names, lines: bool) -> Vec<NamedStack> {
        let mut stacks = self.stacks;
        for (shown, position) in self.positions {
            let (path, stack) = (shown.path, &mut stacks[position]);
            stack.frames = path.frames.iter().map(|frame| Arc::clone(names.get(frame.name))).collect();
            if lines {
                let line = |(file, line)| SourceLine { file: Arc::clone(names.get(file)), line };
                stack.lines = path.frames.iter().map(|frame| frame.line.map(line)).collect();
            }
        }
        stacks
    }
}

/// Adds elementwise. Both series end at the end of the trace, so a shorter one lacks moments at its beginning.
fn add_growth(sum: &mut Vec<u64>, series: &[u64]) {
    if sum.len() < series.len() {
        let missing = series.len() - sum.len();
        sum.splice(0..0, std::iter::repeat_n(0, missing));
    }
    let skipped = sum.len() - series.len();
    for (total, value) in sum[skipped..].iter_mut().zip(series) {
        *total = total.saturating_add(*value);
    }
}

/// The groups of the stacks so far.
pub struct Groups<'a> {
    profile: &'a Profile,
    /// By process and thread; the thread only where it matters.
    known: HashMap<(usize, Option<usize>), usize>,
    positions: HashMap<GroupKind, usize>,
    groups: Vec<Group>,
}

impl<'a> Groups<'a> {
    /// None yet.
    pub fn new(profile: &'a Profile) -> Self {
        Self { profile, known: HashMap::new(), positions: HashMap::new(), groups: Vec::new() }
    }

    /// The group of a stack; `None` if the profile is not split.
    pub fn of(&mut self, stack: &Stack) -> Option<usize> {
        if self.profile.by == By::None {
            return None;
        }
        let thread = stack.thread.filter(|_| self.profile.by == By::Thread);
        if let Some(group) = self.known.get(&(stack.process, thread)) {
            return Some(*group);
        }
        let process = &self.profile.processes[stack.process];
        let (kind, label) = match self.profile.by {
            By::None => return None,
            By::Process => (GroupKind::Process(stack.process), label("pid", process.pid, &process.comm)),
            By::Thread => {
                let name = match thread.and_then(|thread| self.profile.threads.get(thread)) {
                    Some(thread) => label("tid", thread.tid, &thread.name),
                    None => "[unknown thread]".to_owned(),
                };
                let kind = GroupKind::Thread { process: stack.process, thread };
                (kind, format!("{}, {name}", label("pid", process.pid, &process.comm)))
            }
            By::Cgroup => {
                let name = process.cgroup.clone().unwrap_or_else(|| "[unknown cgroup]".to_owned());
                (GroupKind::Cgroup(process.cgroup.clone()), name)
            }
        };
        let group = *self.positions.entry(kind).or_insert_with_key(|kind| {
            self.groups.push(Group { kind: kind.clone(), label });
            self.groups.len() - 1
        });
        self.known.insert((stack.process, thread), group);
        Some(group)
    }

    /// In the order in which they were first asked for.
    pub fn finish(self) -> Vec<Group> {
        self.groups
    }
}

fn label(kind: &str, id: u32, name: &str) -> String {
    numbered(name, format_args!("{kind} {id}"))
}

/// A process without stacks so far.
pub fn process(process: &Process) -> NamedProcess {
    NamedProcess {
        pid: process.pid,
        comm: process.comm.as_str().into(),
        cgroup: process.cgroup.clone(),
        parent: process.parent,
        state: process.state.clone(),
        since: process.since,
        unseen: process.unseen,
        rss: process.rss,
        inherited: process.inherited,
        allocated: Default::default(),
        freed: Default::default(),
        unfreed: Default::default(),
    }
}
