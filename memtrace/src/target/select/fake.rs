//! A `/proc` made of files, for tests.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

use super::procs::Procs;

/// memtrace's own number in it.
pub const OWN: u32 = 77;
const KERNEL_THREAD: u32 = 0x0020_0000;

pub struct Fake {
    directory: TempDir,
}

impl Fake {
    /// Without processes but memtrace and a kernel thread, both called `memtrace`.
    pub fn new() -> Self {
        let fake = Self { directory: tempfile::tempdir().unwrap() };
        fs::create_dir(fake.proc()).unwrap();
        symlink(OWN.to_string(), fake.proc().join("self")).unwrap();
        fs::write(fake.proc().join("uptime"), "1.0 1.0\n").unwrap();
        fake.add(OWN, b"memtrace", "0::/\n");
        fake.stated(2, b"memtrace", "S", KERNEL_THREAD, "0::/\n");
        fake
    }

    fn proc(&self) -> PathBuf {
        self.directory.path().join("proc")
    }

    pub fn procs(&self) -> Procs {
        Procs::new(&self.proc())
    }

    /// A sleeping process of that name with these lines in `cgroup`.
    pub fn add(&self, pid: u32, comm: &[u8], cgroup: &str) {
        self.stated(pid, comm, "S", 0x0040_0000, cgroup);
    }

    pub fn zombie(&self, pid: u32, comm: &[u8], cgroup: &str) {
        self.stated(pid, comm, "Z", 0, cgroup);
    }

    fn stated(&self, pid: u32, comm: &[u8], state: &str, flags: u32, cgroup: &str) {
        let stat =
            [format!("{pid} (").as_bytes(), comm, format!(") {state} 1 1 1 0 -1 {flags} 0 0\n").as_bytes()].concat();
        self.write(pid, "stat", &stat);
        self.write(pid, "comm", &[comm, b"\n"].concat());
        self.write(pid, "cgroup", cgroup.as_bytes());
    }

    pub fn write(&self, pid: u32, name: &str, text: &[u8]) {
        let path = self.proc().join(pid.to_string());
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join(name), text).unwrap();
    }

    /// Puts a process into a pid namespace, in which the last of these numbers is its.
    pub fn in_namespace(&self, pid: u32, inode: u64, numbers: &str) {
        self.write(pid, "status", format!("Name:\tx\nTgid:\t{pid}\nNSpid:\t{numbers}\n").as_bytes());
        fs::create_dir_all(self.proc().join(format!("{pid}/ns"))).unwrap();
        symlink(format!("pid:[{inode}]"), self.proc().join(format!("{pid}/ns/pid"))).unwrap();
    }

    /// A directory beside `/proc` for hierarchies of groups.
    pub fn mount_point(&self, name: &str) -> PathBuf {
        let path = self.directory.path().canonicalize().unwrap().join(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    /// Mounts hierarchies: where, the group seen there, the file system's type, its options.
    pub fn mount(&self, mounts: &[(&Path, &str, &str, &str)]) {
        let mut text =
            String::from("23 1 8:1 / / rw - ext4 /dev/sda1 rw\n36 23 0:5 / /proc rw,nosuid master:3 - proc proc rw\n");
        for (point, root, kind, options) in mounts {
            let point = point.to_str().unwrap().replace(' ', "\\040");
            text += &format!("31 23 0:28 {root} {point} rw,relatime shared:9 - {kind} {kind} {options}\n");
        }
        self.write(OWN, "mountinfo", text.as_bytes());
    }
}
