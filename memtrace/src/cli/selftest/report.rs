//! What selftest found, compared and printed.

use std::fmt::Write as _;

use anyhow::Context as _;
use serde::Serialize;

use crate::{
    cli::workload::{FunctionTruth, Truth},
    collect::stacks::Imbalance,
    profile::{Leaf, Profile},
};

/// Number of the JSON document's form: members are renamed or change their meaning only with a new number.
const SCHEMA: u32 = 1;

/// Bytes and blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Numbers {
    allocated_bytes: u64,
    allocated_count: u64,
    unfreed_bytes: u64,
    unfreed_count: u64,
}

impl Numbers {
    fn add(&mut self, other: Self) {
        self.allocated_bytes = self.allocated_bytes.saturating_add(other.allocated_bytes);
        self.allocated_count = self.allocated_count.saturating_add(other.allocated_count);
        self.unfreed_bytes = self.unfreed_bytes.saturating_add(other.unfreed_bytes);
        self.unfreed_count = self.unfreed_count.saturating_add(other.unfreed_count);
    }
}

impl From<&FunctionTruth> for Numbers {
    fn from(truth: &FunctionTruth) -> Self {
        Self {
            allocated_bytes: truth.allocated_bytes,
            allocated_count: truth.allocated_count,
            unfreed_bytes: truth.unfreed_bytes,
            unfreed_count: truth.unfreed_count,
        }
    }
}

/// What one probed function, or several names of one, allocated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    name: String,
    truth: Numbers,
    seen: Numbers,
}

/// The trace of the workload compared with the truth.
#[derive(Clone, Debug, Serialize)]
pub struct Exactness {
    functions: Vec<Row>,
    /// Over all stacks.
    total: Row,
    /// Calls that returned no block.
    failed_truth: u64,
    failed_seen: u64,
    /// Losses and contradictions, one sentence each.
    problems: Vec<String>,
}

impl Exactness {
    /// Compares. `names[i]` are the names of the code behind `profile.functions[i]`.
    pub fn new(truth: &Truth, names: &[Vec<String>], profile: &Profile, imbalances: &[Imbalance]) -> Self {
        let row = |name: &str| Row { name: name.into(), truth: Numbers::default(), seen: Numbers::default() };
        let mut functions: Vec<Row> = profile.functions.iter().map(|function| row(&function.name)).collect();
        let mut total = row("all stacks");
        for function in &truth.functions {
            total.truth.add(function.into());
            match names.iter().position(|names| names.iter().any(|name| *name == function.name)) {
                Some(index) if index < functions.len() => {
                    let row = &mut functions[index];
                    if row.name != function.name && row.truth != Numbers::default() {
                        let _ = write!(row.name, ", {}", function.name);
                    }
                    row.truth.add(function.into());
                }
                _ => functions.push(Row { truth: function.into(), ..row(&function.name) }),
            }
        }
        let mut unknown = row("[unknown call path]");
        for stack in &profile.stacks {
            let seen = Numbers {
                allocated_bytes: stack.allocated.bytes,
                allocated_count: stack.allocated.count,
                unfreed_bytes: stack.unfreed.bytes,
                unfreed_count: stack.unfreed.count,
            };
            total.seen.add(seen);
            let row = match stack.leaf {
                Leaf::Function(index) => functions.get_mut(index).unwrap_or(&mut unknown),
                Leaf::Unknown | Leaf::Unattributed | Leaf::Others | Leaf::Frame => &mut unknown,
            };
            row.seen.add(seen);
        }
        functions.push(unknown);
        functions.retain(|row| row.truth != Numbers::default() || row.seen != Numbers::default());
        let losses = profile.losses.iter().map(|(loss, count)| format!("{} {}", count.count, loss.sentence()));
        Self {
            functions,
            total,
            failed_truth: truth.failed,
            failed_seen: profile.events.failed,
            problems: losses.chain(imbalances.iter().map(ToString::to_string)).collect(),
        }
    }

    /// Whether every number is the truth.
    pub fn is_exact(&self) -> bool {
        self.functions.iter().chain([&self.total]).all(|row| row.truth == row.seen)
            && self.failed_truth == self.failed_seen
            && self.problems.is_empty()
    }
}

/// What tracing costs: nanoseconds of one pair of malloc(64) and free, medians.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cost {
    rounds: usize,
    untraced_ns: f64,
    /// With programs that do nothing on the same sites: what the kernel takes for the probes themselves.
    empty_ns: f64,
    traced_ns: f64,
}

impl Cost {
    /// Takes the medians of the rounds.
    pub fn new<const ROUNDS: usize>(untraced: [f64; ROUNDS], empty: [f64; ROUNDS], traced: [f64; ROUNDS]) -> Self {
        Self { rounds: ROUNDS, untraced_ns: median(untraced), empty_ns: median(empty), traced_ns: median(traced) }
    }
}

