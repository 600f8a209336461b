//! Call paths ranked by what they hold.

use std::{sync::Arc, time::Duration};

use crate::profile::{Amount, NamedProfile, NamedStack, Subject};

use super::{Unit, Which, share};

/// Call paths, the one that holds most first.
#[derive(Clone, Debug, PartialEq)]
pub struct LeakTable<'a> {
    /// What the trace is about.
    pub subject: Subject,
    /// Which allocations are counted.
    pub which: Which,
    /// What the ranking and the shares are by.
    pub unit: Unit,
    /// Sum over all rows.
    pub total: Amount,
    /// Every call path that holds something.
    pub rows: Vec<LeakRow<'a>>,
}

/// One call path.
#[derive(Clone, Debug, PartialEq)]
pub struct LeakRow<'a> {
    /// Root first, see [`NamedStack::frames`].
    pub frames: &'a [Arc<str>],
    /// What it holds, or allocated.
    pub amount: Amount,
    /// Share of the table's total by its unit, from 0 to 1.
    pub share: f64,
    /// Age of its oldest unfreed block at the end.
    pub oldest: Option<Duration>,
    /// How its unfreed bytes changed.
    pub growth: Growth<'a>,
    /// All its numbers.
    pub stack: &'a NamedStack,
}

/// How the unfreed bytes of one call path changed over the trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth<'a> {
    /// Unfreed bytes at equally spaced moments, the last at the end.
    pub series: &'a [u64],
    /// Bytes per second over the second half of the trace, negative when they became fewer. `None` if the series is too
    /// short to tell.
    pub per_second: Option<f64>,
}

/// Ranks the call paths of `profile` by `unit`; equal ones by the other unit, then by name. Paths without any block
/// are left out; those that hold only blocks of 0 bytes are not.
pub fn leaks(profile: &NamedProfile, unit: Unit, which: Which) -> LeakTable<'_> {
    let total = profile.stacks.iter().fold(Amount::default(), |sum, stack| sum.plus(which.of(stack)));
    let mut rows: Vec<LeakRow<'_>> = profile
        .stacks
        .iter()
        .filter(|stack| which.of(stack).count != 0)
        .map(|stack| LeakRow {
            frames: &stack.frames,
            amount: which.of(stack),
            share: share(unit.of(which.of(stack)), unit.of(total)),
            oldest: stack.oldest,
            growth: Growth { series: &stack.growth, per_second: per_second(&stack.growth, profile.duration) },
            stack,
        })
        .collect();
    let other = unit.other();
    rows.sort_by(|a, b| {
        unit.of(b.amount)
            .cmp(&unit.of(a.amount))
            .then_with(|| other.of(b.amount).cmp(&other.of(a.amount)))
            .then_with(|| a.frames.cmp(b.frames))
            .then_with(|| a.stack.lines.cmp(&b.stack.lines))
            .then_with(|| a.stack.comm.cmp(&b.stack.comm))
            .then_with(|| a.stack.group.cmp(&b.stack.group))
    });
    LeakTable { subject: profile.subject, which, unit, total, rows }
}

/// Sample i of n was taken at (i + 1) / n of the trace. The second half begins at the first sample taken at half of it
/// or later.
fn per_second(series: &[u64], duration: Duration) -> Option<f64> {
    let half = (series.len().checked_sub(1)?) / 2;
    let last = series.len() - 1;
    let seconds = duration.as_secs_f64() * (last - half) as f64 / series.len() as f64;
    if seconds <= 0.0 {
        return None;
    }
    let change = i128::from(series[last]) - i128::from(series[half]);
    Some(change as f64 / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_of_the_second_half() {
        let ten = Duration::from_secs(10);
        assert_eq!(per_second(&[], ten), None);
        assert_eq!(per_second(&[5], ten), None);
        assert_eq!(per_second(&[100, 150], ten), Some(10.0));
        // Samples at 2.5, 5, 7.5 and 10 s.
        assert_eq!(per_second(&[0, 100, 120, 50], ten), Some(-10.0));
        assert_eq!(per_second(&[9, 9, 0, 30, 30, 30], Duration::from_secs(6)), Some(10.0));
        assert_eq!(per_second(&[7, 7, 7], ten), Some(0.0));
        assert_eq!(per_second(&[0, 7], Duration::ZERO), None);
        assert_eq!(per_second(&[u64::MAX, 0], Duration::from_secs(2)), Some(-(u64::MAX as f64)));
    }
}
