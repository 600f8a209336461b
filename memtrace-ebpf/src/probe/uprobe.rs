//! Uprobes on allocator functions. Where the arguments are is told by the probe's cookie.

use core::arch::asm;

use aya_ebpf::{
    EbpfContext as _,
    bindings::pt_regs,
    helpers::generated::bpf_get_attach_cookie,
    macros::{uprobe, uretprobe},
    programs::{ProbeContext, RetProbeContext},
};
use memtrace_common::{
    event::EventKind,
    site::{Arg, Site},
};

use crate::{
    alloc::{self, Call},
    maps,
    preempt::guarded,
};

#[inline(always)]
fn site(ctx: &ProbeContext) -> Site {
    // SAFETY: the helper takes the program's context.
    Site::from_cookie(unsafe { bpf_get_attach_cookie(ctx.as_ptr()) })
}

/// The registers that the handlers need.
pub struct Registers {
    pub arguments: [u64; 6],
    pub sp: u64,
    pub fp: u64,
    pub bx: u64,
}

impl Registers {
    /// Reads them all. The verifier allows only constant offsets into the context, and volatile reads keep the
    /// compiler from choosing a register by computing an offset.
    ///
    /// # Safety
    /// `regs` is the context of a uprobe program.
    #[inline(always)]
    pub unsafe fn read(regs: *const pt_regs) -> Self {
        // SAFETY: promised by the caller: all of the registers can be read.
        unsafe {
            Self {
                arguments: [
                    (&raw const (*regs).rdi).read_volatile(),
                    (&raw const (*regs).rsi).read_volatile(),
                    (&raw const (*regs).rdx).read_volatile(),
                    (&raw const (*regs).rcx).read_volatile(),
                    (&raw const (*regs).r8).read_volatile(),
                    (&raw const (*regs).r9).read_volatile(),
                ],
                sp: (&raw const (*regs).rsp).read_volatile(),
                fp: (&raw const (*regs).rbp).read_volatile(),
                bx: (&raw const (*regs).rbx).read_volatile(),
            }
        }
    }

    /// Value of an argument; 0 for [`Arg::None`].
    #[inline(always)]
    fn argument(&self, arg: Arg) -> u64 {
        match arg {
            Arg::A0 => self.arguments[0],
            Arg::A1 => self.arguments[1],
            Arg::A2 => self.arguments[2],
            Arg::A3 => self.arguments[3],
            Arg::A4 => self.arguments[4],
            Arg::A5 => self.arguments[5],
            Arg::Constant | Arg::None => 0,
        }
    }
}

/// `size` times `count`; the largest number if that does not fit, for which every allocator fails.
#[inline(always)]
fn product(size: u64, count: u64) -> u64 {
    let mut product = size.wrapping_mul(count);
    // SAFETY: a register is set to what it holds. It hides where the value comes from: the compiler would turn the check
    // below into a multiplication of 128 bits, which the BPF target lacks. (Without any instruction there could be two
    // entries for one instruction in the line information, which the kernel refuses.)
    unsafe { asm!("{product} = {product}", product = inout(reg) product, options(pure, nomem, nostack)) };
    if (size | count) >> 32 != 0 && size != 0 && product / size != count {
        return u64::MAX;
    }
    product
}

/// Entry of an allocating function.
#[uprobe]
pub fn alloc_entry(ctx: ProbeContext) -> u32 {
    guarded(|| enter(&ctx));
    0
}

#[inline(always)]
fn enter(ctx: &ProbeContext) {
    if !maps::running() {
        return;
    }
    let site = site(ctx);
    // SAFETY: the context of a uprobe program is the user registers.
    let regs = unsafe { Registers::read(ctx.regs) };
    // The constant is 0 where an argument tells the size.
    let size = regs.argument(site.size) + u64::from(site.constant);
    let size = if site.count as u8 == Arg::None as u8 { size } else { product(size, regs.argument(site.count)) };
    alloc::begin(&Call {
        site,
        size,
        pointer: regs.argument(site.pointer),
        out: regs.argument(site.out),
        sp: regs.sp.wrapping_add(u64::from(site.return_offset)),
        fp: regs.fp,
        bx: regs.bx,
    });
}

/// Return of an allocating function.
#[uretprobe]
pub fn alloc_return(ctx: RetProbeContext) -> u32 {
    guarded(|| {
        if maps::running() {
            // SAFETY: the context of a uprobe program is the user registers.
            let regs = unsafe { &*ctx.regs };
            alloc::commit(regs.rax, regs.rsp);
        }
    });
    0
}

/// Entry of a freeing function.
#[uprobe]
pub fn free_entry(ctx: ProbeContext) -> u32 {
    guarded(|| {
        if maps::running() {
            let site = site(&ctx);
            // SAFETY: as in `enter`.
            let regs = unsafe { Registers::read(ctx.regs) };
            let sp = regs.sp.wrapping_add(u64::from(site.return_offset));
            alloc::release(&site, regs.argument(site.pointer), sp);
        }
    });
    0
}

/// The dynamic loader's debugger hook: it is called before and after every change of the list of loaded libraries. The
/// cookie is the address of the word that says what is changing; 0 if it is not known.
#[uprobe]
pub fn loader_changed(ctx: ProbeContext) -> u32 {
    /// `RT_DELETE` in glibc's link.h.
    const REMOVES: u32 = 2;
    guarded(|| {
        let tgid = (aya_ebpf::helpers::bpf_get_current_pid_tgid() >> 32) as u32;
        if let Some(process) = maps::process(tgid) {
            // SAFETY: the helper takes the program's context.
            let state = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
            // SAFETY: the helper checks the address and faults nothing in.
            let state = unsafe { aya_ebpf::helpers::bpf_probe_read_user(state as *const u32) };
            // SAFETY: a map value.
            unsafe { maps::loader_event(process, state == Ok(REMOVES)) };
            maps::send(EventKind::Mappings, tgid, 0);
        }
    });
    0
}

/// Does nothing: what a probe costs by itself, for the benchmark and `selftest`.
#[uprobe]
pub fn empty_entry(_ctx: ProbeContext) -> u32 {
    0
}

/// Does nothing, at a return.
#[uretprobe]
pub fn empty_return(_ctx: RetProbeContext) -> u32 {
    0
}
