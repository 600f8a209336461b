//! How much memory something takes, counted by the allocator of the test program.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    static NOW: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

fn grow(bytes: usize) {
    let now = NOW.get().saturating_add(bytes);
    NOW.set(now);
    PEAK.set(PEAK.get().max(now));
    CALLS.set(CALLS.get().wrapping_add(1));
}

fn shrink(bytes: usize) {
    NOW.set(NOW.get().saturating_sub(bytes));
}

// SAFETY: everything is done by the system's allocator; the numbers beside are those of the thread alone, and neither
// allocate nor need to be dropped.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's layout.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        shrink(layout.size());
        // SAFETY: the caller's block and layout.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grow(size);
        shrink(layout.size());
        // SAFETY: the caller's block, layout and size.
        unsafe { System.realloc(block, layout, size) }
    }
}

/// What a piece of work took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Most bytes at a time, beside what there was before.
    pub bytes: usize,
    /// Calls of the allocator: work that has no end has no end of them either, or hangs.
    pub calls: usize,
}

impl Taken {
    /// The larger of both.
    pub fn max(self, other: Self) -> Self {
        Self { bytes: self.bytes.max(other.bytes), calls: self.calls.max(other.calls) }
    }
}

/// What `work` takes on this thread.
pub fn taken<T>(work: impl FnOnce() -> T) -> (T, Taken) {
    let (before, calls) = (NOW.get(), CALLS.get());
    PEAK.set(before);
    let result = work();
    (result, Taken { bytes: PEAK.get().saturating_sub(before), calls: CALLS.get().wrapping_sub(calls) })
}
