//! What was traced, what was missed, and how sure the numbers are. Every output carries it.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use memtrace_common::stack::StackEnd;

use crate::profile::{
    Amount, AttachedLate, Events, Memory, NameProblem, NamedProcess, NamedProfile, NamedStack, ProcessState, Subject,
    TraceEnd, UNKNOWN_CALL_PATH, Unwinding,
};

/// RSS growth from which a trace without a single event is suspicious, bytes. A process that allocates nothing still
/// moves by a few pages.
const SUSPICIOUS_GROWTH: u64 = 1 << 20;

/// Coverage of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Coverage {
    /// What the trace is about.
    pub subject: Subject,
    /// The traced processes, at least one, and those that could not be traced.
    pub processes: Vec<NamedProcess>,
    /// How many more could not be traced.
    pub missed_more: u64,
    /// How long events were recorded.
    pub duration: Duration,
    /// How the trace ended.
    pub end: TraceEnd,
    /// Unfreed blocks younger than this are left out (`--older`).
    pub older: Duration,
    /// Those blocks.
    pub younger: Amount,
    /// The probed functions by module: those through which most was allocated first, then in the order of discovery.
    pub probed: Vec<ProbedModule>,
    /// Allocators that were loaded during the trace. They do not make the totals lower bounds by themselves: a lower bound
    /// Whether the probes reached every process on the machine that maps the probed files, traced or not.
    pub everywhere: bool,
    /// says that blocks are known to be missing, and whether these did anything before they were probed is not known.
    pub attached_late: Vec<AttachedLate>,
    /// What the probes saw.
    pub events: Events,
    /// Every non-zero loss.
    pub losses: Vec<LossLine>,
    /// Of how many processes the first calls were not seen, and for how long at most.
    pub unseen: Option<(u64, Duration)>,
    /// Whether blocks are missing from the totals, or processes, so that every total is a lower bound.
    pub lower_bound: bool,
    /// Number of distinct recorded stacks.
    pub stacks: u64,
    /// All allocations.
    pub allocated: Amount,
    /// What of them was freed.
    pub freed: Amount,
    /// Unfreed blocks, without [`Self::younger`].
    pub unfreed: Amount,
    /// Stacks that reach the outermost function.
    pub whole: Share,
    /// Stacks with frames missing at the root end, by reason.
    pub truncated: Vec<Truncated>,
    /// What the unwind tables did not cover.
    pub unwinding: Unwinding,
    /// Modules with names missing.
    pub problems: Vec<NameProblem>,
    /// Resident set size, if it could be read: the sum over the processes of which it could.
    pub rss: Option<Rss>,
    /// The processes' memory as a whole.
    pub memory: Option<Memory>,
}

/// Functions probed in one module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbedModule {
    /// Its file name.
    pub module: String,
    /// Names of the functions.
    pub functions: Vec<String>,
    /// What was allocated through them.
    pub allocated: Amount,
}

/// One reason for losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LossLine {
    /// Short name.
    pub name: &'static str,
    /// What is missing, and what helps.
    pub sentence: &'static str,
    /// How many times.
    pub count: u64,
    /// Bytes asked for by the calls concerned, where known.
    pub bytes: u64,
    /// Whether it makes the totals lower bounds.
    pub lowers_totals: bool,
}

/// Some of the stacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// How many of [`Coverage::stacks`].
    pub stacks: u64,
    /// What they allocated, a part of [`Coverage::allocated`].
    pub allocated: Amount,
    /// What of it is unfreed, a part of [`Coverage::unfreed`].
    pub unfreed: Amount,
}

impl Share {
    fn add(&mut self, stack: &NamedStack) {
        self.stacks = self.stacks.saturating_add(stack.recorded);
        self.allocated = self.allocated.plus(stack.allocated);
        self.unfreed = self.unfreed.plus(stack.unfreed);
    }
}

/// Stacks cut for one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncated {
    /// The reason.
    pub reason: StackEnd,
    /// Which.
    pub share: Share,
}

/// Resident set size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rss {
    /// When the trace started.
    pub before: u64,
    /// When it ended.
    pub after: u64,
    /// Over how many processes this is the sum.
    pub processes: usize,
}

impl Rss {
    /// After minus before.
    pub const fn difference(self) -> i128 {
        self.after as i128 - self.before as i128
    }
}

impl Coverage {
    /// The processes that were traced.
    pub fn traced(&self) -> impl Iterator<Item = &NamedProcess> {
        self.processes.iter().filter(|process| !is_missed(process))
    }

    /// The processes that could not be traced, but for [`Self::missed_more`].
    pub fn missed(&self) -> impl Iterator<Item = &NamedProcess> {
        self.processes.iter().filter(|process| is_missed(process))
    }

    /// How many processes could not be traced.
    pub fn missed_count(&self) -> u64 {
        (self.missed().count() as u64).saturating_add(self.missed_more)
    }

