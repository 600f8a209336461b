//! Kernel tables to raw records.
//!
//! - [`growth`]: samples of every stack's live bytes while the trace runs;
//! - [`modules`]: the target's code mappings, kept with their files open;
//! - [`stacks`]: allocations at the end, put together per stack;
//! - [`space`]: the address space as system calls change it, on [`ranges`];
//! - [`inherited`]: the pages that were resident at the start, where their memory is now;
//! - [`attribution`]: which call path made the new pages resident, from two scans ([`change`]) and the faults in between;
//! - [`faults`] and [`mappings`]: these, put together per stack;
//! - [`blocks`]: which resident pages the live blocks lie on;
//! - [`reconcile`](mod@reconcile): the change of RSS as lines that add up to it, by [`place`].

pub mod attribution;
pub mod blocks;
pub mod change;
pub mod faults;
pub mod growth;
pub mod inherited;
pub mod mappings;
pub mod modules;
mod neighbours;
pub mod place;
#[cfg(test)]
mod random;
pub mod ranges;
pub mod reconcile;
pub mod space;
pub mod stacks;
