//! The member `coverage` of the JSON document; [`super::json`] describes it.

use serde::Serialize;

use crate::{
    profile::{self, AttachedLate, TraceEnd},
    view::Coverage,
};

use super::{
    json::{Amount, nanoseconds},
    json_memory,
    json_processes::{self, Child, Rss},
};

#[derive(Serialize)]
pub struct CoverageObject<'a> {
    pid: u32,
    comm: &'a str,
    duration_ns: u64,
    end: &'static str,
    older_ns: u64,
    younger: Amount,
    probed: Vec<Probed<'a>>,
    everywhere: bool,
    attached_late: Vec<Late<'a>>,
    missed_more: u64,
    events: Events,
    losses: Vec<Loss>,
    stacks: u64,
    allocated: Amount,
    unfreed: Amount,
    whole: Whole,
    truncated: Vec<Truncated>,
    unwinding: Unwinding<'a>,
    problems: Vec<Problem<'a>>,
    rss: Option<RssSum>,
    memory: Option<json_memory::Memory>,
    children: Option<Vec<Child>>,
    missed_growth: Option<u64>,
}

#[derive(Serialize)]
struct Probed<'a> {
    module: &'a str,
    functions: &'a [String],
    allocated: Amount,
}

#[derive(Serialize)]
struct Late<'a> {
    process: usize,
    pid: u32,
    module: &'a str,
    functions: u64,
    since_ns: u64,
}

#[derive(Serialize)]
struct Events {
    allocations: u64,
    frees: u64,
    frees_unknown: u64,
    frees_inherited: u64,
    nested: u64,
    failed: u64,
}

#[derive(Serialize)]
struct Loss {
    name: &'static str,
    count: u64,
    bytes: u64,
    lowers_totals: bool,
    sentence: &'static str,
}

#[derive(Serialize)]
struct Whole {
    stacks: u64,
    allocated: Amount,
    unfreed: Amount,
}

#[derive(Serialize)]
struct Unwinding<'a> {
    without_rows: Vec<Problem<'a>>,
    left_out: u64,
    late_code: LateCode,
}

#[derive(Serialize)]
struct LateCode {
    mappings: u64,
    longest_ns: u64,
    stacks: u64,
    allocated: Amount,
}

impl<'a> From<&'a profile::Unwinding> for Unwinding<'a> {
    fn from(unwinding: &'a profile::Unwinding) -> Self {
        let late = unwinding.late;
        Self {
            without_rows: unwinding
                .problems
                .iter()
                .map(|problem| Problem { module: &problem.module, problem: &problem.problem })
                .collect(),
            left_out: unwinding.left_out,
            late_code: LateCode {
                mappings: late.mappings,
                longest_ns: nanoseconds(late.longest),
                stacks: late.stacks,
                allocated: late.allocated.into(),
            },
        }
    }
}

#[derive(Serialize)]
struct Truncated {
    reason: &'static str,
    stacks: u64,
    allocated: Amount,
    unfreed: Amount,
}

#[derive(Serialize)]
struct Problem<'a> {
    module: &'a str,
    problem: &'a str,
}

/// Of all processes together.
#[derive(Serialize)]
struct RssSum {
    #[serde(flatten)]
    rss: Rss,
    processes: usize,
}

impl<'a> From<&'a Coverage> for CoverageObject<'a> {
    fn from(coverage: &'a Coverage) -> Self {
        let events = &coverage.events;
        let first = coverage.processes.first();
        Self {
            pid: first.map_or(0, |process| process.pid),
            comm: first.map_or("", |process| &process.comm),
            duration_ns: nanoseconds(coverage.duration),
            end: end(coverage.end),
            older_ns: nanoseconds(coverage.older),
            younger: coverage.younger.into(),
            probed: coverage
                .probed
                .iter()
                .map(|probed| Probed {
                    module: &probed.module,
                    functions: &probed.functions,
                    allocated: probed.allocated.into(),
                })
                .collect(),
            everywhere: coverage.everywhere,
            attached_late: coverage.attached_late.iter().map(|late| Late::of(late, coverage)).collect(),
            missed_more: coverage.missed_more,
            events: Events {
                allocations: events.allocations,
                frees: events.frees,
                frees_unknown: events.frees_unknown,
                frees_inherited: events.frees_inherited,
                nested: events.nested,
                failed: events.failed,
            },
            losses: coverage
                .losses
                .iter()
                .map(|loss| Loss {
                    name: loss.name,
                    count: loss.count,
                    bytes: loss.bytes,
                    lowers_totals: loss.lowers_totals,
                    sentence: loss.sentence,
                })
                .collect(),
            stacks: coverage.stacks,
            allocated: coverage.allocated.into(),
            unfreed: coverage.unfreed.into(),
            whole: Whole {
                stacks: coverage.whole.stacks,
                allocated: coverage.whole.allocated.into(),
                unfreed: coverage.whole.unfreed.into(),
            },
            truncated: coverage
                .truncated
                .iter()
                .map(|cut| Truncated {
                    reason: cut.reason.reason(),
                    stacks: cut.share.stacks,
                    allocated: cut.share.allocated.into(),
                    unfreed: cut.share.unfreed.into(),
                })
                .collect(),
            unwinding: (&coverage.unwinding).into(),
            problems: coverage
                .problems
                .iter()
                .map(|problem| Problem { module: &problem.module, problem: &problem.problem })
                .collect(),
            rss: coverage.rss.map(|rss| RssSum { rss: Rss::of((rss.before, rss.after)), processes: rss.processes }),
            memory: coverage.memory.as_ref().map(Into::into),
            children: json_processes::children(&coverage.processes),
            missed_growth: coverage.missed_growth(),
        }
    }
}

impl<'a> Late<'a> {
    fn of(late: &'a AttachedLate, coverage: &Coverage) -> Self {
        Self {
            process: late.process,
            pid: coverage.processes.get(late.process).map_or(0, |process| process.pid),
            module: &late.module,
            functions: late.functions,
            since_ns: nanoseconds(late.since),
        }
    }
}

fn end(end: TraceEnd) -> &'static str {
    match end {
        TraceEnd::Duration => "duration",
        TraceEnd::Interrupted => "interrupted",
        TraceEnd::TargetExited => "target exited",
        TraceEnd::TargetExecuted => "target executed another program",
    }
}
