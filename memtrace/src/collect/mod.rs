//! Kernel tables to raw records.
//!
//! - [`growth`]: samples of every stack's live bytes while the trace runs;
//! - [`modules`]: the target's code mappings, kept with their files open;
//! - [`stacks`]: the tables at the end, put together;
//! - [`ranges`]: which call made each range of mapped address space;
//! - [`change`]: what two readings of the resident pages differ by;
//! - [`attribution`]: which call path made the new pages resident;
//! - [`blocks`]: which resident pages the live blocks lie on;
//! - [`reconcile`](mod@reconcile): the change of RSS as lines that add up to it.

pub mod attribution;
pub mod blocks;
pub mod change;
pub mod growth;
pub mod modules;
mod neighbours;
pub mod place;
#[cfg(test)]
mod random;
pub mod ranges;
pub mod reconcile;
pub mod stacks;
