//! What happens when the target's pages become resident and when its address space changes. Nothing here knows what
//! reported it.

use aya_ebpf::helpers::{bpf_get_current_pid_tgid, generated::bpf_ktime_get_ns};
use memtrace_common::{
    block::{TRACEPOINT_STATE, ThreadState},
    call::{ARGUMENTS, Call, CallEvent},
    event::Counter,
    fault::{Fault, PAGE},
    loss::Loss,
    process::ProcessState,
    resident::{UNKNOWN, entry},
    site::special,
    stack::{OVERFLOW_STACK, OVERFLOW_TRACEPOINT_STACK},
};

use crate::{
    alloc,
    maps::{self, CALLS, RESIDENT, THREADS},
    pages, stack,
    unwind::{self, Code, Start},
};

/// System calls return errors as numbers from -1 down to this (include/linux/err.h).
const MAX_ERROR: i64 = 4095;

/// Bits of the error code of a page fault (Intel SDM volume 3, 4.7).
mod error {
    /// A page was there.
    pub const PRESENT: u64 = 1;
    /// The access was a write.
    pub const WRITE: u64 = 2;
}

/// A stack and what it suffered.
struct Numbered {
    number: u32,
    /// 1 plus the number of a [`Loss`]; 0 for none.
    loss: u32,
}

/// Walks the current thread's stack from `start` and gives it its number. Not to be called inside another walk of a
/// tracepoint.
#[inline(always)]
fn number(thread: u64, process: &ProcessState, site: u16, start: &Start) -> Option<Numbered> {
    let state = alloc::thread_state(thread | TRACEPOINT_STATE)?;
    // SAFETY: a reference to a map value.
    let code = unsafe { Code::of(process) };
    let unchanged = unwind::walk(state, &code, start);
    // SAFETY: a map value that only this thread uses, in one program at a time: those of tracepoints run with
    // preemption off, and the page faults that they cause themselves are left out.
    let state = unsafe { &mut *state };
    state.return_address = start.pc;
    stack::number(state, thread, process.number, site, unchanged);
    let number = if state.stack == OVERFLOW_STACK { OVERFLOW_TRACEPOINT_STACK } else { state.stack };
    Some(Numbered { number, loss: state.loss })
}

/// A page fault at `address`, with the processor's `code`.
#[inline(always)]
pub fn fault(process: &ProcessState, address: u64, code: u64, counter: Counter, start: &Start) {
    let thread = bpf_get_current_pid_tgid();
    let Some(stack) = number(thread, process, special::FAULT, start) else {
        maps::lose(Loss::ThreadsFull, PAGE);
        return;
    };
    maps::count(counter);
    maps::settle_allocated(stack.number, PAGE);
    if stack.loss != 0 {
        maps::lose_number(stack.loss - 1, PAGE);
    }
    let fault = Fault { stack: stack.number, write: code & error::WRITE != 0, late: process.late != 0 };
    if !pages::record(process.number, address / PAGE, fault.pack(), code & error::PRESENT != 0) {
        maps::lose(Loss::PagesFull, PAGE);
    }
}

/// Entry of a system call that changes the address space. `call`: a [`memtrace_common::call::Call`].
#[inline(always)]
pub fn call_entry(process: &ProcessState, call: u32, arguments: &[u64; ARGUMENTS], start: &Start) {
    let thread = bpf_get_current_pid_tgid();
    maps::count(Counter::Calls);
    let Some(stack) = number(thread, process, special::of_call(call), start) else {
        maps::lose(Loss::CallsLost, 0);
        return;
    };
    if stack.loss != 0 {
        maps::lose(Loss::CallsUnnamed, 0);
    }
    if let Some(state) = THREADS.get_ptr_mut(thread | TRACEPOINT_STATE) {
        // Its exit is wanted.
        // SAFETY: a map value that only this thread uses.
        let state = unsafe { &mut *state };
        state.sp = u64::from(call) + 1;
        state.old_address = arguments[0];
        state.size = arguments[1];
        state.out_pointer = arguments[2];
    }
    if maps::records_pages() && call == Call::Munmap as u32 {
        // Before the kernel can hand the range to another thread.
        pages::drop_records(process.number, arguments[0], arguments[1]);
    }
    let flags = if in_allocator(thread, start.sp) { CallEvent::IN_ALLOCATOR } else { 0 };
    send(process, call, thread, |event| {
        event.exit = 0;
        event.arguments = *arguments;
        event.result = 0;
        event.stack = stack.number;
        event.flags = flags;
    });
}

