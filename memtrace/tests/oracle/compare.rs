//! Compares walks with framehop's.

use std::{collections::BTreeMap, fmt};

use framehop::{
    Error, FrameAddress, Unwinder as _,
    x86_64::{CacheX86_64, UnwindRegsX86_64},
};
use memtrace::kernel::source::oracle::{Counts, Sample};
use memtrace_common::stack::{MAX_FRAMES, StackEnd};

use super::{
    modules::{Modules, Rows},
    sample::Taken,
};

/// How framehop's stack ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Root,
    Depth,
    /// It wanted memory that was not handed over.
    Beyond,
    Failed(Error),
}

/// Kinds of difference, each with its explanation; `None`: there is none.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    text: String,
    explanation: Option<&'static str>,
}

/// What the comparison gave.
#[derive(Default)]
pub struct Comparison {
    samples: usize,
    counts: Counts,
    surplus: u64,
    /// Stacks compared to their end, and equal.
    pub whole: usize,
    /// Stacks equal as far as the memory handed over reached.
    part: usize,
    /// Stacks through code that was mapped so shortly before that the kernel side had no rows for it yet: equal up to
    /// there, and marked as cut there.
    late: usize,
    frames: usize,
    deepest: usize,
    /// Samples in which frames of the last stack were taken over.
    kept: usize,
    threads: usize,
    /// Of equal stacks, with an example of each end.
    ends: BTreeMap<String, (usize, String)>,
    kinds: BTreeMap<Kind, (usize, String)>,
}

impl Comparison {
    pub fn of(taken: &Taken) -> Self {
        let mut cache = CacheX86_64::new();
        let mut comparison =
            Self { samples: taken.samples.len(), counts: taken.counts, surplus: taken.surplus, ..Self::default() };
        let mut threads: Vec<u32> = taken.samples.iter().map(|sample| sample.thread).collect();
        threads.sort_unstable();
        threads.dedup();
        comparison.threads = threads.len();
        for sample in &taken.samples {
            let (theirs, end) = unwind(&taken.modules, &mut cache, sample);
            comparison.add(&taken.modules, sample, &theirs, end);
        }
        comparison
    }

    /// Share of equal stacks, of those for which the kernel side had rows.
    pub fn share(&self) -> f64 {
        (self.whole + self.part) as f64 / (self.samples - self.late).max(1) as f64
    }

    /// Differences that nothing explains.
    pub fn unexplained(&self) -> Vec<&str> {
        self.kinds.keys().filter(|kind| kind.explanation.is_none()).map(|kind| kind.text.as_str()).collect()
    }

    fn add(&mut self, modules: &Modules, sample: &Sample, theirs: &[u64], end: End) {
        let ours: Vec<u64> = sample.frames.iter().rev().copied().collect();
        let our_end = StackEnd::from_raw(sample.end).expect("an end");
        self.frames += ours.len();
        self.deepest = self.deepest.max(ours.len());
        self.kept += usize::from(sample.kept > 0);
        let equal = match end {
            End::Beyond => ours.starts_with(theirs),
            End::Root => ours == theirs && our_end == StackEnd::Complete,
            End::Depth => ours == theirs && our_end == StackEnd::Depth,
            End::Failed(_) => ours == theirs && our_end != StackEnd::Complete,
        };
        if equal {
            match end {
                End::Beyond => self.part += 1,
                _ => self.whole += 1,
            }
            let outer = &ours[ours.len().saturating_sub(3)..];
            let outermost = || outer.iter().map(|frame| modules.name(*frame)).collect::<Vec<_>>().join(" ");
            self.ends.entry(format!("{our_end:?}")).or_insert_with(|| (0, outermost())).0 += 1;
            return;
        }
        let cut = ours.last().is_some_and(|frame| modules.is_late(*frame)) && theirs.starts_with(&ours);
        if our_end == StackEnd::UnknownCode && cut {
            self.late += 1;
            return;
        }
        let kind = kind(modules, &ours, our_end, theirs, end);
        let entry =
            self.kinds.entry(kind).or_insert_with(|| (0, example(modules, sample, &ours, our_end, theirs, end)));
        entry.0 += 1;
    }
}

