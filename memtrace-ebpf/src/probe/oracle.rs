//! For the unwinder's test alone: walks at every allocating call, as the recording programs do, and hands the walk over
//! together with the registers and the memory that it read. Loaded only when asked for.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{
        bpf_get_current_pid_tgid,
        generated::{bpf_get_attach_cookie, bpf_get_prandom_u32, bpf_probe_read_kernel, bpf_probe_read_user},
    },
    macros::uprobe,
    programs::ProbeContext,
};
use memtrace_common::{
    oracle::{CHUNK, CHUNKS, OracleControl, OracleSample},
    site::Site,
    stack::MAX_FRAMES,
};

use super::uprobe::Registers;
use crate::{
    alloc,
    maps::{self, ORACLE},
    preempt::guarded,
    unwind::{self, Code, Start},
};

/// Entry of an allocating function.
#[uprobe]
pub fn oracle_entry(ctx: ProbeContext) -> u32 {
    guarded(|| sample(&ctx));
    0
}

#[inline(always)]
fn sample(ctx: &ProbeContext) {
    if !maps::running() {
        return;
    }
    // SAFETY: the helper takes the program's context.
    let site = Site::from_cookie(unsafe { bpf_get_attach_cookie(ctx.as_ptr()) });
    // SAFETY: the context of a uprobe program is the user registers.
    let regs = unsafe { Registers::read(ctx.regs) };
    let thread = bpf_get_current_pid_tgid();
    let Some(process) = maps::process((thread >> 32) as u32) else { return };
    // SAFETY: a map value.
    let code = unsafe { Code::of(process) };
    maps::count_oracle(OracleControl::Calls);
    let sp = regs.sp.wrapping_add(u64::from(site.return_offset));
    let (Some(state), Some(pc)) = (alloc::thread_state(thread), unwind::read_word(sp)) else {
        maps::count_oracle(OracleControl::Unreadable);
        return;
    };
    let start = Start { pc, sp: sp.wrapping_add(8), fp: regs.fp, bx: regs.bx };
    unwind::walk(state, &code, &start);
    let every = maps::oracle_every();
    // Not by the time: some clocks tick so coarsely that its remainder is always the same.
    // SAFETY: a helper without arguments.
    if every > 1 && unsafe { bpf_get_prandom_u32() } % every != 0 {
        return;
    }
    let Some(mut entry) = ORACLE.reserve::<OracleSample>(0) else {
        maps::count_oracle(OracleControl::Dropped);
        return;
    };
    let sample = entry.as_mut_ptr();
    // SAFETY: the map value of this thread.
    let state = unsafe { &*state };
    // SAFETY: the entry is as large as a sample, and is written whole but for the chunks that it does not count.
    unsafe {
        (*sample).pc = start.pc;
        (*sample).sp = start.sp;
        (*sample).fp = start.fp;
        (*sample).thread = thread;
        (*sample).kept = state.chain.walk.joined;
        (*sample).len = u32::from(state.record.len);
        (*sample).end = u32::from(state.record.end);
        bpf_probe_read_kernel(
            (&raw mut (*sample).frames).cast(),
            size_of::<[u64; MAX_FRAMES]>() as u32,
            (&raw const state.record.frames).cast(),
        );
        let mut chunks = 0;
        while chunks < CHUNKS {
            let to = (&raw mut (*sample).stack).cast::<u8>().add(chunks * CHUNK);
            let from = start.sp.wrapping_add((chunks * CHUNK) as u64);
            if bpf_probe_read_user(to.cast(), CHUNK as u32, from as *const _) != 0 {
                break;
            }
            chunks += 1;
        }
        (*sample).chunks = chunks as u32;
    }
    entry.submit(0);
}
