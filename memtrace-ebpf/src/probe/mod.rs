//! Event sources: one module each.

mod process;
mod uprobe;
