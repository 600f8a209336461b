//! Mapped files that may be truncated while they are read.
//!
//! A file of the target can get shorter at any moment. Touching a page of a mapping that is then beyond its end raises
//! SIGBUS (mmap(2)), which would end memtrace. Here such a page becomes one of zeros, and the mapping remembers that.

use std::{
    fs::File,
    io,
    ops::Deref,
    ptr,
    sync::{
        Once,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use memmap2::{Mmap, MmapOptions};

/// Most files that are mapped at a time: a module, its debug file, and what that continues in, in a few threads.
const SLOTS: usize = 64;

/// Where the mapped files are: what the signal handler can look at.
struct Slot {
    start: AtomicUsize,
    /// 0: unused.
    end: AtomicUsize,
    truncated: AtomicBool,
    taken: AtomicBool,
}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        truncated: AtomicBool::new(false),
        taken: AtomicBool::new(false),
    }
}; SLOTS];

/// A file mapped for reading, as long as it was when it was mapped.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
    slot: usize,
}

impl MappedFile {
    /// Maps a whole file.
    ///
    /// # Errors
    /// It is empty, can't be mapped, or too many are mapped already.
    pub fn of(file: &File) -> io::Result<Self> {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(install);
        // SAFETY: the bytes may change while they are read, as those of every mapped file of others. All that reads them
        // checks what it reads against their length only, and every panic is caught.
        let map = unsafe { MmapOptions::new().map(file)? };
        if map.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file is empty"));
        }
        let free = |slot: &Slot| slot.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let slot = TABLE.iter().position(free).ok_or_else(|| io::Error::other("too many files are mapped"))?;
        TABLE[slot].truncated.store(false, Ordering::Relaxed);
        TABLE[slot].start.store(map.as_ptr() as usize, Ordering::Relaxed);
        TABLE[slot].end.store(map.as_ptr() as usize + map.len(), Ordering::Release);
        Ok(Self { map, slot })
    }

    /// Whether something of it was missing when it was read, because the file had become shorter.
    pub fn was_truncated(&self) -> bool {
        TABLE[self.slot].truncated.load(Ordering::Relaxed)
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        TABLE[self.slot].end.store(0, Ordering::Release);
        TABLE[self.slot].taken.store(false, Ordering::Release);
    }
}

fn install() {
    // SAFETY: the structure is filled in completely; the handler does only what a signal handler may.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle as extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut());
    }
}

extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes the information that SA_SIGINFO asks for; for SIGBUS it holds an address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code == libc::BUS_ADRERR && repair(address) {
        return;
    }
    // Not one of these mappings: the instruction is repeated, and ends the process as it would have done.
    // SAFETY: signal(2) may be called in a signal handler.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// Puts zeros where a mapped file has no bytes any more, from the page of `address` to the end of the mapping.
fn repair(address: usize) -> bool {
    const PAGE: usize = 4096;
    for slot in &TABLE {
        let end = slot.end.load(Ordering::Acquire);
        if (slot.start.load(Ordering::Relaxed)..end).contains(&address) {
            slot.truncated.store(true, Ordering::Relaxed);
            let page = address & !(PAGE - 1);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: replaces pages of a mapping that this module owns, which nobody could have read.
            let result = unsafe { libc::mmap(page as *mut _, end - page, libc::PROT_READ, flags, -1, 0) };
            return result != libc::MAP_FAILED;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write as _;

    use super::*;

    #[test]
    fn what_a_truncated_file_lacks_is_zero() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 10 * 4096 + 5]).unwrap();
        let mapped = MappedFile::of(&file).unwrap();
        let untouched = MappedFile::of(&file).unwrap();
        assert_eq!(mapped.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 7 * mapped.len() as u64);
        assert!(!mapped.was_truncated());
        file.set_len(4096).unwrap();
        assert_eq!(mapped.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 7 * 4096);
        assert!(mapped.was_truncated() && !untouched.was_truncated());
        drop(mapped);
        file.set_len(0).unwrap();
        assert_eq!(untouched[0], 0);
        assert!(MappedFile::of(&file).is_err());
    }
}
