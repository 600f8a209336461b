//! What is recorded of a target's memory as a whole: the system calls that change its address space, and which pages are
//! resident before and after.

use std::{
    collections::HashSet,
    fs,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use memtrace_common::{
    call::CallEvent,
    fault::{Chunk, PAGE, PageRecord},
};
use tokio::io::{Interest, unix::AsyncFd};

use super::monotonic_now;
use crate::{
    collect::{attribution, inherited::Inherited, reconcile::Look, space::Space},
    kernel::{KernelError, Tracer, source::call::Calls},
    target::{
        Process, TargetError, mappings,
        pages::{self, PageRange, Pages, Rollup, Scan},
    },
};

/// Shortest time between two looks at the resident pages while the trace runs: should the target end on its own, the last
/// look is what there is.
const PAUSE: Duration = Duration::from_secs(1);
/// Of how much of the time the looking may take: one part in so many.
const SHARE: u32 = 50;

/// What was resident at one moment.
pub struct Snapshot {
    /// When.
    pub at: Instant,
    /// The kernel's own sums, read right after the scan.
    pub rollup: Rollup,
    /// The pages.
    pub scan: Scan,
    /// Page faults of the process so far, as the kernel counts them.
    pub faults: u64,
    /// Of threads that were not running.
    pub stack_pointers: Vec<u64>,
}

impl Snapshot {
    /// Looks at the process now.
    ///
    /// # Errors
    /// It has ended, or may not be looked at.
    pub fn take(process: &Process) -> Result<Self, TargetError> {
        let faults = pages::fault_counts(process)?.total();
        let scan = pages::scan(process, &mappings::read(process)?)?;
        let rollup = pages::rollup(process)?;
        let stack_pointers = process.stack_pointers();
        Ok(Self { at: Instant::now(), rollup, scan, faults, stack_pointers })
    }

    /// As the reconciliation takes it.
    pub fn look(&self) -> Look<'_> {
        Look { scan: &self.scan, rollup: self.rollup }
    }
}

/// The stream of system calls of all processes.
pub struct CallStream(AsyncFd<Calls>);

impl CallStream {
    /// Takes the stream over.
    ///
    /// # Errors
    /// It can't be waited for.
    pub fn new(tracer: &mut Tracer) -> anyhow::Result<Self> {
        let calls = tracer.take_calls()?.context("the stream of system calls was taken before")?;
        // SAFETY: the stream owns its descriptor and moves into the AsyncFd, which closes it after deregistering.
        let calls = unsafe { AsyncFd::register_with_interest(calls, Interest::READABLE) }
            .context("system calls can't be waited for")?;
        Ok(Self(calls))
    }

    /// Ready when there are system calls to be taken.
    ///
    /// # Errors
    /// The stream fails.
    pub async fn readable(&mut self) -> anyhow::Result<()> {
        self.0.readable_mut().await.context("system calls")?.clear_ready();
        Ok(())
    }

    /// The next system call, if there is one.
    pub fn next(&mut self) -> Option<CallEvent> {
        self.0.get_mut().next_call()
    }
}

/// Most system calls that wait for their process to be known.
const MAX_UNCLAIMED: usize = 1 << 16;
/// How long they wait: longer than it is tried to attach to a process.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// System calls, in their order, of processes that are not known yet: the messages that tell of processes come another way.
#[derive(Debug, Default)]
pub struct Unclaimed {
    calls: Vec<CallEvent>,
    /// Those for which there was no room.
    pub lost: u64,
}

impl Unclaimed {
    /// All of them, to be tried again.
    pub fn take(&mut self) -> Vec<CallEvent> {
        std::mem::take(&mut self.calls)
    }

    /// Keeps one, unless its process has been given up.
    pub fn keep(&mut self, event: CallEvent) {
        if Duration::from_nanos(monotonic_now().saturating_sub(event.time)) > MAX_WAIT {
            return;
        }
        if self.calls.len() < MAX_UNCLAIMED {
            self.calls.push(event);
        } else {
            self.lost += 1;
        }
    }

    /// Drops those of images that will not be known any more.
    pub fn forget(&mut self, images: &HashSet<u32>) {
        self.calls.retain(|call| !images.contains(&call.process));
    }
}

