//! What to trace.
pub mod launch;
