//! What the unwinder's test gets to see of a walk: where it started, what it found, and the memory it read.

use crate::stack::MAX_FRAMES;

/// Bytes of stack read at a time.
pub const CHUNK: usize = 512;
/// Most chunks.
pub const CHUNKS: usize = 32;

/// Entries of the `ORACLE_CONTROL` map, a u64 each.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OracleControl {
    /// Of how many calls one, on average, gives a sample; every call is walked. Set by the user side.
    Every = 0,
    /// Calls.
    Calls = 1,
    /// Samples that found no room in the ring buffer.
    Dropped = 2,
    /// Calls whose return address or thread state was not to be had.
    Unreadable = 3,
}

impl OracleControl {
    /// Number of entries.
    pub const COUNT: u32 = 4;
}

/// One walk.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct OracleSample {
    /// Return address of the allocator function: where the walk starts.
    pub pc: u64,
    /// Stack pointer after the return.
    pub sp: u64,
    /// Frame pointer register.
    pub fp: u64,
    /// Thread, as `bpf_get_current_pid_tgid` gives it.
    pub thread: u64,
    /// Frames taken over from the thread's last stack.
    pub kept: u32,
    /// How many of `frames` are set.
    pub len: u32,
    /// A [`crate::stack::StackEnd`].
    pub end: u32,
    /// How many chunks of `stack` could be read.
    pub chunks: u32,
    /// As in [`crate::stack::StackRecord::frames`].
    pub frames: [u64; MAX_FRAMES],
    /// The memory from `sp` on.
    pub stack: [[u8; CHUNK]; CHUNKS],
}

const _: () = assert!(size_of::<OracleSample>() == 48 + 8 * MAX_FRAMES + CHUNK * CHUNKS);
