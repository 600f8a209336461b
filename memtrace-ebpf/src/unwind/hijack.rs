//! Return addresses that the kernel has replaced for somebody's return probe.
//!
//! The kernel keeps the replaced ones in a list of the thread (`return_instances` of its `struct uprobe_task`), each with
//! the stack pointer at the function's entry, where it lay. The list's layout differs from kernel to kernel: the user
//! side finds it in the kernel's type information.

use aya_ebpf::helpers::{
    bpf_probe_read_kernel,
    generated::{bpf_get_current_task, bpf_loop},
};
use core::ffi::c_void;

use crate::maps;

/// Most return probes of a thread at a time: `MAX_URETPROBE_DEPTH` in include/linux/uprobes.h.
const MOST: u32 = 64;

/// A search in the list.
struct Search {
    instance: u64,
    slot: u64,
    found: u64,
}

/// The return address that the kernel has taken from the stack at `slot`; `None` if it has not, or can't be asked.
#[inline(always)]
pub fn original(slot: u64) -> Option<u64> {
    let layout = maps::return_instances();
    if layout.task == 0 {
        return None;
    }
    // SAFETY: a helper without arguments.
    let task = unsafe { bpf_get_current_task() };
    let probes = read(task, layout.task)?;
    let mut search = Search { instance: read(probes, layout.list)?, slot, found: 0 };
    // SAFETY: the callback takes this search.
    unsafe { bpf_loop(MOST, look as *mut c_void, (&raw mut search).cast(), 0) };
    // SAFETY: valid; the callback has changed it.
    let found = unsafe { (&raw const search.found).read_volatile() };
    (found != 0).then_some(found)
}

/// Callback: looks at one entry of the list.
extern "C" fn look(_index: u32, context: *mut c_void) -> i64 {
    // SAFETY: the context passed by `original`.
    let search = unsafe { &mut *context.cast::<Search>() };
    let layout = maps::return_instances();
    if search.instance == 0 {
        return 1;
    }
    if read(search.instance, layout.stack) == Some(search.slot) {
        search.found = read(search.instance, layout.address).unwrap_or(0);
        return 1;
    }
    search.instance = read(search.instance, layout.next).unwrap_or(0);
    0
}

/// Reads a word of kernel memory.
#[inline(always)]
fn read(object: u64, offset: u32) -> Option<u64> {
    if object == 0 {
        return None;
    }
    // SAFETY: the helper checks the address.
    unsafe { bpf_probe_read_kernel(object.wrapping_add(u64::from(offset)) as *const u64) }.ok()
}
