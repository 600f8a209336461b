//! The C library's functions and jemalloc's own, which all come with a prefix too.

use memtrace_common::site::{Answer, Arg};

use super::{Entry, allocate, array, free, resize, resize_array, sized, stored};
use crate::target::function::{Arguments, Role};

/// Bytes of the longest and of the shortest name below.
pub const LONGEST: usize = 18;
pub const SHORTEST: usize = 4;

/// As malloc(3), posix_memalign(3), cfree(3), reallocf(3) of FreeBSD, and ISO C23 (7.24.3) declare them. Of several names
/// for one address the first in this order is the one shown.
pub const C: [Entry; 14] = [
    // void *malloc(size_t size)
    allocate("malloc", Arg::A0),
    // void *calloc(size_t nmemb, size_t size)
    array("calloc", Arg::A0, Arg::A1),
    // void *realloc(void *ptr, size_t size)
    resize("realloc", Arg::A0, Arg::A1),
    // void *reallocarray(void *ptr, size_t nmemb, size_t size)
    resize_array("reallocarray", Arg::A0, Arg::A1, Arg::A2),
    // void *memalign(size_t alignment, size_t size)
    allocate("memalign", Arg::A1),
    // void *aligned_alloc(size_t alignment, size_t size)
    allocate("aligned_alloc", Arg::A1),
    // int posix_memalign(void **memptr, size_t alignment, size_t size)
    stored("posix_memalign", Arg::A0, Arg::A2),
    // void *valloc(size_t size)
    allocate("valloc", Arg::A0),
    // void *pvalloc(size_t size)
    allocate("pvalloc", Arg::A0),
    // void *reallocf(void *ptr, size_t size)
    resize("reallocf", Arg::A0, Arg::A1),
    // void free(void *ptr)
    free("free"),
    // void cfree(void *ptr): gone from glibc's headers since 2.26, kept as a symbol for old programs
    free("cfree"),
    // void free_sized(void *ptr, size_t size)
    free("free_sized"),
    // void free_aligned_sized(void *ptr, size_t alignment, size_t size)
    free("free_aligned_sized"),
];

/// As jemalloc(3) and jemalloc's jemalloc.h declare them.
pub const JEMALLOC: [Entry; 5] = [
    // void *mallocx(size_t size, int flags)
    allocate("mallocx", Arg::A0),
    // void *rallocx(void *ptr, size_t size, int flags)
    resize("rallocx", Arg::A0, Arg::A1),
    // size_t xallocx(void *ptr, size_t size, size_t extra, int flags)
    ("xallocx", Role::Allocate, Arguments { pointer: Arg::A0, answer: Answer::InPlace, ..sized(Arg::A1) }),
    // void dallocx(void *ptr, int flags)
    free("dallocx"),
    // void sdallocx(void *ptr, size_t size, int flags)
    free("sdallocx"),
];
