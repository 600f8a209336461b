//! Closing links. Each close waits for a grace period of the kernel (about 0.1 s each when one follows another, measured on
//! Linux 6.18); those that wait together share one.

use std::{
    sync::mpsc::{Receiver, Sender, channel},
    thread::{self, JoinHandle},
};

/// Most links that are closed at a time, each by a thread of its own.
const AT_A_TIME: usize = 512;

/// Closes `links`; when it returns, all are closed.
pub(super) fn close<T: Send>(links: impl IntoIterator<Item = T>) {
    let mut links = links.into_iter().peekable();
    while links.peek().is_some() {
        thread::scope(|scope| {
            for link in links.by_ref().take(AT_A_TIME) {
                // Where there can be no more threads, it is closed here: together with what would have closed it.
                let _ = thread::Builder::new().spawn_scoped(scope, move || drop(link));
            }
        });
    }
}

/// Closes links in the background, those together that come while others are being closed.
pub(super) struct Closer<T> {
    running: Option<(Sender<Vec<T>>, JoinHandle<()>)>,
}

impl<T> Default for Closer<T> {
    fn default() -> Self {
        Self { running: None }
    }
}

impl<T: Send + 'static> Closer<T> {
    /// Closes `links` at some time.
    pub(super) fn close(&mut self, links: Vec<T>) {
        if links.is_empty() {
            return;
        }
        if self.running.is_none() {
            let (sender, receiver) = channel();
            let thread = thread::Builder::new().spawn(move || run(&receiver));
            self.running = thread.ok().map(|thread| (sender, thread));
        }
        match &self.running {
            // The thread ends only after the sender is gone.
            Some((sender, _)) => drop(sender.send(links)),
            None => close(links),
        }
    }

    /// Waits until all are closed.
    pub(super) fn finish(&mut self) {
        if let Some((sender, thread)) = self.running.take() {
            drop(sender);
            // It does nothing that can panic but close.
            let _ = thread.join();
        }
    }
}

impl<T> Drop for Closer<T> {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.running.take() {
            drop(sender);
            let _ = thread.join();
        }
    }
}

fn run<T: Send>(receiver: &Receiver<Vec<T>>) {
    while let Ok(first) = receiver.recv() {
        close(first.into_iter().chain(receiver.try_iter().flatten()));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    struct Link(Arc<AtomicUsize>);

    impl Drop for Link {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn every_link_is_closed_once() {
        let closed = Arc::new(AtomicUsize::new(0));
        let links = |count: usize| (0..count).map(|_| Link(Arc::clone(&closed))).collect::<Vec<_>>();
        close(links(3 * AT_A_TIME + 1));
        assert_eq!(closed.load(Ordering::SeqCst), 3 * AT_A_TIME + 1);
        let mut closer = Closer::default();
        for count in [0, 1, 5, 300] {
            closer.close(links(count));
        }
        closer.finish();
        assert_eq!(closed.load(Ordering::SeqCst), 3 * AT_A_TIME + 1 + 306);
        closer.close(links(2));
        drop(closer);
        assert_eq!(closed.load(Ordering::SeqCst), 3 * AT_A_TIME + 1 + 308);
    }
}
