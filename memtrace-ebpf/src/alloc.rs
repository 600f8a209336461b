//! What happens when a function allocates, returns and frees. Nothing here knows what reported it.
//!
//! An allocating call is two events: [`begin`] at its entry takes size and stack, [`commit`] at its return takes the
//! pointer. In between the call is pending in the thread's [`ThreadState`].

use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_log_ebpf::debug;
use memtrace_common::{
    block::{Block, BlockKey, ThreadState},
    event::Counter,
    loss::Loss,
    process::ProcessState,
    site::{Answer, Site},
    unwind::Walk,
};

use crate::{
    maps::{self, BLOCKS, THREADS},
    stack,
    unwind::{self, Code, Start},
};

/// An allocating call at its entry.
pub struct Call {
    pub site: Site,
    /// Bytes asked for.
    pub size: u64,
    /// Block to resize; 0 for none.
    pub pointer: u64,
    /// Where the result will be stored; the block that is resized in place; 0 if the result is returned.
    pub out: u64,
    /// Stack pointer, pointing at the return address.
    pub sp: u64,
    /// Frame pointer register, still the caller's.
    pub fp: u64,
    /// rbx, still the caller's.
    pub bx: u64,
}

/// The current time, in nanoseconds of `CLOCK_MONOTONIC`.
#[inline(always)]
fn now() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { aya_ebpf::helpers::generated::bpf_ktime_get_ns() }
}

/// The current thread's state, made at its first call.
#[inline(always)]
pub fn thread_state(thread: u64) -> Option<*mut ThreadState> {
    if let Some(state) = THREADS.get_ptr_mut(thread) {
        return Some(state);
    }
    stack::insert_blank_thread(thread);
    THREADS.get_ptr_mut(thread)
}

/// What a new call is to the one that is pending.
enum Relation {
    /// It happens inside the pending call.
    Nested,
    /// The pending call was left without a return.
    After,
    /// Only a walk of the stack can tell.
    Unclear,
}

/// Compares `call`, whose return address is `return_address`, with the pending call.
#[inline(always)]
fn relation(pending: &ThreadState, call: &Call, return_address: u64) -> Relation {
    // The stack grows down: a pending frame at a lower address is gone.
    if pending.sp < call.sp {
        return Relation::After;
    }
    if pending.sp == call.sp {
        // One function that ends with a jump to another (reallocarray to realloc, memalign to malloc) enters the second
        // with the same stack pointer, asks it for the same size or for more (pvalloc rounds up), and its return address is
        // replaced already.
        let jump = pending.size <= call.size
            && return_address != pending.return_address
            && unwind::may_be_return_trampoline(return_address);
        return if jump { Relation::Nested } else { Relation::After };
    }
    // The slot of the pending call's return address holds the trampoline for as long as the call lasts, and maybe longer:
    // until that part of the stack is used again.
    match unwind::read_word(pending.sp) {
        Some(slot) if slot != pending.return_address && unwind::may_be_return_trampoline(slot) => Relation::Unclear,
        _ => Relation::After,
    }
}

/// Whether the stack just walked may have left the pending call's frame out: frame pointers, followed in code that may not
/// have any (musl's), lead past frames.
#[inline(always)]
fn is_guessed(state: &ThreadState) -> bool {
    state.chain.walk.unclear == Walk::PASSED_OVER || unwind::by_frame_pointers(state)
}

/// Whether the stack just walked, which begins inside the pending call's frame or below its dead remains, leads through
/// that frame: there it meets the trampoline and can go no further.
#[inline(always)]
fn leads_through(state: &ThreadState) -> bool {
    let outermost = unwind::outermost_sp(state);
    outermost <= state.sp.wrapping_add(8) || is_guessed(state)
}

/// Entry of an allocating function.
#[inline(always)]
pub fn begin(call: &Call) {
    let thread = bpf_get_current_pid_tgid();
    let Some(process) = maps::allocating_process((thread >> 32) as u32) else { return };
    // SAFETY: a map value.
    let (number, code) = unsafe { ((*process).number, Code::of(process)) };
    if !call.site.is_of(number) {
        return;
    }
    let Some(state) = thread_state(thread) else {
        maps::lose(Loss::ThreadsFull, call.size);
        return;
    };
    // SAFETY: a map value that only this thread uses; it cannot run another program of ours before this one ends.
    let state = unsafe { &mut *state };
    let return_address = unwind::read_word(call.sp).unwrap_or(0);
    state.chain.walk.unclear = 0;
    if state.sp != 0 {
        match relation(state, call, return_address) {
            Relation::Nested => {
                maps::count(Counter::Nested);
                return;
            }
            Relation::After => abandon(state),
            Relation::Unclear => state.chain.walk.unclear = 1,
        }
    }
    let unchanged =
        unwind::walk(state, &code, &Start { pc: return_address, sp: call.sp + 8, fp: call.fp, bx: call.bx });
    if state.chain.walk.unclear != 0 {
        if leads_through(state) {
            // The stack in the state is not that of the pending call any more.
            state.chain.keep = 0;
            if is_guessed(state) {
                state.hidden_count += 1;
                state.hidden_bytes = state.hidden_bytes.saturating_add(call.size);
            }
            maps::count(Counter::Nested);
            return;
        }
        abandon(state);
    }
    maps::count(Counter::Allocations);
    state.old_address = 0;
    if call.pointer != 0 {
        take_old(state, number, call.pointer);
    }
    state.size = call.size;
    state.out_pointer = call.out;
    state.answer = call.site.answer as u32;
    state.return_address = return_address;
    stack::number(state, thread, number, call.site.index, unchanged);
    state.sp = call.sp;
}

