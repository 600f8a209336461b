//! Processes that were forked off the traced one.

/// What became of a followed process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildState {
    /// It ran at the end of the trace.
    Running,
    /// It ended before.
    Ended,
    /// It executed another program, and was not followed any further.
    Executed,
    /// It could not be followed from its first moment on: it had ended, or could not be opened.
    Missed,
}

/// A process that was forked off the traced one, or off another such process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Child {
    /// Process id.
    pub pid: u32,
    /// What became of it.
    pub state: ChildState,
    /// What it inherited of resident memory, and its resident set at the end, bytes, if both could be found out.
    pub rss: Option<(u64, u64)>,
}
