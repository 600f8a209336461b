//! Walking call stacks.
//!
//! A walk goes from frame to frame with three values: return address, stack pointer and frame pointer. The next
//! frame's are computed from the unwind row of the code at the return address ([`table`]), or from the frame pointer
//! where the code has no rows.
//!
//! A thread's outer frames rarely change between two allocations. So its last stack is kept with the state at every
//! frame ([`Chain`]). When the walk comes to a frame in which all three values are those of a kept frame, the rest of
//! the stack can only differ if one of the words differs that the last walk read on from there: they are read again
//! and compared ([`verify`]), which takes one read a frame and no search. Where one differs, the walk goes on as usual.

mod hijack;
mod rbx;
mod step;
mod table;

use aya_ebpf::helpers::{bpf_probe_read_user, generated::bpf_loop};
use core::{arch::asm, ffi::c_void};
use memtrace_common::{
    block::ThreadState,
    process::ProcessState,
    settings::Unwind,
    stack::{MAX_FRAMES, StackEnd},
    unwind::{Level, MAX_LEVELS, WINDOW, Walk},
};

use crate::maps;

/// User addresses end below this on x86-64, and code is never mapped in the first page. With four-level page tables they end
/// at 1 << 47, but with five levels the kernel puts its trampoline at the top of what those reach
/// (Documentation/arch/x86/x86_64/5level-paging.rst).
pub const USER_END: u64 = 1 << 56;
/// See [`USER_END`].
pub const USER_START: u64 = 4096;

/// Kept frames that are compared in one turn of a loop.
const BATCH: u32 = 2;

/// How often a walk may go over to the kept chain: after that it ignores it.
const ROUNDS: u32 = 3;

/// No frame number.
const NONE: u32 = u32::MAX;

/// Where a walk starts: the state right after the allocator function has returned to its caller.
#[derive(Clone, Copy)]
pub struct Start {
    pub pc: u64,
    pub sp: u64,
    pub fp: u64,
    /// rbx; 0 if it is not known, which ends a walk that needs it.
    pub bx: u64,
}

/// What is known of a process's code.
pub struct Code {
    /// The list of mappings in force ([`memtrace_common::unwind::MappingList`]).
    mappings: u64,
    /// Whether libraries were removed and the list may not show it yet.
    stale: bool,
}

impl Code {
    /// What is known now.
    ///
    /// # Safety
    /// `process` is a map value.
    #[inline(always)]
    pub unsafe fn of(process: *const ProcessState) -> Self {
        // SAFETY: promised by the caller; aligned words are read whole.
        unsafe {
            Self {
                mappings: (&raw const (*process).mappings).read_volatile(),
                stale: (&raw const (*process).loader_seen).read_volatile()
                    < (&raw const (*process).last_removal).read_volatile(),
            }
        }
    }
}

/// What the loops' callbacks are given: it must be on the BPF stack.
#[repr(C)]
struct Context {
    state: *mut ThreadState,
    start: Start,
}

/// The state of the thread whose stack is walked.
///
/// # Safety
/// `context` is that of [`walk`]'s loops, and no other reference to the state is in use.
#[inline(always)]
unsafe fn thread<'a>(context: *mut c_void) -> &'a mut ThreadState {
    // SAFETY: promised by the caller; the map value is this thread's alone.
    unsafe { &mut *(*context.cast::<Context>()).state }
}

/// Reads one word of the target's memory.
#[inline(always)]
pub fn read_word(address: u64) -> Option<u64> {
    // SAFETY: the helper checks the address and faults nothing in.
    unsafe { bpf_probe_read_user(address as *const u64) }.ok()
}

/// Reads two neighbouring words of the target's memory.
#[inline(always)]
fn read_pair(address: u64) -> Option<[u64; 2]> {
    // SAFETY: the helper checks the address and faults nothing in.
    unsafe { bpf_probe_read_user(address as *const [u64; 2]) }.ok()
}

/// Whether a uprobe's return trampoline starts at `address`; `None` if the memory there can't be read.
///
/// The kernel replaces a probed function's return address with its trampoline: one `int3`, or since Linux 6.11 on
/// x86-64 `push rax; push rcx; push r11` and the `uretprobe` system call (arch/x86/kernel/uprobes.c).
#[inline(always)]
fn return_trampoline(address: u64) -> Option<bool> {
    // SAFETY: the helper checks the address and faults nothing in.
    let code: [u8; 4] = unsafe { bpf_probe_read_user(address as *const [u8; 4]) }.ok()?;
    Some(code[0] == 0xcc || code == [0x50, 0x51, 0x41, 0x53])
}

/// Whether a word in place of a return address can be the trampoline. Its page is not readable before a thread of the
/// process has returned through it for the first time.
#[inline(always)]
pub fn may_be_return_trampoline(address: u64) -> bool {
    return_trampoline(address).unwrap_or((USER_START..USER_END).contains(&address))
}

