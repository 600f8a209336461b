//! The processes that are traced, as the kernel side knows them.
//!
//! What a process has recorded is kept under the *number* of its program's image, not under its process id: `execve` makes
//! a new image with memory of its own, and process ids are used again.

use crate::unwind::MappingList;

/// Key in place of a thread group where the kernel side can't tell them apart: it then records whatever the probes reach, as
/// one process. (memtrace runs in another pid namespace than the initial one, whose numbers alone the kernel side sees.)
pub const ANY: u32 = 0;

/// Numbers that the user side gives begin here; below it, from 1 on, the kernel side numbers forked processes and executed
/// programs.
pub const FIRST_OF_USER: u32 = 1 << 31;

/// A traced process.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessState {
    /// Number of its image. A process that shares its parent's memory (`vfork`) has its parent's.
    pub number: u32,
    /// Number of the image that it was forked off; 0 if it was not forked during the trace.
    pub parent: u32,
    /// When it was forked off, nanoseconds of `CLOCK_MONOTONIC`.
    pub forked: u64,
    /// The code mappings in force: a packed [`MappingList`].
    pub mappings: u64,
    /// How often the dynamic loader has called its hook: before and after every change of its list of libraries.
    pub loader_events: u64,
    /// The number of the event after the last removal of libraries, counted from 1: before the user side has read the
    /// process's mappings after this event, code may lie at an address that is not what the list of mappings says.
    pub last_removal: u64,
    /// How many events there were when the user side last read the process's mappings.
    pub loader_seen: u64,
    /// Whether the pages present at the start have been looked at: 0 or 1 ([`crate::fault::Fault::late`]).
    pub late: u32,
    /// Whether calls of allocator functions are recorded: 0 or 1. Not between the execution of another program and the
    /// attachment to its allocator.
    pub allocations: u32,
}

impl ProcessState {
    /// A process with the image `number`, of whose code nothing is known yet.
    pub fn new(number: u32) -> Self {
        Self { number, allocations: 1, mappings: MappingList::default().pack(), ..Self::default() }
    }
}

const _: () = assert!(size_of::<ProcessState>() == 56);

#[cfg(feature = "user")]
mod pod {
    // SAFETY: repr(C), only integers, no padding (size asserted above): any bit pattern is a value.
    unsafe impl aya::Pod for super::ProcessState {}
}
