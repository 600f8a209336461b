//! Why the command line selects no processes. Every message is one sentence with the next step.

use std::{fmt, io};

/// Why a selection of processes cannot be resolved.
#[derive(Debug, thiserror::Error)]
pub enum SelectError {
    /// memtrace itself.
    #[error("process {pid} is memtrace itself, which can't trace itself: choose another process")]
    Own {
        /// Its number.
        pid: u32,
    },
    /// What should name a pid namespace does not.
    #[error("{path:?} is no pid namespace: give --pid-ns the pid of a process, or a file such as /proc/PID/ns/pid")]
    NotPidNamespace {
        /// What was given.
        path: String,
    },
    /// What should name a pid namespace cannot be read.
    #[error("the pid namespace {path:?} can't be read ({source}): check the path, and run memtrace as root")]
    Namespace {
        /// What was given.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// No process has this number in the namespace.
    #[error(
        "no process that can be seen from here has pid {pid} in the pid namespace of {namespace}: the numbers after -p are \
         those that `ps -e` prints inside it"
    )]
    NotInNamespace {
        /// The number inside.
        pid: u32,
        /// What names the namespace, for display.
        namespace: String,
    },
    /// The cgroup does not exist.
    #[error("there is no cgroup {path:?}{}: the cgroups of a process are in /proc/PID/cgroup", Similar(similar))]
    NoSuchCgroup {
        /// What was asked for.
        path: String,
        /// Paths of cgroups that have a similar name.
        similar: Vec<String>,
    },
    /// No process is in such a container.
    #[error(
        "no process runs in a container {id:?} (a whole id, or its first 12 digits or more; or the name of an LXC container): {}",
        if known.is_empty() {
            "/proc/*/cgroup shows no container on this machine; use --cgroup or -p".to_owned()
        } else {
            format!("the containers seen here are {}", known.join(", "))
        }
    )]
    NoSuchContainer {
        /// What was asked for.
        id: String,
        /// Some of the containers that are there.
        known: Vec<String>,
    },
    /// Several containers have an id that begins so.
    #[error("the ids of several containers begin with {id:?}: give more digits of one of {}", candidates.join(", "))]
    AmbiguousContainer {
        /// What was asked for.
        id: String,
        /// Their ids.
        candidates: Vec<String>,
    },
}

struct Similar<'a>(&'a [String]);

impl fmt::Display for Similar<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, path) in self.0.iter().enumerate() {
            let before = if index == 0 { " (similar ones: " } else { ", " };
            write!(f, "{before}{path:?}")?;
        }
        if self.0.is_empty() { Ok(()) } else { f.write_str(")") }
    }
}
