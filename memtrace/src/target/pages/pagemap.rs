//! Reading `/proc/PID/pagemap`, for kernels without `PAGEMAP_SCAN` (Documentation/admin-guide/mm/pagemap.rst).

use std::{fs::File, io, os::unix::fs::FileExt as _, ptr};

use memtrace_common::fault::PAGE;

use super::{
    Process, TargetError,
    builder::{Builder, Entry},
    smaps,
};

/// Bytes of one entry.
const ENTRY: u64 = 8;
/// Address space whose entries are read at once: 1 MiB of them. A multiple of [`HUGE`], to which pieces are aligned.
const PIECE: u64 = 512 << 20;
/// Bytes that a huge page table entry maps.
const HUGE: u64 = 2 << 20;
const HUGE_PAGES: usize = (HUGE / PAGE) as usize;

const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const FILE: u64 = 1 << 61;
/// `MADV_GUARD_INSTALL`, Linux 6.15: such an entry is called swapped too.
const GUARD: u64 = 1 << 58;
const FRAME: u64 = (1 << 55) - 1;

/// Where the zero page is, by number of the page frame. Without `CAP_SYS_ADMIN` frames are hidden.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroFrames {
    /// The zero page; `None` if frames are hidden.
    pub page: Option<u64>,
    /// First frame of the huge zero page, if there is one.
    pub huge: Option<u64>,
}

impl ZeroFrames {
    /// Finds them by reading memory of memtrace's own that was never written.
    pub fn find() -> io::Result<Self> {
        let file = File::open("/proc/self/pagemap")?;
        let fresh = [Fresh::new()?, Fresh::new()?];
        let page = frame(&file, fresh[0].page())?;
        let huge = match (fresh[0].huge(&file)?, fresh[1].huge(&file)?) {
            // Not the huge zero page unless it is the same for both: the kernel can be told to give each its own.
            (Some(one), Some(other)) if one == other && Some(one) != page => Some(one),
            _ => None,
        };
        Ok(Self { page, huge })
    }

    fn contains(self, frame: u64) -> bool {
        let in_huge = |first: u64| (first..first + HUGE_PAGES as u64).contains(&frame);
        self.page == Some(frame) || self.huge.is_some_and(in_huge)
    }
}

/// Private memory that was never written, with a whole aligned huge page in it.
struct Fresh(*mut libc::c_void);

impl Fresh {
    const SIZE: usize = 3 * HUGE as usize;

    fn new() -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, where the kernel likes.
        let memory = unsafe { libc::mmap(ptr::null_mut(), Self::SIZE, libc::PROT_READ, flags, -1, 0) };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(memory))
    }

    /// Address of the first page, which has been read.
    fn page(&self) -> u64 {
        // SAFETY: the mapping is readable.
        unsafe { self.0.cast::<u8>().read_volatile() };
        self.0 as u64
    }

    /// First frame of a huge page after a read; `None` if the kernel did not give one.
    fn huge(&self, file: &File) -> io::Result<Option<u64>> {
        let start = (self.0 as u64 + PAGE).next_multiple_of(HUGE);
        // SAFETY: within the mapping. Where there are no huge pages it fails, and what is found is the zero page.
        unsafe { libc::madvise(start as *mut libc::c_void, HUGE as usize, libc::MADV_HUGEPAGE) };
        // SAFETY: within the mapping, which is readable.
        unsafe { (start as *const u8).read_volatile() };
        frame(file, start)
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, to which nothing points any more.
        unsafe { libc::munmap(self.0, Self::SIZE) };
    }
}

/// The frame behind an address of this process; `None` if it is hidden.
fn frame(file: &File, address: u64) -> io::Result<Option<u64>> {
    let mut entry = [0; ENTRY as usize];
    file.read_exact_at(&mut entry, address / PAGE * ENTRY)?;
    let entry = u64::from_ne_bytes(entry);
    Ok(Some(entry & FRAME).filter(|frame| *frame != 0 && entry & PRESENT != 0))
}

/// Reads the entries of the mappings that have pages according to `/proc/PID/smaps`. Returns the number of pages taken for
/// anonymous ones that may be the zero page.
pub fn scan(process: &Process, file: &File, zero: ZeroFrames, builder: &mut Builder<'_>) -> Result<u64, TargetError> {
    let mut doubt = 0;
    let mut bytes = Vec::new();
    smaps::each(process, |mapping| {
        if mapping.hugetlb > 0 {
            // Their entries look like those of many small pages, of which there are none.
            builder.push(mapping.start, mapping.end.min(mapping.start.saturating_add(mapping.hugetlb)), ANON);
        } else if mapping.rss > 0 || mapping.swap > 0 {
            doubt += read(file, &mapping, zero, &mut bytes, builder)?;
        }
        Ok(())
    })?;
    Ok(doubt)
}

const ANON: Entry = Entry::Present { file: false, huge: false };

