//! The life of the traced processes and their threads: raw tracepoints, which need no tracefs.

use aya_ebpf::{
    helpers::{bpf_get_current_comm, bpf_get_current_pid_tgid, bpf_probe_read_kernel, generated::bpf_ktime_get_ns},
    macros::raw_tracepoint,
    programs::RawTracePointContext,
};
use memtrace_common::{
    block::TRACEPOINT_STATE,
    event::EventKind,
    loss::Loss,
    process::{ANY, ProcessState},
};

use crate::{
    alloc,
    maps::{self, PROCESSES, THREAD_NAMES, THREADS},
};

/// `clone(2)`: the new task shares the address space.
const CLONE_VM: u64 = 0x100;
/// `clone(2)`: the new task is a thread of the same process.
const CLONE_THREAD: u64 = 0x1_0000;

/// The process of the current thread, if it is traced. Where processes can't be told apart, its having allocated tells.
#[inline(always)]
fn traced(thread: u64) -> Option<*mut ProcessState> {
    if maps::any_process() && THREADS.get_ptr(thread).is_none() {
        return None;
    }
    maps::process((thread >> 32) as u32)
}

/// End of a thread: its state goes, since another thread may get its number.
#[raw_tracepoint(tracepoint = "sched_process_exit")]
pub fn thread_exit(_ctx: RawTracePointContext) -> i32 {
    let thread = bpf_get_current_pid_tgid();
    let tgid = (thread >> 32) as u32;
    let Some(process) = traced(thread) else { return 0 };
    let mut seen = false;
    if let Some(state) = THREADS.get_ptr_mut(thread) {
        seen = true;
        // SAFETY: the thread's own state, and the thread runs this program.
        let state = unsafe { &mut *state };
        if state.sp != 0 && maps::running() {
            alloc::abandon(state);
        }
        let _ = THREADS.remove(thread);
    }
    if THREADS.get_ptr(thread | TRACEPOINT_STATE).is_some() {
        seen = true;
        let _ = THREADS.remove(thread | TRACEPOINT_STATE);
    }
    if maps::by_thread()
        && seen
        && let Ok(name) = bpf_get_current_comm()
    {
        // SAFETY: a map value.
        let key = u64::from(unsafe { (*process).number }) << 32 | thread & 0xffff_ffff;
        let _ = THREAD_NAMES.insert(key, name, 0);
    }
    if tgid == thread as u32 {
        maps::send(EventKind::Exit, tgid, 0);
    }
    0
}

/// A new task: when it is a forked process, it has a copy of the memory of the one that forked it, with the breakpoints in it.
#[raw_tracepoint(tracepoint = "task_newtask")]
pub fn new_task(ctx: RawTracePointContext) -> i32 {
    // include/trace/events/task.h: TP_PROTO(struct task_struct *task, u64 clone_flags)
    let (task, flags): (u64, u64) = (ctx.arg(0), ctx.arg(1));
    if flags & CLONE_THREAD != 0 {
        return 0;
    }
    let thread = bpf_get_current_pid_tgid();
    let child = thread_group(task).unwrap_or(0);
    if child != 0 && PROCESSES.get_ptr(child).is_some() {
        // Left over from a process whose number is used again.
        let _ = PROCESSES.remove(child);
    }
    match traced(thread) {
        Some(parent) => {
            // SAFETY: a map value.
            let parent = unsafe { &*parent };
            let number = if child == 0 || !maps::follows() { 0 } else { follow(parent, child, flags & CLONE_VM != 0) };
            // A task that shares memory has the breakpoints because the process has them.
            if number != 0 || flags & CLONE_VM == 0 {
                maps::send(EventKind::Fork, (thread >> 32) as u32, u64::from(child) | u64::from(number) << 32);
            }
        }
        None if maps::announces() && child != 0 => maps::send(EventKind::Appeared, child, 0),
        None => {}
    }
    0
}

/// Makes a forked process a traced one: the number of its image, 0 if there was no room.
#[inline(always)]
fn follow(parent: &ProcessState, child: u32, shares_memory: bool) -> u32 {
    let number = if shares_memory {
        parent.number
    } else {
        maps::new_image(&ProcessState {
            parent: parent.number,
            // SAFETY: a helper without arguments.
            forked: unsafe { bpf_ktime_get_ns() },
            // Its pages are its parent's until it touches them, and are looked at right after this.
            late: 1,
            // Its probes come one by one, and an entry without its return would be a call without an end.
            allocations: if maps::unfiltered() { parent.allocations } else { 0 },
            ..*parent
        })
    };
    if number == 0 || PROCESSES.insert(child, number, 0).is_err() {
        maps::lose(Loss::ChildrenFull, 0);
        return 0;
    }
    number
}

/// The thread group of a task.
#[inline(always)]
fn thread_group(task: u64) -> Option<u32> {
    let offset = maps::task_tgid_offset();
    if offset == 0 {
        return None;
    }
    // SAFETY: the helper checks the address.
    unsafe { bpf_probe_read_kernel(task.wrapping_add(u64::from(offset)) as *const u32) }.ok()
}

/// Another program is executed: the memory that was recorded is gone. What comes belongs to a new image, of whose code nothing is
/// known yet.
#[raw_tracepoint(tracepoint = "sched_process_exec")]
pub fn process_exec(_ctx: RawTracePointContext) -> i32 {
    let thread = bpf_get_current_pid_tgid();
    let tgid = (thread >> 32) as u32;
    let Some(process) = traced(thread) else {
        if maps::announces() {
            maps::send(EventKind::Appeared, tgid, 0);
        }
        return 0;
    };
    if let Some(state) = THREADS.get_ptr_mut(thread) {
        // SAFETY: the thread's own state. Other threads have ended.
        unsafe { (*state).sp = 0 };
    }
    // SAFETY: a map value.
    let allocations = if maps::unfiltered() { unsafe { (*process).allocations } } else { 0 };
    let number = maps::new_image(&ProcessState { late: 1, allocations, ..ProcessState::new(0) });
    let key = if maps::any_process() { ANY } else { tgid };
    if number == 0 || PROCESSES.insert(key, number, 0).is_err() {
        let _ = PROCESSES.remove(key);
        maps::lose(Loss::ChildrenFull, 0);
    }
    maps::send(EventKind::Exec, tgid, u64::from(number));
    0
}
