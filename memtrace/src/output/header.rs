//! The coverage header as text: what was traced, what was missed, and how sure the numbers are.

use std::io::{self, Write};

use crate::{
    profile::{NameProblem, Subject, TraceEnd, UnwindProblem, Unwinding},
    view::{self, Coverage, Share, Which},
};

use super::{escape, memory, probed, processes, units};

/// How a trace ended, to follow "traced 60.0 s, ".
fn end(end: TraceEnd, several: bool) -> &'static str {
    match end {
        TraceEnd::TargetExited if several => "until they exited",
        TraceEnd::TargetExecuted if several => "until the target executed another program",
        TraceEnd::Duration => "as long as asked for",
        TraceEnd::Interrupted => "until interrupted",
        TraceEnd::TargetExited => "until it exited",
        TraceEnd::TargetExecuted => "until it executed another program",
    }
}

/// Writes the header, one labelled line for each topic.
pub fn write(coverage: &Coverage, out: &mut dyn Write) -> io::Result<()> {
    for (label, line) in lines(coverage) {
        writeln!(out, "{label:<9} {line}")?;
    }
    Ok(())
}

fn lines(coverage: &Coverage) -> Vec<(&'static str, String)> {
    let mut lines = vec![("target", target(coverage))];
    lines.extend(processes::lines(coverage));
    lines.extend(probed::lines(coverage));
    lines.push(("seen", seen(coverage)));
    lines.push(("totals", totals(coverage)));
    if !coverage.older.is_zero() {
        let line = format!(
            "{} in {} younger than {} (--older)",
            units::bytes(coverage.younger.bytes),
            units::counted(coverage.younger.count, "unfreed block"),
            units::duration(coverage.older)
        );
        lines.push(("left out", line));
    }
    lines.extend(stacks(coverage));
    lines.extend(unwinding(&coverage.unwinding));
    let problem =
        |problem: &NameProblem| format!("{}: {}", escape::text(&problem.module), escape::text(&problem.problem));
    lines.extend(at_most(MOST_PROBLEMS, &coverage.problems, problem).map(|line| ("names", line)));
    lines.extend(losses(coverage));
    let rss = coverage.rss.map(|rss| {
        format!(
            "{}{}",
            processes::rss(rss.before, rss.after),
            processes::sum_over(rss.processes, coverage.traced().count())
        )
    });
    match &coverage.memory {
        Some(memory) => lines.extend(memory::lines(memory, rss)),
        None => lines.extend(rss.map(|line| ("RSS", line))),
    }
    if let Some(growth) = coverage.missed_growth() {
        let line = format!(
            "no probed function was called while RSS grew by {}: the memory comes from another allocator or straight \
             from mmap, which this view does not trace",
            units::bytes(growth)
        );
        lines.push(("WARNING", line));
    }
    lines
}

fn target(coverage: &Coverage) -> String {
    format!(
        "{}, traced {}, {}",
        processes::subject(coverage, MOST_PROCESSES, escape::text),
        units::duration(coverage.duration),
        end(coverage.end, coverage.processes.len() > 1)
    )
}

/// Most files of which a problem is told.
const MOST_PROBLEMS: usize = 20;

/// Most processes that the first line names.
const MOST_PROCESSES: usize = 4;

fn seen(coverage: &Coverage) -> String {
    match coverage.subject {
        Subject::Heap | Subject::Touched => seen_heap(coverage),
        Subject::Faults => seen_faults(coverage),
        Subject::Exact => "every change that the kernel counted".to_owned(),
        Subject::Mappings => {
            let calls = coverage.memory.as_ref().map_or(0, |memory| memory.calls);
            format!("{} that change the address space", units::counted(calls, "system call"))
        }
    }
}

fn seen_faults(coverage: &Coverage) -> String {
    let faults = coverage.memory.as_ref().and_then(|memory| memory.faults).unwrap_or_default();
    let counted = match faults.counted {
        Some(counted) => format!("; the kernel counted {counted}"),
        None => String::new(),
    };
    format!(
        "{} by the program, {} by the kernel for it{counted}",
        units::counted(faults.user, "page fault"),
        faults.kernel
    )
}

fn seen_heap(coverage: &Coverage) -> String {
    let events = &coverage.events;
    let inherited = match events.frees_inherited {
        0 => String::new(),
        frees => format!(", {frees} by forked processes of their parents' blocks, which stay the parents'"),
    };
    format!(
        "{}, {} ({} of blocks from before the trace{inherited}), {} (not counted), {}",
        units::counted(events.allocations, "allocation"),
        units::counted(events.frees, "free"),
        events.frees_unknown,
        units::counted(events.nested, "nested call"),
        units::counted(events.failed, "failed allocation"),
    )
}