/// Gives the pending call up: its return was never seen.
#[inline(always)]
pub fn abandon(state: &mut ThreadState) {
    maps::lose(Loss::Abandoned, state.size);
    if state.hidden_count != 0 {
        maps::lose_many(Loss::Hidden, state.hidden_count, state.hidden_bytes);
        state.hidden_count = 0;
        state.hidden_bytes = 0;
    }
    debug!((), "call at sp {:x} was left without a return", state.sp);
    state.sp = 0;
}

/// Takes the block that is about to be resized out of the live blocks, before the allocator can hand its address to
/// another thread.
#[inline(always)]
fn take_old(state: &mut ThreadState, process: u32, address: u64) {
    if let Some(block) = remove(process, address) {
        state.old_block = block;
        state.old_address = address;
    }
}

/// Bits of the largest user address (five-level page tables).
const USER_BITS: u32 = 56;

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
    state.hidden_count = 0;
    state.hidden_bytes = 0;
    let process = state.record.process;
    state.released = 0;
    let mut address = result;
    if state.answer == Answer::InPlace as u32 {
        address = if result < state.size { 0 } else { state.out_pointer };
    } else if state.answer != Answer::Pointer as u32 {
        if state.answer == Answer::Stored as u32 && result as u32 != 0 {
            address = 0;
        } else {
            match unwind::read_word(state.out_pointer) {
                Some(stored) => address = stored,
                None => {
                    maps::lose(Loss::ResultUnreadable, state.size);
                    return;
                }
            }
        }
    }
    // What no user address can be, such as the negative numbers that stand for errors, is as good as null.
    if address == 0 || address >> USER_BITS != 0 {
        maps::count(Counter::Failed);
        // A failed realloc leaves the old block alone; glibc's realloc to 0 frees it and returns null.
        if state.old_address != 0 && state.size != 0 && insert(process, state.old_address, &state.old_block) {
            maps::unsettle_freed(state.old_block.stack, state.old_block.size);
        }
        return;
    }
    let block = Block { size: state.size, time: now(), stack: state.stack, zero: 0 };
    if insert(process, address, &block) {
        maps::settle_allocated(block.stack, block.size);
        maps::count(Counter::Commits);
        // Now that the block counts: a call that fails has no path to lose.
        if state.loss != 0 {
            maps::lose_number(state.loss - 1, block.size);
        }
    }
}

/// Adds a live block; false if there was no room.
#[inline(always)]
fn insert(process: u32, address: u64, block: &Block) -> bool {
    const NO_EXIST: u64 = 1;
    const EEXIST: i32 = -17;
    let key = BlockKey { address, process, zero: 0 };
    match BLOCKS.insert(key, block, NO_EXIST) {
        Ok(()) => true,
        Err(EEXIST) => {
            // The allocator gave out an address that is still live here: its free was missed.
            if let Some(old) = remove(process, address) {
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
fn remove(process: u32, address: u64) -> Option<Block> {
    let key = BlockKey { address, process, zero: 0 };
    // SAFETY: copied before the entry is deleted, after which the kernel may reuse its memory.
    let block = unsafe { *BLOCKS.get_ptr(key)? };
    // When two threads free one block at a time, only one of them deletes it.
    BLOCKS.remove(key).ok()?;
    maps::settle_freed(block.stack, block.size);
    Some(block)
}

/// Entry of a freeing function, with the stack pointer at its return address.
#[inline(always)]
pub fn release(site: &Site, address: u64, sp: u64) {
    if address == 0 {
        return;
    }
    let thread = bpf_get_current_pid_tgid();
    let Some(process) = maps::allocating_process((thread >> 32) as u32) else { return };
    // SAFETY: a map value.
    let process = unsafe { &*process };
    if !site.is_of(process.number) {
        return;
    }
    let found = remove(process.number, address).is_some();
    if !found && is_repeated(thread, address, sp) {
        return;
    }
    maps::count(Counter::Frees);
    if !found {
        maps::count(if is_inherited(process, address) { Counter::FreesInherited } else { Counter::FreesUnknown });
    }
    if site.repeats
        && let Some(state) = thread_state(thread)
    {
        // SAFETY: as in `begin`.
        unsafe { (*state).released = address };
    }
}

/// Whether the free of a block that is not live is part of something that was seen already: of a freeing function that
/// calls another one, or of the pending call, which is resizing the block or frees something of the allocator's own.
#[inline(always)]
fn is_repeated(thread: u64, address: u64, sp: u64) -> bool {
    let Some(state) = THREADS.get_ptr_mut(thread) else {
        return false;
    };
    // SAFETY: as in `begin`.
    let state = unsafe { &mut *state };
    if state.released == address {
        return true;
    }
    if state.sp <= sp || unwind::read_word(state.sp) == Some(state.return_address) {
        return false;
    }
    if state.old_address == address {
        // Freed for good, even if the call fails (reallocf).
        state.old_address = 0;
    }
    true
}

/// Whether a forked process had the block at `address` from its parent, which still has it: it stays the parent's.
#[inline(always)]
fn is_inherited(process: &ProcessState, address: u64) -> bool {
    let key = BlockKey { address, process: process.parent, zero: 0 };
    // SAFETY: a map value; an aligned word.
    process.parent != 0 && BLOCKS.get_ptr(key).is_some_and(|block| unsafe { (*block).time } < process.forked)
}
