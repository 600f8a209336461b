//! A profile whose addresses have names. Everything shown to people is made from this.

use std::{sync::Arc, time::Duration};

use memtrace_common::{
    loss::{Loss, LossCount},
    stack::StackEnd,
};

use super::{
    Amount, Child, Events, Function, Imbalance, Memory, Process, Resident, Subject, TraceEnd, Unwinding, check_balance,
};

/// The only frame of pages that no call path is known for.
pub const UNATTRIBUTED: &str = "[unattributed]";

/// The only frame of what the kernel and other processes did.
pub const OTHERS: &str = "[by others]";

/// The only frame of calls whose stack could not be stored.
pub const UNKNOWN_CALL_PATH: &str = "[unknown call path]";

/// A [`super::Profile`] after symbolization. Stacks that got the same names are one stack here.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedProfile {
    /// What the trace is about.
    pub subject: Subject,
    /// The traced process.
    pub process: Process,
    /// How long events were recorded.
    pub duration: Duration,
    /// How the trace ended.
    pub end: TraceEnd,
    /// Blocks younger than this at the end were left out of [`NamedStack::unfreed`] (`--older`).
    pub older: Duration,
    /// The probed functions.
    pub functions: Vec<Function>,
    /// The call paths, in the order in which they were first recorded.
    pub stacks: Vec<NamedStack>,
    /// What the probes saw.
    pub events: Events,
    /// Non-zero losses.
    pub losses: Vec<(Loss, LossCount)>,
    /// What the unwind tables did not cover.
    pub unwinding: Unwinding,
    /// Resident set at the start and at the end, bytes.
    pub rss: Option<(u64, u64)>,
    /// What was found out about the process's memory as a whole.
    pub memory: Option<Memory>,
    /// The followed children; `None` if children were not followed.
    pub children: Option<Vec<Child>>,
    /// Modules whose addresses have no names, or worse ones than they could have.
    pub problems: Vec<NameProblem>,
}

/// One call path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedStack {
    /// Root first; last the function or system call that was called, but for page faults the code that caused them. A cut stack begins with the pseudo frame `[truncated: reason]`; calls
    /// without a stored stack have the one frame [`UNKNOWN_CALL_PATH`]. Names come from the target's files: any
    /// characters can be in there, so escape before printing.
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
    /// Checks for every call path what [`super::Profile::check`] checks for every stack.
    ///
    /// # Errors
    /// The first call path that does not balance.
    pub fn check(&self) -> Result<(), Imbalance> {
        check_balance(self.older, self.stacks.iter().map(|stack| (stack.allocated, stack.freed, stack.unfreed)))
    }
}
