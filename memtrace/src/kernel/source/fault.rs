//! Page faults of the target.

use memtrace_common::{
    fault::{Chunk, ChunkKey},
    maps,
};

use crate::kernel::{
    object::program,
    tracer::{KernelError, Tracer},
};

impl Tracer {
    /// Attaches the programs that record page faults. They need to know the processes' numbers.
    ///
    /// # Errors
    /// The kernel has no such tracepoints or refuses the programs.
    pub fn attach_faults(&mut self) -> Result<(), KernelError> {
        self.attach_raw_tracepoint(program::PAGE_FAULT_USER, "page_fault_user")?;
        self.attach_raw_tracepoint(program::PAGE_FAULT_KERNEL, "page_fault_kernel")
    }

    /// What was recorded of the pages of the image `process`: the numbers of chunks and their content, ascending.
    ///
    /// # Errors
    /// The table can't be read.
    pub fn page_records(&self, process: u32) -> Result<Vec<(u64, Chunk)>, KernelError> {
        let mut chunks = Vec::new();
        self.for_each(maps::PAGES, |key: &ChunkKey, chunk: &Chunk| {
            if key.process == process {
                chunks.push((key.chunk, *chunk));
            }
        })?;
        chunks.sort_unstable_by_key(|(number, _)| *number);
        Ok(chunks)
    }
}
