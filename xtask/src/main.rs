//! `cargo xtask …`: sets up, builds, tests and measures memtrace.

fn main() {}
