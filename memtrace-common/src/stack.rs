//! Call stacks as the kernel side records them.

/// Most frames kept of one stack, the allocator function itself not counted (it is known from the site).
pub const MAX_FRAMES: usize = 127;

/// Stack number of calls whose stack found no room in the stack table: their bytes stay in the totals, their call
/// path is unknown.
pub const OVERFLOW_STACK: u32 = 0;

/// How a stack ended at its root end.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StackEnd {
    /// The frame-pointer chain ended with a null frame pointer or return address: the whole stack is there.
    Complete = 0,
    /// [`MAX_FRAMES`] were recorded and the stack goes on.
    Depth = 1,
    /// A frame pointer pointed backwards, was misaligned or led to something that is no user address. The start
    /// code of most programs leaves such a value, so the user side decides by the outermost name whether frames
    /// are missing.
    BrokenChain = 2,
    /// Stack memory could not be read (not mapped, or swapped out).
    Unreadable = 3,
}

impl StackEnd {
    /// Every value, in order.
    pub const ALL: [Self; 4] = [Self::Complete, Self::Depth, Self::BrokenChain, Self::Unreadable];

    /// The value numbered `raw`.
    pub const fn from_raw(raw: u8) -> Option<Self> {
        match raw {
            0 => Some(Self::Complete),
            1 => Some(Self::Depth),
            2 => Some(Self::BrokenChain),
            3 => Some(Self::Unreadable),
            _ => None,
        }
    }

    /// Reason as printed in `[truncated: …]`.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Depth => "deeper than 127 frames",
            Self::BrokenChain => "no frame pointer",
            Self::Unreadable => "stack memory unreadable",
        }
    }
}

/// One distinct call stack: every field is part of its identity.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct StackRecord {
    /// Thread group, as the initial pid namespace numbers it.
    pub tgid: u32,
    /// Number of the probed site ([`crate::site::Site::index`]), which names the allocator function: the leaf frame.
    pub site: u16,
    /// How many of `frames` are set, at most [`MAX_FRAMES`].
    pub len: u8,
    /// A [`StackEnd`].
    pub end: u8,
    /// Return addresses, innermost (the direct caller of the allocator function) first.
    pub frames: [u64; MAX_FRAMES],
}

/// Totals of one stack since the start of the trace. Allocated minus freed equals the sum of its live blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes asked for by calls that returned a block.
    pub allocated_bytes: u64,
    /// Calls that returned a block.
    pub allocated_count: u64,
    /// Bytes of this stack's blocks that were freed (or replaced, see [`crate::loss::Loss::Conflict`]).
    pub freed_bytes: u64,
    /// Blocks of this stack that were freed (or replaced).
    pub freed_count: u64,
}

const _: () = assert!(size_of::<StackRecord>() == 1024);
const _: () = assert!(size_of::<Totals>() == 32);

#[cfg(feature = "user")]
mod pod {
    // SAFETY: repr(C), only integers, no padding (sizes asserted above): any bit pattern is a value.
    unsafe impl aya::Pod for super::StackRecord {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Totals {}
}
