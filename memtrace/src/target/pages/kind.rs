//! What the kernel counts a resident page as, and counts by that.

use std::ops::{Add, Sub};

/// What the kernel counts a resident page as (`mm_counter`, include/linux/mm.h): the kinds of RSS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PageKind {
    /// Anonymous memory, and private copies of file pages that were written.
    Anon,
    /// Pages of files.
    File,
    /// Pages of tmpfs: shared anonymous memory, memfd, System V shared memory.
    Shmem,
}

impl PageKind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Anon, Self::File, Self::Shmem];
}

/// Pages by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// [`PageKind::Anon`].
    pub anon: u64,
    /// [`PageKind::File`].
    pub file: u64,
    /// [`PageKind::Shmem`].
    pub shmem: u64,
}

impl Pages {
    /// Those of one kind.
    pub fn of(self, kind: PageKind) -> u64 {
        match kind {
            PageKind::Anon => self.anon,
            PageKind::File => self.file,
            PageKind::Shmem => self.shmem,
        }
    }

    /// Adds to one kind.
    pub fn add(&mut self, kind: PageKind, pages: u64) {
        let of = match kind {
            PageKind::Anon => &mut self.anon,
            PageKind::File => &mut self.file,
            PageKind::Shmem => &mut self.shmem,
        };
        *of = of.saturating_add(pages);
    }

    /// All of them.
    pub fn total(self) -> u64 {
        self.anon.saturating_add(self.file).saturating_add(self.shmem)
    }
}

impl Add for Pages {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            anon: self.anon.saturating_add(other.anon),
            file: self.file.saturating_add(other.file),
            shmem: self.shmem.saturating_add(other.shmem),
        }
    }
}

/// The difference by kind, as signed numbers.
impl Sub for Pages {
    type Output = [i64; 3];

    /// In the order of [`PageKind::ALL`].
    fn sub(self, other: Self) -> [i64; 3] {
        PageKind::ALL.map(|kind| self.of(kind).wrapping_sub(other.of(kind)) as i64)
    }
}