    /// RSS growth in bytes, if memory grew while no probed function was called: the target's memory comes from
    /// somewhere else, and an empty result would mislead.
    pub fn missed_growth(&self) -> Option<u64> {
        let rss = self.rss?;
        let growth = rss.after.saturating_sub(rss.before);
        (self.subject == Subject::Heap && self.events.allocations == 0 && growth >= SUSPICIOUS_GROWTH).then_some(growth)
    }
}

/// Whether blocks or processes are missing from a profile, so that every total is a lower bound.
pub fn is_lower_bound(profile: &NamedProfile) -> bool {
    profile.losses.iter().any(|(loss, count)| count.count != 0 && loss.lowers_totals())
        || profile.processes.iter().any(is_missed)
        || profile.missed_more > 0
        || unseen(profile).is_some()
}

/// Of how many processes the first calls were not seen, and for how long at most; `None` if of none, or if calls are not what the
/// profile is about.
fn unseen(profile: &NamedProfile) -> Option<(u64, Duration)> {
    if !matches!(profile.subject, Subject::Heap | Subject::Touched) {
        return None;
    }
    let unseen = profile.processes.iter().filter(|process| !is_missed(process)).filter_map(|process| process.unseen);
    let unseen: Vec<Duration> = unseen.filter(|unseen| !unseen.is_zero()).collect();
    Some((unseen.len() as u64, unseen.iter().max().copied()?))
}

/// Collects the coverage of `profile`.
pub fn coverage(profile: &NamedProfile) -> Coverage {
    let sum = |part: fn(&NamedStack) -> Amount| {
        profile.stacks.iter().fold(Amount::default(), |sum, stack| sum.plus(part(stack)))
    };
    let unfreed = sum(|stack| stack.unfreed);
    let live = sum(|stack| stack.allocated.minus(stack.freed).unwrap_or_default());
    let losses: Vec<LossLine> = profile
        .losses
        .iter()
        .filter(|(_, count)| count.count != 0)
        .map(|(loss, count)| LossLine {
            name: loss.name(),
            sentence: loss.sentence(),
            count: count.count,
            bytes: count.bytes,
            lowers_totals: loss.lowers_totals(),
        })
        .collect();
    Coverage {
        subject: profile.subject,
        processes: profile.processes.clone(),
        missed_more: profile.missed_more,
        duration: profile.duration,
        end: profile.end,
        older: profile.older,
        younger: live.minus(unfreed).unwrap_or_default(),
        probed: probed(profile),
        everywhere: profile.everywhere,
        attached_late: profile.attached_late.clone(),
        events: profile.events,
        unseen: unseen(profile),
        lower_bound: is_lower_bound(profile),
        losses,
        stacks: profile.stacks.iter().fold(0, |sum, stack| sum.saturating_add(stack.recorded)),
        allocated: sum(|stack| stack.allocated),
        freed: sum(|stack| stack.freed),
        unfreed,
        whole: whole(&profile.stacks),
        truncated: truncated(&profile.stacks),
        unwinding: profile.unwinding.clone(),
        problems: profile.problems.clone(),
        rss: profile.rss().map(|(before, after, processes)| Rss { before, after, processes }),
        memory: profile.memory.clone(),
    }
}

fn is_missed(process: &NamedProcess) -> bool {
    matches!(process.state, ProcessState::Missed { .. })
}

/// Modules and functions, each once.
fn probed(profile: &NamedProfile) -> Vec<ProbedModule> {
    let mut modules: Vec<ProbedModule> = Vec::new();
    let mut positions: HashMap<&str, usize> = HashMap::new();
    let mut known: HashSet<(usize, &str)> = HashSet::new();
    for (index, function) in profile.functions.iter().enumerate() {
        let position = *positions.entry(&function.module).or_insert_with(|| {
            modules.push(ProbedModule {
                module: function.module.clone(),
                functions: Vec::new(),
                allocated: Amount::default(),
            });
            modules.len() - 1
        });
        if known.insert((position, &function.name)) {
            modules[position].functions.push(function.name.clone());
        }
        let through = profile.through.get(index).copied().unwrap_or_default();
        modules[position].allocated = modules[position].allocated.plus(through);
    }
    modules.sort_by_key(|module| std::cmp::Reverse(module.allocated.bytes));
    modules
}

fn whole(stacks: &[NamedStack]) -> Share {
    let mut whole = Share::default();
    let is_known = |stack: &&NamedStack| stack.frames.first().is_none_or(|frame| &**frame != UNKNOWN_CALL_PATH);
    stacks.iter().filter(|stack| stack.truncated.is_none()).filter(is_known).for_each(|stack| whole.add(stack));
    whole
}

fn truncated(stacks: &[NamedStack]) -> Vec<Truncated> {
    let mut reasons: BTreeMap<StackEnd, Share> = BTreeMap::new();
    for stack in stacks {
        if let Some(reason) = stack.truncated {
            reasons.entry(reason).or_default().add(stack);
        }
    }
    reasons.into_iter().map(|(reason, share)| Truncated { reason, share }).collect()
}
