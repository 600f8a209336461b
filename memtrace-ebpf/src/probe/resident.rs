//! Changes of the resident set: tracepoint `kmem:rss_stat`, which tells a counter's new size.

use aya_ebpf::{EbpfContext as _, macros::tracepoint, programs::TracePointContext};
use memtrace_common::resident::{Member, field};

use super::user::{User, current};
use crate::{growth, maps, preempt::guarded};

/// A counter has changed.
#[tracepoint]
pub fn resident_changed(ctx: TracePointContext) -> u32 {
    if !maps::running() {
        return 0;
    }
    let record = ctx.as_ptr().cast::<u8>().cast_const();
    // SAFETY: the context of a tracepoint program is the event's record, whose layout the user side has checked.
    let (space, own, member, size) = unsafe {
        (
            record.add(field::SPACE).cast::<u32>().read_volatile(),
            record.add(field::CURRENT).cast::<u32>().read_volatile(),
            record.add(field::MEMBER).cast::<u32>().read_volatile(),
            record.add(field::SIZE).cast::<u64>().read_volatile(),
        )
    };
    if Member::is_resident(member) {
        guarded(|| changed(space, own, member, size));
    }
    0
}

#[inline(always)]
fn changed(space: u32, own: u32, member: u32, size: u64) {
    if own != 0
        && let Some(process) = current()
    {
        if let Some(user) = User::of_current() {
            growth::resident_changed(process, space, member, size, &user.start());
        }
    } else {
        growth::resident_changed_by_others(space, member, size);
    }
}
