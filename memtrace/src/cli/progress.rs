//! Progress on standard error, when it is a terminal.

use std::{
    io::{self, IsTerminal as _},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};

/// A line that changes while something goes on; nothing when standard error is no terminal.
pub struct Progress {
    bar: Option<ProgressBar>,
}

impl Progress {
    /// For a trace.
    pub fn tracing() -> Self {
        Self::new("{msg}")
    }

    /// For giving names to addresses.
    pub fn naming() -> Self {
        Self::new("naming {pos} of {len} addresses")
    }

    fn new(template: &str) -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(0).with_style(style)
        });
        Self { bar }
    }

    /// Shows how far a trace is.
    pub fn tick(&mut self, passed: Duration, limit: Option<Duration>, events: u64, noun: &str) {
        if let Some(bar) = &self.bar {
            let limit = limit.map_or_else(String::new, |limit| format!(" of {} s", limit.as_secs()));
            bar.set_message(format!("{} s{limit}, {events} {noun}", passed.as_secs()));
        }
    }

    /// Shows how many are done.
    pub fn count(&mut self, done: usize, total: usize) {
        if let Some(bar) = &self.bar {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        }
    }

    /// Takes the line away.
    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
