//! Page faults of the target.

use memtrace_common::{
    fault::{Chunk, ChunkKey},
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

    /// What was recorded of the pages of process `tgid`: the numbers of chunks and their content, ascending.
    ///
    /// # Errors
    /// The table can't be read.
    pub fn page_records(&self, tgid: u32) -> Result<Vec<(u64, Chunk)>, KernelError> {
        let mut chunks = Vec::new();
        self.for_each(maps::PAGES, |key: &ChunkKey, chunk: &Chunk| {
            if key.tgid == tgid {
                chunks.push((key.chunk, *chunk));
            }
        })?;
        chunks.sort_unstable_by_key(|(number, _)| *number);
        Ok(chunks)
    }
}
