//! Page faults: which call path made a page resident.

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Pages of a chunk: the unit in which records are stored, since pages that are touched lie next to each other.
pub const CHUNK_PAGES: usize = 64;

/// Identity of a chunk.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ChunkKey {
    /// Page number (address divided by [`PAGE`]) of its first page, divided by [`CHUNK_PAGES`].
    pub chunk: u64,
    /// Number of the process's image ([`crate::process`]).
    pub process: u32,
    /// Always 0: the key is compared byte by byte, so it may hold no padding.
    pub zero: u32,
}

/// The records of a chunk's pages: packed [`PageRecord`]s.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// One word per page; 0: no fault was seen there.
    pub pages: [u64; CHUNK_PAGES],
}

/// A fault as a page's record keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Stack number of the call path.
    pub stack: u32,
    /// Whether the access was a write.
    pub write: bool,
    /// Whether the fault came after the pages present at the start had been looked at.
    pub late: bool,
}

/// What is known of the faults on one page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageRecord {
    /// The last fault that found no page.
    pub absent: Option<Fault>,
    /// The first write after that which found a page it could not write: the zero page that a read had mapped, a page of a
    /// private file mapping, or a page shared with a forked process.
    pub copied: Option<Fault>,
}

impl Fault {
    /// Most stack numbers that fit.
    pub const MAX_STACKS: u32 = 1 << 28;
    /// A packed fault that is one.
    pub const SET: u32 = 1 << 31;
    /// [`Fault::write`].
    pub const WRITE: u32 = 1 << 30;
    /// [`Fault::late`].
    pub const LATE: u32 = 1 << 29;

    /// Packs the fault; never 0.
    #[inline(always)]
    pub const fn pack(self) -> u32 {
        self.stack & (Self::MAX_STACKS - 1)
            | Self::SET
            | if self.write { Self::WRITE } else { 0 }
            | if self.late { Self::LATE } else { 0 }
    }

    /// Unpacks a fault; `None` if there is none.
    pub const fn unpack(packed: u32) -> Option<Self> {
        if packed & Self::SET == 0 {
            return None;
        }
        Some(Self {
            stack: packed & (Self::MAX_STACKS - 1),
            write: packed & Self::WRITE != 0,
            late: packed & Self::LATE != 0,
        })
    }
}

impl PageRecord {
    /// Unpacks a record: the absent fault in the lower half, the copied in the upper.
    pub const fn unpack(packed: u64) -> Self {
        Self { absent: Fault::unpack(packed as u32), copied: Fault::unpack((packed >> 32) as u32) }
    }

    /// The record after one more fault (packed), which found a page if `present`.
    #[inline(always)]
    pub const fn after(record: u64, fault: u32, present: bool) -> u64 {
        if !present {
            return fault as u64;
        }
        let settled = record as u32 & (Fault::SET | Fault::WRITE) == Fault::SET | Fault::WRITE;
        if fault & Fault::WRITE == 0 || settled || record >> 32 != 0 {
            return record;
        }
        record | (fault as u64) << 32
    }
}

const _: () = assert!(size_of::<ChunkKey>() == 16);
const _: () = assert!(size_of::<Chunk>() == 512);

#[cfg(feature = "user")]
mod pod {
    // SAFETY: repr(C), only integers, no padding (sizes asserted above): any bit pattern is a value.
    unsafe impl aya::Pod for super::ChunkKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Chunk {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(stack: u32, write: bool) -> Fault {
        Fault { stack, write, late: stack % 2 == 1 }
    }

    fn record(faults: &[(Fault, bool)]) -> PageRecord {
        let packed =
            faults.iter().fold(0, |record, (fault, present)| PageRecord::after(record, fault.pack(), *present));
        PageRecord::unpack(packed)
    }

    #[test]
    fn packing_round_trip() {
        for stack in [0, 1, 77, Fault::MAX_STACKS - 1] {
            for write in [false, true] {
                assert_eq!(Fault::unpack(fault(stack, write).pack()), Some(fault(stack, write)));
            }
        }
        assert_eq!(Fault::unpack(0), None);
    }

    #[test]
    fn a_write_to_a_fresh_page_stays_whatever_is_written_later() {
        let first = fault(1, true);
        let expected = PageRecord { absent: Some(first), copied: None };
        assert_eq!(record(&[(first, false), (fault(2, true), true), (fault(3, false), true)]), expected);
    }

    #[test]
    fn the_first_write_after_a_read_is_kept_beside_it() {
        let (read, write) = (fault(1, false), fault(2, true));
        let expected = PageRecord { absent: Some(read), copied: Some(write) };
        assert_eq!(record(&[(read, false), (write, true), (fault(3, true), true)]), expected);
    }

    #[test]
    fn a_write_to_a_page_from_before_is_kept() {
        let write = fault(2, true);
        assert_eq!(record(&[(write, true)]), PageRecord { absent: None, copied: Some(write) });
    }

    #[test]
    fn a_page_that_is_absent_again_starts_anew() {
        let again = fault(4, false);
        let expected = PageRecord { absent: Some(again), copied: None };
        assert_eq!(record(&[(fault(1, false), false), (fault(2, true), true), (again, false)]), expected);
    }
}
