//! Control groups: those of a process, and the processes of one.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::{Path, PathBuf},
};

use super::{
    super::{TargetError, near::Nearest, procfs},
    SelectError,
    procs::Procs,
};

/// Most bytes of `/proc/self/mountinfo`: a machine with thousands of containers has some MiB.
const MAX_MOUNTS: u64 = 64 << 20;
/// Most cgroups that suggestions are made from.
const MAX_CANDIDATES: usize = 100_000;
/// Most suggestions.
const SUGGESTIONS: usize = 5;

/// One line of `/proc/PID/cgroup` (cgroups(7)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// Controllers of the version 1 hierarchy, or `name=NAME`, separated by commas; empty for version 2.
    controllers: String,
    /// The group, from the root of the hierarchy as memtrace's cgroup namespace has it.
    pub path: PathBuf,
}

/// The groups of a process, one for each hierarchy; empty once it has ended.
pub fn memberships(procs: &Procs, pid: u32) -> Vec<Membership> {
    parse(&procfs::read_small(&procs.path(pid, "cgroup")).unwrap_or_default())
}

fn parse(text: &[u8]) -> Vec<Membership> {
    // The kernel refuses newlines in the names of groups, and colons in those of hierarchies.
    let lines = text.split(|byte| *byte == b'\n').filter_map(|line| {
        let mut fields = line.splitn(3, |byte| *byte == b':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let path = PathBuf::from(OsString::from_vec(path.to_vec()));
        path.is_absolute().then(|| Membership { controllers: String::from_utf8_lossy(controllers).into_owned(), path })
    });
    lines.collect()
}

/// The group of a process that names it best: that of version 2, else that of the memory controller, else any; one that is
/// not the root of its hierarchy before one that is. Escape before printing.
pub fn cgroup_of(procs: &Procs, pid: u32) -> Option<String> {
    let rank = |membership: &&Membership| {
        let kind = match membership.controllers.as_str() {
            "" => 0,
            controllers if controllers.split(',').any(|controller| controller == "memory") => 1,
            _ => 2,
        };
        (membership.path == Path::new("/"), kind)
    };
    let memberships = memberships(procs, pid);
    memberships.iter().min_by_key(rank).map(|membership| membership.path.to_string_lossy().into_owned())
}

/// A place where a hierarchy is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    point: PathBuf,
    /// The group that is seen at `point`.
    root: PathBuf,
    /// Options of a version 1 hierarchy, its controllers among them; `None` for version 2.
    options: Option<Vec<String>>,
}

impl Mount {
    /// Parses a line of mountinfo (proc_pid_mountinfo(5)); `None` if it is no hierarchy.
    fn parse(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let (root, point) = (fields.nth(3)?, fields.next()?);
        let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
        let (kind, _, options) = (rest.next()?, rest.next()?, rest.next()?);
        let options = match kind {
            b"cgroup2" => None,
            b"cgroup" => Some(String::from_utf8_lossy(options).split(',').map(str::to_owned).collect()),
            _ => return None,
        };
        Some(Self { point: unescape(point), root: unescape(root), options })
    }

    fn has(&self, membership: &Membership) -> bool {
        match &self.options {
            None => membership.controllers.is_empty(),
            Some(options) => membership.controllers.split(',').any(|name| options.iter().any(|option| option == name)),
        }
    }

    /// Whether a group is there.
    fn shows(&self, path: &Path) -> bool {
        path.strip_prefix(&self.root).is_ok_and(|inside| self.point.join(inside).is_dir())
    }
}

/// Undoes mountinfo's `\040` for blanks and the like.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let octal =
            tail.get(..3).filter(|digits| *first == b'\\' && digits.iter().all(|digit| (b'0'..b'8').contains(digit)));
        if let Some(digits) = octal {
            bytes.push(digits.iter().fold(0u8, |value, digit| value.wrapping_mul(8).wrapping_add(digit - b'0')));
            rest = &tail[3..];
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// A group that was asked for, with the groups below it.
#[derive(Clone, Debug)]
pub struct Cgroup {
    text: String,
    path: PathBuf,
    /// Where groups of that path can be.
    mounts: Vec<Mount>,
    /// Whether only the hierarchies of these mounts are meant.
    only: bool,
}

impl Cgroup {
    /// `text` is a path below a mount of a hierarchy, which then is the one meant, or a path as `/proc/PID/cgroup` shows it,
    /// of whatever hierarchy.
    pub fn new(procs: &Procs, text: &Path) -> Self {
        let mountinfo = procfs::read(&procs.global("self/mountinfo"), MAX_MOUNTS).unwrap_or_default();
        let mounts: Vec<_> = mountinfo.split(|byte| *byte == b'\n').filter_map(Mount::parse).collect();
        let shown = text.to_string_lossy().into_owned();
        // Names of joint controllers are links: /sys/fs/cgroup/cpu to /sys/fs/cgroup/cpu,cpuacct.
        let real = text.canonicalize().unwrap_or_else(|_| text.to_owned());
        let mut below: Vec<_> = mounts.iter().filter(|mount| real.starts_with(&mount.point)).collect();
        below.sort_by_key(|mount| mount.point.as_os_str().len());
        if let Some(mount) = below.pop()
            && let Ok(inside) = real.strip_prefix(&mount.point)
        {
            return Self { text: shown, path: mount.root.join(inside), mounts: vec![mount.clone()], only: true };
        }
        Self { text: shown, path: Path::new("/").join(text), mounts, only: false }
    }

    /// What was asked for.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether a process is in it.
    pub fn has(&self, procs: &Procs, pid: u32) -> bool {
        memberships(procs, pid).iter().any(|membership| {
            membership.path.starts_with(&self.path)
                && (!self.only || self.mounts.iter().any(|mount| mount.has(membership)))
        })
    }

    /// Checks that it exists, though no process is in it.
    ///
    /// # Errors
    /// [`SelectError::NoSuchCgroup`].
    pub fn check(&self, procs: &Procs) -> Result<(), TargetError> {
        if self.mounts.iter().any(|mount| mount.shows(&self.path)) {
            return Ok(());
        }
        let mut known = BTreeSet::new();
        for pid in procs.all()? {
            for membership in memberships(procs, pid) {
                known.extend(membership.path.ancestors().map(|path| path.to_string_lossy().into_owned()));
            }
            if known.len() > MAX_CANDIDATES {
                break;
            }
        }
        let mut nearest = Nearest::new(&last(&self.path), SUGGESTIONS);
        for path in known {
            nearest.offer(path.rsplit('/').next().unwrap_or_default(), || path.clone());
        }
        let similar = nearest.best();
        Err(SelectError::NoSuchCgroup { path: self.text.clone(), similar }.into())
    }
}

fn last(path: &Path) -> String {
    path.file_name().map(|name| String::from_utf8_lossy(name.as_bytes()).into_owned()).unwrap_or_default()
}

#[cfg(test)]
#[path = "cgroup_tests.rs"]
mod tests;
