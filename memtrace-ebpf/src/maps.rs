//! Every map, the constants set at load time, and the counters. The user side sets the number of entries.

use aya_ebpf::{
    macros::map,
    maps::{Array, HashMap, PerCpuArray, RingBuf},
};
use core::arch::asm;
use memtrace_common::{
    block::{Block, BlockKey, ThreadState},
    event::{Counter, Event, EventKind},
    loss::{Loss, LossCount},
    settings::{Control, Run},
    stack::{StackRecord, Totals},
};

#[map]
static CONTROL: Array<Control> = Array::with_max_entries(1, 0);
#[map]
pub static BLOCKS: HashMap<BlockKey, Block> = HashMap::with_max_entries(1024, 0);
#[map]
pub static THREADS: HashMap<u64, ThreadState> = HashMap::with_max_entries(64, 0);
#[map]
pub static STACK_IDS: HashMap<u64, u32> = HashMap::with_max_entries(64, 0);
#[map]
pub static STACKS: Array<StackRecord> = Array::with_max_entries(64, 0);
#[map]
static TOTALS: Array<Totals> = Array::with_max_entries(64, 0);
#[map]
static LOSSES: Array<LossCount> = Array::with_max_entries(Loss::COUNT, 0);
#[map]
static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Counter::COUNT, 0);
/// One all-zero state, which new threads start from: it is too large to be made on the BPF stack.
#[map]
static BLANK_THREAD: Array<ThreadState> = Array::with_max_entries(1, 0);
#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(256 * 1024, 0);

#[unsafe(no_mangle)]
static TARGET_TGID: u32 = 0;
#[unsafe(no_mangle)]
static HASH_IGNORE: u64 = 0;
#[unsafe(no_mangle)]
static MAX_STACKS: u32 = 0;

/// Reads a constant that the user side replaces before loading; the compiler must not see its value.
macro_rules! constant {
    ($name:ident) => {
        // SAFETY: a valid, aligned static that nothing writes after loading.
        unsafe { core::ptr::read_volatile(&raw const $name) }
    };
}

#[inline(always)]
pub fn target_tgid() -> u32 {
    constant!(TARGET_TGID)
}

#[inline(always)]
pub fn hash_ignore() -> u64 {
    constant!(HASH_IGNORE)
}

#[inline(always)]
pub fn max_stacks() -> u32 {
    constant!(MAX_STACKS)
}

/// Adds to a 64-bit counter in map memory, atomically.
///
/// # Safety
/// `counter` points to an aligned u64 in a map value.
#[inline(always)]
pub unsafe fn add(counter: *mut u64, value: u64) {
    // Rust gives the BPF target no atomic read-modify-write operations.
    // SAFETY: promised by the caller; the instruction touches nothing else.
    unsafe {
        asm!("lock *(u64 *)({counter} + 0) += {value}", counter = in(reg) counter, value = in(reg) value, options(nostack));
    }
}

/// Whether probes record at this moment.
#[inline(always)]
pub fn running() -> bool {
    match CONTROL.get_ptr(0) {
        // SAFETY: map memory; a 32-bit read is whole.
        Some(control) => unsafe { core::ptr::read_volatile(&raw const (*control).run) == Run::Running as u32 },
        None => false,
    }
}

/// Stops recording for good.
#[inline(always)]
pub fn stop() {
    if let Some(control) = CONTROL.get_ptr_mut(0) {
        // SAFETY: map memory; a 32-bit write is whole.
        unsafe { core::ptr::write_volatile(&raw mut (*control).run, Run::Stopped as u32) }
    }
}

/// The state that new threads start from.
#[inline(always)]
pub fn blank_thread() -> Option<*const ThreadState> {
    BLANK_THREAD.get_ptr(0)
}

/// Takes the next stack number; `None` when the stack table is full.
#[inline(always)]
pub fn next_stack() -> Option<u32> {
    let control = CONTROL.get_ptr_mut(0)?;
    let max = u64::from(max_stacks());
    // SAFETY: map memory, aligned. Checked before too, so that the counter cannot run over when the table is full.
    unsafe {
        if core::ptr::read_volatile(&raw const (*control).next_stack) >= max {
            return None;
        }
        let mut id = 1u64;
        asm!(
            "{id} = atomic_fetch_add((u64 *)({counter} + 0), {id})",
            counter = in(reg) &raw mut (*control).next_stack,
            id = inout(reg) id,
            options(nostack),
        );
        (id < max).then_some(id as u32)
    }
}

#[inline(always)]
pub fn count(counter: Counter) {
    if let Some(slot) = COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: map value of type u64. Atomic, since a program can be preempted by another on the same CPU.
        unsafe { add(slot, 1) }
    }
}

#[inline(always)]
pub fn lose(loss: Loss, bytes: u64) {
    if let Some(slot) = LOSSES.get_ptr_mut(loss as u32) {
        // SAFETY: map value; both fields are aligned u64.
        unsafe {
            add(&raw mut (*slot).count, 1);
            add(&raw mut (*slot).bytes, bytes);
        }
    }
}

/// Adds a block to its stack's totals.
#[inline(always)]
pub fn settle_allocated(stack: u32, bytes: u64) {
    if let Some(totals) = TOTALS.get_ptr_mut(stack) {
        // SAFETY: map value; the fields are aligned u64.
        unsafe {
            add(&raw mut (*totals).allocated_bytes, bytes);
            add(&raw mut (*totals).allocated_count, 1);
        }
    }
}

/// Takes a block off its stack's totals.
#[inline(always)]
pub fn settle_freed(stack: u32, bytes: u64) {
    if let Some(totals) = TOTALS.get_ptr_mut(stack) {
        // SAFETY: map value; the fields are aligned u64.
        unsafe {
            add(&raw mut (*totals).freed_bytes, bytes);
            add(&raw mut (*totals).freed_count, 1);
        }
    }
}

/// Undoes [`settle_freed`].
#[inline(always)]
pub fn unsettle_freed(stack: u32, bytes: u64) {
    if let Some(totals) = TOTALS.get_ptr_mut(stack) {
        // SAFETY: map value; the fields are aligned u64. Adding the two's complement subtracts.
        unsafe {
            add(&raw mut (*totals).freed_bytes, bytes.wrapping_neg());
            add(&raw mut (*totals).freed_count, 1u64.wrapping_neg());
        }
    }
}

/// Sends a message to the user side.
#[inline(always)]
pub fn send(kind: EventKind, tgid: u32, value: u64) {
    match EVENTS.reserve::<Event>(0) {
        Some(mut entry) => {
            entry.write(Event { kind: kind as u32, tgid, value });
            entry.submit(0);
        }
        None => lose(Loss::RingFull, 0),
    }
}
