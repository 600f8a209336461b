//! Kernel tables to raw records.
//!
//! - [`growth`]: samples of every stack's live bytes while the trace runs;
//! - [`stacks`]: the tables at the end, put together.

pub mod growth;
pub mod stacks;
