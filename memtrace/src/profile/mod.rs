//! What a trace found, before names are given: stacks with their numbers, and what it takes to read them later.

use std::{path::PathBuf, time::Duration};

use memtrace_common::{
    loss::{Loss, LossCount},
    stack::StackEnd,
};

/// Bytes and blocks (or calls) together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Bytes asked for.
    pub bytes: u64,
    /// Blocks, or calls.
    pub count: u64,
}

/// A finished trace of one process.
#[derive(Clone, Debug)]
pub struct Profile {
    /// The traced process.
    pub process: Process,
    /// How long events were recorded.
    pub duration: Duration,
    /// How the trace ended.
    pub end: TraceEnd,
    /// Blocks younger than this at the end were left out of [`Stack::unfreed`] (`--older`).
    pub older: Duration,
    /// The probed functions; [`Stack::function`] is an index of it.
    pub functions: Vec<Function>,
    /// Every distinct call stack with at least one allocation.
    pub stacks: Vec<Stack>,
    /// Code mappings of the process, for naming addresses.
    pub mappings: Vec<Mapping>,
    /// What the probes saw.
    pub events: Events,
    /// Non-zero losses.
    pub losses: Vec<(Loss, LossCount)>,
    /// Resident set at the start and at the end (the last known value if the process has exited), bytes.
    pub rss: Option<(u64, u64)>,
}

/// Who was traced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Process id.
    pub pid: u32,
    /// Its command name (`/proc/PID/comm`). Any bytes but NUL can be in there: escape before printing.
    pub comm: String,
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
    /// Index in [`Profile::functions`] of the allocator function called: the leaf. `None` for the calls whose stack
    /// could not be stored, whose path is unknown.
    pub function: Option<usize>,
    /// Return addresses, innermost (the caller of the allocator function) first.
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