/// The memory of a process that is being traced.
pub struct Memory {
    /// Its address space.
    pub space: Space,
    /// What was resident when the process began to be traced.
    pub before: Option<Snapshot>,
    /// What was resident at the last look.
    pub last: Option<Snapshot>,
    /// Whether that was at the end of the trace.
    pub at_end: bool,
    /// Resident bytes that a forked process had from its parent.
    pub inherited: Option<u64>,
    next: Instant,
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            space: Space::default(),
            before: None,
            last: None,
            at_end: false,
            inherited: None,
            next: Instant::now() + PAUSE,
        }
    }
}

impl Memory {
    /// Looks at what is there at the start. Recording has begun.
    ///
    /// # Errors
    /// The process's pages can't be looked at.
    pub fn begin(&mut self, process: &Process) -> Result<(), TargetError> {
        let mappings = mappings::read(process)?;
        self.space.begin(&mappings, mappings::heap_start(process)?);
        let before = Snapshot::take(process)?;
        self.space.inherit(Inherited::new(&before.scan.ranges, monotonic_now()));
        self.before = Some(before);
        self.next = Instant::now() + PAUSE;
        Ok(())
    }

    /// The same for a process that was just forked, of whose pages `records` tells, when it is asked, which it has touched by then:
    /// those it has not inherited.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn begin_forked(
        &mut self,
        process: &Process,
        records: impl FnOnce() -> Result<Vec<(u64, Chunk)>, KernelError>,
    ) -> anyhow::Result<()> {
        let before = Snapshot::take(process)?;
        // After the look: a page that is seen there has its fault recorded by now.
        let records = records()?;
        let inherited = without(&before.scan.ranges, attribution::records(&records));
        let pages: u64 = inherited.iter().map(|range| u64::from(range.count)).sum();
        self.inherited = Some(pages.saturating_mul(PAGE));
        self.space.inherit(Inherited::new(&inherited, monotonic_now()));
        self.before = Some(before);
        self.next = Instant::now() + PAUSE;
        Ok(())
    }

    /// Resident pages at the start.
    pub fn pages(&self) -> Option<Pages> {
        self.before.as_ref().map(|before| before.scan.pages())
    }

    /// Applies a system call; whether it mapped or unmapped code.
    pub fn apply(&mut self, event: &CallEvent, process: &Process) -> bool {
        self.space.apply(event, |id, address| segment_length(process, id, address)).code
    }

    /// Looks at the resident pages if that is due.
    pub fn watch(&mut self, process: &Process) {
        let now = Instant::now();
        if now < self.next {
            return;
        }
        if let Ok(snapshot) = Snapshot::take(process) {
            self.last = Some(snapshot);
        }
        self.next = Instant::now() + PAUSE.max(now.elapsed() * SHARE);
    }

    /// Looks at what is there at the end, if the process still is.
    pub fn end(&mut self, process: &Process) {
        match Snapshot::take(process) {
            Ok(snapshot) => {
                self.last = Some(snapshot);
                self.at_end = true;
            }
            Err(error) => tracing::info!("the pages at the end could not be looked at: {error}"),
        }
    }

    /// The first and the last look, if there are both.
    pub fn looks(&self) -> Option<(&Snapshot, &Snapshot)> {
        Some((self.before.as_ref()?, self.last.as_ref()?))
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

/// How long the System V segment `id` is that a process has attached at an address. The mapping there may have been cut by now,
/// and the segment is known under its id only in the same IPC namespace.
fn segment_length(process: &Process, id: u64, address: u64) -> Option<u64> {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/ipc")).ok();
    let own = namespace("self");
    if own.is_some()
        && own == namespace(&process.pid().to_string())
        && let Some(length) = fs::read_to_string("/proc/sysvipc/shm").ok().and_then(|table| segment_size(&table, id))
    {
        return Some(length);
    }
    let mappings = mappings::read(process).ok()?;
    mappings.iter().find(|mapping| mapping.start == address).map(|mapping| mapping.end - mapping.start)
}

/// Bytes of a segment in the kernel's table of all (proc_sysvipc(5)): columns key, id, permissions, size.
fn segment_size(table: &str, id: u64) -> Option<u64> {
    table.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        (fields.next()?.parse() == Ok(id)).then(|| fields.nth(1)?.parse().ok())?
    })
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

    #[test]
    fn sizes_of_segments() {
        let table = "       key      shmid perms                  size  cpid\n         0          3  1600                101400  7\n";
        assert_eq!(segment_size(table, 3), Some(101_400));
        assert_eq!(segment_size(table, 4), None);
        assert_eq!(segment_size("0 3", 3), None);
    }
}