/// Exit of any system call.
#[inline(always)]
pub fn call_exit(process: &ProcessState, result: i64) {
    let thread = bpf_get_current_pid_tgid();
    let Some(state) = THREADS.get_ptr_mut(thread | TRACEPOINT_STATE) else { return };
    // SAFETY: a map value that only this thread uses.
    let state = unsafe { &mut *state };
    if state.sp == 0 {
        return;
    }
    let call = (state.sp - 1) as u32;
    state.sp = 0;
    if maps::records_pages() && !(-MAX_ERROR..=0).contains(&result) {
        follow_pages(process.number, call, state, result as u64);
    }
    send(process, call, thread, |event| {
        event.exit = 1;
        event.arguments = [0; ARGUMENTS];
        event.result = result;
        event.stack = 0;
        event.flags = 0;
    });
}

/// Keeps the records of pages right after a call that returned an address.
#[inline(always)]
fn follow_pages(process: u32, call: u32, state: &ThreadState, result: u64) {
    let (address, length, new_length) = (state.old_address, state.size, state.out_pointer);
    if call == Call::Mmap as u32 {
        // What was there before is no more.
        pages::drop_records(process, result, length);
    } else if call == Call::Mremap as u32 && result != address && length != 0 {
        let moved = if length < new_length { length } else { new_length };
        pages::move_records(process, address, result, moved);
    }
}

/// Whether the thread is inside a probed allocating function, whose frame then lies above `sp`.
#[inline(always)]
fn in_allocator(thread: u64, sp: u64) -> bool {
    // SAFETY: a map value of this thread.
    THREADS.get_ptr(thread).is_some_and(|state| unsafe { (*state).sp } > sp)
}

#[inline(always)]
fn send(process: &ProcessState, call: u32, thread: u64, fill: impl FnOnce(&mut CallEvent)) {
    let Some(mut entry) = CALLS.reserve::<CallEvent>(0) else {
        maps::lose(Loss::CallsLost, 0);
        return;
    };
    // SAFETY: the entry is as large as an event, all of whose fields are written here.
    unsafe {
        let event = &mut *entry.as_mut_ptr();
        event.call = call;
        event.process = process.number;
        event.tid = thread as u32;
        // SAFETY: a helper without arguments.
        event.time = bpf_ktime_get_ns();
        fill(event);
    }
    entry.submit(0);
}

/// A counter of the target's resident set has got a new size by the current thread, one of the target's.
#[inline(always)]
pub fn resident_changed(process: &ProcessState, space: u32, member: u32, size: u64, start: &Start) {
    let Some(known) = RESIDENT.get_ptr_mut(entry::SPACE) else { return };
    // SAFETY: map memory, an aligned word.
    unsafe { core::ptr::write_volatile(known, u64::from(space)) };
    let Some(last) = exchange_size(member, size) else { return };
    let Some(stack) = number(bpf_get_current_pid_tgid(), process, special::of_member(member), start) else {
        maps::lose(Loss::ThreadsFull, size.abs_diff(last));
        return;
    };
    if stack.loss != 0 {
        maps::lose_number(stack.loss - 1, size.abs_diff(last));
    }
    if size >= last {
        maps::settle_allocated(stack.number, size - last);
    } else {
        maps::settle_freed(stack.number, last - size);
    }
}

/// The same by somebody else: a thread of the kernel, or another process.
#[inline(always)]
pub fn resident_changed_by_others(space: u32, member: u32, size: u64) {
    let Some(known) = RESIDENT.get_ptr_mut(entry::SPACE) else { return };
    // SAFETY: map memory, an aligned word.
    if unsafe { core::ptr::read_volatile(known) } != u64::from(space) {
        return;
    }
    let Some(last) = exchange_size(member, size) else { return };
    let (sum, bytes) =
        if size >= last { (entry::OTHERS_ADDED, size - last) } else { (entry::OTHERS_REMOVED, last - size) };
    if let Some(sum) = RESIDENT.get_ptr_mut(sum + member) {
        // SAFETY: map memory, an aligned word.
        unsafe { maps::add(sum, bytes) };
    }
}

/// Notes a counter's new size; the one before, `None` if it is not known. Differences of sizes that were taken one after the
/// other add up to the change from the first to the last, in whatever order concurrent changes come.
#[inline(always)]
fn exchange_size(member: u32, size: u64) -> Option<u64> {
    let slot = RESIDENT.get_ptr_mut(entry::LAST + member)?;
    // SAFETY: map memory, an aligned word.
    let last = unsafe { maps::exchange(slot, size) };
    if last != UNKNOWN {
        return Some(last);
    }
    let first = RESIDENT.get_ptr_mut(entry::FIRST + member)?;
    // SAFETY: map memory, an aligned word.
    unsafe { core::ptr::write_volatile(first, size) };
    None
}
