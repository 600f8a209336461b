//! Why a file has no unwind table. Every message is one sentence with the next step.

use std::io;

/// Why a file's unwind information cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum UnwindError {
    /// It could not be read, or has been truncated since its headers were read.
    #[error("it could not be read ({0}): check the permissions of the file, and run memtrace as root")]
    Io(#[from] io::Error),
    /// Not an ELF file at all.
    #[error("it is not an ELF file: its code can only be unwound by frame pointers")]
    NotElf,
    /// An ELF file for something else than x86-64.
    #[error("it is not an x86-64 ELF program or library: memtrace supports no other yet")]
    OtherMachine,
    /// Its headers contradict themselves or the file's length.
    #[error("its ELF headers are damaged ({0}): reinstall the package it comes from, and restart the process")]
    Malformed(&'static str),
    /// More than memtrace is willing to read.
    #[error(
        "its {what} takes {size} bytes, and memtrace reads at most {limit}: unwind it by frame pointers (--unwind fp)"
    )]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Its size, bytes.
        size: u64,
        /// The largest size read, bytes.
        limit: u64,
    },
    /// Its code spans more addresses than a row can tell apart.
    #[error("its code spans more than 4 GiB of addresses: unwind it by frame pointers (--unwind fp)")]
    TooFar,
    /// More rows than a table may have.
    #[error("its unwind table would have more than {limit} rows: unwind it by frame pointers (--unwind fp)")]
    TooManyRows {
        /// The most rows of a table.
        limit: usize,
    },
    /// Reading it would take much longer than its size justifies, which no compiler's output does.
    #[error("its unwind information is made to take very long to read: do not trust this file")]
    TooComplex,
}
