//! The life of the target's threads: raw tracepoints, which need no tracefs.

use aya_ebpf::{
    helpers::{bpf_get_current_pid_tgid, bpf_probe_read_kernel},
    macros::raw_tracepoint,
    programs::RawTracePointContext,
};
use memtrace_common::{block::TRACEPOINT_STATE, event::EventKind, loss::Loss};

use crate::{
    alloc,
    maps::{self, CHILDREN, THREADS},
};

/// `clone(2)`: the new task shares the address space.
const CLONE_VM: u64 = 0x100;

/// Whether the current thread belongs to the target. Without a number to compare with, its having allocated tells.
#[inline(always)]
fn is_target(thread: u64) -> bool {
    match maps::target_tgid() {
        0 => THREADS.get_ptr(thread).is_some(),
        _ => !maps::is_left_out((thread >> 32) as u32),
    }
}

/// End of a thread: its state goes, since another thread may get its number.
#[raw_tracepoint(tracepoint = "sched_process_exit")]
pub fn thread_exit(_ctx: RawTracePointContext) -> i32 {
    let thread = bpf_get_current_pid_tgid();
    if is_target(thread)
        && let Some(state) = THREADS.get_ptr_mut(thread)
    {
        // SAFETY: the thread's own state, and the thread runs this program.
        let state = unsafe { &mut *state };
        if state.sp != 0 && maps::running() {
            alloc::abandon(state);
        }
        let _ = THREADS.remove(thread);
    }
    // Its number can become another process's. (A child whose first thread ends before the others is left from then on.)
    if maps::follows() && (thread >> 32) as u32 == thread as u32 && maps::is_child(thread as u32) {
        let _ = CHILDREN.remove(thread as u32);
    }
    if THREADS.get_ptr(thread | TRACEPOINT_STATE).is_some() {
        let _ = THREADS.remove(thread | TRACEPOINT_STATE);
    }
    0
}

/// A new task: when it is a forked process, it has a copy of the target's memory with the breakpoints in it.
#[raw_tracepoint(tracepoint = "task_newtask")]
pub fn new_task(ctx: RawTracePointContext) -> i32 {
    // include/trace/events/task.h: TP_PROTO(struct task_struct *task, u64 clone_flags)
    let (task, flags): (u64, u64) = (ctx.arg(0), ctx.arg(1));
    let thread = bpf_get_current_pid_tgid();
    if flags & CLONE_VM == 0 && is_target(thread) {
        let child = thread_group(task).unwrap_or(0);
        if maps::follows() && maps::running() && child != 0 && CHILDREN.insert(child, 1u32, 0).is_err() {
            maps::lose(Loss::ChildrenFull, 0);
        }
        maps::send(EventKind::Fork, (thread >> 32) as u32, u64::from(child));
    }
    0
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

/// Another program is executed: the memory that was recorded is gone, so recording ends here; or for a followed child, the
/// following.
#[raw_tracepoint(tracepoint = "sched_process_exec")]
pub fn process_exec(_ctx: RawTracePointContext) -> i32 {
    let thread = bpf_get_current_pid_tgid();
    let tgid = (thread >> 32) as u32;
    if !is_target(thread) || !maps::running() {
        return 0;
    }
    if maps::is_child(tgid) {
        let _ = CHILDREN.remove(tgid);
        maps::send(EventKind::ChildExec, tgid, 0);
    } else {
        maps::stop();
        maps::send(EventKind::Exec, tgid, 0);
    }
    0
}
