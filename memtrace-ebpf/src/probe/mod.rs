//! Event sources: one module each.

mod fault;
mod oracle;
mod process;
mod resident;
mod syscall;
mod uprobe;
mod user;
