//! The kernel side's unwind tables and code mappings: filled through shared memory, and changed while it runs.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd},
    ptr::NonNull,
};

use aya::maps::{Array, Map, MapData};
use memtrace_common::{
    maps,
    settings::Control,
    unwind::{CodeMapping, MAX_MAPPINGS, MappingList},
};

use super::tracer::{KernelError, Tracer};

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
    /// Number of the list of mappings in force.
    generation: u64,
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

    /// Puts a new list of code mappings in force, at one moment for all walks. They must be sorted and must not
    /// overlap; those beyond [`MAX_MAPPINGS`] are left out.
    ///
    /// # Errors
    /// The tables can't be written.
    pub fn set_mappings(&mut self, mappings: &[CodeMapping]) -> Result<(), KernelError> {
        let name = maps::MAPPINGS;
        let used = mappings.len().min(MAX_MAPPINGS as usize);
        let list = MappingList { generation: self.code.generation + 1, count: used as u32 };
        let map = self.map_mut(name)?;
        let mut array: Array<&mut MapData, CodeMapping> =
            Array::try_from(map).map_err(|source| KernelError::Map { name, source })?;
        for (number, mapping) in (list.first()..).zip(&mappings[..used]) {
            array.set(number, mapping, 0).map_err(|source| KernelError::Map { name, source })?;
        }
        self.write_control(Control::Mappings, list.pack())?;
        self.code.generation = list.generation;
        Ok(())
    }

    fn share(&self, name: &'static str) -> Result<SharedArray, KernelError> {
        let data = match self.map(name)? {
            Map::Array(data) => data,
            _ => return Err(KernelError::Missing(name)),
        };
        let info = data.info().map_err(|source| KernelError::Map { name, source })?;
        SharedArray::map(data.fd().as_fd(), info.max_entries()).map_err(|source| KernelError::Table { name, source })
    }
}

/// An array map in this process's memory, filled from its start.
#[derive(Debug)]
struct SharedArray {
    memory: NonNull<u64>,
    entries: usize,
    used: usize,
}

// SAFETY: the memory is owned by this value alone on this side.
unsafe impl Send for SharedArray {}

impl SharedArray {
    fn map(fd: BorrowedFd<'_>, entries: u32) -> io::Result<Self> {
        let entries = entries as usize;
        // SAFETY: maps a new region; the kernel checks length and access.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                entries * STRIDE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(memory.cast::<u64>()) {
            Some(memory) if memory.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { memory, entries, used: 0 }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn has_room(&self, count: usize) -> bool {
        self.entries - self.used >= count
    }

    /// Adds values, for which there must be room: the number of the first.
    fn append(&mut self, values: impl Iterator<Item = u64>) -> u32 {
        let first = self.used;
        for value in values.take(self.entries - self.used) {
            // SAFETY: within the mapping, by the line above. The kernel side reads it only once a mapping refers to it.
            unsafe { self.memory.add(self.used).write_volatile(value) };
            self.used += 1;
        }
        first as u32
    }
}

impl Drop for SharedArray {
    fn drop(&mut self) {
        // SAFETY: the region that was mapped; nothing refers to it any more.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.entries * STRIDE) };
    }
}
