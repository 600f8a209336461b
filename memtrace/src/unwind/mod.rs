//! `.eh_frame` of an ELF file to a [`Table`] that the kernel side can search.
//!
//! `elf` reads the [`Sections`] that are needed from a file; `cfi` decodes call frame information (DWARF 5 section 6.4,
//! and for `.eh_frame` the LSB core specification 10.6); `rule` turns one decoded row into the form of
//! [`memtrace_common::unwind`]; `plt` makes rows for code of linkers that describe none; `table` puts the rows of all
//! functions together and indexes them.
//!
//! Files are taken for hostile: reads, rows and time are bounded, and damage ends in an error or a count, never in a
//! panic.

mod cfi;
mod elf;
mod error;
mod plt;
mod rule;
mod sections;
mod table;

pub use elf::ReadAt;
pub use error::UnwindError;
pub use rule::Reason;
pub use sections::{Section, Sections};
pub use table::{Share, Skipped, Summary, Table};

#[cfg(test)]
mod fixture;
#[cfg(test)]
mod fuzz_tests;
#[cfg(test)]
mod readelf_tests;
#[cfg(test)]
mod stepping;
#[cfg(test)]
mod stepping_tests;