/// The stack as framehop sees it, innermost frame first.
fn unwind(modules: &Modules, cache: &mut CacheX86_64, sample: &Sample) -> (Vec<u64>, End) {
    let [pc, sp, fp] = sample.start;
    let mut registers = UnwindRegsX86_64::new(pc, sp, fp);
    let mut frames = vec![pc];
    let missed = std::cell::Cell::new(false);
    let mut read = |address: u64| {
        let word = address
            .checked_sub(sp)
            .and_then(|offset| usize::try_from(offset).ok())
            .and_then(|offset| Some(u64::from_le_bytes(*sample.stack.get(offset..)?.first_chunk()?)));
        if word.is_none() {
            missed.set(true);
        }
        word.ok_or(())
    };
    while frames.len() < MAX_FRAMES {
        let last = frames.last().copied().and_then(FrameAddress::from_return_address).expect("no frame is 0");
        let next = modules.unwinder.unwind_frame(last, &mut registers, cache, &mut read);
        if missed.get() {
            return (frames, End::Beyond);
        }
        match next {
            // A word of 0 in place of a return address.
            Ok(None | Some(0)) => return (frames, End::Root),
            Ok(Some(address)) => frames.push(address),
            Err(error) => return (frames, End::Failed(error)),
        }
    }
    (frames, End::Depth)
}

/// Why the stacks differ: by what is known at the frame from which they go different ways.
fn kind(modules: &Modules, ours: &[u64], our_end: StackEnd, theirs: &[u64], end: End) -> Kind {
    let same = ours.iter().zip(theirs).take_while(|(ours, theirs)| ours == theirs).count();
    let rows = modules.rows(ours[same - 1]);
    let ways = |frames: &[u64], end: String| if frames.len() > same { "goes on".to_owned() } else { end };
    let (we, they) = (ways(ours, format!("{our_end:?}")), ways(theirs, format!("{end:?}")));
    let (place, explanation) = match rows {
        Rows::None | Rows::NoModule => {
            ("code without unwind information".to_owned(), Some("both guess there, and memtrace wants a call before"))
        }
        Rows::Unsupported(reason) => (format!("{reason:?}"), Some("memtrace's rows have no such rule, and it says so")),
        Rows::Some(row) => (format!("{:?}", row.cfa), None),
    };
    Kind { text: format!("{place}: memtrace {we}, framehop {they}"), explanation }
}

fn example(modules: &Modules, sample: &Sample, ours: &[u64], our_end: StackEnd, theirs: &[u64], end: End) -> String {
    let names = |frames: &[u64]| frames.iter().map(|frame| modules.name(*frame)).collect::<Vec<_>>().join(" ");
    let same = ours.iter().zip(theirs).take_while(|(ours, theirs)| ours == theirs).count();
    let from = same.saturating_sub(2);
    format!(
        "{same} frames equal, {} kept, {} bytes of stack\n        memtrace … {} {our_end:?}\n        framehop … {} {end:?}",
        sample.kept,
        sample.stack.len(),
        names(&ours[from..ours.len().min(same + 6)]),
        names(&theirs[from..theirs.len().min(same + 6)]),
    )
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { samples, counts, surplus, whole, part, .. } = self;
        write!(
            f,
            "{samples} samples of {} calls in {} threads ({} without room, {surplus} more than wanted, {} unreadable)",
            counts.calls, self.threads, counts.dropped, counts.unreadable
        )?;
        write!(
            f,
            "\n    equal {:.3} %: {whole} to their end, {part} as far as the memory handed over reached; {} more fell into \
             the time between a library's mapping and its rows",
            self.share() * 100.0,
            self.late
        )?;
        write!(
            f,
            "\n    {:.1} frames on average, at most {}; {:.1} % started from the last stack",
            self.frames as f64 / (*samples).max(1) as f64,
            self.deepest,
            self.kept as f64 / (*samples).max(1) as f64 * 100.0
        )?;
        for (end, (count, example)) in &self.ends {
            write!(f, "\n    {count} equal end as {end} (… {example})")?;
        }
        for (kind, (count, example)) in &self.kinds {
            let why = kind.explanation.unwrap_or("NOT EXPLAINED");
            write!(f, "\n    {count} differ: {} ({why})\n        {example}", kind.text)?;
        }
        Ok(())
    }
}
