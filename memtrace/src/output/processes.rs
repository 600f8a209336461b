//! The processes of a trace, for the coverage header and the titles of pictures.

use std::{borrow::Cow, collections::HashMap};

use crate::{
    profile::{NamedProcess, ProcessState},
    view::Coverage,
};

use super::{escape, header, units};

/// Most processes with a line of their own.
const MOST_LINES: usize = 10;
/// Most names behind one reason.
const MOST_NAMES: usize = 4;

/// Who was traced: `nginx (pid 7)`, or `3 processes: nginx (pid 7), nginx (pid 8) … and 1 more`, at most `most` of them named.
pub fn subject(coverage: &Coverage, most: usize, escape: fn(&str) -> Cow<'_, str>) -> String {
    let processes = &coverage.processes;
    match processes.as_slice() {
        [process] if coverage.missed_more == 0 => name(process, escape),
        _ => format!(
            "{}: {}",
            units::counted_as(all(coverage), "process", "processes"),
            names(processes, most, coverage.missed_more, escape)
        ),
    }
}

fn name(process: &NamedProcess, escape: fn(&str) -> Cow<'_, str>) -> String {
    format!("{} (pid {})", escape(&process.comm), process.pid)
}

fn names<'a>(
    processes: impl IntoIterator<Item = &'a NamedProcess>,
    most: usize,
    unnamed: u64,
    escape: fn(&str) -> Cow<'_, str>,
) -> String {
    let mut processes = processes.into_iter();
    let named: Vec<String> = processes.by_ref().take(most).map(|process| name(process, escape)).collect();
    match (processes.count() as u64).saturating_add(unnamed) {
        0 => named.join(", "),
        more => format!("{} … and {more} more", named.join(", ")),
    }
}

/// How many processes there were: one that executed another program was one, though it has an entry for each program, in whatever
/// order. (Those that share a number are several, of which all but one got it when another had ended.)
fn count(processes: &[NamedProcess]) -> u64 {
    let mut by_pid: HashMap<u32, u64> = HashMap::new();
    for process in processes {
        let ends = by_pid.entry(process.pid).or_default();
        *ends += u64::from(process.state != ProcessState::Executed);
    }
    by_pid.values().map(|ends| (*ends).max(1)).sum()
}

fn all(coverage: &Coverage) -> u64 {
    count(&coverage.processes).saturating_add(coverage.missed_more)
}

/// `2 of 5 processes were not traced`; `None` if all were.
pub fn missed(coverage: &Coverage) -> Option<String> {
    let missed = coverage.missed_count();
    (missed > 0).then(|| {
        let all = units::counted_as(all(coverage), "process", "processes");
        format!("{missed} of {all} {} not traced", if missed == 1 { "was" } else { "were" })
    })
}

/// Lines with their labels; none for a single process that was traced.
pub fn lines(coverage: &Coverage) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if coverage.processes.len() > 1 {
        lines.extend(traced(coverage));
    }
    if let Some(missed) = missed(coverage) {
        lines.push(("missed", format!("{missed}: every total is a lower bound")));
        lines.extend(reasons(coverage));
    }
    if let Some((processes, longest)) = coverage.unseen {
        let line = format!(
            "the first calls of {}, for {} at most: every total is a lower bound",
            units::counted_as(processes, "process", "processes"),
            units::delay(longest)
        );
        lines.push(("unseen", line));
    }
    lines
}

