//! What a trace found, before names are given: stacks with their numbers, and what it takes to read them later.

mod memory;
mod named;
mod process;
mod unwinding;

use std::{path::PathBuf, time::Duration};

use memtrace_common::{
    call::Call,
    loss::{Loss, LossCount},
    stack::StackEnd,
};

pub use memory::{FaultCounts, GrowthSummary, Memory, Resident};
pub use named::{
    Group, GroupKind, NameProblem, NamedProcess, NamedProfile, NamedStack, OTHERS, SourceLine, UNATTRIBUTED,
    UNKNOWN_CALL_PATH,
};
pub use process::{By, Process, ProcessState, Thread, numbered, or_no_name};
pub use unwinding::{LateCode, UnwindProblem, Unwinding};

/// Bytes and blocks (or calls) together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Bytes asked for.
    pub bytes: u64,
    /// Blocks, or calls.
    pub count: u64,
}

impl Amount {
    /// Both sums; a sum that does not fit stays at the largest value.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self { bytes: self.bytes.saturating_add(other.bytes), count: self.count.saturating_add(other.count) }
    }

    /// Both differences; `None` if one would be negative.
    #[must_use]
    pub fn minus(self, other: Self) -> Option<Self> {
        Some(Self { bytes: self.bytes.checked_sub(other.bytes)?, count: self.count.checked_sub(other.count)? })
    }
}

/// What a trace is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Subject {
    /// Calls of the allocator: [`Stack::allocated`] is what they asked for, [`Stack::unfreed`] what of it was not freed.
    #[default]
    Heap,
    /// Page faults: [`Stack::allocated`] are all faults (each counts as a page), [`Stack::unfreed`] are the pages that
    /// became resident and still are.
    Faults,
    /// Changes of the resident set as the kernel counts them: [`Stack::allocated`] is what was added, [`Stack::freed`] what was
    /// taken away, [`Stack::unfreed`] what was added more than taken away.
    Exact,
    /// Resident memory of unfreed blocks, by who allocated it and who touched it ([`Stack::touch`]): both
    /// [`Stack::allocated`] and [`Stack::unfreed`] are the bytes on pages that became resident.
    Touched,
    /// Address space: [`Stack::allocated`] is what was mapped, [`Stack::unfreed`] what of it is still mapped.
    Mappings,
}

/// A finished trace of one process or several.
#[derive(Clone, Debug)]
pub struct Profile {
    /// What the trace is about.
    pub subject: Subject,
    /// The traced processes, at least one. The first is the one that is shown first.
    pub processes: Vec<Process>,
    /// Processes that could not be traced, besides those that are [`ProcessState::Missed`]: too many to keep.
    pub missed_more: u64,
    /// The threads that allocated; empty unless [`Self::by`] asks for them.
    pub threads: Vec<Thread>,
    /// What results are split by.
    pub by: By,
    /// How long events were recorded.
    pub duration: Duration,
    /// How the trace ended.
    pub end: TraceEnd,
    /// Blocks younger than this at the end were left out of [`Stack::unfreed`] (`--older`).
    pub older: Duration,
    /// The probed functions; [`Stack::function`] is an index of it.
    pub functions: Vec<Function>,
    /// Whether the probes reached every process on the machine that maps the probed files, traced or not.
    pub everywhere: bool,
    /// Allocators that were loaded during the trace.
    pub attached_late: Vec<AttachedLate>,
    /// Every distinct call stack with at least one allocation.
    pub stacks: Vec<Stack>,
    /// What the probes saw.
    pub events: Events,
    /// Non-zero losses.
    pub losses: Vec<(Loss, LossCount)>,
    /// What the unwind tables did not cover.
    pub unwinding: Unwinding,
    /// What was found out about the memory as a whole: the sum over the processes whose memory was looked at.
    pub memory: Option<Memory>,
}

/// How a trace ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceEnd {
    /// The duration asked for was over.
    Duration,
    /// Ctrl-C or a termination signal.
    Interrupted,
    /// The target exited.
    TargetExited,
    /// The target executed another program.
    TargetExecuted,
}

/// An allocator that a process loaded during the trace: what it did before its functions were probed is not seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachedLate {
    /// Index in [`Profile::processes`].
    pub process: usize,
    /// File name of the module. Escape before printing.
    pub module: String,
    /// How many functions of it were probed then.
    pub functions: u64,
    /// From the start of the trace.
    pub since: Duration,
}

/// A probed function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name, for example `malloc`.
    pub name: String,
    /// File name of the module it is in, for example `libc.so.6`.
    pub module: String,
}

/// One distinct call stack and what it did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stack {
    /// Whose it is: an index in [`Profile::processes`].
    pub process: usize,
    /// The thread's index in [`Profile::threads`], if threads are told apart and it is known.
    pub thread: Option<usize>,
    /// What is at the leaf end.
    pub leaf: Leaf,
    /// Return addresses, innermost (the caller of the allocator function) first. With [`Leaf::Frame`], the innermost is the
    /// address of the instruction plus 1.
    pub frames: Vec<u64>,
    /// How the walk ended at the root end.
    pub end: StackEnd,
    /// All calls during the trace that returned a block.
    pub allocated: Amount,
    /// Blocks of this stack that were freed during the trace.
    pub freed: Amount,
    /// Blocks still unfreed at the end and at least [`Profile::older`] old.
    pub unfreed: Amount,
    /// Age of the oldest of them at the end.
    pub oldest: Option<Duration>,
    /// Unfreed bytes at equally spaced moments of the trace, the last at its end; empty if the trace was too short.
    pub growth: Vec<u64>,
    /// What of [`Self::unfreed`] is in resident pages at the end, if that was looked at.
    pub resident: Option<Resident>,
    /// With [`Subject::Touched`]: who made the pages resident.
    pub touch: Option<Touch>,
}

