//! What to trace.
