//! The life of the target's threads: raw tracepoints, which need no tracefs.

use aya_ebpf::{helpers::bpf_get_current_pid_tgid, macros::raw_tracepoint, programs::RawTracePointContext};
use memtrace_common::event::EventKind;

use crate::maps::{self, THREADS};

#[inline(always)]
fn is_target(tgid: u32) -> bool {
    let target = maps::target_tgid();
    target != 0 && tgid == target
}

/// End of a thread: its state goes, since another thread may get its number.
#[raw_tracepoint(tracepoint = "sched_process_exit")]
pub fn thread_exit(_ctx: RawTracePointContext) -> i32 {
    let thread = bpf_get_current_pid_tgid();
    let tgid = (thread >> 32) as u32;
    let target = maps::target_tgid();
    if target == 0 || tgid == target {
        let _ = THREADS.remove(thread);
    }
    0
}

/// Another program is executed: the memory that was recorded is gone, so recording ends here.
#[raw_tracepoint(tracepoint = "sched_process_exec")]
pub fn process_exec(_ctx: RawTracePointContext) -> i32 {
    let tgid = (bpf_get_current_pid_tgid() >> 32) as u32;
    if is_target(tgid) && maps::running() {
        maps::stop();
        maps::send(EventKind::Exec, tgid, 0);
    }
    0
}
