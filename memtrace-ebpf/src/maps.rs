//! Every map, the constants set at load time, and the counters. The user side sets the number of entries.

use aya_ebpf::{
    helpers::generated::bpf_ktime_get_ns,
    macros::map,
    maps::{Array, HashMap, PerCpuArray, RingBuf},
};
use core::arch::asm;
use memtrace_common::{
    block::{Block, BlockKey, ThreadState},
    event::{Counter, Event, EventKind},
    fault::{Chunk, ChunkKey},
    loss::{Loss, LossCount},
    oracle::OracleControl,
    resident,
    settings::{Control, ReturnInstances, Run},
    stack::{StackRecord, Totals},
    unwind::{CodeMapping, MAX_MAPPINGS},
};

/// `BPF_F_MMAPABLE` in include/uapi/linux/bpf.h.
const BPF_F_MMAPABLE: u32 = 1 << 10;

#[map]
static CONTROL: Array<u64> = Array::with_max_entries(Control::COUNT, 0);
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
/// Packed unwind rows of all modules. Mapped by the user side, which fills it.
#[map]
static ROWS: Array<u64> = Array::with_max_entries(64, BPF_F_MMAPABLE);
/// Block indexes of all modules. Mapped by the user side, which fills it.
#[map]
static ROW_INDEX: Array<u32> = Array::with_max_entries(64, BPF_F_MMAPABLE);
/// Two lists of the target's code mappings, sorted by address.
#[map]
static MAPPINGS: Array<CodeMapping> = Array::with_max_entries(2 * MAX_MAPPINGS, 0);
/// One all-zero state, which new threads start from: it is too large to be made on the BPF stack.
#[map]
static BLANK_THREAD: Array<ThreadState> = Array::with_max_entries(1, 0);
#[map]
pub static CHILDREN: HashMap<u32, u32> = HashMap::with_max_entries(1024, 0);
#[map]
pub static PAGES: HashMap<ChunkKey, Chunk> = HashMap::with_max_entries(64, 0);
/// One all-zero chunk, which new ones start from.
#[map]
static BLANK_CHUNK: Array<Chunk> = Array::with_max_entries(1, 0);
/// Sizes of the target's resident set.
#[map]
pub static RESIDENT: Array<u64> = Array::with_max_entries(resident::entry::COUNT, 0);
/// One page, unless system calls are traced.
#[map]
pub static CALLS: RingBuf = RingBuf::with_byte_size(4096, 0);
#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(256 * 1024, 0);

/// One page, unless the unwinder's test asks for more.
#[map]
pub static ORACLE: RingBuf = RingBuf::with_byte_size(4096, 0);
#[map]
static ORACLE_CONTROL: Array<u64> = Array::with_max_entries(OracleControl::COUNT, 0);

#[unsafe(no_mangle)]
static TARGET_TGID: u32 = 0;
#[unsafe(no_mangle)]
static HASH_IGNORE: u64 = 0;
#[unsafe(no_mangle)]
static MAX_STACKS: u32 = 0;
#[unsafe(no_mangle)]
static RETURN_TASK: u32 = 0;
#[unsafe(no_mangle)]
static RETURN_LIST: u32 = 0;
#[unsafe(no_mangle)]
static RETURN_STACK: u32 = 0;
#[unsafe(no_mangle)]
static RETURN_ADDRESS: u32 = 0;
#[unsafe(no_mangle)]
static RETURN_NEXT: u32 = 0;
#[unsafe(no_mangle)]
static RECORDS_PAGES: u32 = 0;
#[unsafe(no_mangle)]
static TASK_TGID: u32 = 0;
#[unsafe(no_mangle)]
static FOLLOW: u32 = 0;
#[unsafe(no_mangle)]
static FAULTS_DISABLED: u32 = 0;
#[unsafe(no_mangle)]
static PLAIN_WALKS: u32 = 0;
#[unsafe(no_mangle)]
static PREEMPT_GUARD: u32 = 0;

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

