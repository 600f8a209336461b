//! Kernel tables to raw records.
//!
//! - [`growth`]: samples of every stack's live bytes while the trace runs;
//! - [`modules`]: the target's code mappings, kept with their files open;
//! - [`stacks`]: the tables at the end, put together.

pub mod growth;
pub mod modules;
pub mod stacks;
