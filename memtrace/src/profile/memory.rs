//! The memory of processes as a whole.

use std::time::Duration;

use crate::{
    collect::{attribution::StackPages, ranges::Audit, reconcile::Reconciliation},
    target::pages::Pages,
};

/// Bytes in resident pages, by what the kernel counts the pages as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// Anonymous memory.
    pub anonymous: u64,
    /// Pages of files.
    pub file: u64,
    /// Shared memory and files in memory (tmpfs).
    pub shared: u64,
}

impl Resident {
    /// All of them.
    pub const fn total(self) -> u64 {
        self.anonymous.saturating_add(self.file).saturating_add(self.shared)
    }

    /// Both sums.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            anonymous: self.anonymous.saturating_add(other.anonymous),
            file: self.file.saturating_add(other.file),
            shared: self.shared.saturating_add(other.shared),
        }
    }
}

/// Page faults as they were counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Seen while the program's own code ran.
    pub user: u64,
    /// Seen while the kernel worked for it.
    pub kernel: u64,
    /// By how much the kernel's own count (minor and major faults of all threads) grew meanwhile, if it could be read.
    pub counted: Option<u64>,
}

/// What was found out about a process's memory as a whole, or the sum over several.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    /// Over how many processes this is the sum.
    pub processes: u32,
    /// Page faults, if they were traced.
    pub faults: Option<FaultCounts>,
    /// Which pages became resident, if page faults were traced.
    pub growth: Option<GrowthSummary>,
    /// System calls seen that change the address space.
    pub calls: u64,
    /// Those that were not recorded, or whose path is not known: memory may be in another line than it belongs.
    pub calls_lost: u64,
    /// What the memory map at the end says of the mappings that were seen; `None` if it could not be read then.
    pub audit: Option<Audit>,
    /// RSS, and what it consists of; `None` if the process was gone before its pages could be looked at.
    pub reconciliation: Option<Reconciliation>,
    /// How long before its end the pages were last looked at, if the process ended before they could be at the end. Of several
    /// the longest.
    pub looked_before_end: Option<Duration>,
}

impl Memory {
    /// The sum of both. What is known of one of them only is what is known of it; [`Reconciliation::processes`] and
    /// [`GrowthSummary::processes`] tell of how many that is. The kernel's count of faults is known if it is of both.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            processes: self.processes.saturating_add(other.processes),
            faults: either(self.faults, other.faults, FaultCounts::plus),
            growth: either(self.growth, other.growth, GrowthSummary::plus),
            calls: self.calls.saturating_add(other.calls),
            calls_lost: self.calls_lost.saturating_add(other.calls_lost),
            audit: either(self.audit, other.audit, Audit::plus),
            reconciliation: either(self.reconciliation, other.reconciliation, Reconciliation::plus),
            looked_before_end: self.looked_before_end.max(other.looked_before_end),
        }
    }
}

/// The sum of what is there.
fn either<T>(one: Option<T>, other: Option<T>, plus: fn(T, T) -> T) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(plus(one, other)),
        (one, other) => one.or(other),
    }
}

impl FaultCounts {
    /// Both sums; the kernel's count is known if both are.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            user: self.user.saturating_add(other.user),
            kernel: self.kernel.saturating_add(other.kernel),
            counted: self.counted.zip(other.counted).map(|(one, other)| one.saturating_add(other)),
        }
    }
}

impl GrowthSummary {
    /// Both sums.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            processes: self.processes.saturating_add(other.processes),
            new: self.new.plus(other.new),
            unattributed: self.unattributed + other.unattributed,
            gone: self.gone + other.gone,
        }
    }
}

/// Pages that became resident during a trace, and still are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrowthSummary {
    /// Over how many processes this is the sum: those whose pages could be looked at.
    pub processes: u32,
    /// All of them.
    pub new: StackPages,
    /// Those of no known call path.
    pub unattributed: Pages,
    /// Pages that were resident before, and are not any more or were given back meanwhile.
    pub gone: Pages,
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