/// The middle one; of an even number the upper of the two.
fn median<const N: usize>(mut values: [f64; N]) -> f64 {
    const { assert!(N > 0) };
    values.sort_by(f64::total_cmp);
    values[N / 2]
}

/// Everything.
#[derive(Clone, Debug)]
pub struct Report {
    /// Against the truth.
    pub exactness: Exactness,
    /// In time, if it was measured.
    pub cost: Option<Cost>,
}

impl Report {
    /// As a JSON document.
    ///
    /// # Errors
    /// None that are known.
    pub fn json(&self) -> anyhow::Result<String> {
        #[derive(Serialize)]
        struct Document<'a> {
            schema: u32,
            exact: bool,
            exactness: &'a Exactness,
            cost: Option<Cost>,
            /// Time with traced over with empty probes.
            traced_over_empty: Option<f64>,
            /// Part of the time of a traced pair that the probes themselves take.
            empty_share: Option<f64>,
        }
        let mut text = serde_json::to_string_pretty(&Document {
            schema: SCHEMA,
            exact: self.exactness.is_exact(),
            exactness: &self.exactness,
            cost: self.cost,
            traced_over_empty: self.cost.map(|cost| cost.traced_ns / cost.empty_ns),
            empty_share: self.cost.map(|cost| cost.empty_ns / cost.traced_ns),
        })
        .context("writing JSON")?;
        text.push('\n');
        Ok(text)
    }

    /// As a table.
    pub fn text(&self, colour: bool) -> String {
        let mut text = self.exactness.text(colour);
        let Some(Cost { rounds, untraced_ns, empty_ns, traced_ns }) = self.cost else { return text };
        let _ = write!(
            text,
            "\nCOST of a pair of malloc(64) and free, medians of {rounds} rounds\n\
             untraced      {untraced_ns:>8.1} ns\n\
             empty probes  {empty_ns:>8.1} ns\n\
             traced        {traced_ns:>8.1} ns, {:.2} times as much as with empty probes (which are {:.0} % of it)\n",
            traced_ns / empty_ns,
            100.0 * empty_ns / traced_ns,
        );
        text
    }
}

