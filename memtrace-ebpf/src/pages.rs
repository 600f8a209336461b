//! The records of pages: kept in chunks, moved and dropped along with the memory that they are about.

use aya_ebpf::helpers::generated::bpf_loop;
use core::ffi::c_void;
use memtrace_common::{
    fault::{CHUNK_PAGES, Chunk, ChunkKey, PAGE, PageRecord},
    loss::Loss,
};

use crate::maps::{self, PAGES};

/// Most pages whose records are moved at a time (the kernel allows no longer loops).
const MOST_MOVED: u64 = 1 << 22;
/// Most chunks that are dropped at a time, 16 GiB of memory: records of larger mappings may outlive them.
const MOST_DROPPED: u64 = 1 << 16;

/// What the loops' callbacks are given.
struct Move {
    process: u32,
    from: u64,
    to: u64,
}

#[inline(always)]
fn key(process: u32, page: u64) -> ChunkKey {
    ChunkKey { chunk: page / CHUNK_PAGES as u64, process, zero: 0 }
}

/// The word of `page` in its chunk.
#[inline(always)]
fn slot(chunk: *mut Chunk, page: u64) -> *mut u64 {
    let place = (page % CHUNK_PAGES as u64) as usize;
    // SAFETY: the index is below the number of pages.
    unsafe { (&raw mut (*chunk).pages).cast::<u64>().add(place) }
}

/// The chunk of a page, made if there is none; `None` if there is no room.
#[inline(always)]
fn chunk(process: u32, page: u64) -> Option<*mut Chunk> {
    const NO_EXIST: u64 = 1;
    let key = key(process, page);
    if let Some(chunk) = PAGES.get_ptr_mut(key) {
        return Some(chunk);
    }
    if let Some(blank) = maps::blank_chunk() {
        // SAFETY: a map value that nothing ever writes.
        let blank = unsafe { &*blank };
        let _ = PAGES.insert(key, blank, NO_EXIST);
    }
    PAGES.get_ptr_mut(key)
}

/// Notes a fault under its page; false if there was no room.
#[inline(always)]
pub fn record(process: u32, page: u64, fault: u32, present: bool) -> bool {
    let Some(chunk) = chunk(process, page) else { return false };
    let slot = slot(chunk, page);
    // SAFETY: a word of a map value. When two threads meet at one page, either of the two records is as good, and a word is
    // written whole.
    unsafe {
        let before = core::ptr::read_volatile(slot);
        let after = PageRecord::after(before, fault, present);
        if after != before {
            core::ptr::write_volatile(slot, after);
        }
    }
    true
}

/// Moves the records of `length` bytes from one address to another, over whatever records are there.
#[inline(always)]
pub fn move_records(process: u32, from: u64, to: u64, length: u64) {
    let mut pages = length.wrapping_add(PAGE - 1) / PAGE;
    if pages > MOST_MOVED {
        maps::lose(Loss::PagesFull, pages.wrapping_sub(MOST_MOVED).wrapping_mul(PAGE));
        pages = MOST_MOVED;
    }
    let mut context = Move { process, from: from / PAGE, to: to / PAGE };
    // SAFETY: the callback takes this context.
    unsafe { bpf_loop(pages as u32, move_one as *mut c_void, (&raw mut context).cast(), 0) };
}

/// Callback: moves the record of page `index`.
extern "C" fn move_one(index: u32, context: *mut c_void) -> i64 {
    // SAFETY: the context passed by `move_records`.
    let context = unsafe { &*context.cast::<Move>() };
    let from = context.from.wrapping_add(u64::from(index));
    let to = context.to.wrapping_add(u64::from(index));
    let mut record = 0;
    if let Some(chunk) = PAGES.get_ptr_mut(key(context.process, from)) {
        let slot = slot(chunk, from);
        // SAFETY: a word of a map value.
        unsafe {
            record = core::ptr::read_volatile(slot);
            if record != 0 {
                core::ptr::write_volatile(slot, 0);
            }
        }
    }
    let there = if record == 0 { PAGES.get_ptr_mut(key(context.process, to)) } else { chunk(context.process, to) };
    match there {
        // SAFETY: as above.
        Some(chunk) => unsafe { core::ptr::write_volatile(slot(chunk, to), record) },
        None if record != 0 => maps::lose(Loss::PagesFull, PAGE),
        None => {}
    }
    0
}

/// What the loops that drop records are given.
struct Dropped {
    process: u32,
    /// A page number, or that of a chunk.
    first: u64,
}

/// Drops the records of memory that is no longer, or newly, mapped.
///
/// Whole chunks are deleted; of those at both ends, the words are. (One loop with a case for each would make the verifier of
/// Linux 7.2 look at every combination of cases.)
#[inline(always)]
pub fn drop_records(process: u32, address: u64, length: u64) {
    const PAGES: u64 = CHUNK_PAGES as u64;
    let first = address / PAGE;
    let end = address.wrapping_add(length).wrapping_add(PAGE - 1) / PAGE;
    if end <= first {
        return;
    }
    let (whole, behind) = (first.wrapping_add(PAGES - 1) / PAGES, end / PAGES);
    if whole >= behind {
        drop_pages(process, first, end);
        return;
    }
    drop_pages(process, first, whole * PAGES);
    drop_pages(process, behind * PAGES, end);
    let chunks = behind - whole;
    let chunks = if chunks < MOST_DROPPED { chunks } else { MOST_DROPPED };
    let mut context = Dropped { process, first: whole };
    // SAFETY: the callback takes this context.
    unsafe { bpf_loop(chunks as u32, drop_chunk as *mut c_void, (&raw mut context).cast(), 0) };
}

/// Drops the records of the pages from `first` up to `end`, fewer than two chunks.
#[inline(always)]
fn drop_pages(process: u32, first: u64, end: u64) {
    let pages = end.wrapping_sub(first);
    if pages > 2 * CHUNK_PAGES as u64 {
        return;
    }
    let mut context = Dropped { process, first };
    // SAFETY: the callback takes this context.
    unsafe { bpf_loop(pages as u32, drop_page as *mut c_void, (&raw mut context).cast(), 0) };
}

/// Callback: drops the record of page `index`.
extern "C" fn drop_page(index: u32, context: *mut c_void) -> i64 {
    // SAFETY: the context passed by `drop_pages`.
    let context = unsafe { &*context.cast::<Dropped>() };
    let page = context.first.wrapping_add(u64::from(index));
    if let Some(chunk) = PAGES.get_ptr_mut(key(context.process, page)) {
        // SAFETY: a word of a map value.
        unsafe { core::ptr::write_volatile(slot(chunk, page), 0) };
    }
    0
}

/// Callback: drops chunk `index`.
extern "C" fn drop_chunk(index: u32, context: *mut c_void) -> i64 {
    // SAFETY: the context passed by `drop_records`.
    let context = unsafe { &*context.cast::<Dropped>() };
    let chunk = context.first.wrapping_add(u64::from(index));
    let _ = PAGES.remove(ChunkKey { chunk, process: context.process, zero: 0 });
    0
}
