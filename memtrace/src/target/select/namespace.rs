//! Pid namespaces: which processes have a number in one, and which number.

use std::{
    convert::Infallible,
    fmt,
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _},
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    str::FromStr,
};

use super::{super::TargetError, SelectError, procs::Procs};

/// Deepest nesting of pid namespaces (`MAX_PID_NS_LEVEL`, include/linux/pid_namespace.h).
const MAX_DEPTH: usize = 32;
// Of ioctl_ns(2).
const NS_GET_PARENT: libc::Ioctl = 0xb702;
const NS_GET_NSTYPE: libc::Ioctl = 0xb703;

/// What names a pid namespace on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PidNamespace {
    /// That of a process.
    Process(u32),
    /// A file of the namespace: `/proc/PID/ns/pid`, or where that has been mounted.
    File(PathBuf),
}

impl FromStr for PidNamespace {
    type Err = Infallible;

    /// A number is a process, anything else a file.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(text.parse().map_or_else(|_| Self::File(text.into()), Self::Process))
    }
}

impl fmt::Display for PidNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(pid) => write!(f, "process {pid}"),
            Self::File(path) => write!(f, "{path:?}"),
        }
    }
}

impl PidNamespace {
    /// Its inode number, which tells it from all others that exist at the time (namespaces(7)).
    pub fn inode(&self, procs: &Procs) -> Result<u64, TargetError> {
        match self {
            Self::Process(pid) => {
                let path = procs.path(*pid, "ns/pid");
                match fs::read_link(&path) {
                    Ok(link) => inode(&link).ok_or_else(|| not_one(&path)),
                    Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                        Err(TargetError::NoSuchProcess { pid: *pid })
                    }
                    Err(error) => Err(unreadable(&path, error)),
                }
            }
            Self::File(path) => {
                if let Some(inode) = fs::read_link(path).ok().and_then(|link| inode(&link)) {
                    return Ok(inode);
                }
                let file = open(path).map_err(|error| unreadable(path, error))?;
                // SAFETY: takes no third argument.
                let kind = unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_NSTYPE) };
                if kind != libc::CLONE_NEWPID {
                    return Err(not_one(path));
                }
                Ok(file.metadata().map_err(|error| unreadable(path, error))?.ino())
            }
        }
    }
}

fn unreadable(path: &Path, source: io::Error) -> TargetError {
    SelectError::Namespace { path: path.to_string_lossy().into_owned(), source }.into()
}

fn not_one(path: &Path) -> TargetError {
    SelectError::NotPidNamespace { path: path.to_string_lossy().into_owned() }.into()
}

/// The inode number in the text of a link of `/proc/PID/ns`: `pid:[4026531836]`.
fn inode(link: &Path) -> Option<u64> {
    link.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()
}

/// Opens a file that should be a namespace; a pipe would not block.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
}

/// The number of a process in the namespace with this inode number; `None` if it has none there, because it is neither in
/// it nor in one below.
pub fn number_in(procs: &Procs, pid: u32, namespace: u64) -> Option<u32> {
    let numbers = procs.numbers(pid)?;
    number_of(procs, pid, &numbers, namespace)
}

/// The processes that have these numbers in the namespace, each with its number there: the first process found for every
/// number, or `None`.
pub fn resolve(procs: &Procs, wanted: &[u32], namespace: u64) -> Result<Vec<Option<u32>>, TargetError> {
    let mut found = vec![None; wanted.len()];
    for pid in procs.all()? {
        let Some(numbers) = procs.numbers(pid) else { continue };
        if !numbers.iter().any(|number| wanted.contains(number)) {
            continue;
        }
        if let Some(number) = number_of(procs, pid, &numbers, namespace)
            && let Some(place) = wanted.iter().position(|wanted| *wanted == number)
            && found[place].is_none()
        {
            found[place] = Some(pid);
        }
    }
    Ok(found)
}

fn number_of(procs: &Procs, pid: u32, numbers: &[u32], namespace: u64) -> Option<u32> {
    let path = procs.path(pid, "ns/pid");
    let mut inwards = numbers.iter().rev();
    if inode(&fs::read_link(&path).ok()?)? == namespace {
        return inwards.next().copied();
    }
    if numbers.len() == 1 {
        return None;
    }
    let mut file = open(&path).ok()?;
    for number in inwards.skip(1).take(MAX_DEPTH) {
        file = parent(&file)?;
        if file.metadata().ok()?.ino() == namespace {
            return Some(*number);
        }
    }
    None
}

/// The namespace that this one was made in; `None` if it is outside of memtrace's own.
fn parent(file: &File) -> Option<File> {
    // SAFETY: takes no third argument.
    let descriptor = unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_PARENT) };
    if descriptor < 0 {
        return None;
    }
    // SAFETY: a new file descriptor that nothing else owns.
    Some(unsafe { File::from_raw_fd(descriptor) })
}