/// Where the kernel keeps replaced return addresses.
#[inline(always)]
pub fn return_instances() -> ReturnInstances {
    ReturnInstances {
        task: constant!(RETURN_TASK),
        list: constant!(RETURN_LIST),
        stack: constant!(RETURN_STACK),
        address: constant!(RETURN_ADDRESS),
        next: constant!(RETURN_NEXT),
    }
}

#[inline(always)]
pub fn max_stacks() -> u32 {
    constant!(MAX_STACKS)
}

/// Whether faults are recorded, so that the records have to be kept right.
#[inline(always)]
pub fn records_pages() -> bool {
    constant!(RECORDS_PAGES) != 0
}

/// Where a task's thread group is in `struct task_struct`; 0: not known.
#[inline(always)]
pub fn task_tgid_offset() -> u32 {
    constant!(TASK_TGID)
}

/// Whether the processes that the target forks are followed.
#[inline(always)]
pub fn follows() -> bool {
    constant!(FOLLOW) != 0
}

/// Whether a thread group is a followed child of the target.
#[inline(always)]
pub fn is_child(tgid: u32) -> bool {
    follows() && CHILDREN.get_ptr(tgid).is_some()
}

/// Whether a thread group is neither the target nor a followed child of it. Without a target's number the probes' own
/// filter is relied upon.
#[inline(always)]
pub fn is_left_out(tgid: u32) -> bool {
    let target = target_tgid();
    target != 0 && tgid != target && !is_child(tgid)
}

/// Where the kernel counts why it handles no page faults, in `struct task_struct`; 0: not known.
#[inline(always)]
pub fn faults_disabled_offset() -> u32 {
    constant!(FAULTS_DISABLED)
}

#[inline(always)]
pub fn plain_walks() -> bool {
    constant!(PLAIN_WALKS) != 0
}

