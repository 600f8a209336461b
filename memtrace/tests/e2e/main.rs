//! End-to-end tests: memtrace against programs whose allocations are known exactly.
//!
//! The programs are in `tests/fixtures`; each counts its own allocations, call by call, and prints them as JSON. The
//! tests run as root on a kernel with uprobes, and say loudly what is missing otherwise. None of them relies on how
//! fast anything is: they wait for lines and for states, with generous limits.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support {
    pub mod build;
    pub mod cargo;
    pub mod cells;
    pub mod code;
    pub mod compare;
    pub mod cpp_library;
    pub mod folded;
    pub mod growth;
    pub mod json;
    pub mod kernel;
    pub mod memtrace;
    pub mod process;
    pub mod root;
    pub mod smaps;
    pub mod start;
    pub mod target;
    pub mod told;
    pub mod trace;
    pub mod truth;
}

mod allocators;
mod bad_input;
mod bad_modules;
mod command;
mod custom;
mod fixtures;
mod harm;
mod limits;
mod names;
mod names_apart;
mod outputs;
mod pages;
mod pages_exact;
mod pages_life;
mod pages_refused;
mod places;
mod programs;
mod real_programs;
mod real_redis;
mod real_servers;
mod reconcile;
mod reconcile_programs;
mod rules;
mod space;
mod stacks;
mod stacks_bounds;
mod stacks_late;
mod stacks_loader;
mod targets;
mod targets_blind;
mod targets_chosen;
mod targets_filter;
mod targets_life;
mod targets_servers;
mod targets_split;
mod truth;
