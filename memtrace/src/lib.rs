//! memtrace tells which code makes a running process's memory grow.
//!
//! The stages, in the direction of the data; each imports only what stands above it:
//!
//! - [`target`]: what to trace: processes, modules, allocator functions, probe sites;
//! - [`kernel`]: can this kernel do it; load, attach (the only place that names aya);
//! - [`unwind`]: `.eh_frame` to compact tables for the kernel side;
//! - [`collect`]: kernel tables to raw records and loss totals;
//! - [`profile`]: raw records to a [`profile::Profile`];
//! - [`symbol`]: a profile to a named profile;
//! - [`view`]: a named profile to plain tables;
//! - [`output`]: tables to bytes;
//! - [`cli`]: the commands, which join the stages.

pub mod cli;
pub mod collect;
pub mod kernel;
pub mod output;
pub mod profile;
pub mod symbol;
pub mod target;
pub mod unwind;
pub mod view;
