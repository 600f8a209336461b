//! A profile whose addresses have names. Everything shown to people is made from this.

use std::{sync::Arc, time::Duration};

use memtrace_common::{
    loss::{Loss, LossCount},
    stack::StackEnd,
};

use super::{
    Amount, AttachedLate, By, Events, Function, Imbalance, Memory, ProcessState, Resident, Subject, Thread, TraceEnd,
    Unwinding, check_balance,
};

/// The only frame of pages that no call path is known for.
pub const UNATTRIBUTED: &str = "[unattributed]";

/// The only frame of what the kernel and other processes did.
pub const OTHERS: &str = "[by others]";

/// The only frame of calls whose stack could not be stored.
pub const UNKNOWN_CALL_PATH: &str = "[unknown call path]";

/// A [`super::Profile`] after symbolization. Stacks of one group and of processes with one command name that got the same
/// names are one stack here.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedProfile {
    /// What the trace is about.
    pub subject: Subject,
    /// The traced processes, at least one. The first is the one that is shown first.
    pub processes: Vec<NamedProcess>,
    /// As [`super::Profile::missed_more`].
    pub missed_more: u64,
    /// The threads that allocated; empty unless [`Self::by`] asks for them.
    pub threads: Vec<Thread>,
    /// What the stacks are split by.
    pub by: By,
    /// The groups that have stacks, in the order in which they were first recorded; empty without [`Self::by`].
    pub groups: Vec<Group>,
    /// How long events were recorded.
    pub duration: Duration,
    /// How the trace ended.
    pub end: TraceEnd,
    /// Blocks younger than this at the end were left out of [`NamedStack::unfreed`] (`--older`).
    pub older: Duration,
    /// The probed functions.
    pub functions: Vec<Function>,
    /// What was allocated through each of [`Self::functions`], parallel to it.
    pub through: Vec<Amount>,
    /// Whether the probes reached every process on the machine that maps the probed files, traced or not.
    pub everywhere: bool,
    /// Allocators that were loaded during the trace.
    pub attached_late: Vec<AttachedLate>,
    /// The call paths, in the order in which they were first recorded.
    pub stacks: Vec<NamedStack>,
    /// What the probes saw.
    pub events: Events,
    /// Non-zero losses.
    pub losses: Vec<(Loss, LossCount)>,
    /// What the unwind tables did not cover.
    pub unwinding: Unwinding,
    /// What was found out about the memory as a whole: the sum over the processes whose memory was looked at.
    pub memory: Option<Memory>,
    /// Modules whose addresses have no names, or worse ones than they could have.
    pub problems: Vec<NameProblem>,
}

/// A traced process, without what its names came from, and what it did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedProcess {
    /// Process id.
    pub pid: u32,
    /// Its command name. Any bytes but NUL can be in there: escape before printing.
    pub comm: Arc<str>,
    /// Path of its control group; `None` if it could not be read. Escape before printing.
    pub cgroup: Option<String>,
    /// The process that forked it during the trace.
    pub parent: Option<u32>,
    /// What became of it.
    pub state: ProcessState,
    /// From the start of the trace to the moment from which on it was traced; zero if that was the start.
    pub since: Duration,
    /// How long it ran before its calls were seen, for a process that appeared during the trace.
    pub unseen: Option<Duration>,
    /// Resident set when it began to be traced and at the end, bytes.
    pub rss: Option<(u64, u64)>,
    /// Resident bytes that it had from its parent at the fork.
    pub inherited: Option<u64>,
    /// All its calls during the trace that returned a block.
    pub allocated: Amount,
    /// Its blocks that were freed during the trace.
    pub freed: Amount,
    /// Its blocks still unfreed at the end and at least [`NamedProfile::older`] old.
    pub unfreed: Amount,
}

/// One part of a profile that is split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// What is in it.
    pub kind: GroupKind,
    /// Its name for people: `nginx (pid 7)`, `nginx (pid 7), worker (tid 9)`, `/system.slice/nginx.service`. Names in it come
    /// from the target: escape before printing. Two groups can have the same one.
    pub label: String,
}

/// What is in a [`Group`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// One process: an index in [`NamedProfile::processes`].
    Process(usize),
    /// One thread.
    Thread {
        /// Its process's index in [`NamedProfile::processes`].
        process: usize,
        /// Its index in [`NamedProfile::threads`]; `None`: threads of the process that are not known.
        thread: Option<usize>,
    },
    /// The processes of one control group; `None`: those whose control group is not known.
    Cgroup(Option<String>),
}

/// One call path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedStack {
    /// Command name of its processes.
    pub comm: Arc<str>,
    /// Index in [`NamedProfile::groups`], if the profile is split.
    pub group: Option<usize>,
    /// Its process, if it is of one only: an index in [`NamedProfile::processes`].
    pub process: Option<usize>,
    /// Its thread, if threads are told apart and it is of one only: an index in [`NamedProfile::threads`].
    pub thread: Option<usize>,
    /// Root first; last the function or system call that was called, but for page faults the code that caused them. A cut
    /// stack begins with the pseudo frame `[truncated: reason]`; calls without a stored stack have the one frame
    /// [`UNKNOWN_CALL_PATH`]. Names come from the target's files: any characters can be in there, so escape before printing.
    pub frames: Vec<Arc<str>>,
    /// Where in the source each of the frames is, parallel to them: the line of the call, for inlined functions too.
    /// Empty if lines were not asked for.
    pub lines: Vec<Option<SourceLine>>,
    /// Why frames are missing at the root end, if they are.
    pub truncated: Option<StackEnd>,
    /// How many recorded stacks have these names.
    pub recorded: u64,
    /// All calls during the trace that returned a block.
    pub allocated: Amount,
    /// Blocks of this path that were freed during the trace.
    pub freed: Amount,
    /// Blocks still unfreed at the end and at least [`NamedProfile::older`] old.
    pub unfreed: Amount,
    /// Age of the oldest of them at the end.
    pub oldest: Option<Duration>,
    /// Unfreed bytes at equally spaced moments of the trace, the last at its end; empty if the trace was too short.
    pub growth: Vec<u64>,
    /// What of [`Self::unfreed`] is in resident pages at the end, if that was looked at.
    pub resident: Option<Resident>,
}

/// A line of a source file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceLine {
    /// Path as the compiler recorded it; any characters can be in there.
    pub file: Arc<str>,
    /// Line number, from 1.
    pub line: u32,
}

/// A module whose addresses could not be named as well as they should.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameProblem {
    /// File name of the module. Any characters can be in there.
    pub module: String,
    /// What happened, and what the consequence is. May quote the module's contents.
    pub problem: String,
}

impl NamedProfile {
    /// Resident sets at the start and at the end, bytes, summed over the processes of which both are known, and how many those
    /// are; `None` if they are of none.
    pub fn rss(&self) -> Option<(u64, u64, usize)> {
        let known = self.processes.iter().filter_map(|process| process.rss);
        known.fold(None, |sum, (before, after)| {
            let (all_before, all_after, count) = sum.unwrap_or_default();
            Some((before.saturating_add(all_before), after.saturating_add(all_after), count + 1))
        })
    }

    /// Checks for every call path what [`super::Profile::check`] checks for every stack.
    ///
    /// # Errors
    /// The first call path that does not balance.
    pub fn check(&self) -> Result<(), Imbalance> {
        check_balance(self.older, self.stacks.iter().map(|stack| (stack.allocated, stack.freed, stack.unfreed)))
    }
}
