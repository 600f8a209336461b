//! Page faults of the target.

use memtrace_common::{
    fault::{CHUNK_PAGES, Chunk, ChunkKey, PageRecord},
    maps,
    settings::Control,
};

use crate::kernel::{
    object::program,
    tracer::{KernelError, Tracer},
};

impl Tracer {
    /// Attaches the programs that record page faults. They need [`super::super::Settings::tgid`].
    ///
    /// # Errors
    /// The kernel has no such tracepoints or refuses the programs.
    pub fn attach_faults(&mut self) -> Result<(), KernelError> {
        self.attach_raw_tracepoint(program::PAGE_FAULT_USER, "page_fault_user")?;
        self.attach_raw_tracepoint(program::PAGE_FAULT_KERNEL, "page_fault_kernel")
    }

    /// Says that the pages present at the start have been looked at ([`memtrace_common::fault::Fault::late`]).
    ///
    /// # Errors
    /// The control map can't be written.
    pub fn set_late(&mut self) -> Result<(), KernelError> {
        self.write_control(Control::Late, 1)
    }

    /// Everything recorded of pages.
    ///
    /// # Errors
    /// The table can't be read.
    pub fn page_records(&self) -> Result<PageRecords, KernelError> {
        let mut chunks = Vec::new();
        self.for_each(maps::PAGES, |key: &ChunkKey, chunk: &Chunk| chunks.push((key.chunk, *chunk)))?;
        chunks.sort_unstable_by_key(|(number, _)| *number);
        Ok(PageRecords { chunks })
    }
}

/// What was recorded of pages: 8 bytes a page, in the chunks in which the kernel side keeps them.
#[derive(Debug, Default)]
pub struct PageRecords {
    /// Sorted by number.
    chunks: Vec<(u64, Chunk)>,
}

impl PageRecords {
    /// Page numbers (address divided by the page size) with their records, in rising order; pages without a fault are
    /// left out.
    pub fn iter(&self) -> impl Iterator<Item = (u64, PageRecord)> {
        self.chunks.iter().flat_map(|(number, chunk)| {
            let first = number * CHUNK_PAGES as u64;
            let pages = (first..).zip(&chunk.pages).filter(|(_, packed)| **packed != 0);
            pages.map(|(page, packed)| (page, PageRecord::unpack(*packed)))
        })
    }
}
