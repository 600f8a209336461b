//! Array maps in this process's memory.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64},
};

/// An array map's memory, which the kernel side reads and writes at the same time.
#[derive(Debug)]
pub(super) struct Shared {
    memory: NonNull<u8>,
    bytes: usize,
}

// SAFETY: all access is by atomic words.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Maps the first `bytes` of a map that was made with `BPF_F_MMAPABLE`.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn map(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        // SAFETY: maps a new region; the kernel checks length and access.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(memory.cast::<u8>()) {
            Some(memory) if memory.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { memory, bytes }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The word of 8 bytes at `offset`, which must be a multiple of 8.
    pub(super) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.bytes);
        // SAFETY: inside the mapping and aligned, by the line above; it lives as long as `self`.
        unsafe { AtomicU64::from_ptr(self.memory.as_ptr().add(offset).cast()) }
    }

    /// The word of 4 bytes at `offset`, which must be a multiple of 4.
    pub(super) fn half(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.bytes);
        // SAFETY: as in `word`.
        unsafe { AtomicU32::from_ptr(self.memory.as_ptr().add(offset).cast()) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the region that was mapped; nothing refers to it any more.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.bytes) };
    }
}