/// Stack pointer in the outermost frame of the stack just walked.
#[inline(always)]
pub fn outermost_sp(state: &ThreadState) -> u64 {
    state.chain.levels[0].sp
}

/// Whether the stack just walked was walked by frame pointers only, so that it may have left frames out.
#[inline(always)]
pub fn by_frame_pointers(state: &ThreadState) -> bool {
    state.chain.walk.mode == Unwind::FramePointers as u32
}

/// `index` modulo [`MAX_LEVELS`], in a form that the compiler can't take away: the verifier needs to see it.
#[inline(always)]
pub fn bounded(index: u32) -> usize {
    let mut index = u64::from(index);
    // SAFETY: arithmetic on a register.
    unsafe {
        asm!("{index} &= {mask}", index = inout(reg) index, mask = const MAX_LEVELS - 1, options(pure, nomem, nostack));
    }
    index as usize
}

/// Walks the stack into `state.record` (length, end and frames). True if it is the same stack as the thread's last one.
#[inline(always)]
pub fn walk(state: *mut ThreadState, code: &Code, start: &Start) -> bool {
    let mut context = Context { state, start: *start };
    let context = (&raw mut context).cast::<c_void>();
    // SAFETY: the map value of this thread.
    let thread = unsafe { &mut *state };
    let (mode, mappings) = (maps::unwind_mode(), code.mappings);
    let before = u32::from(thread.record.len);
    let walk = &mut thread.chain.walk;
    begin(walk, start);
    walk.mode = mode;
    walk.mappings = mappings;
    walk.code.start = 0;
    walk.code.end = 0;
    walk.window_bytes = 0;
    walk.stale = u32::from(code.stale);
    let usable = !maps::plain_walks() && thread.chain.mappings == mappings && thread.chain.keep != 0 && walk.stale == 0;
    walk.kept = if usable { before } else { 0 };
    // SAFETY: the callback takes this context; the verifier checks what it does with it.
    unsafe { bpf_loop(ROUNDS + 1, round as *mut c_void, context, 0) };
    let (found, joined) = (volatile(&walk.found), volatile(&walk.joined));
    if joined != 0 {
        if found == 0 && joined == before {
            return true;
        }
        // The end is the kept chain's.
    } else {
        thread.record.end = volatile(&walk.end) as u8;
        thread.chain.keep = u64::from(volatile(&walk.keep));
    }
    thread.record.len = (joined + found) as u8;
    thread.chain.mappings = mappings;
    // SAFETY: as above.
    unsafe { bpf_loop(MAX_FRAMES as u32, place as *mut c_void, context, 0) };
    false
}

/// Callback: walks until the walk meets the kept chain or ends, and compares the rest of the chain. Once more if that
/// shows a difference; the last time without the chain.
extern "C" fn round(index: u32, context: *mut c_void) -> i64 {
    // SAFETY: the context passed by `walk`.
    let state = unsafe { thread(context) };
    state.chain.walk.joined = 0;
    state.chain.walk.adopted = NONE;
    if index >= ROUNDS {
        state.chain.walk.kept = 0;
    }
    // SAFETY: as in `walk`.
    unsafe {
        bpf_loop(2 * MAX_FRAMES as u32, step::step as *mut c_void, context, 0);
        if volatile(&state.chain.walk.joined) == 0 {
            return 1;
        }
        bpf_loop(MAX_FRAMES as u32, verify as *mut c_void, context, 0);
        if volatile(&state.chain.walk.adopted) == NONE {
            if volatile(&state.chain.walk.found) + volatile(&state.chain.walk.joined) <= MAX_FRAMES as u32 {
                return 1;
            }
            // Which frames are cut off has changed: walk them all.
            begin(&mut state.chain.walk, &(*context.cast::<Context>()).start);
            state.chain.walk.kept = 0;
            return 0;
        }
        bpf_loop(MAX_FRAMES as u32, step::adopt as *mut c_void, context, 0);
    }
    step::resume(state);
    0
}

#[inline(always)]
fn begin(walk: &mut Walk, start: &Start) {
    walk.pc = start.pc;
    walk.sp = start.sp;
    walk.fp = start.fp;
    walk.bx = start.bx;
    walk.found = 0;
    walk.end = StackEnd::Depth as u32;
    walk.keep = 0;
}

/// A value that a callback may have changed.
#[inline(always)]
fn volatile(value: &u32) -> u32 {
    // SAFETY: a reference is valid.
    unsafe { core::ptr::read_volatile(value) }
}

/// Callback: puts found frame `index` into its place in the record.
extern "C" fn place(index: u32, context: *mut c_void) -> i64 {
    // SAFETY: the context passed by `walk`.
    let state = unsafe { thread(context) };
    let walk = &state.chain.walk;
    if index >= walk.found {
        return 1;
    }
    let from = bounded(index);
    let to = bounded(walk.joined + walk.found - 1 - index);
    if to >= MAX_FRAMES {
        return 1;
    }
    // SAFETY: both indexes were bounded.
    unsafe {
        *state.record.frames.get_unchecked_mut(to) = *state.chain.scratch.get_unchecked(from);
        copy_level(state.chain.scratch_levels.get_unchecked(from), state.chain.levels.get_unchecked_mut(to));
    }
    0
}

