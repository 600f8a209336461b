//! Files below a root directory that is not memtrace's own: a target's, for example, in another mount namespace.

use std::{
    ffi::CString,
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, RawFd},
        unix::{ffi::OsStrExt as _, fs::OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
};

use super::Process;

/// A root directory, held open: it stays usable after the process that has it has ended.
#[derive(Debug)]
pub struct Root {
    directory: File,
    /// Where it is, as memtrace sees it; `/` also where it is nowhere.
    prefix: PathBuf,
}

impl Root {
    /// The root directory of a process.
    ///
    /// # Errors
    /// It can't be opened: the process has ended, or privileges are missing.
    pub fn of(process: &Process) -> io::Result<Self> {
        Self::at(&process.path("root"))
    }

    /// The directory at `path`, as memtrace sees it.
    ///
    /// # Errors
    /// It can't be opened, or is no directory.
    pub fn at(path: &Path) -> io::Result<Self> {
        let flags = libc::O_PATH | libc::O_DIRECTORY;
        let directory = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        let prefix = std::fs::read_link(format!("/proc/self/fd/{}", directory.as_raw_fd()))?;
        Ok(Self { directory, prefix })
    }

    /// A path by which [`Self::at`] opens it again as long as this one lives.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.directory.as_raw_fd()))
    }

    /// A path of a memory map, as it is below the root. The kernel shows paths as they are for the reader of the map: of a
    /// process in a chroot they begin with its root directory, of one in another mount namespace they do not.
    pub fn inside<'a>(&self, path: &'a Path) -> &'a Path {
        path.strip_prefix(&self.prefix).unwrap_or(path)
    }

    /// Opens a regular file below the root for reading. `path` is taken as a process would that has this root: neither
    /// `..` nor an absolute path nor a symbolic link leads out of it (`RESOLVE_IN_ROOT`, openat2(2)). Anything but a
    /// regular file is refused before it is opened, which can have effects or wait for ever.
    ///
    /// # Errors
    /// There is no such file, or it can't be read; [`io::ErrorKind::InvalidInput`] if it is not a regular one.
    pub fn open(&self, path: &Path) -> io::Result<File> {
        let handle = openat2(self.directory.as_raw_fd(), path, libc::O_PATH | libc::O_CLOEXEC)?;
        if !handle.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        File::open(format!("/proc/self/fd/{}", handle.as_raw_fd()))
    }
}

fn openat2(directory: RawFd, path: &Path, flags: i32) -> io::Result<File> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the structure is made of integers, for which zero is a value.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = u64::from(flags.cast_unsigned());
    how.resolve = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_MAGICLINKS;
    // SAFETY: a string and a structure that outlive the call, and the size of the latter.
    let fd = unsafe { libc::syscall(libc::SYS_openat2, directory, path.as_ptr(), &raw const how, size_of_val(&how)) };
    let fd = RawFd::try_from(fd).map_err(io::Error::other)?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that the kernel has just made, owned by nobody else.
    Ok(unsafe { File::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::{fs, io::Read as _, os::unix::fs::symlink};

    use super::*;

    fn content(root: &Root, path: &str) -> io::Result<String> {
        let mut text = String::new();
        root.open(Path::new(path))?.read_to_string(&mut text)?;
        Ok(text)
    }

    #[test]
    fn nothing_leads_out_of_a_root() {
        let outside = tempfile::tempdir().unwrap();
        let inside = outside.path().join("root");
        fs::create_dir_all(inside.join("dir")).unwrap();
        fs::write(outside.path().join("secret"), "outside").unwrap();
        fs::write(inside.join("secret"), "inside").unwrap();
        symlink(outside.path().join("secret"), inside.join("absolute")).unwrap();
        symlink("../../secret", inside.join("dir/relative")).unwrap();
        symlink("/secret", inside.join("dir/rooted")).unwrap();
        let root = Root::at(&inside).unwrap();
        // The link's path does not exist below the root.
        assert_eq!(content(&root, "absolute").unwrap_err().kind(), io::ErrorKind::NotFound);
        for path in ["secret", "/secret", "../secret", "dir/../../secret", "dir/relative", "dir/rooted"] {
            assert_eq!(content(&root, path).unwrap(), "inside", "{path}");
        }
        // What a link says still holds when the path to the root is another.
        let again = Root::at(&root.path()).unwrap();
        assert_eq!(content(&again, "dir/relative").unwrap(), "inside");
    }

    #[test]
    fn paths_of_memory_maps() {
        let directory = tempfile::tempdir().unwrap();
        let root = Root::at(directory.path()).unwrap();
        assert_eq!(root.inside(&directory.path().join("usr/x")), Path::new("usr/x"));
        assert_eq!(root.inside(Path::new("/usr/x")), Path::new("/usr/x"));
        let whole = Root::at(Path::new("/")).unwrap();
        assert_eq!(whole.inside(Path::new("/usr/x")), Path::new("usr/x"));
    }

    #[test]
    fn only_regular_files() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = CString::new(directory.path().join("fifo").as_os_str().as_bytes()).unwrap();
        // SAFETY: a string that outlives the call.
        assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
        let root = Root::at(directory.path()).unwrap();
        for path in ["fifo", "/", "."] {
            assert_eq!(root.open(Path::new(path)).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{path}");
        }
        assert!(Root::at(Path::new("/proc/self/exe")).is_err());
        assert!(root.open(Path::new("a\0b")).is_err());
        symlink("/proc/self/fd/1", directory.path().join("magic")).unwrap();
        assert!(root.open(Path::new("magic")).is_err());
    }
}
