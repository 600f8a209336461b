//! Kernel tables to raw records.
