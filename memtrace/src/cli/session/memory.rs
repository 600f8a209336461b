//! What is recorded of a target's memory as a whole: the system calls that change its address space, and which pages are
//! resident before and after.

use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use tokio::io::{Interest, unix::AsyncFd};

use super::monotonic_now;
use crate::{
    collect::{inherited::Inherited, reconcile::Look, space::Space},
    kernel::{Tracer, source::call::Calls},
    target::{
        Process, TargetError, mappings,
        pages::{self, Pages, Rollup, Scan},
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

/// The memory of a target that is being traced.
pub struct Memory {
    calls: AsyncFd<Calls>,
    space: Space,
    /// Those of followed children.
    children: BTreeMap<u32, Space>,
    before: Option<Snapshot>,
    last: Option<Snapshot>,
    next: Instant,
}

impl Memory {
    /// Takes over the stream of system calls.
    ///
    /// # Errors
    /// It can't be waited for.
    pub fn new(tracer: &mut Tracer) -> anyhow::Result<Self> {
        let calls = tracer.take_calls()?.context("the stream of system calls was taken before")?;
        // SAFETY: the stream owns its descriptor and moves into the AsyncFd, which closes it after deregistering.
        let calls = unsafe { AsyncFd::register_with_interest(calls, Interest::READABLE) }
            .context("system calls can't be waited for")?;
        Ok(Self {
            calls,
            space: Space::default(),
            children: BTreeMap::new(),
            before: None,
            last: None,
            next: Instant::now(),
        })
    }

    /// Looks at what is there at the start. Recording has begun.
    ///
    /// # Errors
    /// The target's pages can't be looked at.
    pub fn begin(&mut self, process: &Process) -> Result<(), TargetError> {
        let mappings = mappings::read(process)?;
        self.space.begin(&mappings, mappings::heap_start(process)?);
        let before = Snapshot::take(process)?;
        self.space.inherit(Inherited::new(&before.scan.ranges, monotonic_now()));
        self.before = Some(before);
        self.next = Instant::now() + PAUSE;
        Ok(())
    }

    /// Resident pages at the start.
    pub fn pages(&self) -> Option<Pages> {
        self.before.as_ref().map(|before| before.scan.pages())
    }

    /// Takes over the address space of a forked process. (Calls that were reported before the fork are in one of their own.)
    pub fn adopt(&mut self, pid: u32, space: Space) {
        self.children.insert(pid, space);
    }

    /// Ready when there are system calls to be taken.
    ///
    /// # Errors
    /// The stream fails.
    pub async fn readable(&mut self) -> anyhow::Result<()> {
        self.calls.readable_mut().await.context("system calls")?.clear_ready();
        Ok(())
    }

    /// Takes all system calls there are; whether one of them mapped or unmapped code.
    pub fn drain(&mut self, process: &Process) -> bool {
        let mut code = false;
        while let Some(event) = self.calls.get_mut().next_call() {
            let space = match event.tgid {
                tgid if tgid == process.pid() => &mut self.space,
                tgid => self.children.entry(tgid).or_default(),
            };
            code |= space.apply(&event, |id, address| segment_length(process, id, address)).code;
        }
        code
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

    /// Looks at what is there at the end, if the target still is; whether it was.
    pub fn end(&mut self, process: &Process) -> bool {
        match Snapshot::take(process) {
            Ok(snapshot) => {
                self.last = Some(snapshot);
                true
            }
            Err(error) => {
                tracing::info!("the pages at the end could not be looked at: {error}");
                false
            }
        }
    }

    /// The address spaces, that of the target and those of followed children, and what was resident before and at the last look.
    pub fn finish(self) -> (Space, BTreeMap<u32, Space>, Option<Snapshot>, Option<Snapshot>) {
        (self.space, self.children, self.before, self.last)
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
    use super::segment_size;

    #[test]
    fn sizes_of_segments() {
        let table = "       key      shmid perms                  size  cpid\n         0          3  1600                101400  7\n";
        assert_eq!(segment_size(table, 3), Some(101_400));
        assert_eq!(segment_size(table, 4), None);
        assert_eq!(segment_size("0 3", 3), None);
    }
}
