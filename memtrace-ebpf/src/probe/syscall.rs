//! System calls: raw tracepoints `sys_enter (struct pt_regs *regs, long id)` and `sys_exit (struct pt_regs *regs, long ret)`
//! (include/trace/events/syscalls.h).

use aya_ebpf::{macros::raw_tracepoint, programs::RawTracePointContext};
use memtrace_common::call::Call;

use super::user::{User, traced};
use crate::{growth, preempt::guarded};

/// Entry of a system call.
#[raw_tracepoint(tracepoint = "sys_enter")]
pub fn call_entry(ctx: RawTracePointContext) -> i32 {
    let Some(call) = Call::from_system_call(ctx.arg(1)) else { return 0 };
    if let Some(process) = traced() {
        guarded(|| {
            if let Some(user) = User::read(ctx.arg(0)) {
                growth::call_entry(process, call, &user.arguments(), &user.start());
            }
        });
    }
    0
}

/// Exit of a system call.
#[raw_tracepoint(tracepoint = "sys_exit")]
pub fn call_exit(ctx: RawTracePointContext) -> i32 {
    if let Some(process) = traced() {
        guarded(|| growth::call_exit(process, ctx.arg(1)));
    }
    0
}
