//! Ctrl-C and termination signals.

use anyhow::Context as _;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Waits for the signals that ask memtrace to end.
pub struct Interrupt {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Interrupt {
    /// Takes the signals over. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The system refuses.
    pub fn install() -> anyhow::Result<Self> {
        let take = |kind| signal(kind).context("signals can't be taken over");
        Ok(Self {
            interrupt: take(SignalKind::interrupt())?,
            terminate: take(SignalKind::terminate())?,
            hangup: take(SignalKind::hangup())?,
        })
    }

    /// Ready at the first of them. From then on a second Ctrl-C ends memtrace at once, whatever it is doing.
    pub async fn wait(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hangup.recv() => {}
        }
        // SAFETY: gives the signal its default action back; no handler of ours needs it any more.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
    }
}