#[inline(always)]
pub fn preempt_guard() -> bool {
    constant!(PREEMPT_GUARD) != 0
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

/// Puts `value` in place of a 64-bit word in map memory, atomically: what was there.
///
/// # Safety
/// `word` points to an aligned u64 in a map value.
#[inline(always)]
pub unsafe fn exchange(word: *mut u64, value: u64) -> u64 {
    let mut value = value;
    // SAFETY: promised by the caller; the instruction touches nothing else.
    unsafe {
        asm!("{value} = xchg_64({word} + 0, {value})", word = in(reg) word, value = inout(reg) value, options(nostack));
    }
    value
}

#[inline(always)]
fn control(entry: Control) -> u64 {
    match CONTROL.get_ptr(entry as u32) {
        // SAFETY: map memory; an aligned word is read whole.
        Some(value) => unsafe { core::ptr::read_volatile(value) },
        None => 0,
    }
}

/// Whether probes record at this moment.
#[inline(always)]
pub fn running() -> bool {
    control(Control::Run) == Run::Running as u64
}

/// How stacks are walked ([`memtrace_common::settings::Unwind`]).
#[inline(always)]
pub fn unwind_mode() -> u32 {
    control(Control::Unwind) as u32
}

/// Whether the pages present at the start have been looked at.
#[inline(always)]
pub fn late() -> bool {
    control(Control::Late) != 0
}

/// A chunk without faults.
#[inline(always)]
pub fn blank_chunk() -> Option<*const Chunk> {
    BLANK_CHUNK.get_ptr(0)
}

/// The list of mappings in force ([`memtrace_common::unwind::MappingList`]).
#[inline(always)]
pub fn mappings() -> u64 {
    control(Control::Mappings)
}

#[inline(always)]
pub fn row(number: u32) -> Option<u64> {
    // SAFETY: a map value; the user side changes no row that a mapping in force uses.
    ROWS.get_ptr(number).map(|row| unsafe { *row })
}

#[inline(always)]
pub fn row_index(number: u32) -> Option<u32> {
    // SAFETY: as in `row`.
    ROW_INDEX.get_ptr(number).map(|entry| unsafe { *entry })
}

#[inline(always)]
pub fn mapping(number: u32) -> Option<*const CodeMapping> {
    MAPPINGS.get_ptr(number)
}

/// Counts a call of the loader's hook; `removes` tells whether libraries are being removed.
#[inline(always)]
pub fn loader_event(removes: bool) {
    let (Some(events), Some(last)) =
        (CONTROL.get_ptr_mut(Control::LoaderEvents as u32), CONTROL.get_ptr_mut(Control::LastRemoval as u32))
    else {
        return;
    };
    // SAFETY: map memory, aligned words. The loader holds a lock, so that there is one event at a time.
    unsafe {
        add(events, 1);
        if removes {
            core::ptr::write_volatile(last, core::ptr::read_volatile(events) + 1);
        }
    }
}

/// Whether libraries were removed and the list of mappings may not show it yet.
#[inline(always)]
pub fn libraries_removed() -> bool {
    control(Control::LoaderSeen) < control(Control::LastRemoval)
}

/// Stops recording for good.
#[inline(always)]
pub fn stop() {
    if let Some(run) = CONTROL.get_ptr_mut(Control::Run as u32) {
        // SAFETY: map memory; an aligned word is written whole.
        unsafe { core::ptr::write_volatile(run, Run::Stopped as u64) }
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
    let next = CONTROL.get_ptr_mut(Control::NextStack as u32)?;
    let max = u64::from(max_stacks());
    // SAFETY: map memory, aligned. Checked before too, so that the counter cannot run over when the table is full.
    unsafe {
        if core::ptr::read_volatile(next) >= max {
            return None;
        }
        let mut id = 1u64;
        asm!(
            "{id} = atomic_fetch_add((u64 *)({next} + 0), {id})",
            next = in(reg) next,
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

/// More than any address space holds: the call asked for it in vain, or its size did not fit 64 bits.
const IMPOSSIBLE: u64 = 1 << 57;

#[inline(always)]
pub fn count_oracle(counter: OracleControl) {
    if let Some(slot) = ORACLE_CONTROL.get_ptr_mut(counter as u32) {
        // SAFETY: map value of type u64.
        unsafe { add(slot, 1) }
    }
}

/// Of how many walks one is handed over.
#[inline(always)]
pub fn oracle_every() -> u32 {
    // SAFETY: map memory; an aligned word is read whole.
    ORACLE_CONTROL.get_ptr(OracleControl::Every as u32).map_or(1, |every| unsafe { *every as u32 })
}

#[inline(always)]
pub fn lose(loss: Loss, bytes: u64) {
    lose_number(loss as u32, bytes);
}

/// As [`lose`], by the [`Loss`]'s number. (To make a loss of a number takes a table, and the verifier of Linux 6.1 does
/// not see that the number is in it.)
#[inline(always)]
pub fn lose_number(loss: u32, bytes: u64) {
    let bytes = if bytes < IMPOSSIBLE { bytes } else { 0 };
    if let Some(slot) = LOSSES.get_ptr_mut(loss) {
        // SAFETY: map value; both fields are aligned u64.
        unsafe {
            add(&raw mut (*slot).count, 1);
            add(&raw mut (*slot).bytes, bytes);
        }
    }
}

/// As [`lose`], `count` times at once, over which there were `bytes`.
#[inline(always)]
pub fn lose_many(loss: Loss, count: u64, bytes: u64) {
    if let Some(slot) = LOSSES.get_ptr_mut(loss as u32) {
        // SAFETY: map value; both fields are aligned u64.
        unsafe {
            add(&raw mut (*slot).count, count);
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
            // SAFETY: a helper without arguments.
            let time = unsafe { bpf_ktime_get_ns() };
            entry.write(Event { kind: kind as u32, tgid, value, time });
            entry.submit(0);
        }
        None => lose(Loss::RingFull, 0),
    }
}
