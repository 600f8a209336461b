//! Page faults: raw tracepoints `page_fault_user` and `page_fault_kernel` (arch/x86/include/asm/trace/exceptions.h), both
//! with `(unsigned long address, struct pt_regs *regs, unsigned long error_code)`. They come before the kernel handles the
//! fault.

use aya_ebpf::{
    helpers::{bpf_probe_read_kernel, generated::bpf_get_current_task},
    macros::raw_tracepoint,
    programs::RawTracePointContext,
};
use memtrace_common::{event::Counter, process::ProcessState};

use super::user::{User, traced};
use crate::{growth, maps, preempt::guarded, unwind::USER_END};

/// A fault by the program's own code.
#[raw_tracepoint(tracepoint = "page_fault_user")]
pub fn page_fault_user(ctx: RawTracePointContext) -> i32 {
    if let Some(process) = traced() {
        guarded(|| {
            if let Some(user) = User::read(ctx.arg(1)) {
                handle(process, ctx.arg(0), ctx.arg(2), Counter::UserFaults, &user);
            }
        });
    }
    0
}

/// A fault of the kernel on the program's behalf: in a system call, or while it delivers a signal.
#[raw_tracepoint(tracepoint = "page_fault_kernel")]
pub fn page_fault_kernel(ctx: RawTracePointContext) -> i32 {
    if let Some(process) = traced() {
        guarded(|| {
            if !faults_disabled()
                && let Some(user) = User::of_current()
            {
                handle(process, ctx.arg(0), ctx.arg(2), Counter::KernelFaults, &user);
            }
        });
    }
    0
}

#[inline(always)]
fn handle(process: &ProcessState, address: u64, code: u64, counter: Counter, user: &User) {
    if address < USER_END {
        growth::fault(process, address, code, counter, &user.start());
    }
}

/// Whether the kernel fails accesses to absent pages at this moment rather than make them present. It does so while
/// programs like these read the target's memory, for example.
#[inline(always)]
fn faults_disabled() -> bool {
    /// The helper that reads kernel memory disables faults itself (copy_from_kernel_nofault in mm/maccess.c).
    const OWN: u32 = 1;
    let offset = maps::faults_disabled_offset();
    // SAFETY: a helper without arguments, and one that checks the address.
    offset != 0
        && unsafe { bpf_probe_read_kernel((bpf_get_current_task() + u64::from(offset)) as *const u32) }
            .is_ok_and(|depth| depth > OWN)
}
