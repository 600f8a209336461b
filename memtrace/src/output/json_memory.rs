//! The members of the JSON document on the processes' memory as a whole; [`super::json`] describes them.

use std::collections::BTreeMap;

use memtrace_common::fault::PAGE;
use serde::Serialize;

use crate::{
    collect::{
        attribution::Source,
        reconcile::{Reconciliation, RssByKind},
    },
    profile,
    target::pages,
};

use super::memory;

#[derive(Serialize)]
pub struct Memory {
    processes: u32,
    faults: Option<Faults>,
    growth: Option<Growth>,
    calls: u64,
    calls_lost: u64,
    audit: Option<Audit>,
    looked_before_end_ns: Option<u64>,
    reconciliation: Option<Reconciled>,
}

#[derive(Serialize)]
struct Faults {
    user: u64,
    kernel: u64,
    counted: Option<u64>,
}

#[derive(Serialize)]
struct Growth {
    processes: u32,
    new: Kinds,
    unattributed: Kinds,
    gone: Kinds,
    by_source: BTreeMap<&'static str, u64>,
}

#[derive(Serialize)]
struct Kinds {
    anonymous: u64,
    file: u64,
    shared: u64,
}

#[derive(Serialize)]
struct Audit {
    not_mapped: u64,
    unowned: u64,
}

#[derive(Serialize)]
struct Reconciled {
    processes: u32,
    before: Rss,
    after: Rss,
    change: i64,
    heap: Option<Heap>,
    lines: Vec<Line>,
    unexplained: i64,
    unexplained_share: Option<f64>,
}

#[derive(Serialize)]
struct Rss {
    rss: u64,
    #[serde(flatten)]
    kinds: Kinds,
}

#[derive(Serialize)]
struct Heap {
    requested: u64,
    resident: u64,
    new: u64,
}

#[derive(Serialize)]
struct Line {
    part: &'static str,
    change: i64,
    resident: u64,
}

impl Kinds {
    /// Each number of pages times `unit`.
    fn new(pages: pages::Pages, unit: u64) -> Self {
        let times = |pages: u64| pages.saturating_mul(unit);
        Self { anonymous: times(pages.anon), file: times(pages.file), shared: times(pages.shmem) }
    }
}

impl From<&RssByKind> for Rss {
    fn from(rss: &RssByKind) -> Self {
        Self { rss: rss.total, kinds: Kinds::new(rss.scanned, PAGE) }
    }
}

impl From<&Reconciliation> for Reconciled {
    fn from(reconciliation: &Reconciliation) -> Self {
        Self {
            processes: reconciliation.processes,
            before: (&reconciliation.before).into(),
            after: (&reconciliation.after).into(),
            change: reconciliation.change(),
            heap: reconciliation.heap.map(|heap| Heap {
                requested: heap.requested,
                resident: heap.resident,
                new: heap.new,
            }),
            lines: reconciliation
                .lines
                .iter()
                .map(|line| Line { part: memory::name(line.part), change: line.change, resident: line.resident })
                .collect(),
            unexplained: reconciliation.unexplained,
            unexplained_share: reconciliation.unexplained_share(),
        }
    }
}

impl From<&profile::GrowthSummary> for Growth {
    fn from(growth: &profile::GrowthSummary) -> Self {
        let sources = Source::ALL.into_iter().map(memory::source_name);
        Self {
            processes: growth.processes,
            new: Kinds::new(growth.new.pages, 1),
            unattributed: Kinds::new(growth.unattributed, 1),
            gone: Kinds::new(growth.gone, 1),
            by_source: sources.zip(growth.new.by_source).collect(),
        }
    }
}

impl From<&profile::Memory> for Memory {
    fn from(memory: &profile::Memory) -> Self {
        Self {
            processes: memory.processes,
            faults: memory.faults.map(|faults| Faults {
                user: faults.user,
                kernel: faults.kernel,
                counted: faults.counted,
            }),
            growth: memory.growth.as_ref().map(Into::into),
            calls: memory.calls,
            calls_lost: memory.calls_lost,
            audit: memory.audit.map(|audit| Audit { not_mapped: audit.not_mapped, unowned: audit.unowned }),
            looked_before_end_ns: memory.looked_before_end.map(|ago| u64::try_from(ago.as_nanos()).unwrap_or(u64::MAX)),
            reconciliation: memory.reconciliation.as_ref().map(Into::into),
        }
    }
}
