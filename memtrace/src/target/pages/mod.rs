//! The resident pages of a process, as the kernel counts them in its RSS.
//!
//! [`scan()`] lists them as ranges, by the `PAGEMAP_SCAN` ioctl where the kernel has it (Linux 6.7), else by reading
//! `/proc/PID/pagemap`; [`area`] says what each mapping is for; [`smaps`] reads the kernel's own sums, which are the truth
//! that the ranges are held against; [`counts`] reads the kernel's count of page faults.
//!
//! The process runs on while it is looked at, so that two readings differ by what happened in between.

pub mod area;
mod builder;
pub mod counts;
mod ioctl;
mod kind;
mod pagemap;
pub mod smaps;

use std::fs::File;

use memtrace_common::fault::PAGE;

pub use area::{Area, Role};
pub use counts::{FaultCounts, fault_counts};
pub use kind::{PageKind, Pages};
pub use smaps::{Rollup, rollup};

use self::builder::Builder;
use super::{Mapping, Process, TargetError};

/// Consecutive resident pages of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRange {
    /// Number of the first page: its address divided by [`PAGE`].
    pub first: u64,
    /// How many pages; at least 1.
    pub count: u32,
    /// What the kernel counts them as.
    pub kind: PageKind,
    /// Whether they are mapped by huge page table entries, so that one fault made 2 MiB of them resident.
    pub huge: bool,
}

/// How a scan was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The `PAGEMAP_SCAN` ioctl.
    PagemapScan,
    /// Reading `/proc/PID/pagemap`, for mappings that are resident according to `/proc/PID/smaps`.
    Pagemap,
}

/// What was resident at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scan {
    /// Ascending and disjoint. Neighbours differ in kind, size of their entries or mapping, unless a range would be too
    /// long for its count. Mappings of the zero page and of hugetlbfs are left out: neither is RSS.
    pub ranges: Vec<PageRange>,
    /// The mappings that were looked at, ascending.
    pub areas: Vec<Area>,
    /// Pages that are swapped out. Shared memory's are not told by the page table, and not counted.
    pub swapped: u64,
    /// Bytes of hugetlbfs pages, which are resident but no RSS.
    pub hugetlb: u64,
    /// How it was made.
    pub method: Method,
    /// Pages in [`Self::ranges`] as anonymous that may be mappings of the zero page, which are no RSS: without
    /// `CAP_SYS_ADMIN` `/proc/PID/pagemap` does not show which page it is. Always 0 with [`Method::PagemapScan`].
    pub zero_in_doubt: u64,
    /// Mappings whose file system could not be found out, so that their pages may be shared memory where the scan says
    /// file, or the reverse, and hugetlbfs is taken for either.
    pub unknown_file_systems: usize,
}

impl Scan {
    /// Sum of the ranges.
    pub fn pages(&self) -> Pages {
        let mut pages = Pages::default();
        for range in &self.ranges {
            pages.add(range.kind, u64::from(range.count));
        }
        pages
    }
}

impl PageRange {
    /// Number of the page after the last.
    pub fn end(&self) -> u64 {
        self.first.saturating_add(u64::from(self.count))
    }
}

/// Finds the resident pages of `mappings`.
///
/// # Errors
/// [`TargetError::Exited`] once the process has ended, [`TargetError::PermissionDenied`], [`TargetError::Io`].
pub fn scan(process: &Process, mappings: &[Mapping]) -> Result<Scan, TargetError> {
    let (file, areas, unknown) = prepare(process, mappings)?;
    let mut builder = Builder::new(&areas);
    let found = ioctl::scan(&file, &areas, &mut builder);
    let supported = found.map_err(|error| unreadable(process, "pagemap", error))?;
    if !supported {
        return read(process, &file, areas, unknown);
    }
    finish(process, builder, Method::PagemapScan, 0, unknown)
}

/// As [`scan()`], for kernels without the ioctl.
fn read(process: &Process, file: &File, areas: Vec<Area>, unknown: usize) -> Result<Scan, TargetError> {
    let zero =
        pagemap::ZeroFrames::find().map_err(|source| TargetError::Io { path: "/proc/self/pagemap".into(), source })?;
    let mut builder = Builder::new(&areas);
    let doubt = pagemap::scan(process, file, zero, &mut builder)?;
    finish(process, builder, Method::Pagemap, doubt, unknown)
}

fn prepare(process: &Process, mappings: &[Mapping]) -> Result<(File, Vec<Area>, usize), TargetError> {
    let file = File::open(process.path("pagemap")).map_err(|error| unreadable(process, "pagemap", error))?;
    let (areas, unknown) = area::areas(process, mappings);
    // A file opened when the memory was already given up reads as empty. The ioctl must not be tried on it: before
    // Linux 6.15 it follows a null pointer then (fs/proc/task_mmu.c, pagemap_open).
    let first = areas.first().map_or(0, |area| area.start);
    let mut entry = [0; 8];
    let read = std::os::unix::fs::FileExt::read_at(&file, &mut entry, first / PAGE * 8);
    match read.map_err(|error| unreadable(process, "pagemap", error))? {
        8 => Ok((file, areas, unknown)),
        _ => Err(gone(process)),
    }
}

fn finish(
    process: &Process,
    builder: Builder<'_>,
    method: Method,
    zero_in_doubt: u64,
    unknown_file_systems: usize,
) -> Result<Scan, TargetError> {
    // An address space that was taken down meanwhile looks like an empty one.
    process.check_alive()?;
    Ok(builder.finish(method, zero_in_doubt, unknown_file_systems))
}

/// The error for `/proc/PID/NAME` having failed with `error`.
fn unreadable(process: &Process, name: &str, error: std::io::Error) -> TargetError {
    match error.raw_os_error() {
        // What a thread that has given up its memory says (Linux 6.15 and later when the file is opened, others when it is
        // read).
        Some(libc::ESRCH) => gone(process),
        _ => process.unreadable(name, error),
    }
}

/// The error for memory that is no longer there.
fn gone(process: &Process) -> TargetError {
    match process.check_alive() {
        Ok(()) => process.ended(),
        Err(error) => error,
    }
}

const _: () = assert!(size_of::<PageRange>() == 16);

#[cfg(test)]
mod tests;
