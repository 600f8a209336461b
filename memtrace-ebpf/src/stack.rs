//! Storing call stacks.

use memtrace_common::{
    block::ThreadState,
    event::EventKind,
    loss::Loss,
    stack::{MAX_FRAMES, OVERFLOW_STACK, StackRecord},
};

use crate::maps::{self, STACK_IDS, STACKS, THREADS};

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

/// Gives the stack just walked, that of `thread` of the process image `process`, its number in `state.stack`; `state.loss` says what is missing. `unchanged`: its frames are
/// those of the thread's last stack.
#[inline(always)]
pub fn number(state: &mut ThreadState, thread: u64, process: u32, site: u16, unchanged: bool) {
    if unchanged && state.record.site == site && state.record.process == process && state.stack != OVERFLOW_STACK {
        return;
    }
    state.record.process = process;
    state.record.thread = if maps::by_thread() { thread as u32 } else { 0 };
    state.record.site = site;
    let found = if state.return_address == 0 {
        Err(Loss::StackUnreadable)
    } else {
        find((thread >> 32) as u32, &state.record, hash(&state.record))
    };
    (state.stack, state.loss) = match found {
        Ok(number) => (number, 0),
        Err(loss) => (OVERFLOW_STACK, loss as u32 + 1),
    };
}

/// Hash of everything that makes a stack's identity, from its outermost frame on.
#[inline(always)]
fn hash(record: &StackRecord) -> u64 {
    let mut hash = mix(u64::from(record.thread), u64::from(record.process) << 16 | u64::from(record.site));
    hash = mix(hash, u64::from(record.len) << 8 | u64::from(record.end));
    let mut i = 0u64;
    while i < MAX_FRAMES as u64 {
        if i >= u64::from(record.len) {
            break;
        }
        // SAFETY: the loop's condition bounds the index.
        hash = mix(hash, unsafe { *record.frames.get_unchecked(i as usize) });
        i += 1;
    }
    hash
}

/// Looks the stack up, or stores it: its number, or why it has none.
#[inline(always)]
fn find(tgid: u32, record: &StackRecord, hash: u64) -> Result<u32, Loss> {
    let hash = hash & !maps::hash_ignore();
    for probe in 0..HASH_PROBES {
        let key = hash.wrapping_add(probe);
        let id = match STACK_IDS.get_ptr(key) {
            // SAFETY: a map value, written before it was published.
            Some(id) => unsafe { *id },
            None => match store(tgid, record, key) {
                Ok(id) => return Ok(id),
                Err(Some(other)) => other,
                Err(None) => return Err(Loss::StacksFull),
            },
        };
        if let Some(stored) = STACKS.get_ptr(id)
            // SAFETY: a map value; a stack's record never changes after its number was published.
            && same(unsafe { &*stored }, record)
        {
            return Ok(id);
        }
    }
    Err(Loss::HashCollision)
}

/// Stores a new stack under `key`. `Err(Some(id))`: another thread has just stored stack `id` there.
#[inline(always)]
fn store(tgid: u32, record: &StackRecord, key: u64) -> Result<u32, Option<u32>> {
    const NO_EXIST: u64 = 1;
    let id = maps::next_stack().ok_or(None)?;
    STACKS.set(id, record, 0).map_err(|_| None)?;
    if STACK_IDS.insert(key, id, NO_EXIST).is_ok() {
        maps::send(EventKind::NewStack, tgid, u64::from(id));
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
    if a.process != b.process || a.thread != b.thread || a.site != b.site || a.len != b.len || a.end != b.end {
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
