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
    site::{Arg, Site, place},
};

use crate::{
    alloc::{self, Call},
    maps,
    preempt::guarded,
};

#[inline(always)]
fn cookie(ctx: &ProbeContext) -> u64 {
    // SAFETY: the helper takes the program's context.
    unsafe { bpf_get_attach_cookie(ctx.as_ptr()) }
}

/// The registers that the handlers need.
pub struct Registers {
    /// The integer arguments, and two zeros: an [`Arg`]'s number modulo 8 is its place, so that a choice takes no branch. (The
    /// verifier would walk all that follows once for each combination of branches.)
    arguments: [u64; 8],
    pub sp: u64,
    pub fp: u64,
    pub bx: u64,
}

const _: () = assert!(Arg::Constant as u8 % 8 == 6 && Arg::None as u8 % 8 == 7);

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
                    0,
                    0,
                ],
                sp: (&raw const (*regs).rsp).read_volatile(),
                fp: (&raw const (*regs).rbp).read_volatile(),
                bx: (&raw const (*regs).rbx).read_volatile(),
            }
        }
    }

    /// Value of the argument whose number is in the low bits of `arg`; 0 for [`Arg::Constant`] and [`Arg::None`].
    #[inline(always)]
    fn argument(&self, arg: u64) -> u64 {
        let mut place = arg;
        // SAFETY: arithmetic on a register, in a form that the compiler can't take for the number of an enumeration: the
        // verifier needs to see the bound. Then the index is below 8. The array is read as it is in memory.
        unsafe {
            asm!("{place} &= 7", place = inout(reg) place, options(pure, nomem, nostack));
            (&raw const self.arguments).cast::<u64>().add(place as usize).read_volatile()
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
    let cookie = cookie(ctx);
    let site = Site::from_cookie(cookie);
    // SAFETY: the context of a uprobe program is the user registers.
    let regs = unsafe { Registers::read(ctx.regs) };
    // The constant is 0 where an argument tells the size.
    let size = regs.argument(cookie >> place::SIZE) + u64::from(site.constant);
    let has_count = cookie >> place::COUNT & 15 != Arg::None as u64;
    let size = if has_count { product(size, regs.argument(cookie >> place::COUNT)) } else { size };
    alloc::begin(&Call {
        site,
        size,
        pointer: regs.argument(cookie >> place::POINTER),
        out: regs.argument(cookie >> place::OUT),
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
            let cookie = cookie(&ctx);
            let site = Site::from_cookie(cookie);
            // SAFETY: as in `enter`.
            let regs = unsafe { Registers::read(ctx.regs) };
            let sp = regs.sp.wrapping_add(u64::from(site.return_offset));
            alloc::release(&site, regs.argument(cookie >> place::POINTER), sp);
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
