//! rbx in a frame, for the few functions whose frame is found from it.
//!
//! A walk does not carry it along. It notes for every frame where the function has saved its caller's, so that the last
//! saved one can be looked for from the frame that needs it inwards.

use aya_ebpf::helpers::generated::bpf_loop;
use core::ffi::c_void;
use memtrace_common::{
    block::ThreadState,
    stack::MAX_FRAMES,
    unwind::{RbxRule, ucontext},
};

use super::{bounded, read_word};

/// A search in progress.
struct Search {
    state: *const ThreadState,
    /// Frames further in than the one that needs rbx.
    inner: u32,
    /// Whether a frame has saved it, or lost it: 0 or 1.
    met: u32,
    /// What was saved; 0 if it is lost.
    value: u64,
}

/// rbx in the frame found last, of `found`; `start`: where the walk started. `None` if it is lost.
#[inline(always)]
pub fn find(state: *const ThreadState, found: u32, start: u64) -> Option<u64> {
    let mut search = Search { state, inner: found.wrapping_sub(1), met: 0, value: 0 };
    // SAFETY: the callback takes this search.
    unsafe { bpf_loop(MAX_FRAMES as u32, look as *mut c_void, (&raw mut search).cast(), 0) };
    // SAFETY: valid; the callback has changed them.
    let (met, saved) = unsafe { ((&raw const search.met).read_volatile(), (&raw const search.value).read_volatile()) };
    let value = if met == 0 { start } else { saved };
    (value != 0).then_some(value)
}

/// Callback: looks at the frame `index` further in.
extern "C" fn look(index: u32, context: *mut c_void) -> i64 {
    // SAFETY: the context passed by `find`.
    let search = unsafe { &mut *context.cast::<Search>() };
    if index >= search.inner {
        return 1;
    }
    let number = bounded(search.inner - 1 - index);
    // SAFETY: the state is a map value; the indexes are bounded.
    let (level, outer) = unsafe {
        let levels = &(*search.state).chain.scratch_levels;
        (levels.get_unchecked(number), levels.get_unchecked(bounded(number as u32 + 1)).sp)
    };
    let rule = level.rbx().raw();
    if rule == RbxRule::SAME.raw() {
        return 0;
    }
    search.met = 1;
    search.value = if rule == RbxRule::SIGNAL.raw() {
        read_word(level.sp.wrapping_add(ucontext::RBX)).unwrap_or(0)
    } else if rule == RbxRule::LOST.raw() {
        0
    } else {
        // The caller's stack pointer is this frame's CFA.
        read_word(outer.wrapping_sub(8 * (u64::from(rule) + 1))).unwrap_or(0)
    };
    1
}
