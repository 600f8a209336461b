//! Who was traced: processes and threads, and what results are split by.

use std::{fmt::Display, time::Duration};

use super::{Mapping, NameSources};

/// What results are split by (`--by`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum By {
    /// Nothing: call paths of all processes with the same command name are one.
    #[default]
    None,
    /// Threads.
    Thread,
    /// Processes.
    Process,
    /// Control groups of the processes.
    Cgroup,
}

impl By {
    /// Every value.
    pub const ALL: [Self; 4] = [Self::None, Self::Thread, Self::Process, Self::Cgroup];

    /// The name used in options and machine-readable output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Thread => "thread",
            Self::Process => "process",
            Self::Cgroup => "cgroup",
        }
    }
}

/// A traced process. One that executes another program is another entry from then on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Process id.
    pub pid: u32,
    /// Its command name (`/proc/PID/comm`). Any bytes but NUL can be in there: escape before printing.
    pub comm: String,
    /// Path of its control group, below the mount point; `None` if it could not be read. Escape before printing.
    pub cgroup: Option<String>,
    /// The process that forked it during the trace.
    pub parent: Option<u32>,
    /// What became of it.
    pub state: ProcessState,
    /// From the start of the trace to the moment from which on it was traced; zero if that was the start.
    pub since: Duration,
    /// How long it ran before its calls were seen, for a process that appeared during the trace.
    pub unseen: Option<Duration>,
    /// Its code mappings, for naming addresses.
    pub mappings: Vec<Mapping>,
    /// What else its names are taken from.
    pub names: NameSources,
    /// Resident set when it began to be traced and at the end (the last known value if it has exited), bytes.
    pub rss: Option<(u64, u64)>,
    /// Resident bytes that it had from its parent at the fork.
    pub inherited: Option<u64>,
}

impl Process {
    /// One that is traced from the start and runs at the end, with nothing else known of it.
    pub fn new(pid: u32, comm: impl Into<String>) -> Self {
        Self {
            pid,
            comm: comm.into(),
            cgroup: None,
            parent: None,
            state: ProcessState::Running,
            since: Duration::ZERO,
            unseen: None,
            mappings: Vec::new(),
            names: NameSources::default(),
            rss: None,
            inherited: None,
        }
    }
}

/// What became of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessState {
    /// It ran at the end of the trace.
    Running,
    /// It ended before.
    Ended,
    /// It executed another program. That may follow as another entry with the same pid.
    Executed,
    /// It could not be traced.
    Missed {
        /// Why. May quote names of the target: escape before printing.
        reason: String,
    },
}

/// A thread that allocated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thread {
    /// Index in [`super::Profile::processes`].
    pub process: usize,
    /// Thread id.
    pub tid: u32,
    /// Its name (`/proc/PID/task/TID/comm`), empty if it ended before that could be read. Escape before printing.
    pub name: String,
}

/// A name for people: that of a process or thread, or what stands for one that is empty.
pub fn or_no_name(name: &str) -> &str {
    if name.trim().is_empty() { "[no name]" } else { name }
}

/// A name with what tells it from others of the same name: `nginx (pid 7)`.
pub fn numbered(name: &str, number: impl Display) -> String {
    format!("{} ({number})", or_no_name(name))
}
