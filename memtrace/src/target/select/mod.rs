//! Which processes to trace: those that the command line asks for, now and later.
//!
//! All that is known comes from `/proc`: names from `comm`, control groups and containers from `cgroup`, numbers in other
//! pid namespaces from `status` and `ns/pid`. A process decides about its own name and, in part, about the names of its
//! groups: they are compared as bytes, never interpreted. Races with processes that end are no errors.

mod cgroup;
mod container;
mod error;
mod namespace;
mod procs;

use std::{path::Path, sync::OnceLock};

use wildmatch::WildMatch;

use self::{cgroup::Cgroup, container::Container, procs::Procs};
use super::{Process, TargetError};
pub use error::SelectError;
pub use namespace::PidNamespace;

/// Longest command name that the kernel keeps (`TASK_COMM_LEN` less the NUL, include/linux/sched.h).
const MAX_COMM: usize = 15;

/// The processes that are asked for.
#[derive(Clone, Debug)]
pub struct Selection {
    procs: Procs,
    rule: Rule,
}

#[derive(Clone, Debug)]
enum Rule {
    Pids(Vec<u32>),
    /// Numbers in a pid namespace, and its inode number once that was needed: who named it may end meanwhile.
    PidsIn(Vec<u32>, PidNamespace, OnceLock<u64>),
    Comm(String),
    /// A command name with wildcards.
    CommLike(WildMatch),
    Cgroup(Cgroup),
    Container(Container),
    All,
}

impl Selection {
    /// Processes by their numbers: those in the given pid namespace, or else those of `/proc`.
    pub fn pids(pids: &[u32], namespace: Option<PidNamespace>) -> Self {
        Self::pids_in(proc(), pids, namespace)
    }

    /// Processes of that command name. `*` stands for any characters and `?` for any one of them. A longer name is cut as the
    /// kernel cuts it: to 15 bytes.
    pub fn comm(name: &str) -> Self {
        Self::comm_in(proc(), name)
    }

    /// Processes in a control group or one below it: a path under the mount of a hierarchy, which then is the one meant,
    /// or a path as `/proc/PID/cgroup` shows it, of whatever hierarchy.
    pub fn cgroup(path: &Path) -> Self {
        Self::cgroup_in(proc(), path)
    }

    /// Processes in a container: its id, at least the first twelve digits of it, either also as Kubernetes writes it
    /// (`containerd://ID`), or the name of an LXC container.
    pub fn container(id: &str) -> Self {
        Self::container_in(proc(), id)
    }

    /// All processes of user programs.
    pub fn all() -> Self {
        Self { procs: proc(), rule: Rule::All }
    }

    fn pids_in(procs: Procs, pids: &[u32], namespace: Option<PidNamespace>) -> Self {
        let mut pids = pids.to_vec();
        pids.sort_unstable();
        pids.dedup();
        let rule = match namespace {
            None => Rule::Pids(pids),
            Some(namespace) => Rule::PidsIn(pids, namespace, OnceLock::new()),
        };
        Self { procs, rule }
    }

    fn comm_in(procs: Procs, name: &str) -> Self {
        let rule =
            if name.contains(['*', '?']) { Rule::CommLike(WildMatch::new(name)) } else { Rule::Comm(name.to_owned()) };
        Self { procs, rule }
    }

    fn cgroup_in(procs: Procs, path: &Path) -> Self {
        let rule = Rule::Cgroup(Cgroup::new(&procs, path));
        Self { procs, rule }
    }

    fn container_in(procs: Procs, id: &str) -> Self {
        Self { procs, rule: Rule::Container(Container::new(id)) }
    }

    /// The numbers, as `/proc` has them, of its processes at this moment, ascending: no kernel threads, no zombies, not
    /// memtrace itself. None at all is no error if the selection [is open](Self::is_open) and what it names exists.
    ///
    /// # Errors
    /// For numbers, what [`Process::open`] says of the first process that cannot be traced; [`SelectError`];
    /// [`TargetError::Io`] if `/proc` cannot be read.
    pub fn find(&self) -> Result<Vec<u32>, TargetError> {
        let found = self.resolve()?;
        if !self.is_open() {
            for pid in &found {
                Process::open(*pid)?;
            }
        }
        Ok(found)
    }