impl Exactness {
    fn text(&self, colour: bool) -> String {
        let paint = |code: &str, word: &str| match colour {
            true => format!("\x1b[{code}m{word}\x1b[0m"),
            false => word.to_owned(),
        };
        let verdict = |equal: bool| if equal { paint("32", "equal") } else { paint("31", "different") };
        let width = self.functions.iter().map(|row| row.name.len()).chain([12]).max().unwrap_or(0);
        let mut text = format!(
            "{:width$}  {:>12} {:>9}  {:>12} {:>9}\n",
            "EXACTNESS", "ALLOCATED B", "BLOCKS", "UNFREED B", "BLOCKS"
        );
        let mut line = |name: &str, numbers: &Numbers, end: &str| {
            let Numbers { allocated_bytes, allocated_count, unfreed_bytes, unfreed_count } = numbers;
            let _ = writeln!(
                text,
                "{name:width$}  {allocated_bytes:>12} {allocated_count:>9}  {unfreed_bytes:>12} {unfreed_count:>9}{end}"
            );
        };
        for row in self.functions.iter().chain([&self.total]) {
            line(&row.name, &row.seen, &format!("  {}", verdict(row.seen == row.truth)));
            if row.seen != row.truth {
                line("  the truth:", &row.truth, "");
            }
        }
        let _ = writeln!(
            text,
            "{:width$}  {:>12} {:>9}  {:>12} {:>9}  {}",
            "failed calls",
            "",
            self.failed_seen,
            "",
            "",
            verdict(self.failed_seen == self.failed_truth)
        );
        if self.failed_seen != self.failed_truth {
            let _ = writeln!(text, "  the truth: {}", self.failed_truth);
        }
        for problem in &self.problems {
            let _ = writeln!(text, "{}: {problem}", paint("31", "problem"));
        }
        text
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{borrow::Cow, time::Duration};

    use memtrace_common::{
        loss::{Loss, LossCount},
        stack::StackEnd,
    };

    use super::*;
    use crate::profile::{Amount, Events, Function, Process, Stack, TraceEnd, Unwinding};

    const NAMES: [&str; 7] =
        ["malloc", "calloc", "realloc", "reallocarray", "memalign", "aligned_alloc", "posix_memalign"];

    fn truth() -> Truth {
        let function = |name| FunctionTruth {
            name: Cow::Borrowed(name),
            allocated_bytes: 100,
            allocated_count: 10,
            unfreed_bytes: 30,
            unfreed_count: 3,
        };
        Truth { functions: NAMES.map(function), failed: 2 }
    }

    /// Sites as glibc 2.36 has them: memalign and aligned_alloc are one.
    fn names() -> Vec<Vec<String>> {
        let names = [
            &["malloc", "__libc_malloc"][..],
            &["calloc"],
            &["realloc"],
            &["reallocarray"],
            &["memalign", "aligned_alloc"],
            &["posix_memalign"],
            &["free"],
        ];
        names.iter().map(|names| names.iter().map(|name| (*name).into()).collect()).collect()
    }

    fn profile() -> Profile {
        let stack = |index: usize, times: u64| Stack {
            process: 0,
            thread: None,
            leaf: Leaf::Function(index),
            resident: None,
            touch: None,
            frames: vec![1],
            end: StackEnd::Complete,
            allocated: Amount { bytes: 100 * times, count: 10 * times },
            freed: Amount { bytes: 70 * times, count: 7 * times },
            unfreed: Amount { bytes: 30 * times, count: 3 * times },
            oldest: None,
            growth: Vec::new(),
        };
        Profile {
            subject: Default::default(),
            memory: None,
            by: Default::default(),
            threads: Vec::new(),
            processes: vec![Process::new(1, "x")],
            duration: Duration::from_secs(1),
            end: TraceEnd::Interrupted,
            older: Duration::ZERO,
            everywhere: false,
            attached_late: Vec::new(),
            missed_more: 0,
            functions: names()
                .iter()
                .map(|names| Function { name: names[0].clone(), module: "libc.so.6".into() })
                .collect(),
            stacks: vec![stack(0, 1), stack(1, 1), stack(2, 1), stack(3, 1), stack(4, 1), stack(4, 1), stack(5, 1)],
            events: Events { failed: 2, ..Events::default() },
            losses: Vec::new(),
            unwinding: Unwinding::default(),
        }
    }

    fn compare(profile: &Profile) -> Exactness {
        Exactness::new(&truth(), &names(), profile, &[])
    }

    #[test]
    fn equal_numbers_are_exact() {
        let exactness = compare(&profile());
        assert!(exactness.is_exact(), "{exactness:?}");
        assert_eq!(exactness.functions.len(), 6);
        assert_eq!(exactness.functions[4].name, "memalign, aligned_alloc");
        assert_eq!(exactness.total.truth.allocated_bytes, 700);
    }

    #[test]
    fn one_byte_too_many_is_not() {
        let mut profile = profile();
        profile.stacks[2].unfreed.bytes += 1;
        let exactness = compare(&profile);
        assert!(!exactness.is_exact());
        let text = exactness.text(false);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(lines.contains(&vec!["realloc", "100", "10", "31", "3", "different"]), "{text}");
        assert!(lines.contains(&vec!["the", "truth:", "100", "10", "30", "3"]), "{text}");
    }

    #[test]
    fn calls_of_others_are_not_overlooked() {
        let mut unknown = profile();
        unknown.stacks.push(Stack { leaf: Leaf::Unknown, ..unknown.stacks[0].clone() });
        assert!(!compare(&unknown).is_exact());
        assert_eq!(compare(&unknown).functions.last().unwrap().name, "[unknown call path]");
        let mut other = profile();
        other.stacks.push(Stack { leaf: Leaf::Function(6), ..other.stacks[0].clone() });
        assert!(!compare(&other).is_exact());
    }

    #[test]
    fn losses_failures_and_missing_functions_are_not_exact() {
        let mut lossy = profile();
        lossy.losses.push((Loss::RingFull, LossCount { count: 1, bytes: 0 }));
        assert!(!compare(&lossy).is_exact());
        assert!(compare(&lossy).text(false).contains("problem: 1 messages to memtrace lost"));
        let mut failed = profile();
        failed.events.failed = 1;
        assert!(!compare(&failed).is_exact());
        let mut names = names();
        names[3] = vec!["other".into()];
        let exactness = Exactness::new(&truth(), &names, &profile(), &[]);
        assert!(!exactness.is_exact());
    }

    #[test]
    fn medians_and_documents() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        let report = Report { exactness: compare(&profile()), cost: Some(Cost::new([9.0], [2000.0], [3000.0])) };
        let value: serde_json::Value = serde_json::from_str(&report.json().unwrap()).unwrap();
        assert_eq!((&value["schema"], &value["exact"]), (&1.into(), &true.into()));
        assert_eq!(value["traced_over_empty"], 1.5);
        let text = report.text(false);
        assert!(
            text.contains("traced          3000.0 ns, 1.50 times as much as with empty probes (which are 67 % of it)"),
            "{text}"
        );
    }
}
