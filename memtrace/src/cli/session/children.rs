//! The processes that the target forks.

use std::{collections::BTreeMap, num::NonZeroU32};

use memtrace_common::fault::{PAGE, PageRecord};

use super::{Session, attach_points, memory::Snapshot, monotonic_now};
use crate::{
    collect::{attribution, inherited::Inherited, space::Space},
    kernel::KernelError,
    profile::{self, ProcessState},
    target::{Process, pages::PageRange},
};

/// A followed process.
pub struct Child {
    process: Option<Process>,
    executed: bool,
    /// What was resident right after the fork, if that is looked at.
    pub before: Option<Snapshot>,
    /// What of it was inherited, bytes.
    inherited: u64,
    /// What is resident at the end.
    pub after: Option<Snapshot>,
}

/// The followed processes, by their ids.
#[derive(Default)]
pub struct Children {
    by_pid: BTreeMap<u32, Child>,
}

impl Children {
    /// A child has executed another program.
    pub fn executed(&mut self, pid: u32) {
        if let Some(child) = self.by_pid.get_mut(&pid) {
            child.executed = true;
        }
    }

    /// Whether what a process had is no more: it has ended, or executed another program.
    pub fn is_gone(&self, pid: u32) -> bool {
        self.by_pid.get(&pid).is_some_and(|child| child.state() != ProcessState::Running)
    }

    /// Looks at what is resident at the end.
    pub fn end(&mut self) {
        for child in self.by_pid.values_mut().filter(|child| child.before.is_some() && !child.executed) {
            child.after = child.process.as_ref().and_then(|process| Snapshot::take(process).ok());
        }
    }

    /// Those that run at the end and were looked at after the fork and now.
    pub fn looked_at(&self) -> impl Iterator<Item = (u32, &Snapshot, &Snapshot)> {
        self.by_pid.iter().filter_map(|(pid, child)| Some((*pid, child.before.as_ref()?, child.after.as_ref()?)))
    }

    /// All of them, for the profile. `parent` is the traced process.
    pub fn report(&self, parent: u32) -> Vec<profile::Process> {
        let report = |(pid, child): (&u32, &Child)| profile::Process {
            parent: Some(parent),
            state: child.state(),
            rss: child.before.as_ref().zip(child.after.as_ref()).map(|(a, b)| (a.rollup.rss, b.rollup.rss)),
            inherited: child.before.as_ref().map(|_| child.inherited),
            ..profile::Process::new(
                *pid,
                child.process.as_ref().map_or_else(String::new, |child| child.comm().to_owned()),
            )
        };
        self.by_pid.iter().map(report).collect()
    }
}

impl Child {
    fn state(&self) -> ProcessState {
        match &self.process {
            _ if self.executed => ProcessState::Executed,
            None => ProcessState::Missed { reason: "it had ended, or could not be opened".into() },
            Some(process) if process.is_alive() => ProcessState::Running,
            Some(_) => ProcessState::Ended,
        }
    }
}

impl Session {
    /// Follows a process that was just forked. Its page faults and system calls are recorded from its first moment on; its
    /// allocations from now on.
    pub(super) fn follow(&mut self, pid: u32) -> Result<(), KernelError> {
        let process = Process::open(pid).ok();
        let mut child = Child { before: None, inherited: 0, after: None, executed: false, process };
        if let (Some(process), Some(number)) = (&child.process, NonZeroU32::new(pid)) {
            if !self.discovery.sites.is_empty()
                && let Err(error) = self.tracer.attach_allocator(&attach_points(&self.discovery), number)
            {
                tracing::warn!("the allocations of the forked process {pid} are not seen: {error}");
            }
            if let Some(memory) = &mut self.memory
                && let Ok(before) = Snapshot::take(process)
            {
                // What it has touched by now it has not inherited.
                let chunks = self.tracer.page_records(pid)?;
                let inherited = without(&before.scan.ranges, attribution::records(&chunks));
                let pages: u64 = inherited.iter().map(|range| u64::from(range.count)).sum();
                child.inherited = pages.saturating_mul(PAGE);
                let mut space = Space::default();
                space.inherit(Inherited::new(&inherited, monotonic_now()));
                memory.adopt(pid, space);
                child.before = Some(before);
            }
        }
        if let Some(children) = &mut self.children {
            children.by_pid.insert(pid, child);
        }
        Ok(())
    }
}

/// `ranges` without the pages that an ascending list of records says were absent.
fn without(ranges: &[PageRange], records: impl Iterator<Item = (u64, PageRecord)>) -> Vec<PageRange> {
    let mut absent = records.filter(|(_, record)| record.absent.is_some()).map(|(page, _)| page).peekable();
    let mut left = Vec::new();
    for range in ranges {
        let mut first = range.first;
        while absent.next_if(|page| *page < first).is_some() {}
        while let Some(page) = absent.next_if(|page| *page < range.end()) {
            push(&mut left, range, first, page);
            first = page + 1;
        }
        push(&mut left, range, first, range.end());
    }
    left
}

fn push(ranges: &mut Vec<PageRange>, range: &PageRange, first: u64, end: u64) {
    if first < end {
        ranges.push(PageRange { first, count: u32::try_from(end - first).unwrap_or(u32::MAX), ..*range });
    }
}

#[cfg(test)]
mod tests {
    use memtrace_common::fault::Fault;

    use super::*;
    use crate::target::pages::PageKind;

    #[test]
    fn touched_pages_are_not_inherited() {
        let range = |first, count| PageRange { first, count, kind: PageKind::Anon, huge: false };
        let absent = PageRecord { absent: Some(Fault { stack: 2, write: true, late: true }), copied: None };
        let copied = PageRecord { absent: None, ..absent };
        let records = [(3, absent), (10, absent), (12, copied), (13, absent), (14, absent), (25, absent)];
        let left = without(&[range(10, 10), range(20, 5), range(30, 1)], records.into_iter());
        assert_eq!(left, [range(11, 2), range(15, 5), range(20, 5), range(30, 1)]);
    }
}