/// What was done with all bytes, and what those of the first view are.
pub const fn verbs(subject: Subject) -> (&'static str, &'static str) {
    match subject {
        Subject::Heap => ("allocated", "unfreed"),
        Subject::Faults | Subject::Touched => ("touched", "resident"),
        Subject::Exact => ("added", "more than taken away"),
        Subject::Mappings => ("mapped", "still mapped"),
    }
}

fn totals(coverage: &Coverage) -> String {
    let allocated = coverage.allocated;
    let unfreed = coverage.unfreed;
    let (did, is) = verbs(coverage.subject);
    if coverage.subject == Subject::Exact {
        let net = i128::from(allocated.bytes) - i128::from(coverage.freed.bytes);
        return format!(
            "{} B ({}) added, {} B ({}) taken away: {}",
            allocated.bytes,
            units::bytes(allocated.bytes),
            coverage.freed.bytes,
            units::bytes(coverage.freed.bytes),
            units::signed_bytes(net)
        );
    }
    let noun = |which| view::words(coverage.subject, which).noun;
    format!(
        "{}{} B ({}) {did} in {}, {} B ({}) {is} in {}",
        if coverage.lower_bound { "at least " } else { "" },
        allocated.bytes,
        units::bytes(allocated.bytes),
        units::counted(allocated.count, noun(Which::All)),
        unfreed.bytes,
        units::bytes(unfreed.bytes),
        units::counted(unfreed.count, noun(Which::Unfreed)),
    )
}

fn stacks(coverage: &Coverage) -> Vec<(&'static str, String)> {
    let part = |part, whole| units::percent(view::share(part, whole));
    let text = |share: &Share| {
        format!(
            "{} of stacks; {} of allocated bytes, {} of unfreed bytes",
            part(share.stacks, coverage.stacks),
            part(share.allocated.bytes, coverage.allocated.bytes),
            part(share.unfreed.bytes, coverage.unfreed.bytes)
        )
    };
    let recorded = units::counted(coverage.stacks, "stack");
    if coverage.whole.stacks == coverage.stacks {
        return vec![("stacks", format!("{recorded} recorded, all whole"))];
    }
    let whole = &coverage.whole;
    let mut lines = vec![("stacks", format!("{recorded} recorded, {} whole ({})", whole.stacks, text(whole)))];
    for cut in &coverage.truncated {
        lines.push(("", format!("{} truncated: {} ({})", cut.share.stacks, cut.reason.reason(), text(&cut.share))));
    }
    lines
}

/// A line for each of the first `most` of `list`, and one for the rest.
fn at_most<'a, T>(most: usize, list: &'a [T], line: impl Fn(&T) -> String + 'a) -> impl Iterator<Item = String> + 'a {
    let (shown, rest) = list.split_at(most.min(list.len()));
    let rest = (!rest.is_empty()).then(|| format!("… and {}", units::counted(rest.len() as u64, "more file")));
    shown.iter().map(line).chain(rest)
}

/// What the unwind tables did not cover.
fn unwinding(unwinding: &Unwinding) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    let problem = |problem: &UnwindProblem| {
        format!("no rows for {}: {}", escape::text(&problem.module), escape::text(&problem.problem))
    };
    lines.extend(at_most(MOST_PROBLEMS, &unwinding.problems, problem));
    if unwinding.left_out != 0 {
        let mappings = units::counted(unwinding.left_out, "code mapping");
        lines.push(format!("{mappings} beyond those that can be unwound: stacks through them are cut"));
    }
    let late = unwinding.late;
    if late.mappings != 0 {
        let cut = match late.stacks {
            0 => "no stack was cut for that".to_owned(),
            stacks => format!(
                "{} cut for that, which allocated {}",
                units::counted(stacks, "stack"),
                units::bytes(late.allocated.bytes)
            ),
        };
        lines.push(format!(
            "{} appeared during the trace, with rows in force after at most {}; {cut}",
            units::counted(late.mappings, "code mapping"),
            units::delay(late.longest)
        ));
    }
    lines.into_iter().enumerate().map(|(position, line)| (if position == 0 { "unwinding" } else { "" }, line)).collect()
}

fn losses(coverage: &Coverage) -> Vec<(&'static str, String)> {
    if coverage.losses.is_empty() {
        return vec![("lost", "nothing".into())];
    }
    let mut lines: Vec<(&str, String)> = coverage
        .losses
        .iter()
        .map(|loss| {
            let line = match loss.bytes {
                0 => format!("{} × {}", loss.count, loss.sentence),
                bytes => format!("{} × {}; {}", loss.count, loss.sentence, units::bytes(bytes)),
            };
            ("lost", line)
        })
        .collect();
    if coverage.losses.iter().any(|loss| loss.lowers_totals) {
        lines.push(("", "therefore every total is a lower bound".into()));
    }
    lines
}
