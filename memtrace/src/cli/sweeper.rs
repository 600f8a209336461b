//! Keeps forked children of the target free of breakpoints while a trace goes on.

use std::time::{Duration, Instant};

use crate::kernel::source::uprobe::Sweep;

/// Shortest time between two sweeps of forked children.
const SWEEP_PAUSE: Duration = Duration::from_millis(200);

/// Sweeps breakpoints out of forked children, one sweep at a time and not too often.
pub struct Sweeper {
    sweep: Option<Sweep>,
    /// When the next sweep is due.
    pub due: Option<Instant>,
    running: Option<std::thread::JoinHandle<Sweep>>,
    forks: u64,
}

impl Sweeper {
    /// For the kernel side's sweep, if it needs one.
    pub fn new(sweep: Option<Sweep>) -> Self {
        Self { sweep, due: None, running: None, forks: 0 }
    }

    /// The target has forked.
    pub fn forked(&mut self) {
        self.forks += 1;
        if self.due.is_none() && (self.sweep.is_some() || self.running.is_some()) {
            self.due = Some(Instant::now() + if self.forks == 1 { Duration::ZERO } else { SWEEP_PAUSE });
        }
    }

    /// Starts the sweep that is due, and takes note of one that has ended.
    pub fn step(&mut self) {
        if let Some(thread) = self.running.take_if(|thread| thread.is_finished()) {
            self.sweep = thread.join().ok();
        }
        if self.due.is_some_and(|due| due <= Instant::now()) {
            match self.sweep.take() {
                Some(sweep) => {
                    self.due = None;
                    self.running = Some(std::thread::spawn(move || {
                        if let Err(error) = sweep.run() {
                            tracing::warn!("breakpoints may stay in forked children until the trace ends: {error}");
                        }
                        sweep
                    }));
                }
                None => self.due = Some(Instant::now() + SWEEP_PAUSE),
            }
        }
    }
}
