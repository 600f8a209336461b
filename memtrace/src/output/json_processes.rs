//! The members of the JSON document on processes, threads and groups; [`super::json`] describes them.

use serde::Serialize;

use crate::{
    profile::{self, GroupKind, NamedProcess, ProcessState},
    view::GroupTable,
};

use super::json::{Amount, nanoseconds};

#[derive(Serialize)]
pub struct Rss {
    before: u64,
    after: u64,
    difference: i128,
}

impl Rss {
    /// Of the values at the start and at the end.
    pub fn of((before, after): (u64, u64)) -> Self {
        Self { before, after, difference: i128::from(after) - i128::from(before) }
    }
}

#[derive(Serialize)]
pub struct Process<'a> {
    pid: u32,
    comm: &'a str,
    cgroup: Option<&'a str>,
    parent: Option<u32>,
    state: &'static str,
    reason: Option<&'a str>,
    since_ns: u64,
    unseen_ns: Option<u64>,
    rss: Option<Rss>,
    inherited: Option<u64>,
    allocated: Amount,
    freed: Amount,
    unfreed: Amount,
}

impl<'a> From<&'a NamedProcess> for Process<'a> {
    fn from(process: &'a NamedProcess) -> Self {
        let reason = match &process.state {
            ProcessState::Missed { reason } => Some(reason.as_str()),
            ProcessState::Running | ProcessState::Ended | ProcessState::Executed => None,
        };
        Self {
            pid: process.pid,
            comm: &process.comm,
            cgroup: process.cgroup.as_deref(),
            parent: process.parent,
            state: state(&process.state),
            reason,
            since_ns: nanoseconds(process.since),
            unseen_ns: process.unseen.map(nanoseconds),
            rss: process.rss.map(Rss::of),
            inherited: process.inherited,
            allocated: process.allocated.into(),
            freed: process.freed.into(),
            unfreed: process.unfreed.into(),
        }
    }
}

fn state(state: &ProcessState) -> &'static str {
    match state {
        ProcessState::Running => "running",
        ProcessState::Ended => "ended",
        ProcessState::Executed => "executed",
        ProcessState::Missed { .. } => "missed",
    }
}

#[derive(Serialize)]
pub struct Child {
    pid: u32,
    state: &'static str,
    rss: Option<Rss>,
}

/// The processes that were forked during the trace; `None` if there are none.
pub fn children(processes: &[NamedProcess]) -> Option<Vec<Child>> {
    let forked = processes.iter().filter(|process| process.parent.is_some());
    let child = |process: &NamedProcess| Child {
        pid: process.pid,
        state: state(&process.state),
        rss: process.rss.map(|(before, after)| Rss::of((process.inherited.unwrap_or(before), after))),
    };
    let children: Vec<Child> = forked.map(child).collect();
    (!children.is_empty()).then_some(children)
}

#[derive(Serialize)]
pub struct Thread<'a> {
    process: usize,
    tid: u32,
    name: &'a str,
}

impl<'a> From<&'a profile::Thread> for Thread<'a> {
    fn from(thread: &'a profile::Thread) -> Self {
        Self { process: thread.process, tid: thread.tid, name: &thread.name }
    }
}

#[derive(Serialize)]
pub struct Group<'a> {
    label: &'a str,
    process: Option<usize>,
    thread: Option<usize>,
    cgroup: Option<&'a str>,
    bytes: u64,
    count: u64,
    share: f64,
}

/// The groups in the order of the document.
pub struct Groups<'a> {
    table: GroupTable<'a>,
    /// For each of the profile's groups its row.
    positions: Vec<usize>,
}

impl<'a> Groups<'a> {
    /// Those of a table with all groups.
    pub fn new(table: GroupTable<'a>) -> Self {
        let mut positions = vec![0; table.rows.len()];
        for (position, row) in table.rows.iter().enumerate() {
            positions[row.index] = position;
        }
        Self { table, positions }
    }

    /// Where a group of the profile is in the document.
    pub fn position(&self, group: usize) -> Option<usize> {
        self.positions.get(group).copied()
    }

    /// The document's groups.
    pub fn objects(&self) -> Vec<Group<'a>> {
        let object = |row: &crate::view::GroupRow<'a>| {
            let (process, thread, cgroup) = match &row.group.kind {
                GroupKind::Process(process) => (Some(*process), None, None),
                GroupKind::Thread { process, thread } => (Some(*process), *thread, None),
                GroupKind::Cgroup(path) => (None, None, path.as_deref()),
            };
            let (bytes, count) = (row.amount.bytes, row.amount.count);
            Group { label: &row.group.label, process, thread, cgroup, bytes, count, share: row.share }
        };
        self.table.rows.iter().map(object).collect()
    }
}