/// Copies a level word by word. (The compiler would call `memcpy`, which is a loop over bytes here.)
#[inline(always)]
fn copy_level(from: &Level, to: &mut Level) {
    // SAFETY: both are valid; volatile so that the three copies are not joined into a call.
    unsafe {
        (&raw mut to.sp).write_volatile((&raw const from.sp).read_volatile());
        (&raw mut to.fp).write_volatile((&raw const from.fp).read_volatile());
        (&raw mut to.slots).write_volatile((&raw const from.slots).read_volatile());
    }
}

/// Callback: compares the words that the last walk read on the way from kept frame `joined - 1 - BATCH * index` outwards,
/// [`BATCH`] frames far. Where they differ the walk goes on by itself from that frame, `adopted`.
extern "C" fn verify(index: u32, context: *mut c_void) -> i64 {
    // SAFETY: the context passed by `walk`.
    let state = unsafe { thread(context) };
    for step in 0..BATCH {
        if verify_one(state, index * BATCH + step) {
            return 1;
        }
    }
    0
}

/// Compares what led from one kept frame to the next outer one; true at the end.
#[inline(always)]
fn verify_one(state: &mut ThreadState, index: u32) -> bool {
    let joined = state.chain.walk.joined;
    if index + 1 >= joined {
        // The outermost frame: the end follows from its state.
        return true;
    }
    let number = joined - 1 - index;
    let at = bounded(number - 1);
    if at >= MAX_FRAMES {
        return true;
    }
    // SAFETY: the indexes are bounded.
    let (slots, fp, cfa, outer_fp, pc) = unsafe {
        let level = state.chain.levels.get_unchecked(bounded(number));
        let outer = state.chain.levels.get_unchecked(at);
        (level.slots(), level.fp, outer.sp, outer.fp, *state.record.frames.get_unchecked(at))
    };
    let (fp_slot, cfa_slot) = slots;
    let same = fp_slot != Level::OPAQUE
        && word(state, cfa.wrapping_sub(8)) == Some(pc)
        && (fp_slot == 0 || word(state, cfa.wrapping_add_signed(i64::from(fp_slot) * 8)) == Some(outer_fp))
        && (cfa_slot == 0 || read_word(fp.wrapping_add_signed(i64::from(cfa_slot) * 8)) == Some(cfa));
    if same {
        return false;
    }
    // Everything up to this frame is as it was. It is walked on from here, and may meet the chain again further out.
    state.chain.walk.adopted = number;
    true
}

/// Reads one word of the target's stack, together with up to [`WINDOW`] words from a little below it on: the words that
/// come next lie above it.
#[inline(always)]
fn word(state: &mut ThreadState, address: u64) -> Option<u64> {
    const BYTES: u64 = WINDOW as u64 * 8;
    /// The frame pointer is saved in one of the words below the return address, next to the other registers that a
    /// function saves.
    const BELOW: u64 = 6 * 8;
    if address & 7 != 0 {
        return read_word(address);
    }
    if address.wrapping_sub(state.chain.walk.window) >= state.chain.walk.window_bytes {
        let from = address.wrapping_sub(BELOW);
        // Not beyond the outermost frame: there the stack's memory may end.
        let rest = state.chain.levels[0].sp.wrapping_sub(from) & !7;
        let bytes = if rest < BYTES { rest } else { BYTES };
        // SAFETY: writes at most as many bytes as the array has; the helper checks the address and faults nothing in.
        let error = unsafe {
            bpf_probe_read_user_buf(from as *const c_void, (&raw mut state.chain.window).cast(), bytes as u32)
        };
        if error != 0 {
            // The stack's memory ends before.
            state.chain.walk.window_bytes = 0;
            return read_word(address);
        }
        state.chain.walk.window = from;
        state.chain.walk.window_bytes = bytes;
        if BELOW >= bytes {
            return read_word(address);
        }
    }
    let mut index = address.wrapping_sub(state.chain.walk.window) >> 3;
    // SAFETY: arithmetic on a register; the index is then bounded.
    unsafe {
        asm!("{index} &= {mask}", index = inout(reg) index, mask = const WINDOW - 1, options(pure, nomem, nostack));
        Some(*state.chain.window.get_unchecked(index as usize))
    }
}

#[inline(always)]
unsafe fn bpf_probe_read_user_buf(from: *const c_void, to: *mut c_void, bytes: u32) -> i64 {
    // SAFETY: promised by the caller.
    unsafe { aya_ebpf::helpers::generated::bpf_probe_read_user(to, bytes, from) }
}
