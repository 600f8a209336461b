//! Walking and storing call stacks.

use aya_ebpf::helpers::bpf_probe_read_user;
use memtrace_common::{
    block::ThreadState,
    event::EventKind,
    loss::Loss,
    stack::{MAX_FRAMES, OVERFLOW_STACK, StackEnd, StackRecord},
};

use crate::{
    alloc::{self, Call},
    maps::{self, STACK_IDS, STACKS, THREADS},
};

/// User addresses end below this on x86-64 with four-level page tables, and code is never mapped in the first page.
const USER_END: u64 = 1 << 47;
const USER_START: u64 = 4096;

/// How many table places a hash may take when different stacks share it.
const HASH_PROBES: u64 = 4;

/// Odd multiplier with well-mixed bits: 2^64 divided by the golden ratio.
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

#[inline(always)]
fn mix(hash: u64, word: u64) -> u64 {
    let hash = (hash ^ word).wrapping_mul(MULTIPLIER);
    hash ^ (hash >> 32)
}

/// Puts an all-zero state into the thread table.
#[inline(always)]
pub fn insert_blank_thread(thread: u64) {
    if let Some(blank) = maps::blank_thread() {
        // SAFETY: a map value that nothing ever writes.
        let blank = unsafe { &*blank };
        let _ = THREADS.insert(thread, blank, 0);
    }
}

/// Walks the stack of `call` into the thread's state and gives it its number.
#[inline(always)]
pub fn record(state: &mut ThreadState, tgid: u32, call: &Call) {
    let Some(return_address) = alloc::read_word(call.sp) else {
        maps::lose(Loss::StackUnreadable, call.size);
        state.return_address = 0;
        state.stack = OVERFLOW_STACK;
        return;
    };
    state.return_address = return_address;
    let hash = walk(&mut state.record, tgid, call, return_address);
    state.stack = number(&state.record, hash, call.size);
}

/// Follows the frame pointers; the hash covers everything written to `record`.
#[inline(always)]
fn walk(record: &mut StackRecord, tgid: u32, call: &Call, return_address: u64) -> u64 {
    record.tgid = tgid;
    record.site = call.site.index;
    record.frames[0] = return_address;
    let mut hash = mix(u64::from(tgid) << 16 | u64::from(call.site.index), return_address);
    let mut end = StackEnd::Depth;
    let mut len = 1u64;
    let mut fp = call.fp;
    // Frames lie above the return address that was just read.
    let mut lowest = call.sp + 8;
    while len < MAX_FRAMES as u64 {
        if fp == 0 {
            end = StackEnd::Complete;
            break;
        }
        if fp < lowest || fp & 7 != 0 || fp >= USER_END {
            end = StackEnd::BrokenChain;
            break;
        }
        // SAFETY: the helper checks the address and faults nothing in.
        let Ok([next, address]) = (unsafe { bpf_probe_read_user(fp as *const [u64; 2]) }) else {
            end = StackEnd::Unreadable;
            break;
        };
        if address == 0 {
            end = StackEnd::Complete;
            break;
        }
        if !(USER_START..USER_END).contains(&address) {
            end = StackEnd::BrokenChain;
            break;
        }
        // SAFETY: the loop's condition bounds the index.
        unsafe { *record.frames.get_unchecked_mut(len as usize) = address };
        hash = mix(hash, address);
        len += 1;
        lowest = fp + 16;
        fp = next;
    }
    record.len = len as u8;
    record.end = end as u8;
    mix(hash, len << 8 | end as u64)
}

/// Looks the stack up, or stores it: its number, or [`OVERFLOW_STACK`] when there is no room.
#[inline(always)]
fn number(record: &StackRecord, hash: u64, size: u64) -> u32 {
    let hash = hash & !maps::hash_ignore();
    for probe in 0..HASH_PROBES {
        let key = hash.wrapping_add(probe);
        let id = match STACK_IDS.get_ptr(key) {
            // SAFETY: a map value, written before it was published.
            Some(id) => unsafe { *id },
            None => match store(record, key) {
                Ok(id) => return id,
                Err(Some(other)) => other,
                Err(None) => {
                    maps::lose(Loss::StacksFull, size);
                    return OVERFLOW_STACK;
                }
            },
        };
        if let Some(stored) = STACKS.get_ptr(id)
            // SAFETY: a map value; a stack's record never changes after its number was published.
            && same(unsafe { &*stored }, record)
        {
            return id;
        }
    }
    maps::lose(Loss::HashCollision, size);
    OVERFLOW_STACK
}

/// Stores a new stack under `key`. `Err(Some(id))`: another thread has just stored stack `id` there.
#[inline(always)]
fn store(record: &StackRecord, key: u64) -> Result<u32, Option<u32>> {
    const NO_EXIST: u64 = 1;
    let id = maps::next_stack().ok_or(None)?;
    STACKS.set(id, record, 0).map_err(|_| None)?;
    if STACK_IDS.insert(key, id, NO_EXIST).is_ok() {
        maps::send(EventKind::NewStack, record.tgid, u64::from(id));
        return Ok(id);
    }
    // The number taken stays unused.
    match STACK_IDS.get_ptr(key) {
        // SAFETY: as in `number`.
        Some(other) => Err(Some(unsafe { *other })),
        None => Err(None),
    }
}

#[inline(always)]
fn same(a: &StackRecord, b: &StackRecord) -> bool {
    if a.tgid != b.tgid || a.site != b.site || a.len != b.len || a.end != b.end {
        return false;
    }
    let mut i = 0u64;
    while i < MAX_FRAMES as u64 {
        if i >= u64::from(a.len) {
            break;
        }
        // SAFETY: the loop's condition bounds the index.
        unsafe {
            if a.frames.get_unchecked(i as usize) != b.frames.get_unchecked(i as usize) {
                return false;
            }
        }
        i += 1;
    }
    true
}
