//! What happens when a function allocates, returns and frees. Nothing here knows what reported it.
//!
//! An allocating call is two events: [`begin`] at its entry takes size and stack, [`commit`] at its return takes the
//! pointer. In between the call is pending in the thread's [`ThreadState`].

use aya_ebpf::helpers::{bpf_get_current_pid_tgid, bpf_probe_read_user};
use aya_log_ebpf::debug;
use memtrace_common::{
    block::{Block, BlockKey, ThreadState},
    event::Counter,
    loss::Loss,
    site::Site,
};

use crate::{
    maps::{self, BLOCKS, THREADS},
    stack,
};

/// An allocating call at its entry.
pub struct Call {
    pub site: Site,
    /// Bytes asked for.
    pub size: u64,
    /// Block to resize; 0 for none.
    pub pointer: u64,
    /// Where the result will be stored; 0 if it is returned.
    pub out: u64,
    /// Stack pointer, pointing at the return address.
    pub sp: u64,
    /// Frame pointer register, still the caller's.
    pub fp: u64,
}

/// The current time, in nanoseconds of `CLOCK_MONOTONIC`.
#[inline(always)]
fn now() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { aya_ebpf::helpers::generated::bpf_ktime_get_ns() }
}

/// Reads one word of the target's memory.
#[inline(always)]
pub fn read_word(address: u64) -> Option<u64> {
    // SAFETY: the helper checks the address and faults nothing in.
    unsafe { bpf_probe_read_user(address as *const u64) }.ok()
}

/// The current thread's state, made at its first call.
#[inline(always)]
fn thread_state(thread: u64) -> Option<*mut ThreadState> {
    if let Some(state) = THREADS.get_ptr_mut(thread) {
        return Some(state);
    }
    stack::insert_blank_thread(thread);
    THREADS.get_ptr_mut(thread)
}

/// Whether a uprobe's return trampoline starts at `address`.
///
/// The kernel replaces a probed function's return address with its trampoline: one `int3`, or since Linux 6.11 on
/// x86-64 `push rax; push rcx; push r11` and the `uretprobe` system call (arch/x86/kernel/uprobes.c).
#[inline(always)]
fn is_return_trampoline(address: u64) -> bool {
    // SAFETY: the helper checks the address and faults nothing in.
    match unsafe { bpf_probe_read_user(address as *const [u8; 4]) } {
        Ok(code) => code[0] == 0xcc || code == [0x50, 0x51, 0x41, 0x53],
        Err(_) => false,
    }
}

/// Whether `call` happens inside the pending one, rather than after it was left without a return.
#[inline(always)]
fn is_nested(pending: &ThreadState, call: &Call) -> bool {
    // The stack grows down: a pending frame at a lower address is gone.
    if pending.sp < call.sp {
        return false;
    }
    // The slot of the pending call's return address holds the trampoline for as long as the call lasts. Another word
    // means that the frame was left and its stack used again, or that the thread has changed to another stack.
    let Some(address) = read_word(pending.sp) else {
        return false;
    };
    if address == pending.return_address || !is_return_trampoline(address) {
        return false;
    }
    // One function that ends with a jump to another (reallocarray to realloc, memalign to malloc) enters the second
    // with the same stack pointer, and asks it for the same size.
    pending.sp > call.sp || pending.size == call.size
}

/// Entry of an allocating function.
#[inline(always)]
pub fn begin(call: &Call) {
    let thread = bpf_get_current_pid_tgid();
    let tgid = (thread >> 32) as u32;
    let target = maps::target_tgid();
    if target != 0 && tgid != target {
        return;
    }
    let Some(state) = thread_state(thread) else {
        maps::lose(Loss::ThreadsFull, call.size);
        return;
    };
    // SAFETY: a map value that only this thread uses; it cannot run another program of ours before this one ends.
    let state = unsafe { &mut *state };
    if state.sp != 0 {
        if is_nested(state, call) {
            maps::count(Counter::Nested);
            return;
        }
        maps::lose(Loss::Abandoned, state.size);
        debug!((), "call at sp {:x} was left without a return", state.sp);
        state.sp = 0;
    }
    maps::count(Counter::Allocations);
    state.old_address = 0;
    if call.pointer != 0 {
        take_old(state, tgid, call.pointer);
    }
    state.size = call.size;
    state.out_pointer = call.out;
    stack::record(state, tgid, call);
    state.sp = call.sp;
}

