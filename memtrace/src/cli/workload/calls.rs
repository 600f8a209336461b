//! The calls themselves, each counted where it is made. Nothing here allocates in any other way.

use std::{
    array,
    hint::black_box,
    ptr,
    sync::{
        Barrier,
        atomic::{AtomicPtr, Ordering},
    },
};

use libc::{c_void, size_t};

/// Pairs of allocating and freeing that each thread makes besides the blocks it leaves.
const CHURN: usize = 50_000;
/// Blocks of the churn that are alive at a time.
const ALIVE: usize = 64;
/// Blocks that each thread hands to the next one, which frees them.
const HANDED_OVER: usize = 32;
/// Size of those blocks.
const HANDED_OVER_SIZE: size_t = 100;
/// More than any allocator has (PTRDIFF_MAX is the most, malloc(3)).
const TOO_LARGE: size_t = size_t::MAX / 2 + 4096;

/// Names of the functions called; [`Function`] is an index.
pub const FUNCTIONS: [&str; 7] =
    ["malloc", "calloc", "realloc", "reallocarray", "memalign", "aligned_alloc", "posix_memalign"];

#[derive(Clone, Copy)]
enum Function {
    Malloc,
    Calloc,
    Realloc,
    Reallocarray,
    Memalign,
    AlignedAlloc,
    PosixMemalign,
}

/// Bytes and blocks.
#[derive(Clone, Copy, Default)]
pub struct Amount {
    pub bytes: u64,
    pub count: u64,
}

impl Amount {
    fn add(&mut self, bytes: u64, count: u64) {
        self.bytes += bytes;
        self.count += count;
    }
}

/// What one thread, or all of them, did.
#[derive(Clone, Copy, Default)]
pub struct Tally {
    allocated: [Amount; FUNCTIONS.len()],
    freed: [Amount; FUNCTIONS.len()],
    failed: u64,
}

impl Tally {
    /// What the function at `index` of [`FUNCTIONS`] allocated, and what of that was freed, by whatever function.
    pub fn of(&self, index: usize) -> (Amount, Amount) {
        (self.allocated[index], self.freed[index])
    }

    /// Calls that returned no block.
    pub fn failed(&self) -> u64 {
        self.failed
    }

    /// Adds what another thread did.
    pub fn add(&mut self, other: &Self) {
        for (mine, its) in self.allocated.iter_mut().zip(&other.allocated) {
            mine.add(its.bytes, its.count);
        }
        for (mine, its) in self.freed.iter_mut().zip(&other.freed) {
            mine.add(its.bytes, its.count);
        }
        self.failed += other.failed;
    }

    #[inline(always)]
    fn got(&mut self, function: Function, pointer: *mut c_void, size: size_t) -> Block {
        // Kept from the compiler, which would leave out the calls whose result is not used.
        let pointer = black_box(pointer);
        if pointer.is_null() {
            self.failed += 1;
        } else {
            self.allocated[function as usize].add(size as u64, 1);
        }
        Block { pointer, size, function }
    }

    #[inline(always)]
    fn gone(&mut self, block: &Block) {
        if !block.pointer.is_null() {
            self.freed[block.function as usize].add(block.size as u64, 1);
        }
    }

    // Inlined, so that each place where one of these is used calls the C library itself: a call path of its own.

    #[inline(always)]
    fn malloc(&mut self, size: size_t) -> Block {
        // SAFETY: takes any number.
        self.got(Function::Malloc, unsafe { libc::malloc(black_box(size)) }, size)
    }

    #[inline(always)]
    fn calloc(&mut self, count: size_t, size: size_t) -> Block {
        // SAFETY: takes any numbers.
        let pointer = unsafe { libc::calloc(black_box(count), black_box(size)) };
        self.got(Function::Calloc, pointer, count.wrapping_mul(size))
    }

    /// Resizes a block, or allocates if there is none. If that fails, the old block is returned.
    #[inline(always)]
    fn realloc(&mut self, old: Block, size: size_t) -> Block {
        // SAFETY: the block is alive, or null; it is not used again unless the call failed.
        let pointer = unsafe { libc::realloc(black_box(old.pointer), black_box(size)) };
        self.resized(Function::Realloc, old, pointer, size)
    }

    #[inline(always)]
    fn reallocarray(&mut self, old: Block, count: size_t, size: size_t) -> Block {
        // SAFETY: as in `realloc`.
        let pointer = unsafe { libc::reallocarray(old.pointer, black_box(count), black_box(size)) };
        self.resized(Function::Reallocarray, old, pointer, count.wrapping_mul(size))
    }

    #[inline(always)]
    fn resized(&mut self, function: Function, old: Block, pointer: *mut c_void, size: size_t) -> Block {
        let new = self.got(function, pointer, size);
        // To size 0 the block is freed and nothing returned (malloc(3)).
        if new.pointer.is_null() && size != 0 {
            return old;
        }
        self.gone(&old);
        new
    }

    #[inline(always)]
    fn memalign(&mut self, alignment: size_t, size: size_t) -> Block {
        // SAFETY: takes any numbers.
        self.got(Function::Memalign, unsafe { libc::memalign(black_box(alignment), black_box(size)) }, size)
    }

    #[inline(always)]
    fn aligned_alloc(&mut self, alignment: size_t, size: size_t) -> Block {
        // SAFETY: takes any numbers.
        self.got(Function::AlignedAlloc, unsafe { libc::aligned_alloc(black_box(alignment), black_box(size)) }, size)
    }

