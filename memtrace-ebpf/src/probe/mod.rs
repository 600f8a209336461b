//! Event sources: one module each.

mod oracle;
mod process;
mod uprobe;
