//! snmalloc's functions for Rust, as its src/snmalloc/override/rust.cc declares them. Its C functions are the C
//! library's, plain or with the prefix `sn_`.

use memtrace_common::site::Arg;

use super::{Entry, allocate, free, resize};

pub const SNMALLOC: [Entry; 4] = [
    // void *sn_rust_alloc(size_t alignment, size_t size)
    allocate("sn_rust_alloc", Arg::A1),
    allocate("sn_rust_alloc_zeroed", Arg::A1),
    // void *sn_rust_realloc(void *ptr, size_t alignment, size_t old_size, size_t new_size)
    resize("sn_rust_realloc", Arg::A0, Arg::A3),
    // void sn_rust_dealloc(void *ptr, size_t alignment, size_t size)
    free("sn_rust_dealloc"),
];
