//! Keeping other threads off the CPU while a program runs.
//!
//! Since Linux 6.13 the verifier gives programs of the kprobe type, uprobe programs among them, a stack of their own for
//! each CPU if a function of theirs takes 64 bytes or more (`bpf_enable_priv_stack` in kernel/bpf/verifier.c). Programs
//! on kprobes run with preemption off, but those on uprobes can be preempted: the next thread that comes by the probe
//! on this CPU then overwrites the first one's stack, where pointers are that the verifier trusts. So a program with
//! such a stack turns preemption off before it writes to its stack, and on again after it has read from it last (a test
//! on the user side looks at the instructions).
//!
//! Programs on tracepoints can be preempted from Linux 7 on. The kernel does not run one that is running already on the CPU, so
//! none of them overwrites the other's stack; but the event would be missed. They turn preemption off as well.

use core::arch::asm;
use memtrace_common::settings::calls;

use crate::maps;

/// Calls a kernel function without arguments by its stand-in.
macro_rules! call {
    ($number:expr) => {
        // SAFETY: clobbers what every call may clobber. The user side has replaced the number, or this is never reached.
        #[cfg(target_arch = "bpf")]
        unsafe {
            asm!(
                "call {number}",
                number = const $number,
                lateout("r0") _, lateout("r1") _, lateout("r2") _, lateout("r3") _, lateout("r4") _, lateout("r5") _,
            );
        }
        // Lints are checked for the machine that builds, which has other registers; there nothing is assembled.
        // SAFETY: as above.
        #[cfg(not(target_arch = "bpf"))]
        unsafe {
            asm!("call {number}", number = const $number);
        }
    };
}

/// Runs `body` without being preempted, where the user side has found that necessary.
#[inline(always)]
pub fn guarded(body: impl FnOnce()) {
    // A constant for the verifier, which takes the branch not taken out of the program.
    if maps::preempt_guard() {
        call!(calls::PREEMPT_DISABLE);
    }
    body();
    if maps::preempt_guard() {
        call!(calls::PREEMPT_ENABLE);
    }
}
