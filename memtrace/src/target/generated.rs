//! What names code of a process that is in no file: the map that a just-in-time compiler writes for profilers, and the
//! kernel's vDSO.

use std::{
    fs::File,
    io::{self, Write as _},
    os::{
        fd::FromRawFd as _,
        unix::fs::{FileExt as _, MetadataExt as _},
    },
    path::Path,
};

use super::{Mapping, Process, procfs, rooted::Root};

/// Most bytes of a vDSO: it has one or two pages of code.
const MAX_VDSO: u64 = 64 * 1024;

impl Mapping {
    /// Whether it is the kernel's vDSO.
    pub fn is_vdso(&self) -> bool {
        !self.has_file() && self.name == Path::new("[vdso]")
    }
}

/// Opens `/tmp/perf-PID.map` of a process: in its own root directory, numbered as in its own pid namespace. `None` if
/// there is none that may be believed: it must be a regular file of the process's user or of root, since anybody can
/// write files into `/tmp`.
///
/// The format is in the kernel's sources, tools/perf/Documentation/jit-interface.txt.
pub fn perf_map(process: &Process, root: &Root) -> Option<File> {
    let status = procfs::read_small(&process.path("status")).ok()?;
    let pid = inner_pid(&status)?;
    let file = root.open(Path::new(&format!("tmp/perf-{pid}.map"))).ok()?;
    let owner = file.metadata().ok()?.uid();
    (owner == process.uid() || owner == 0).then_some(file)
}

/// The process's number in its innermost pid namespace (`NSpid`, proc_pid_status(5)).
fn inner_pid(status: &[u8]) -> Option<u32> {
    procfs::field(status, "NSpid")?.split_ascii_whitespace().next_back()?.parse().ok()
}

/// Copies the vDSO out of the memory of a process, into a file without a name.
///
/// # Errors
/// The memory can't be read, or the mapping is larger than any vDSO.
pub fn vdso(process: &Process, mapping: &Mapping) -> io::Result<File> {
    let size = mapping.end - mapping.start;
    if size > MAX_VDSO {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut image = vec![0; size as usize];
    File::open(process.path("mem"))?.read_exact_at(&mut image, mapping.start)?;
    let mut file = unnamed_file()?;
    file.write_all(&image)?;
    Ok(file)
}

fn unnamed_file() -> io::Result<File> {
    // SAFETY: a string that outlives the call.
    let fd = unsafe { libc::memfd_create(c"vdso".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that the kernel has just made, owned by nobody else.
    Ok(unsafe { File::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::{
        fs,
        os::unix::fs::{chown, symlink},
    };

    use super::*;

    #[test]
    fn number_in_the_innermost_namespace() {
        assert_eq!(inner_pid(b"Name:\tx\nNSpid:\t4242\t17\t1\n"), Some(1));
        assert_eq!(inner_pid(b"NSpid:\t5\n"), Some(5));
        assert_eq!(inner_pid(b"NSpid:\t\n"), None);
        assert_eq!(inner_pid(b"Pid:\t5\n"), None);
    }

    /// Whom a map belongs to; needs root to give files away.
    #[test]
    fn only_maps_of_the_process_or_of_root() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("tmp")).unwrap();
        let process = Process::open(std::process::id()).unwrap();
        let path = directory.path().join(format!("tmp/perf-{}.map", process.pid()));
        let root = Root::at(directory.path()).unwrap();
        assert!(perf_map(&process, &root).is_none());
        fs::write(&path, "1000 10 f\n").unwrap();
        assert!(perf_map(&process, &root).is_some());
        if process.uid() == 0 {
            chown(&path, Some(65_534), None).unwrap();
            assert!(perf_map(&process, &root).is_none());
        }
        fs::remove_file(&path).unwrap();
        symlink("/etc/passwd", &path).unwrap();
        assert!(perf_map(&process, &root).is_none());
    }
}
