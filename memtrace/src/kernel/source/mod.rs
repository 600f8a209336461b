//! Event sources: what calls the kernel side's handlers.

pub mod call;
pub mod fault;
pub mod oracle;
pub mod process;
pub mod resident;
pub mod uprobe;
