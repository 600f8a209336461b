//! mimalloc's functions, as its mimalloc.h declares them (versions 2.0, 2.3 and 3.3, the names of which mean the same).
//! Those that begin with `mi_heap_` take a heap before everything else.
//!
//! Not here: the functions that copy strings (mi_strdup and the like), which take no size. Their blocks are seen where they
//! call one of these functions, and missed where the compiler put its code into them.

use memtrace_common::site::Arg;

use super::{Entry, allocate, array, free, resize, resize_array, stored};

pub const MIMALLOC: [Entry; 87] = [
    // (size) and (size, alignment[, offset])
    allocate("mi_malloc", Arg::A0),
    allocate("mi_heap_malloc", Arg::A1),
    allocate("mi_zalloc", Arg::A0),
    allocate("mi_heap_zalloc", Arg::A1),
    allocate("mi_malloc_small", Arg::A0),
    allocate("mi_heap_malloc_small", Arg::A1),
    allocate("mi_malloc_aligned", Arg::A0),
    allocate("mi_heap_malloc_aligned", Arg::A1),
    allocate("mi_malloc_aligned_at", Arg::A0),
    allocate("mi_heap_malloc_aligned_at", Arg::A1),
    allocate("mi_zalloc_aligned", Arg::A0),
    allocate("mi_heap_zalloc_aligned", Arg::A1),
    allocate("mi_zalloc_aligned_at", Arg::A0),
    allocate("mi_heap_zalloc_aligned_at", Arg::A1),
    allocate("mi_zalloc_small", Arg::A0),
    allocate("mi_heap_zalloc_small", Arg::A1),
    // (count, size) and (count, size, alignment[, offset])
    array("mi_calloc", Arg::A0, Arg::A1),
    array("mi_heap_calloc", Arg::A1, Arg::A2),
    array("mi_mallocn", Arg::A0, Arg::A1),
    array("mi_heap_mallocn", Arg::A1, Arg::A2),
    array("mi_calloc_aligned", Arg::A0, Arg::A1),
    array("mi_heap_calloc_aligned", Arg::A1, Arg::A2),
    array("mi_calloc_aligned_at", Arg::A0, Arg::A1),
    array("mi_heap_calloc_aligned_at", Arg::A1, Arg::A2),
    // (p, newsize) and (p, newsize, alignment[, offset])
    resize("mi_realloc", Arg::A0, Arg::A1),
    resize("mi_heap_realloc", Arg::A1, Arg::A2),
    resize("mi_reallocf", Arg::A0, Arg::A1),
    resize("mi_heap_reallocf", Arg::A1, Arg::A2),
    resize("mi_rezalloc", Arg::A0, Arg::A1),
    resize("mi_heap_rezalloc", Arg::A1, Arg::A2),
    resize("mi_realloc_aligned", Arg::A0, Arg::A1),
    resize("mi_heap_realloc_aligned", Arg::A1, Arg::A2),
    resize("mi_realloc_aligned_at", Arg::A0, Arg::A1),
    resize("mi_heap_realloc_aligned_at", Arg::A1, Arg::A2),
    resize("mi_rezalloc_aligned", Arg::A0, Arg::A1),
    resize("mi_heap_rezalloc_aligned", Arg::A1, Arg::A2),
    resize("mi_rezalloc_aligned_at", Arg::A0, Arg::A1),
    resize("mi_heap_rezalloc_aligned_at", Arg::A1, Arg::A2),
    // (p, count, size) and (p, count, size, alignment[, offset])
    resize_array("mi_reallocn", Arg::A0, Arg::A1, Arg::A2),
    resize_array("mi_heap_reallocn", Arg::A1, Arg::A2, Arg::A3),
    resize_array("mi_recalloc", Arg::A0, Arg::A1, Arg::A2),
    resize_array("mi_heap_recalloc", Arg::A1, Arg::A2, Arg::A3),
    resize_array("mi_recalloc_aligned", Arg::A0, Arg::A1, Arg::A2),
    resize_array("mi_heap_recalloc_aligned", Arg::A1, Arg::A2, Arg::A3),
    resize_array("mi_recalloc_aligned_at", Arg::A0, Arg::A1, Arg::A2),
    resize_array("mi_heap_recalloc_aligned_at", Arg::A1, Arg::A2, Arg::A3),
    resize_array("mi_reallocarray", Arg::A0, Arg::A1, Arg::A2),
    resize_array("mi_aligned_recalloc", Arg::A0, Arg::A1, Arg::A2),
    resize_array("mi_aligned_offset_recalloc", Arg::A0, Arg::A1, Arg::A2),
    // The heap of a thread (3.x)
    allocate("mi_theap_malloc", Arg::A1),
    allocate("mi_theap_zalloc", Arg::A1),
    allocate("mi_theap_malloc_small", Arg::A1),
    allocate("mi_theap_zalloc_small", Arg::A1),
    allocate("mi_theap_malloc_aligned", Arg::A1),
    array("mi_theap_calloc", Arg::A1, Arg::A2),
    resize("mi_theap_realloc", Arg::A1, Arg::A2),
    // With the block's size as a last argument to be written to (2.2 and 3.x)
    allocate("mi_umalloc", Arg::A0),
    allocate("mi_uzalloc", Arg::A0),
    allocate("mi_umalloc_small", Arg::A0),
    allocate("mi_uzalloc_small", Arg::A0),
    allocate("mi_umalloc_aligned", Arg::A0),
    allocate("mi_uzalloc_aligned", Arg::A0),
    array("mi_ucalloc", Arg::A0, Arg::A1),
    resize("mi_urealloc", Arg::A0, Arg::A1),
    // void *mi_expand(void *p, size_t newsize): p, or null if the block could not grow in place
    resize("mi_expand", Arg::A0, Arg::A1),
    resize("mi__expand", Arg::A0, Arg::A1),
    // (size) and (alignment, size)
    allocate("mi_valloc", Arg::A0),
    allocate("mi_pvalloc", Arg::A0),
    allocate("mi_memalign", Arg::A1),
    allocate("mi_aligned_alloc", Arg::A1),
    // int mi_posix_memalign(void **p, size_t alignment, size_t size)
    stored("mi_posix_memalign", Arg::A0, Arg::A2),
    // What C++'s operators are made of
    allocate("mi_new", Arg::A0),
    allocate("mi_new_nothrow", Arg::A0),
    allocate("mi_new_aligned", Arg::A0),
    allocate("mi_new_aligned_nothrow", Arg::A0),
    allocate("mi_heap_alloc_new", Arg::A1),
    array("mi_new_n", Arg::A0, Arg::A1),
    array("mi_heap_alloc_new_n", Arg::A1, Arg::A2),
    resize("mi_new_realloc", Arg::A0, Arg::A1),
    resize_array("mi_new_reallocn", Arg::A0, Arg::A1, Arg::A2),
    free("mi_free"),
    free("mi_free_size"),
    free("mi_free_size_aligned"),
    free("mi_free_aligned"),
    free("mi_cfree"),
    free("mi_free_small"),
    free("mi_ufree"),
];
