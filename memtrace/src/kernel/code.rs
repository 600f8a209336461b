//! The kernel side's unwind tables: filled through shared memory, while it runs.

use std::sync::atomic::Ordering;

use memtrace_common::maps;

use super::{
    shared::Shared,
    tracer::{KernelError, Tracer},
};

/// Bytes of an array map's element in shared memory: values are rounded up to 8 (kernel/bpf/arraymap.c).
const STRIDE: usize = 8;

/// Where a module's table is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableRef {
    /// See [`CodeMapping::first_row`].
    pub first_row: u32,
    /// See [`CodeMapping::rows`].
    pub rows: u32,
    /// See [`CodeMapping::first_block`].
    pub first_block: u32,
    /// See [`CodeMapping::blocks`].
    pub blocks: u32,
}

/// What a tracer knows of its code tables.
#[derive(Debug, Default)]
pub(super) struct CodeTables {
    rows: Option<SharedArray>,
    index: Option<SharedArray>,
}

impl Tracer {
    /// Adds a module's table; `None` if there is no room for it any more.
    ///
    /// # Errors
    /// The tables can't be mapped into this process.
    pub fn add_table(&mut self, rows: &[u64], index: &[u32]) -> Result<Option<TableRef>, KernelError> {
        if self.code.rows.is_none() {
            self.code.rows = Some(self.share(maps::ROWS)?);
            self.code.index = Some(self.share(maps::ROW_INDEX)?);
        }
        let (Some(all_rows), Some(all_index)) = (&mut self.code.rows, &mut self.code.index) else {
            return Err(KernelError::Missing(maps::ROWS));
        };
        if !all_rows.has_room(rows.len()) || !all_index.has_room(index.len()) {
            return Ok(None);
        }
        Ok(Some(TableRef {
            first_row: all_rows.append(rows.iter().copied()),
            rows: rows.len() as u32,
            first_block: all_index.append(index.iter().map(|entry| u64::from(*entry))),
            blocks: index.len() as u32,
        }))
    }

    fn share(&self, name: &'static str) -> Result<SharedArray, KernelError> {
        let (memory, _) = self.share_map(name)?;
        Ok(SharedArray { memory, used: 0 })
    }
}

/// An array map that is filled from its start.
#[derive(Debug)]
struct SharedArray {
    memory: Shared,
    used: usize,
}

impl SharedArray {
    fn has_room(&self, count: usize) -> bool {
        self.memory.bytes() / STRIDE - self.used >= count
    }

    /// Adds values, for which there must be room: the number of the first.
    fn append(&mut self, values: impl Iterator<Item = u64>) -> u32 {
        let first = self.used;
        for value in values.take(self.memory.bytes() / STRIDE - self.used) {
            // The kernel side reads it only once a mapping refers to it.
            self.memory.word(self.used * STRIDE).store(value, Ordering::Relaxed);
            self.used += 1;
        }
        first as u32
    }
}