    #[inline(always)]
    fn posix_memalign(&mut self, alignment: size_t, size: size_t) -> Block {
        let mut pointer = ptr::null_mut();
        // SAFETY: the pointer outlives the call, which takes any numbers. When it fails, the pointer stays null.
        unsafe { libc::posix_memalign(&raw mut pointer, black_box(alignment), black_box(size)) };
        self.got(Function::PosixMemalign, pointer, size)
    }

    #[inline(always)]
    fn free(&mut self, block: Block) {
        self.gone(&block);
        // SAFETY: the block is alive, or null, and not used again.
        unsafe { libc::free(block.pointer) };
    }
}

/// A block that is alive, or a null pointer. Not freed when dropped: that is a leak, as wanted.
struct Block {
    pointer: *mut c_void,
    size: size_t,
    function: Function,
}

impl Block {
    const NONE: Self = Self { pointer: ptr::null_mut(), size: 0, function: Function::Malloc };
}

/// Where threads hand blocks to each other.
pub struct Exchange<const THREADS: usize> {
    slots: [[AtomicPtr<c_void>; HANDED_OVER]; THREADS],
    filled: Barrier,
}

impl<const THREADS: usize> Exchange<THREADS> {
    /// One without blocks.
    pub fn new() -> Self {
        Self {
            slots: array::from_fn(|_| array::from_fn(|_| AtomicPtr::new(ptr::null_mut()))),
            filled: Barrier::new(THREADS),
        }
    }
}

/// Everything that thread `number` of `THREADS` does in a run.
pub fn run<const THREADS: usize>(number: usize, exchange: &Exchange<THREADS>) -> Tally {
    let mut tally = Tally::default();
    for _ in 0..10 {
        short_path(&mut tally);
        middle_path(&mut tally);
    }
    churn(&mut tally);
    hand_over(&mut tally, number, exchange);
    outer_path(&mut tally);
    failures(&mut tally);
    tally
}

/// Leaves one block of each function.
#[inline(never)]
fn short_path(tally: &mut Tally) {
    tally.malloc(11);
    tally.calloc(3, 7);
    tally.realloc(Block::NONE, 31);
    tally.reallocarray(Block::NONE, 41, 2);
    tally.memalign(64, 51);
    tally.aligned_alloc(32, 64);
    tally.posix_memalign(256, 71);
}

/// As [`short_path`], by way of blocks of other functions, and with the sizes that take other ways in the allocator.
#[inline(never)]
fn middle_path(tally: &mut Tally) {
    tally.malloc(0);
    tally.calloc(1, 200_000);
    let grown = tally.calloc(5, 5);
    let grown = tally.realloc(grown, 300);
    tally.realloc(grown, 300_000);
    let shrunk = tally.malloc(4000);
    tally.reallocarray(shrunk, 10, 10);
    tally.memalign(4096, 5000);
    tally.aligned_alloc(4096, 8192);
    tally.posix_memalign(8192, 1);
}

/// [`short_path`] and [`middle_path`] from elsewhere.
#[inline(never)]
fn outer_path(tally: &mut Tally) {
    short_path(tally);
    middle_path(tally);
    tally.malloc(12_345);
}

/// Many blocks that live for a while. Leaves none.
#[inline(never)]
fn churn(tally: &mut Tally) {
    let mut alive = [const { Block::NONE }; ALIVE];
    for i in 0..CHURN {
        let size = 1 + i * 37 % 4001;
        let block = match i % 16 {
            0 => tally.calloc(size, 2),
            1 => tally.posix_memalign(64, size),
            2 => {
                let block = tally.malloc(size);
                tally.realloc(block, size * 2)
            }
            3 => {
                let block = tally.malloc(size);
                tally.realloc(block, 0)
            }
            _ => tally.malloc(size),
        };
        let old = std::mem::replace(&mut alive[i * 7 % ALIVE], block);
        tally.free(old);
    }
    for block in alive {
        tally.free(block);
    }
}

/// Frees what the previous thread has allocated.
#[inline(never)]
fn hand_over<const THREADS: usize>(tally: &mut Tally, number: usize, exchange: &Exchange<THREADS>) {
    for slot in &exchange.slots[number] {
        let block = tally.malloc(HANDED_OVER_SIZE);
        slot.store(block.pointer, Ordering::Release);
    }
    exchange.filled.wait();
    for slot in &exchange.slots[(number + 1) % THREADS] {
        let pointer = slot.swap(ptr::null_mut(), Ordering::Acquire);
        tally.free(Block { pointer, size: HANDED_OVER_SIZE, function: Function::Malloc });
    }
}

/// Calls that return no block; the blocks that a failed call was to resize are left.
#[inline(never)]
fn failures(tally: &mut Tally) {
    tally.malloc(TOO_LARGE);
    tally.calloc(TOO_LARGE, 3);
    tally.posix_memalign(3, 100);
    let block = tally.malloc(21);
    tally.realloc(block, TOO_LARGE);
    let block = tally.malloc(22);
    tally.reallocarray(block, TOO_LARGE, 3);
}

/// Allocates and frees 64 bytes `number` times.
#[inline(never)]
pub fn pairs(number: u64) {
    for _ in 0..number {
        // SAFETY: any number; the block is freed once.
        unsafe { libc::free(black_box(libc::malloc(black_box(64)))) };
    }
}
