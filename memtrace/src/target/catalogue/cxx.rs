//! C++'s replaceable functions, named as the Itanium C++ ABI mangles them on a machine where `size_t` is `unsigned long`.
//! The size, and the block of a delete, is the first argument of every one (ISO C++20, 17.6.3).

use memtrace_common::site::Arg;

use super::{Entry, allocate, free};

pub const CXX: [Entry; 20] = [
    allocate("_Znwm", Arg::A0),
    allocate("_Znam", Arg::A0),
    allocate("_ZnwmRKSt9nothrow_t", Arg::A0),
    allocate("_ZnamRKSt9nothrow_t", Arg::A0),
    allocate("_ZnwmSt11align_val_t", Arg::A0),
    allocate("_ZnamSt11align_val_t", Arg::A0),
    allocate("_ZnwmSt11align_val_tRKSt9nothrow_t", Arg::A0),
    allocate("_ZnamSt11align_val_tRKSt9nothrow_t", Arg::A0),
    free("_ZdlPv"),
    free("_ZdaPv"),
    free("_ZdlPvm"),
    free("_ZdaPvm"),
    free("_ZdlPvRKSt9nothrow_t"),
    free("_ZdaPvRKSt9nothrow_t"),
    free("_ZdlPvSt11align_val_t"),
    free("_ZdaPvSt11align_val_t"),
    free("_ZdlPvmSt11align_val_t"),
    free("_ZdaPvmSt11align_val_t"),
    free("_ZdlPvSt11align_val_tRKSt9nothrow_t"),
    free("_ZdaPvSt11align_val_tRKSt9nothrow_t"),
];
