//! Samples of every stack's live bytes while the trace runs.

use std::time::Duration;

use memtrace_common::stack::Totals;

/// Most samples kept; when there are as many, every second one is dropped and the interval doubled.
const MAX_SAMPLES: usize = 32;
/// Interval of the first samples.
const FIRST_INTERVAL: Duration = Duration::from_millis(250);
/// Points of a finished series.
pub const POINTS: usize = 8;

/// Live bytes of every stack at equally spaced moments. The memory is bounded: [`MAX_SAMPLES`] numbers per stack.
#[derive(Debug)]
pub struct Growth {
    interval: Duration,
    /// Sample `i` was taken at `(i + 1) * interval`: live bytes by stack number.
    samples: Vec<Vec<u64>>,
}

impl Default for Growth {
    fn default() -> Self {
        Self { interval: FIRST_INTERVAL, samples: Vec::new() }
    }
}

impl Growth {
    /// When the next sample is due, counted from the start of the trace.
    pub fn next_due(&self) -> Duration {
        self.interval * (self.samples.len() as u32 + 1)
    }

    /// Adds the sample that was due.
    pub fn push(&mut self, totals: &[Totals]) {
        self.samples.push(totals.iter().map(live_bytes).collect());
        if self.samples.len() >= MAX_SAMPLES {
            // Those at even multiples of the interval are what a doubled interval would have taken.
            let mut index = 0;
            self.samples.retain(|_| {
                index += 1;
                index % 2 == 0
            });
            self.interval *= 2;
        }
    }

    /// Skips a sample that could not be taken in time: the last one stands for it.
    pub fn skip(&mut self) {
        let last = self.samples.last().cloned().unwrap_or_default();
        self.samples.push(last);
    }

    /// Live bytes of stack `number` at up to [`POINTS`] equally spaced moments of a trace that took `duration`, the last
    /// of them at its end, where the stack has `end` bytes. Empty if the trace was too short for two points.
    pub fn series(&self, number: u32, duration: Duration, end: u64) -> Vec<u64> {
        let points = self.samples.len().min(POINTS - 1) + 1;
        if points < 2 {
            return Vec::new();
        }
        let mut series: Vec<u64> = (1..points)
            .map(|point| {
                let moment = duration.as_secs_f64() * point as f64 / points as f64;
                let nearest = (moment / self.interval.as_secs_f64()).round() as usize;
                let sample = &self.samples[nearest.clamp(1, self.samples.len()) - 1];
                // A stack that did not exist yet had nothing.
                sample.get(number as usize).copied().unwrap_or(0)
            })
            .collect();
        series.push(end);
        series
    }
}

fn live_bytes(totals: &Totals) -> u64 {
    // The four counters are not read at one moment: a free may be seen whose allocation is not.
    totals.allocated_bytes.saturating_sub(totals.freed_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(live: u64) -> Totals {
        Totals { allocated_bytes: live + 7, allocated_count: 2, freed_bytes: 7, freed_count: 1 }
    }

    /// A stack that grows by one byte a second, seen for `seconds`.
    fn linear(seconds: u64) -> Growth {
        let mut growth = Growth::default();
        while growth.next_due() <= Duration::from_secs(seconds) {
            let live = growth.next_due().as_secs();
            growth.push(&[totals(0), totals(live)]);
        }
        growth
    }

    #[test]
    fn steady_growth_is_a_straight_line() {
        for seconds in [8, 64, 800, 8000] {
            let growth = linear(seconds);
            let series = growth.series(1, Duration::from_secs(seconds), seconds);
            assert_eq!(series.len(), POINTS);
            for (point, value) in series.iter().enumerate() {
                let expected = seconds * (point as u64 + 1) / POINTS as u64;
                let off = value.abs_diff(expected);
                assert!(off <= seconds / 16 + 1, "{seconds} s, point {point}: {value}, expected {expected}");
            }
            assert_eq!(series[POINTS - 1], seconds);
            assert!(growth.samples.len() < MAX_SAMPLES);
        }
    }

    #[test]
    fn new_stacks_start_from_nothing() {
        let growth = linear(8);
        assert_eq!(growth.series(9, Duration::from_secs(8), 5), vec![0, 0, 0, 0, 0, 0, 0, 5]);
    }

    #[test]
    fn short_traces_have_no_series() {
        assert!(Growth::default().series(0, Duration::from_millis(100), 1).is_empty());
    }

    #[test]
    fn a_skipped_sample_repeats_the_last() {
        let mut growth = Growth::default();
        growth.push(&[totals(3)]);
        growth.skip();
        assert_eq!(growth.samples, vec![vec![3], vec![3]]);
    }
}