/// The call path that made pages resident.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Touch {
    /// As [`Stack::frames`] with [`Leaf::Frame`].
    pub frames: Vec<u64>,
    /// How the walk ended at the root end.
    pub end: StackEnd,
    /// The system call that did it, if no access did.
    pub call: Option<Call>,
    /// Whether it is known.
    pub known: bool,
}

/// The innermost end of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaf {
    /// The stack could not be stored: its path is unknown.
    Unknown,
    /// Not a stack: resident pages that no call path is known for.
    Unattributed,
    /// Not a stack: what threads of the kernel and other processes did.
    Others,
    /// The function or system call that was called: an index in [`Profile::functions`].
    Function(usize),
    /// The innermost frame itself.
    Frame,
}

/// What the probes saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Outermost calls of allocating functions.
    pub allocations: u64,
    /// Calls of freeing functions with a pointer.
    pub frees: u64,
    /// Frees of blocks that were not allocated during the trace.
    pub frees_unknown: u64,
    /// Frees, by forked processes, of blocks that they had from their parents: those stay the parents'.
    pub frees_inherited: u64,
    /// Allocating calls inside another one, which do not count.
    pub nested: u64,
    /// Allocating calls that returned no block.
    pub failed: u64,
}

/// A mapping of executable code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// File offset of `start`.
    pub offset: u64,
    /// Name as `/proc/PID/maps` shows it: a path in the target's mount namespace, `[vdso]`, or empty.
    pub name: String,
    /// Where the file can be opened at any time (a descriptor that memtrace holds), if it is a file.
    pub open: Option<PathBuf>,
}

/// What names of a process come from besides the files that it maps. The paths lead to descriptors that memtrace holds, so
/// that they can be used after the process has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameSources {
    /// The process's root directory, in its mount namespace: its separate debug files are looked up there first.
    pub root: Option<PathBuf>,
    /// The map of generated code that the process wrote (`/tmp/perf-PID.map`).
    pub perf_map: Option<PathBuf>,
    /// Code mappings that were seen but not kept, for there were too many.
    pub left_out: u64,
    /// Indices of the [`Process::mappings`], in order, at whose addresses there may have been a library that memtrace never
    /// saw: one that was loaded and removed between two reads of the memory map.
    pub doubtful: Vec<usize>,
}

/// A stack whose numbers contradict each other: a bug of memtrace or of its kernel side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the numbers of stack {stack} do not add up: {allocated:?} allocated, {freed:?} freed, {unfreed:?} unfreed; \
     this is a bug of memtrace, please report it"
)]
pub struct Imbalance {
    /// Position of the stack.
    pub stack: usize,
    /// All blocks it allocated.
    pub allocated: Amount,
    /// Those that were freed.
    pub freed: Amount,
    /// Those found live, and old enough to count.
    pub unfreed: Amount,
}

impl Profile {
    /// Checks that for every stack, allocated minus freed equals unfreed. With [`Self::older`], which leaves young
    /// blocks out of unfreed, the difference may be larger.
    ///
    /// # Errors
    /// The first stack that does not balance.
    pub fn check(&self) -> Result<(), Imbalance> {
        check_balance(self.older, self.stacks.iter().map(|stack| (stack.allocated, stack.freed, stack.unfreed)))
    }
}

fn check_balance(older: Duration, stacks: impl Iterator<Item = (Amount, Amount, Amount)>) -> Result<(), Imbalance> {
    for (stack, (allocated, freed, unfreed)) in stacks.enumerate() {
        let young = allocated.minus(freed).and_then(|live| live.minus(unfreed));
        let balanced = match young {
            Some(young) => young == Amount::default() || !older.is_zero(),
            None => false,
        };
        if !balanced {
            return Err(Imbalance { stack, allocated, freed, unfreed });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn check(older: u64, allocated: u64, freed: u64, unfreed: u64) -> Result<(), Imbalance> {
        let amount = |bytes| Amount { bytes, count: 1 };
        let zero = Amount { bytes: freed, count: 0 };
        check_balance(Duration::from_secs(older), [(amount(allocated), zero, amount(unfreed))].into_iter())
    }

    #[test]
    fn balance() {
        check(0, 10, 4, 6).unwrap();
        check(5, 10, 4, 6).unwrap();
        check(5, 10, 4, 0).unwrap();
        assert!(check(0, 10, 4, 5).is_err());
        assert!(check(0, 10, 4, 7).is_err());
        assert!(check(5, 10, 4, 7).is_err());
        assert!(check(5, 10, 11, 0).is_err());
    }

    #[test]
    fn sums_do_not_overflow() {
        let most = Amount { bytes: u64::MAX, count: 1 };
        assert_eq!(most.plus(most), Amount { bytes: u64::MAX, count: 2 });
    }
}
