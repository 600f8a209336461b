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
    process::{ANY, ATTEMPTS, ProcessState},
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
/// Lists of code mappings, each sorted by address.
#[map]
static MAPPINGS: Array<CodeMapping> = Array::with_max_entries(2 * MAX_MAPPINGS, 0);
/// One all-zero state, which new threads start from: it is too large to be made on the BPF stack.
#[map]
static BLANK_THREAD: Array<ThreadState> = Array::with_max_entries(1, 0);
#[map]
pub static PROCESSES: HashMap<u32, u32> = HashMap::with_max_entries(64, 0);
/// Mapped by the user side, which writes some of the words.
#[map]
static IMAGES: Array<ProcessState> = Array::with_max_entries(64, BPF_F_MMAPABLE);
#[map]
pub static THREAD_NAMES: HashMap<u64, [u8; 16]> = HashMap::with_max_entries(1, 0);
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
static ANY_PROCESS: u32 = 0;
#[unsafe(no_mangle)]
static BY_THREAD: u32 = 0;
#[unsafe(no_mangle)]
static ANNOUNCE: u32 = 0;
#[unsafe(no_mangle)]
static UNFILTERED: u32 = 0;
#[unsafe(no_mangle)]
static HASH_IGNORE: u64 = 0;
#[unsafe(no_mangle)]
static MAX_IMAGES: u32 = 0;
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

/// Whether thread groups can't be told apart.
#[inline(always)]
pub fn any_process() -> bool {
    constant!(ANY_PROCESS) != 0
}

/// Whether stacks of different threads are told apart.
#[inline(always)]
pub fn by_thread() -> bool {
    constant!(BY_THREAD) != 0
}

/// Whether processes that are not traced are reported when they appear.
#[inline(always)]
pub fn announces() -> bool {
    constant!(ANNOUNCE) != 0
}

/// Whether the probes reach every process.
#[inline(always)]
pub fn unfiltered() -> bool {
    constant!(UNFILTERED) != 0
}

/// The state of a thread group's image, if it is traced.
#[inline(always)]
pub fn process(tgid: u32) -> Option<*mut ProcessState> {
    let only = constant!(TARGET_TGID);
    if only != 0 && tgid != only {
        return None;
    }
    let number = PROCESSES.get_ptr(if any_process() { ANY } else { tgid })?;
    // SAFETY: a map value; an aligned word is read whole.
    image(unsafe { core::ptr::read_volatile(number) })
}

/// The place of the image with this number.
#[inline(always)]
fn image(number: u32) -> Option<*mut ProcessState> {
    IMAGES.get_ptr_mut(number & (constant!(MAX_IMAGES).wrapping_sub(1)))
}

/// A place for a new image, its number set and everything else as in `state`.
#[inline(always)]
pub fn new_image(state: &ProcessState) -> u32 {
    let Some(counter) = IMAGES.get_ptr_mut(0) else { return 0 };
    for _ in 0..ATTEMPTS {
        let mut last = 1u64;
        // SAFETY: map memory, an aligned word; the instruction touches nothing else.
        unsafe {
            asm!(
                "{last} = atomic_fetch_add((u64 *)({counter} + 8), {last})",
                counter = in(reg) counter,
                last = inout(reg) last,
                options(nostack),
            );
        }
        let number = (last as u32).wrapping_add(1);
        let Some(place) = image(number) else { return 0 };
        // SAFETY: map memory, an aligned word. No other has this number, so that a free place stays free.
        let free = unsafe { (&raw const (*place).number).read_volatile() } == 0;
        if free && place != counter {
            // SAFETY: as above; the number comes last, for those who look at all places.
            unsafe {
                *place = ProcessState { number: 0, ..*state };
                (&raw mut (*place).number).write_volatile(number);
            }
            return number;
        }
    }
    0
}

/// The state of a thread group whose calls of allocator functions are recorded.
#[inline(always)]
pub fn allocating_process(tgid: u32) -> Option<*mut ProcessState> {
    let process = process(tgid)?;
    // SAFETY: a map value.
    (unsafe { (*process).allocations } != 0).then_some(process)
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

/// Whether the processes that traced ones fork are traced.
#[inline(always)]
pub fn follows() -> bool {
    constant!(FOLLOW) != 0
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

/// A chunk without faults.
#[inline(always)]
pub fn blank_chunk() -> Option<*const Chunk> {
    BLANK_CHUNK.get_ptr(0)
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
///
/// # Safety
/// `process` is a map value.
#[inline(always)]
pub unsafe fn loader_event(process: *mut ProcessState, removes: bool) {
    // SAFETY: promised by the caller; aligned words. The loader holds a lock, so that there is one event at a time.
    unsafe {
        add(&raw mut (*process).loader_events, 1);
        if removes {
            let events = (&raw const (*process).loader_events).read_volatile();
            (&raw mut (*process).last_removal).write_volatile(events + 1);
        }
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
