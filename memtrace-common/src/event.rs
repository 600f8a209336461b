//! Counters of what the probes saw, and messages to the user side.

/// Index of a per-CPU counter.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// Outermost calls of allocating functions.
    Allocations = 0,
    /// Calls of freeing functions with a pointer.
    Frees = 1,
    /// Frees of blocks that were not allocated during the trace.
    FreesUnknown = 2,
    /// Calls inside another allocating function, which do not count.
    Nested = 3,
    /// Outermost calls that returned no block.
    Failed = 4,
    /// Blocks recorded.
    Commits = 5,
    /// Page faults of the target at user addresses, by its own code.
    UserFaults = 6,
    /// The same by the kernel on its behalf, in system calls.
    KernelFaults = 7,
    /// System calls that change the address space.
    Calls = 8,
    /// Frees of blocks that a forked process had from its parent.
    FreesInherited = 9,
}

impl Counter {
    /// Number of counters.
    pub const COUNT: u32 = 10;
}

/// What a message says.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The target's dynamic loader mapped or unmapped a library: read the mappings again.
    Mappings = 1,
    /// A traced process executed another program. `value` is the number of its new image, of which allocations are not recorded
    /// yet ([`crate::process::ProcessState::allocations`]).
    Exec = 2,
    /// A traced process forked: the child has a copy of its memory with the breakpoints in it. The lower half of `value` is
    /// the child's thread group, or 0 if it is not known; the upper half the number of its image, or 0 if it is not traced.
    Fork = 3,
    /// A stack was seen for the first time; `value` is its number.
    NewStack = 4,
    /// The first thread of a traced process has ended: the process may have.
    Exit = 5,
    /// A process that is not traced was forked or has executed a program. Only if that is asked for
    /// ([`crate::settings::globals::ANNOUNCE`]).
    Appeared = 6,
}

impl EventKind {
    /// The kind numbered `raw`.
    pub const fn from_raw(raw: u32) -> Option<Self> {
        match raw {
            1 => Some(Self::Mappings),
            2 => Some(Self::Exec),
            3 => Some(Self::Fork),
            4 => Some(Self::NewStack),
            5 => Some(Self::Exit),
            6 => Some(Self::Appeared),
            _ => None,
        }
    }
}

/// One message.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// An [`EventKind`].
    pub kind: u32,
    /// Thread group concerned.
    pub tgid: u32,
    /// Depends on the kind.
    pub value: u64,
    /// When it was sent, nanoseconds of `CLOCK_MONOTONIC`.
    pub time: u64,
}

const _: () = assert!(size_of::<Event>() == 24);
