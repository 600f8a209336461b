//! Named profiles to plain tables: numbers and names, no formatting.
//!
//! - [`leaks`]: call paths ranked by what they hold;
//! - [`flame`]: call paths and one number each, for flame graphs;
//! - [`groups`]: processes, threads or control groups ranked by what they hold;
//! - [`coverage`]: what was traced, what was missed, and how sure the numbers are;
//! - [`headline`]: the frame that says most about a call path;
//! - [`frame`]: how one frame is written.

mod coverage;
pub mod frame;
pub mod groups;
mod headline;
mod leaks;
mod words;

use std::fmt;

use memtrace_common::fault::PAGE;

use crate::profile::{Amount, NamedProfile, NamedStack};

pub use coverage::{Coverage, LossLine, ProbedModule, Rss, Share, Truncated, coverage, is_lower_bound};
pub use groups::{GroupRow, GroupTable, Owners, groups};
pub use headline::headline;
pub use leaks::{Growth, LeakRow, LeakTable, leaks};
pub use words::{Words, words};

/// Which allocations (or faults, or mappings) a table is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Which {
    /// Allocated during the trace, still unfreed at its end (resident; mapped).
    #[default]
    Unfreed,
    /// All allocations during the trace, frees not subtracted.
    All,
}

impl Which {
    /// Every value, in order.
    pub const ALL: [Self; 2] = [Self::Unfreed, Self::All];

    /// The part of a call path's numbers that counts.
    pub const fn of(self, stack: &NamedStack) -> Amount {
        match self {
            Self::Unfreed => stack.unfreed,
            Self::All => stack.allocated,
        }
    }
}

/// What is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Bytes asked for.
    #[default]
    Bytes,
    /// Blocks (unfreed) or calls (all).
    Count,
    /// Bytes in pages of 4 KiB, rounded up.
    Pages,
}

impl Unit {
    /// Every value, in order.
    pub const ALL: [Self; 3] = [Self::Bytes, Self::Count, Self::Pages];

    /// The name used in options and machine-readable output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Count => "count",
            Self::Pages => "pages",
        }
    }

    /// What decides between equal numbers of this unit.
    pub(crate) const fn other(self) -> Self {
        match self {
            Self::Bytes => Self::Count,
            Self::Count | Self::Pages => Self::Bytes,
        }
    }

    /// The number of this unit.
    pub const fn of(self, amount: Amount) -> u64 {
        match self {
            Self::Bytes => amount.bytes,
            Self::Count => amount.count,
            Self::Pages => amount.bytes.div_ceil(PAGE),
        }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// `part` of `whole`, from 0 to 1; 0 if there is no whole.
pub fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Call paths with their number, in the profile's order. Paths with 0 are left out.
pub fn flame(profile: &NamedProfile, which: Which, unit: Unit) -> Vec<(&NamedStack, u64)> {
    profile.stacks.iter().map(|stack| (stack, unit.of(which.of(stack)))).filter(|(_, value)| *value != 0).collect()
}

#[cfg(test)]
pub(crate) mod sample;
#[cfg(test)]
mod tests;
