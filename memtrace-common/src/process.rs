//! The processes that are traced, as the kernel side knows them.
//!
//! What a process has recorded is kept under the *number* of its program's image, not under its process id: `execve` makes
//! a new image with memory of its own, and process ids are used again. A number is used once; its remainder by the length of
//! the table of images is the place of the image's state.
//!
//! Both sides change the states in place, word by word, each its own words.

use crate::unwind::MappingList;

/// Key in place of a thread group where the kernel side can't tell them apart: it then records whatever the probes reach, as
/// one process. (memtrace runs in another pid namespace than the initial one, whose numbers alone the kernel side sees.)
pub const ANY: u32 = 0;

/// Length of the table of images when single processes are traced.
pub const FEW_IMAGES: u32 = 1 << 12;
/// The same when every process is traced.
pub const MANY_IMAGES: u32 = 1 << 16;

/// Numbers that are tried before it is given up to find a free place for an image.
pub const ATTEMPTS: u32 = 8;

/// An image of a traced process. In place 0, which no image gets, [`Self::forked`] is the number given last.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessState {
    /// The number; 0 if the place is free.
    pub number: u32,
    /// Number of the image that it was forked off; 0 if it was not forked during the trace.
    pub parent: u32,
    /// When it was forked off, nanoseconds of `CLOCK_MONOTONIC`.
    pub forked: u64,
    /// The code mappings in force: a packed [`MappingList`]. Written by the user side.
    pub mappings: u64,
    /// How often the dynamic loader has called its hook: before and after every change of its list of libraries.
    pub loader_events: u64,
    /// The number of the event after the last removal of libraries, counted from 1: before the user side has read the
    /// process's mappings after this event, code may lie at an address that is not what the list of mappings says.
    pub last_removal: u64,
    /// How many events there were when the user side last read the process's mappings. Written by the user side.
    pub loader_seen: u64,
    /// Whether the pages present at the start have been looked at: 0 or 1 ([`crate::fault::Fault::late`]). Written by the
    /// user side.
    pub late: u32,
    /// Whether calls of allocator functions are recorded: 0 or 1. Not between the execution of another program and the
    /// attachment to its allocator. Written by the user side.
    pub allocations: u32,
    /// Always 0: the size is a power of two.
    pub zero: u64,
}

impl ProcessState {
    /// An image of whose code nothing is known yet.
    #[inline(always)]
    pub const fn new(number: u32) -> Self {
        Self {
            number,
            parent: 0,
            forked: 0,
            mappings: MappingList { generation: 0, first: 0, count: 0 }.pack(),
            loader_events: 0,
            last_removal: 0,
            loader_seen: 0,
            late: 0,
            allocations: 0,
            zero: 0,
        }
    }
}

const _: () = assert!(size_of::<ProcessState>() == 64);
const _: () = assert!(FEW_IMAGES.is_power_of_two() && MANY_IMAGES.is_power_of_two());

#[cfg(feature = "user")]
mod pod {
    // SAFETY: repr(C), only integers, no padding (size asserted above): any bit pattern is a value.
    unsafe impl aya::Pod for super::ProcessState {}
}
