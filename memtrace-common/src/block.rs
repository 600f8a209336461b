//! Live blocks, and the state of a thread that is inside an allocating function.

use crate::{stack::StackRecord, unwind::Chain};

/// Identity of a live block.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BlockKey {
    /// Address that the allocator returned, in the target's address space.
    pub address: u64,
    /// Thread group, as the initial pid namespace numbers it.
    pub tgid: u32,
    /// Always 0: the key is compared byte by byte, so it may hold no padding.
    pub zero: u32,
}

/// A block that was allocated during the trace and has not been freed.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Bytes that the caller asked for (not what the allocator rounds it to).
    pub size: u64,
    /// Time of the commit, nanoseconds of `CLOCK_MONOTONIC`.
    pub time: u64,
    /// Stack number, an index of the `STACKS` and `TOTALS` maps.
    pub stack: u32,
    /// Always 0.
    pub zero: u32,
}

/// Bit of a thread's number under which its state for page faults and system calls is kept.
pub const TRACEPOINT_STATE: u64 = 1 << 63;

/// What a thread has pending between the entry of the outermost allocating function and its return.
///
/// It lives in a map under the thread's id and is written by that thread alone, so that it serves as scratch space
/// too: per-CPU scratch could be overwritten by another thread, since uprobe programs can be preempted.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ThreadState {
    /// Stack pointer at the entry of the outermost call, at the moment when it points at the return address.
    /// 0 when nothing is pending.
    pub sp: u64,
    /// The return address found there.
    pub return_address: u64,
    /// Bytes asked for.
    pub size: u64,
    /// Where the pointer will be stored, for functions that return it through a parameter; the block, for those that
    /// resize it in place; otherwise 0.
    pub out_pointer: u64,
    /// The block that a `realloc` took out of the live blocks at entry, put back if the call fails.
    pub old_block: Block,
    /// Its address; 0 when there is none.
    pub old_address: u64,
    /// The block that the thread freed last, if it has allocated none since and the function that freed it may call
    /// another one that is probed; otherwise 0.
    pub released: u64,
    /// How the call tells where the new block is: a number of [`crate::site::Answer`].
    pub answer: u32,
    /// Always 0.
    pub zero: u32,
    /// Number of [`Self::record`] in the stack table.
    pub stack: u32,
    /// 1 plus the number of the [`crate::loss::Loss`] that the call's stack suffered; 0 for none.
    pub loss: u32,
    /// Calls that were taken for calls inside the pending one, but may not be: frame pointers could not tell.
    pub hidden_count: u64,
    /// Bytes that those asked for.
    pub hidden_bytes: u64,
    /// The stack of the outermost call.
    pub record: StackRecord,
    /// How that stack was unwound: what the next walk of the thread starts from.
    pub chain: Chain,
}

const _: () = assert!(size_of::<BlockKey>() == 16);
const _: () = assert!(size_of::<Block>() == 24);
const _: () = assert!(size_of::<ThreadState>() == 104 + size_of::<StackRecord>() + size_of::<Chain>());

#[cfg(feature = "user")]
mod pod {
    // SAFETY: repr(C), only integers, no padding (sizes asserted above): any bit pattern is a value.
    unsafe impl aya::Pod for super::BlockKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Block {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::ThreadState {}
}