/// The processes that hold most.
fn traced(coverage: &Coverage) -> Vec<(&'static str, String)> {
    let mut processes: Vec<&NamedProcess> = coverage.traced().collect();
    processes.sort_by_key(|process| std::cmp::Reverse(process.unfreed.bytes));
    let (shown, rest) = processes.split_at(MOST_LINES.min(processes.len()));
    let mut lines: Vec<String> = shown.iter().map(|process| line(coverage, process)).collect();
    if !rest.is_empty() {
        let of = |state: ProcessState| rest.iter().filter(|process| process.state == state).count();
        let bytes = rest.iter().fold(0u64, |sum, process| sum.saturating_add(process.unfreed.bytes));
        lines.push(format!(
            "… and {} more: {} running at the end, {} ended, {} executed another program; {} {}",
            rest.len(),
            of(ProcessState::Running),
            of(ProcessState::Ended),
            of(ProcessState::Executed),
            units::bytes(bytes),
            header::verbs(coverage.subject).1,
        ));
    }
    let label = |position| if position == 0 { "processes" } else { "" };
    lines.into_iter().enumerate().map(|(position, line)| (label(position), line)).collect()
}

fn line(coverage: &Coverage, process: &NamedProcess) -> String {
    let state = match process.state {
        ProcessState::Running => "",
        ProcessState::Ended => ", which ended",
        ProcessState::Executed => ", which executed another program",
        ProcessState::Missed { .. } => ", not traced",
    };
    let holds = units::bytes(process.unfreed.bytes);
    let mut line = format!("{}{state}: {holds} {}", name(process, escape::text), header::verbs(coverage.subject).1);
    if let Some((before, after)) = process.rss {
        line.push_str(&format!(", RSS {}", rss(before, after)));
    }
    if let Some(inherited) = process.inherited {
        line.push_str(&format!(", {} inherited from its parent", units::bytes(inherited)));
    }
    if let Some(parent) = process.parent {
        line.push_str(&format!(", forked by pid {parent}"));
    }
    if !process.since.is_zero() {
        line.push_str(&format!(", traced from {} on", units::delay(process.since)));
    }
    if let Some(unseen) = process.unseen {
        line.push_str(&format!(", not seen for its first {}", units::delay(unseen)));
    }
    line
}

/// Why processes were not traced: the reasons, the one for most first.
fn reasons(coverage: &Coverage) -> Vec<(&'static str, String)> {
    let mut by_reason: HashMap<&str, Vec<&NamedProcess>> = HashMap::new();
    for process in &coverage.processes {
        if let ProcessState::Missed { reason } = &process.state {
            by_reason.entry(reason).or_default().push(process);
        }
    }
    let mut reasons: Vec<(&str, Vec<&NamedProcess>)> = by_reason.into_iter().collect();
    reasons.sort_by(|(a, of_a), (b, of_b)| of_b.len().cmp(&of_a.len()).then_with(|| a.cmp(b)));
    let (shown, rest) = reasons.split_at(MOST_LINES.min(reasons.len()));
    let mut lines: Vec<(&str, String)> = shown
        .iter()
        .map(|(reason, of)| {
            let names = names(of.iter().copied(), MOST_NAMES, 0, escape::text);
            ("", format!("{} × {}: {names}", of.len(), escape::text(reason)))
        })
        .collect();
    if !rest.is_empty() {
        let processes: usize = rest.iter().map(|(_, of)| of.len()).sum();
        lines.push(("", format!("… and {processes} more for {}", units::counted(rest.len() as u64, "other reason"))));
    }
    if coverage.missed_more > 0 {
        lines.push(("", format!("… and {} more, too many to keep their reasons", coverage.missed_more)));
    }
    lines
}

/// `1.0 MiB → 3.0 MiB (+2.0 MiB)`.
pub fn rss(before: u64, after: u64) -> String {
    let change = units::signed_bytes(i128::from(after) - i128::from(before));
    format!("{} → {} ({change})", units::bytes(before), units::bytes(after))
}

/// What follows a number that is the sum over `some` of `all` processes; nothing if there is only one.
pub fn sum_over(some: usize, all: usize) -> String {
    match all {
        0 | 1 => String::new(),
        _ if some == all => format!(", sum over {all} processes: pages that they share count for each"),
        _ => format!(", sum over {some} of {all} processes: pages that they share count for each"),
    }
}

#[cfg(test)]
#[path = "processes_tests.rs"]
mod tests;
