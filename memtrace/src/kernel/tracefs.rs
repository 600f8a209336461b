//! The kernel's list of tracepoints, without mounting it anywhere: `fsopen(2)` gives a directory of its own (Linux 5.2).

use std::{
    ffi::CString,
    fs::File,
    io::{self, Read as _},
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

/// Longest file read.
const LIMIT: u64 = 64 * 1024;

/// `FSCONFIG_CMD_CREATE` (include/uapi/linux/mount.h).
const FSCONFIG_CMD_CREATE: libc::c_uint = 6;

/// An open tracefs.
#[derive(Debug)]
pub struct Tracefs {
    root: OwnedFd,
}

impl Tracefs {
    /// Opens it.
    ///
    /// # Errors
    /// The kernel has none, or refuses (`CAP_SYS_ADMIN`).
    pub fn open() -> io::Result<Self> {
        let name = c"tracefs";
        // SAFETY: the name ends with a NUL; the result is checked.
        let context = owned(unsafe { libc::syscall(libc::SYS_fsopen, name.as_ptr(), 0) })?;
        let null = std::ptr::null::<libc::c_char>();
        // SAFETY: this command takes neither key nor value.
        let created =
            unsafe { libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), FSCONFIG_CMD_CREATE, null, null, 0) };
        if created < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: plain numbers; the result is checked.
        let root = owned(unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), 0, 0) })?;
        Ok(Self { root })
    }

    /// Reads a file of a tracepoint: `id` or `format`.
    ///
    /// # Errors
    /// There is no such tracepoint.
    pub fn read(&self, group: &str, name: &str, file: &str) -> io::Result<String> {
        let path = CString::new(format!("events/{group}/{name}/{file}"))?;
        // SAFETY: the path ends with a NUL; the result is checked.
        let descriptor = owned(unsafe {
            libc::syscall(libc::SYS_openat, self.root.as_raw_fd(), path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC)
        })?;
        let mut text = String::new();
        File::from(descriptor).take(LIMIT).read_to_string(&mut text)?;
        Ok(text)
    }

    /// The number of a tracepoint.
    ///
    /// # Errors
    /// There is no such tracepoint.
    pub fn id(&self, group: &str, name: &str) -> io::Result<u64> {
        let text = self.read(group, name, "id")?;
        text.trim().parse().map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
    }
}

fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that the kernel has just made, and nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(result as i32) })
}

/// Offset and size in bytes of a field, by the text of a tracepoint's `format` file.
pub fn field(format: &str, name: &str) -> Option<(usize, usize)> {
    format.lines().find_map(|line| {
        let mut parts = line.trim().split(';').map(str::trim);
        let declared = parts.next()?.strip_prefix("field:")?;
        let (_, declared) = declared.rsplit_once(' ')?;
        if declared != name {
            return None;
        }
        let mut number = |key: &str| parts.next()?.strip_prefix(key)?.parse().ok();
        Some((number("offset:")?, number("size:")?))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn fields_are_found_by_name() {
        let format = "name: x\nID: 7\nformat:\n\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\n\
                      \tfield:unsigned int mm_id;\toffset:8;\tsize:4;\tsigned:0;\n\tfield:long size;\toffset:24;\tsize:8;\tsigned:1;\n";
        assert_eq!(field(format, "mm_id"), Some((8, 4)));
        assert_eq!(field(format, "size"), Some((24, 8)));
        assert_eq!(field(format, "id"), None);
    }

    #[test]
    fn this_kernel_s_tracepoints_are_there_without_a_mount() {
        let tracefs = Tracefs::open().unwrap();
        assert!(tracefs.id("kmem", "rss_stat").unwrap() > 0);
        assert!(tracefs.id("kmem", "no_such_thing").is_err());
        let format = tracefs.read("kmem", "rss_stat", "format").unwrap();
        assert_eq!(field(&format, "member").unwrap().1, 4);
    }
}
