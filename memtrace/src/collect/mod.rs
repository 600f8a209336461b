//! Kernel tables to raw records.
//!
//! - [`space`]: the address space as system calls change it, on [`ranges`];
//! - [`attribution`]: which call path made the new pages resident, from two scans ([`change`]) and the faults in between;
//! - [`faults`] and [`mappings`]: these, put together per stack;
//! - [`growth`]: samples of every stack's live bytes while the trace runs;
//! - [`modules`]: the target's code mappings, kept with their files open;
//! - [`stacks`]: the tables at the end, put together.

pub mod attribution;
pub mod change;
pub mod faults;
pub mod growth;
pub mod mappings;
pub mod modules;
mod neighbours;
#[cfg(test)]
mod random;
pub mod ranges;
pub mod space;
pub mod stacks;
