//! Call stacks as the kernel side records them.

/// Most frames kept of one stack, the allocator function itself not counted (it is known from the site).
pub const MAX_FRAMES: usize = 127;

/// Stack number of calls whose stack found no room in the stack table: their bytes stay in the totals, their call
/// path is unknown.
pub const OVERFLOW_STACK: u32 = 0;

/// The same for page faults and system calls, so that their numbers are not mixed up with those of allocations.
pub const OVERFLOW_TRACEPOINT_STACK: u32 = 1;

/// The first number that a stack can have.
pub const FIRST_STACK: u32 = 2;

/// How a stack ended at its root end.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StackEnd {
    /// The outermost frame was reached: the unwind information says so, or its return address is null.
    Complete = 0,
    /// [`MAX_FRAMES`] were recorded and the stack goes on.
    Depth = 1,
    /// In code without unwind information, a frame pointer was null, pointed backwards, was misaligned or led to
    /// something that is no user address. The start code of most programs leaves such a value, so the user side decides by the
    /// outermost name whether frames are missing.
    BrokenChain = 2,
    /// Stack memory could not be read (not mapped, or swapped out).
    Unreadable = 3,
    /// A return address lies in no code that is known: mapped just now, or no code at all.
    UnknownCode = 4,
    /// The unwind information there uses a rule that the tables can't express, or contradicts itself.
    BadRow = 5,
    /// A return address was replaced by the trampoline of somebody's return probe.
    Hijacked = 6,
    /// The code there has unwind information for which there is no table: it did not fit, or is damaged.
    NoTable = 7,
}

impl StackEnd {
    /// Every value, in order.
    pub const ALL: [Self; 8] = [
        Self::Complete,
        Self::Depth,
        Self::BrokenChain,
        Self::Unreadable,
        Self::UnknownCode,
        Self::BadRow,
        Self::Hijacked,
        Self::NoTable,
    ];

    /// The value numbered `raw`.
    pub const fn from_raw(raw: u8) -> Option<Self> {
        if (raw as usize) < Self::ALL.len() { Some(Self::ALL[raw as usize]) } else { None }
    }

    /// Reason as printed in `[truncated: …]`.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Depth => "deeper than 127 frames",
            Self::BrokenChain => "no frame pointer",
            Self::Unreadable => "stack memory unreadable",
            Self::UnknownCode => "return address in unknown code",
            Self::BadRow => "unwind rule not supported",
            Self::NoTable => "no unwind table for this module",
            Self::Hijacked => "return address replaced by another tool's probe",
        }
    }
}

/// One distinct call stack: every field is part of its identity.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct StackRecord {
    /// Number of the process's image ([`crate::process`]).
    pub process: u32,
    /// The thread, as the initial pid namespace numbers it, if threads are told apart; else 0.
    pub thread: u32,
    /// Number of the probed site ([`crate::site::Site::index`]), which names the allocator function: the leaf frame.
    pub site: u16,
    /// How many of `frames` are set, at most [`MAX_FRAMES`].
    pub len: u8,
    /// A [`StackEnd`].
    pub end: u8,
    /// Always 0.
    pub zero: u32,
    /// Return addresses, outermost first; the last of the `len` is that of the allocator function's direct caller. In
    /// this order the part of a stack that did not change since the thread's last call stays where it is.
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

const _: () = assert!(size_of::<StackRecord>() == 1032);
const _: () = assert!(size_of::<Totals>() == 32);

#[cfg(feature = "user")]
mod pod {
    // SAFETY: repr(C), only integers, no padding (sizes asserted above): any bit pattern is a value.
    unsafe impl aya::Pod for super::StackRecord {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Totals {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_numbered_by_position() {
        for (position, end) in StackEnd::ALL.iter().enumerate() {
            assert_eq!(*end as usize, position);
            assert_eq!(StackEnd::from_raw(position as u8), Some(*end));
        }
        assert_eq!(StackEnd::from_raw(StackEnd::ALL.len() as u8), None);
    }
}
