//! The life of the target's threads: raw tracepoints, which need no tracefs.

use aya_ebpf::{helpers::bpf_get_current_pid_tgid, macros::raw_tracepoint, programs::RawTracePointContext};
use memtrace_common::{block::TRACEPOINT_STATE, event::EventKind};

use crate::{
    alloc,
    maps::{self, THREADS},
};

/// `clone(2)`: the new task shares the address space.
const CLONE_VM: u64 = 0x100;

/// Whether the current thread belongs to the target. Without a number to compare with, its having allocated tells.
#[inline(always)]
fn is_target(thread: u64) -> bool {
    match maps::target_tgid() {
        0 => THREADS.get_ptr(thread).is_some(),
        target => (thread >> 32) as u32 == target,
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
    if THREADS.get_ptr(thread | TRACEPOINT_STATE).is_some() {
        let _ = THREADS.remove(thread | TRACEPOINT_STATE);
    }
    0
}

/// A new task: when it is a forked process, it has a copy of the target's memory with the breakpoints in it.
#[raw_tracepoint(tracepoint = "task_newtask")]
pub fn new_task(ctx: RawTracePointContext) -> i32 {
    // include/trace/events/task.h: TP_PROTO(struct task_struct *task, u64 clone_flags)
    let flags: u64 = ctx.arg(1);
    let thread = bpf_get_current_pid_tgid();
    if flags & CLONE_VM == 0 && is_target(thread) {
        maps::send(EventKind::Fork, (thread >> 32) as u32, 0);
    }
    0
}

/// Another program is executed: the memory that was recorded is gone, so recording ends here.
#[raw_tracepoint(tracepoint = "sched_process_exec")]
pub fn process_exec(_ctx: RawTracePointContext) -> i32 {
    let thread = bpf_get_current_pid_tgid();
    if is_target(thread) && maps::running() {
        maps::stop();
        maps::send(EventKind::Exec, (thread >> 32) as u32, 0);
    }
    0
}