    fn resolve(&self) -> Result<Vec<u32>, TargetError> {
        let procs = &self.procs;
        match &self.rule {
            Rule::Pids(pids) => self.not_own(pids.clone()),
            Rule::PidsIn(pids, namespace, known) => {
                let inode = inode(procs, namespace, known)?;
                let mut found = Vec::with_capacity(pids.len());
                for (number, pid) in pids.iter().zip(namespace::resolve(procs, pids, inode)?) {
                    let missing = || SelectError::NotInNamespace { pid: *number, namespace: namespace.to_string() };
                    found.push(pid.ok_or_else(missing)?);
                }
                found.sort_unstable();
                self.not_own(found)
            }
            Rule::Container(container) => container.find(procs, procs.traceable()?),
            Rule::Cgroup(cgroup) => {
                let found: Vec<_> = procs.traceable()?.into_iter().filter(|pid| cgroup.has(procs, *pid)).collect();
                if found.is_empty() {
                    cgroup.check(procs)?;
                }
                Ok(found)
            }
            Rule::Comm(_) | Rule::CommLike(_) | Rule::All => {
                Ok(procs.traceable()?.into_iter().filter(|pid| self.covers(*pid)).collect())
            }
        }
    }

    fn not_own(&self, found: Vec<u32>) -> Result<Vec<u32>, TargetError> {
        let pid = self.procs.own();
        if found.contains(&pid) { Err(SelectError::Own { pid }.into()) } else { Ok(found) }
    }

    /// Whether a process belongs to it that has just appeared, has executed another program or has changed its name. `pid` is
    /// a process, no thread, numbered as `/proc` does.
    pub fn matches(&self, pid: u32) -> bool {
        self.covers(pid) && self.procs.is_traceable(pid)
    }

    fn covers(&self, pid: u32) -> bool {
        let procs = &self.procs;
        match &self.rule {
            Rule::Pids(pids) => pids.contains(&pid),
            Rule::PidsIn(pids, namespace, known) => inode(procs, namespace, known)
                .ok()
                .and_then(|inode| namespace::number_in(procs, pid, inode))
                .is_some_and(|number| pids.contains(&number)),
            Rule::Comm(name) => procs.comm(pid).is_some_and(|comm| comm == cut(name)),
            Rule::CommLike(pattern) => {
                procs.comm(pid).is_some_and(|comm| pattern.matches(&String::from_utf8_lossy(&comm)))
            }
            Rule::Cgroup(cgroup) => cgroup.has(procs, pid),
            Rule::Container(container) => container.has(procs, pid),
            Rule::All => true,
        }
    }

    /// Whether processes that appear later can belong to it.
    pub fn is_open(&self) -> bool {
        !matches!(self.rule, Rule::Pids(_) | Rule::PidsIn(..))
    }

    /// Whether it selects every process.
    pub fn is_all(&self) -> bool {
        matches!(self.rule, Rule::All)
    }

    /// What it selects, for a message: `processes named "nginx"`. Names in it are escaped.
    pub fn describe(&self) -> String {
        match &self.rule {
            Rule::Pids(pids) => numbered(pids),
            Rule::PidsIn(pids, namespace, _) => format!("{} of the pid namespace of {namespace}", numbered(pids)),
            Rule::Comm(name) => format!("processes named {:?}", String::from_utf8_lossy(cut(name))),
            Rule::CommLike(pattern) => format!("processes named like {:?}", pattern.to_string()),
            Rule::Cgroup(cgroup) => format!("processes in the cgroup {:?}", cgroup.text()),
            Rule::Container(container) => format!("processes in the container {:?}", container.text()),
            Rule::All => "all processes".to_owned(),
        }
    }
}

/// The cgroup that names a process best: that of version 2, else that of version 1's memory controller, else any; one that
/// is not the root of its hierarchy before one that is. `None` once the process has ended. Escape before printing.
pub fn cgroup_of(pid: u32) -> Option<String> {
    cgroup::cgroup_of(&proc(), pid)
}

fn proc() -> Procs {
    Procs::new(Path::new("/proc"))
}

fn numbered(pids: &[u32]) -> String {
    let noun = if pids.len() == 1 { "process" } else { "processes" };
    let numbers: Vec<_> = pids.iter().map(u32::to_string).collect();
    format!("{noun} {}", numbers.join(", "))
}

fn cut(name: &str) -> &[u8] {
    &name.as_bytes()[..name.len().min(MAX_COMM)]
}

/// The inode number of a namespace, looked up once.
fn inode(procs: &Procs, namespace: &PidNamespace, known: &OnceLock<u64>) -> Result<u64, TargetError> {
    match known.get() {
        Some(inode) => Ok(*inode),
        None => namespace.inode(procs).map(|inode| *known.get_or_init(|| inode)),
    }
}

#[cfg(test)]
mod fake;
#[cfg(test)]
mod live_tests;
#[cfg(test)]
mod tests;
