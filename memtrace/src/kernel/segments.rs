//! Which parts of the table of code mappings are free.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// How long a part that was given back is left alone if there are others: a walk that began before may still read it, and a fork
/// may just have handed it on.
const REST: Duration = Duration::from_secs(1);

/// A part of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    first: u32,
    count: u32,
}

impl Part {
    fn end(self) -> u32 {
        self.first + self.count
    }
}

/// The free parts of a table.
#[derive(Debug)]
pub(super) struct Segments {
    /// Ascending, none next to another.
    free: Vec<Part>,
    /// Given back not long ago, the oldest first.
    resting: VecDeque<(Instant, Part)>,
}

impl Segments {
    /// A free table of `length` places.
    pub(super) fn new(length: u32) -> Self {
        Self { free: vec![Part { first: 0, count: length }], resting: VecDeque::new() }
    }

    /// Takes `count` places next to each other: the first of them, `None` if there is no room. `is_used` tells whether a part that
    /// was given back (first place, place after the last) is in use by another list all the same.
    pub(super) fn take(&mut self, count: u32, is_used: impl Fn(u32, u32) -> bool) -> Option<u32> {
        if count == 0 {
            return Some(0);
        }
        self.settle(false, &is_used);
        if let Some(first) = self.take_free(count) {
            return Some(first);
        }
        self.settle(true, &is_used);
        self.take_free(count)
    }

    fn take_free(&mut self, count: u32) -> Option<u32> {
        let place = self.free.iter().position(|part| part.count >= count)?;
        let part = &mut self.free[place];
        let first = part.first;
        part.first += count;
        part.count -= count;
        if part.count == 0 {
            self.free.remove(place);
        }
        Some(first)
    }

    /// Gives places back. Forked processes may use them still.
    pub(super) fn give_back(&mut self, first: u32, count: u32) {
        let part = Part { first, count };
        // Several images can have had one list.
        if count > 0 && !self.resting.iter().any(|(_, resting)| *resting == part) && !self.is_free(part) {
            self.resting.push_back((Instant::now(), part));
        }
    }

    fn is_free(&self, part: Part) -> bool {
        self.free.iter().any(|free| free.first < part.end() && part.first < free.end())
    }

    /// Makes parts free that have rested for long enough, or all if there is need.
    fn settle(&mut self, need: bool, is_used: &impl Fn(u32, u32) -> bool) {
        let now = Instant::now();
        let mut rest = VecDeque::new();
        for (since, part) in self.resting.drain(..) {
            if (need || now.duration_since(since) >= REST) && !is_used(part.first, part.end()) {
                let at = self.free.partition_point(|free| free.first < part.first);
                self.free.insert(at, part);
            } else {
                rest.push_back((since, part));
            }
        }
        self.resting = rest;
        self.free.dedup_by(|next, part| {
            let joined = part.end() == next.first;
            if joined {
                part.count += next.count;
            }
            joined
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_taken_and_joined_again() {
        let mut segments = Segments::new(100);
        let unused = |_, _| false;
        let (a, b, c) = (segments.take(40, unused), segments.take(40, unused), segments.take(20, unused));
        assert_eq!((a, b, c), (Some(0), Some(40), Some(80)));
        assert_eq!(segments.take(1, unused), None);
        segments.give_back(40, 40);
        segments.give_back(40, 40);
        segments.give_back(0, 40);
        assert_eq!(segments.take(80, unused), Some(0), "resting parts are taken if there is need");
        assert_eq!(segments.take(1, unused), None);
    }

    #[test]
    fn what_another_list_uses_stays() {
        let mut segments = Segments::new(10);
        assert_eq!(segments.take(10, |_, _| false), Some(0));
        segments.give_back(0, 10);
        assert_eq!(segments.take(5, |first, end| first < 10 && end > 0), None);
        assert_eq!(segments.take(5, |_, _| false), Some(0));
    }

    #[test]
    fn fresh_parts_come_before_resting_ones() {
        let mut segments = Segments::new(10);
        assert_eq!(segments.take(4, |_, _| false), Some(0));
        segments.give_back(0, 4);
        assert_eq!(segments.take(4, |_, _| false), Some(4));
    }

    #[test]
    fn an_empty_list_takes_no_room() {
        let mut segments = Segments::new(0);
        assert_eq!(segments.take(0, |_, _| false), Some(0));
        segments.give_back(0, 0);
        assert_eq!(segments.take(1, |_, _| false), None);
    }
}
