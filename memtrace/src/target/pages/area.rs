//! What a mapping is for, as far as the memory map and its file system tell.

use std::{
    collections::HashMap,
    ffi::CString,
    mem::MaybeUninit,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::Path,
};

use super::{Mapping, Process};

/// `HUGETLBFS_MAGIC` (include/uapi/linux/magic.h).
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
/// `TMPFS_MAGIC`: also of the kernel's own mount for memfd, System V and shared anonymous memory.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// First address that is not the process's; `[vsyscall]` lies there.
const KERNEL: u64 = 1 << 63;

/// What a mapping is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// The program's data segment, which `brk` moves: `[heap]`.
    Heap,
    /// The main thread's stack: `[stack]`.
    MainStack,
    /// Private memory without a file.
    Anonymous,
    /// A file; pages written in a private mapping of one are anonymous memory all the same.
    File,
    /// A file of tmpfs: shared anonymous memory, memfd, System V shared memory, files in `/dev/shm`.
    Shmem,
    /// A file of hugetlbfs, or `MAP_HUGETLB` memory.
    Hugetlb,
    /// The kernel's: `[vdso]`, `[vvar]`, `[uprobes]` and the like.
    Special,
}

/// A mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// What it is for.
    pub role: Role,
    /// Whether it is shared (`MAP_SHARED`).
    pub shared: bool,
}

/// What there is to know of a file system here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileSystem {
    Tmpfs,
    Hugetlbfs,
    Other,
}

/// The role of every mapping, ascending, without those that are not in the process's half of the address space; and the
/// number of those whose file system could not be found out.
pub fn areas(process: &Process, mappings: &[Mapping]) -> (Vec<Area>, usize) {
    // One file system has one device number, so one mapping of each has to be asked.
    let mut file_systems = HashMap::new();
    let mut unknown = 0;
    let mut areas = Vec::with_capacity(mappings.len());
    let mut end = 0;
    for mapping in mappings {
        // The map was read in pieces while it changed, if mappings overlap.
        let start = mapping.start.max(end);
        if mapping.end > KERNEL || start >= mapping.end {
            continue;
        }
        end = mapping.end;
        let role = without_file(mapping).unwrap_or_else(|| {
            let known = file_systems.get(&mapping.file.device).copied().or_else(|| file_system(process, mapping));
            if let Some(known) = known {
                file_systems.insert(mapping.file.device, known);
            }
            match known {
                Some(FileSystem::Tmpfs) => Role::Shmem,
                Some(FileSystem::Hugetlbfs) => Role::Hugetlb,
                Some(FileSystem::Other) => Role::File,
                None => {
                    unknown += 1;
                    by_name(mapping)
                }
            }
        });
        areas.push(Area { start, end, role, shared: mapping.shared });
    }
    (areas, unknown)
}

/// The role of a mapping without a file.
fn without_file(mapping: &Mapping) -> Option<Role> {
    let name = mapping.name.as_os_str().as_bytes();
    // A private mapping of /dev/zero is anonymous memory (drivers/char/mem.c, mmap_zero).
    if name == b"/dev/zero" && !mapping.shared {
        return Some(Role::Anonymous);
    }
    if mapping.has_file() || name.starts_with(b"/") {
        return None;
    }
    Some(match name {
        b"[heap]" => Role::Heap,
        b"" => Role::Anonymous,
        _ if name == b"[stack]" || name.starts_with(b"[stack:") => Role::MainStack,
        // Named by the process (PR_SET_VMA_ANON_NAME).
        _ if name.starts_with(b"[anon:") => Role::Anonymous,
        _ => Role::Special,
    })
}

/// The role of a mapping whose file system is not known.
fn by_name(mapping: &Mapping) -> Role {
    let name = mapping.name.as_os_str().as_bytes();
    if name.starts_with(b"/anon_hugepage") {
        Role::Hugetlb
    } else if [&b"/memfd:"[..], b"/SYSV", b"/dev/zero (deleted)", b"/dev/shm/", b"[anon_shmem:"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
    {
        Role::Shmem
    } else {
        Role::File
    }
}

/// Asks for the file system of a mapped file, without opening the file: that can have effects.
fn file_system(process: &Process, mapping: &Mapping) -> Option<FileSystem> {
    let mapped = process.path(&format!("map_files/{:x}-{:x}", mapping.start, mapping.end));
    // map_files takes CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN (proc_pid_map_files(5)).
    statfs(&mapped).or_else(|| {
        let path = mapping.path()?;
        let path = process.path("root").join(path.strip_prefix("/").unwrap_or(path));
        let device = std::fs::metadata(&path).ok()?.dev();
        ((libc::major(device), libc::minor(device)) == mapping.file.device).then(|| statfs(&path))?
    })
}

fn statfs(path: &Path) -> Option<FileSystem> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    let mut found = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: a string that ends in NUL, and room for the result.
    if unsafe { libc::statfs(path.as_ptr(), found.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: filled in by the successful call.
    let found = unsafe { found.assume_init() };
    Some(match found.f_type {
        TMPFS_MAGIC => FileSystem::Tmpfs,
        HUGETLBFS_MAGIC => FileSystem::Hugetlbfs,
        _ => FileSystem::Other,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::target::mappings;

    /// The roles of a memory map whose files are nowhere to be found.
    fn roles(map: &str) -> (Vec<Role>, usize) {
        let process = Process::open(std::process::id()).unwrap();
        let (areas, unknown) = areas(&process, &mappings::parse(map.as_bytes()).unwrap());
        (areas.iter().map(|area| area.role).collect(), unknown)
    }

    #[test]
    fn roles_without_a_file() {
        let map = "1000-2000 rw-p 0 0:0 0 [heap]\n2000-3000 rw-p 0 0:0 0 [stack]\n3000-4000 rw-p 0 0:0 0 \n\
                   4000-5000 rw-p 0 0:0 0 [anon:[heap]]\n5000-6000 r-xp 0 0:0 0 [vdso]\n6000-7000 rw-p 0 fe:ff 4 /dev/zero\n\
                   ffffffffff600000-ffffffffff601000 --xp 0 0:0 0 [vsyscall]\n";
        let expected =
            vec![Role::Heap, Role::MainStack, Role::Anonymous, Role::Anonymous, Role::Special, Role::Anonymous];
        assert_eq!(roles(map), (expected, 0));
    }

    #[test]
    fn unknown_file_systems_are_counted() {
        let map = "1000-2000 rw-s 0 fe:ff 5 /memfd:[heap] (deleted)\n2000-3000 rw-s 0 fe:ff 6 /anon_hugepage (deleted)\n\
                   3000-4000 rw-s 0 fe:ff 7 /nowhere/to/be/found\n4000-5000 rw-s 0 fe:ff 8 /SYSV00000000 (deleted)\n";
        assert_eq!(roles(map), (vec![Role::Shmem, Role::Hugetlb, Role::File, Role::Shmem], 4));
    }

    #[test]
    fn overlapping_mappings_are_cut() {
        let process = Process::open(std::process::id()).unwrap();
        let map =
            mappings::parse(b"1000-3000 rw-p 0 0:0 0 \n1000-2000 rw-p 0 0:0 0 \n2000-5000 rw-p 0 0:0 0 ").unwrap();
        let (areas, _) = areas(&process, &map);
        let spans: Vec<_> = areas.iter().map(|area| (area.start, area.end)).collect();
        assert_eq!(spans, [(0x1000, 0x3000), (0x3000, 0x5000)]);
    }
}
