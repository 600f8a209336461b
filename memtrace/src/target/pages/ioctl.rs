//! The `PAGEMAP_SCAN` ioctl (Linux 6.7; include/uapi/linux/fs.h, ioctl_pagemap_scan(2)).

use std::{fs::File, io, os::fd::AsRawFd as _};

use super::{
    Area,
    builder::{Builder, Entry},
};

/// Regions that one call returns at most: 384 KiB of them.
const REGIONS: usize = 16 * 1024;
/// Pages that one call finds at most, since it keeps the process from changing its mappings meanwhile: some milliseconds.
const MAX_PAGES: u64 = 1 << 15;

const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PAGE_IS_HUGE: u64 = 1 << 6;
/// `MADV_GUARD_INSTALL`, Linux 6.15: such an entry is called swapped too.
const PAGE_IS_GUARD: u64 = 1 << 8;

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct Argument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl =
    3 << 30 | (size_of::<Argument>() as libc::Ioctl) << 16 | (b'f' as libc::Ioctl) << 8 | 16;

/// Walks the page tables of `areas`. Returns whether the kernel has the ioctl.
///
/// `file` is an open `/proc/PID/pagemap` that has memory.
pub fn scan(file: &File, areas: &[Area], builder: &mut Builder<'_>) -> io::Result<bool> {
    let (Some(first), Some(last)) = (areas.first(), areas.last()) else { return Ok(true) };
    let mut wanted = PAGE_IS_FILE | PAGE_IS_PRESENT | PAGE_IS_SWAPPED | PAGE_IS_PFNZERO | PAGE_IS_HUGE | PAGE_IS_GUARD;
    let mut regions = vec![Region::default(); REGIONS];
    let mut start = first.start;
    while start < last.end {
        let mut argument = Argument {
            size: size_of::<Argument>() as u64,
            start,
            end: last.end,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            max_pages: MAX_PAGES,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: wanted,
            ..Argument::default()
        };
        // SAFETY: the argument is what the request takes, and points at `vec_len` regions that outlive the call.
        let found = unsafe { libc::ioctl(file.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
        let Ok(found) = usize::try_from(found) else {
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::ENOTTY) => return Ok(false),
                Some(libc::EINTR) => continue,
                // A category that the kernel does not know.
                Some(libc::EINVAL) if wanted & PAGE_IS_GUARD != 0 => wanted &= !PAGE_IS_GUARD,
                _ => return Err(error),
            }
            continue;
        };
        for region in regions.iter().take(found) {
            builder.push(region.start, region.end, entry(region.categories));
        }
        if argument.walk_end <= start {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "PAGEMAP_SCAN does not get on"));
        }
        start = argument.walk_end;
    }
    Ok(true)
}

fn entry(categories: u64) -> Entry {
    let has = |category| categories & category != 0;
    if has(PAGE_IS_PFNZERO) || has(PAGE_IS_GUARD) {
        Entry::Nothing
    } else if has(PAGE_IS_PRESENT) {
        Entry::Present { file: has(PAGE_IS_FILE), huge: has(PAGE_IS_HUGE) }
    } else if has(PAGE_IS_SWAPPED) {
        Entry::Swapped
    } else {
        Entry::Nothing
    }
}

const _: () = assert!(size_of::<Argument>() == 96);
const _: () = assert!(PAGEMAP_SCAN == 0xc060_6610);