/// Takes the block that is about to be resized out of the live blocks, before the allocator can hand its address to
/// another thread.
#[inline(always)]
fn take_old(state: &mut ThreadState, tgid: u32, address: u64) {
    if let Some(block) = remove(tgid, address) {
        state.old_block = block;
        state.old_address = address;
    }
}

/// Return of a probed function; `sp` is the stack pointer after the return address was popped.
#[inline(always)]
pub fn commit(result: u64, sp: u64) {
    let thread = bpf_get_current_pid_tgid();
    let Some(state) = THREADS.get_ptr_mut(thread) else {
        return;
    };
    // SAFETY: as in `begin`.
    let state = unsafe { &mut *state };
    // Returns of nested calls come with a lower stack pointer, those of calls not recorded with nothing pending.
    if state.sp == 0 || state.sp.wrapping_add(8) != sp {
        return;
    }
    state.sp = 0;
    let tgid = (thread >> 32) as u32;
    let address = if state.out_pointer == 0 {
        result
    } else if result as u32 != 0 {
        0
    } else {
        match read_word(state.out_pointer) {
            Some(address) => address,
            None => {
                maps::lose(Loss::ResultUnreadable, state.size);
                return;
            }
        }
    };
    if address == 0 {
        maps::count(Counter::Failed);
        // A failed realloc leaves the old block alone; glibc's realloc to 0 frees it and returns null.
        if state.old_address != 0 && state.size != 0 {
            maps::unsettle_freed(state.old_block.stack, state.old_block.size);
            insert(tgid, state.old_address, &state.old_block);
        }
        return;
    }
    let block = Block { size: state.size, time: now(), stack: state.stack, zero: 0 };
    if insert(tgid, address, &block) {
        maps::settle_allocated(block.stack, block.size);
        maps::count(Counter::Commits);
    }
}

/// Adds a live block; false if there was no room.
#[inline(always)]
fn insert(tgid: u32, address: u64, block: &Block) -> bool {
    const NO_EXIST: u64 = 1;
    const EEXIST: i32 = -17;
    let key = BlockKey { address, tgid, zero: 0 };
    match BLOCKS.insert(key, block, NO_EXIST) {
        Ok(()) => true,
        Err(EEXIST) => {
            // The allocator gave out an address that is still live here: its free was missed.
            if let Some(old) = remove(tgid, address) {
                maps::lose(Loss::Conflict, old.size);
                debug!((), "address {:x} was given out while live", address);
            }
            let inserted = BLOCKS.insert(key, block, 0).is_ok();
            if !inserted {
                maps::lose(Loss::BlocksFull, block.size);
            }
            inserted
        }
        Err(_) => {
            maps::lose(Loss::BlocksFull, block.size);
            false
        }
    }
}

/// Takes a block out of the live blocks and settles its stack's totals.
#[inline(always)]
fn remove(tgid: u32, address: u64) -> Option<Block> {
    let key = BlockKey { address, tgid, zero: 0 };
    // SAFETY: copied before the entry is deleted, after which the kernel may reuse its memory.
    let block = unsafe { *BLOCKS.get_ptr(key)? };
    // When two threads free one block at a time, only one of them deletes it.
    BLOCKS.remove(key).ok()?;
    maps::settle_freed(block.stack, block.size);
    Some(block)
}

/// Entry of a freeing function.
#[inline(always)]
pub fn release(address: u64) {
    if address == 0 {
        return;
    }
    let tgid = (bpf_get_current_pid_tgid() >> 32) as u32;
    let target = maps::target_tgid();
    if target != 0 && tgid != target {
        return;
    }
    maps::count(Counter::Frees);
    if remove(tgid, address).is_none() {
        maps::count(Counter::FreesUnknown);
    }
}