/// Reads the entries of one mapping.
fn read(
    file: &File,
    mapping: &smaps::Entry,
    zero: ZeroFrames,
    bytes: &mut Vec<u8>,
    builder: &mut Builder<'_>,
) -> io::Result<u64> {
    let (mut found, mut anonymous, mut swapped) = (0u64, 0u64, 0u64);
    let mut start = mapping.start;
    while start < mapping.end {
        // Of a mapping of terabytes with little in it, only what comes before its last page is read; but with frames
        // hidden, zero pages are counted as found.
        if zero.page.is_some() && found * PAGE >= mapping.rss && swapped * PAGE >= mapping.swap {
            break;
        }
        let end = mapping.end.min((start / PIECE + 1) * PIECE);
        bytes.resize(usize::try_from((end - start) / PAGE * ENTRY).unwrap_or(0), 0);
        let length = read_at(file, bytes, start / PAGE * ENTRY)?;
        let (chunks, _) = bytes[..length].as_chunks();
        let entries: Vec<u64> = chunks.iter().map(|entry| u64::from_ne_bytes(*entry)).collect();
        runs(start, &entries, zero, mapping.huge > 0, |from, to, entry| {
            match entry {
                Entry::Nothing => {}
                Entry::Swapped => swapped += (to - from) / PAGE,
                Entry::Present { file, .. } => {
                    found += (to - from) / PAGE;
                    anonymous += if file { 0 } else { (to - from) / PAGE };
                }
            }
            builder.push(from, to, entry);
        });
        if length < bytes.len() {
            break;
        }
        start = end;
    }
    // smaps does not count the zero page, so what was found beyond its count is that.
    let beyond = found.saturating_sub(mapping.rss / PAGE);
    Ok(if zero.page.is_none() { beyond.min(anonymous) } else { 0 })
}

/// Reads until the buffer is full or nothing more comes; returns how many bytes.
fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut length = 0;
    while length < bytes.len() {
        match file.read_at(&mut bytes[length..], offset + length as u64) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

/// Calls `visit` with stretches of equal entries: first address, address after the last, what they are.
fn runs(start: u64, entries: &[u64], zero: ZeroFrames, huge: bool, mut visit: impl FnMut(u64, u64, Entry)) {
    let mut from = 0;
    let mut current = Entry::Nothing;
    let mut huge_until = 0;
    for (index, raw) in entries.iter().enumerate() {
        let address = start + index as u64 * PAGE;
        if huge && address.is_multiple_of(HUGE) && is_huge(&entries[index..]) {
            huge_until = address + HUGE;
        }
        let entry = match *raw {
            raw if raw & PRESENT != 0 && zero.contains(raw & FRAME) => Entry::Nothing,
            raw if raw & PRESENT != 0 => Entry::Present { file: raw & FILE != 0, huge: address < huge_until },
            raw if raw & (SWAPPED | GUARD) == SWAPPED => Entry::Swapped,
            _ => Entry::Nothing,
        };
        if entry != current {
            if from < index {
                visit(start + from as u64 * PAGE, address, current);
            }
            (from, current) = (index, entry);
        }
    }
    if from < entries.len() {
        visit(start + from as u64 * PAGE, start + entries.len() as u64 * PAGE, current);
    }
}

/// Whether the entries start with those of one huge page. The file does not say so: it is taken for one if its frames
/// follow each other from an aligned one, in a mapping that has huge pages according to `/proc/PID/smaps`.
fn is_huge(entries: &[u64]) -> bool {
    let Some(pages) = entries.get(..HUGE_PAGES) else { return false };
    let first = pages[0] & FRAME;
    first != 0
        && first.is_multiple_of(HUGE_PAGES as u64)
        && pages.iter().zip(first..).all(|(entry, frame)| entry & PRESENT != 0 && entry & FRAME == frame)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::target::test_program::is_root;

    const ZERO: ZeroFrames = ZeroFrames { page: Some(7), huge: Some(512) };

    fn found(start: u64, entries: &[u64], huge: bool) -> Vec<(u64, u64, Entry)> {
        let mut found = Vec::new();
        runs(start, entries, ZERO, huge, |from, to, entry| found.push((from / PAGE, to / PAGE, entry)));
        found.retain(|(_, _, entry)| *entry != Entry::Nothing);
        found
    }

    #[test]
    fn stretches_of_equal_entries() {
        let file = Entry::Present { file: true, huge: false };
        let entries = [
            0,
            PRESENT | 9,
            PRESENT | 70,
            PRESENT | 7,
            PRESENT | 600,
            PRESENT | FILE | 8,
            SWAPPED | 7,
            SWAPPED | GUARD,
            SWAPPED | FILE,
        ];
        let expected = [(101, 103, ANON), (105, 106, file), (106, 107, Entry::Swapped), (108, 109, Entry::Swapped)];
        assert_eq!(found(100 * PAGE, &entries, false), expected);
        assert!(found(0, &[], true).is_empty());
    }

    #[test]
    fn huge_pages_by_their_frames() {
        let huge = Entry::Present { file: false, huge: true };
        let mut entries: Vec<u64> = (0..1300).map(|page| PRESENT | (4096 - 2 + page)).collect();
        let start = 2 * HUGE - 2 * PAGE;
        let first = start / PAGE;
        let expected = [(first, first + 2, ANON), (first + 2, first + 1026, huge), (first + 1026, first + 1300, ANON)];
        assert_eq!(found(start, &entries, true), expected);
        assert_eq!(found(start, &entries, false), [(first, first + 1300, ANON)]);
        entries[5] = PRESENT | 4;
        let expected =
            [(first, first + 514, ANON), (first + 514, first + 1026, huge), (first + 1026, first + 1300, ANON)];
        assert_eq!(found(start, &entries, true), expected);
    }

    #[test]
    fn the_zero_page_is_found_by_those_who_may() {
        let zero = ZeroFrames::find().unwrap();
        assert_eq!(zero.page.is_some(), is_root());
        assert!(zero.huge.is_none_or(|huge| huge.is_multiple_of(512) && Some(huge) != zero.page));
    }
}
