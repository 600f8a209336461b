//! What stood between the target's code and whole stacks.

use std::time::Duration;

use super::Amount;

/// What a trace's unwind tables did not cover.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unwinding {
    /// Modules without rows.
    pub problems: Vec<UnwindProblem>,
    /// Code mappings beyond those that the kernel side can hold: stacks through them are cut.
    pub left_out: u64,
    /// Code that appeared during the trace.
    pub late: LateCode,
}

/// A module whose frames are not unwound by rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnwindProblem {
    /// File name of the module. Any characters can be in there.
    pub module: String,
    /// Why, and what happens to stacks through it.
    pub problem: String,
}

/// Code that the target mapped during the trace (libraries that it opened, code compiled at run time).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LateCode {
    /// How many mappings of code appeared.
    pub mappings: u64,
    /// The longest time that may have passed between such a mapping and its rows being in force, counted from the
    /// message that made memtrace look, or if there was none, from the last time that it had looked.
    pub longest: Duration,
    /// Stacks that end in code of which nothing was known yet.
    pub stacks: u64,
    /// What those allocated.
    pub allocated: Amount,
}
