//! The processes that the kernel side traces, and the states of their images, which are changed through shared memory.

use std::{
    num::NonZeroU32,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use aya::maps::{Array, HashMap, MapData};
use memtrace_common::{
    maps,
    process::{ANY, ATTEMPTS, ProcessState},
    unwind::{CodeMapping, MAX_MAPPINGS, MappingList},
};

use super::{
    segments::Segments,
    shared::Shared,
    tracer::{KernelError, Tracer},
};

/// What a tracer knows of its processes.
pub(super) struct Processes {
    images: Shared,
    length: u32,
    segments: Segments,
    /// Number of the last list of mappings.
    generation: u64,
}

/// A word of an image's state, in words of 4 bytes from its start.
#[derive(Clone, Copy)]
enum Half {
    Number = 0,
    Parent = 1,
    Late = 12,
    Allocations = 13,
}

/// The same in words of 8 bytes.
#[derive(Clone, Copy)]
enum Word {
    Forked = 1,
    Mappings = 2,
    LoaderEvents = 3,
    LastRemoval = 4,
    LoaderSeen = 5,
}

/// Bytes of a state.
const STRIDE: usize = size_of::<ProcessState>();

impl Processes {
    pub(super) fn new(images: Shared, length: u32, mappings: u32) -> Self {
        Self { images, length, segments: Segments::new(mappings), generation: 0 }
    }

    fn place(&self, number: u32) -> usize {
        (number & (self.length - 1)) as usize * STRIDE
    }

    fn half(&self, number: u32, half: Half) -> &AtomicU32 {
        self.images.half(self.place(number) + half as usize * 4)
    }

    fn word(&self, number: u32, word: Word) -> &AtomicU64 {
        self.images.word(self.place(number) + word as usize * 8)
    }

    /// Takes a number whose place is free; 0 if there is none.
    fn new_image(&self, state: &ProcessState) -> u32 {
        for _ in 0..ATTEMPTS {
            let number = self.word(0, Word::Forked).fetch_add(1, Ordering::SeqCst).wrapping_add(1) as u32;
            if self.place(number) == 0 || self.half(number, Half::Number).load(Ordering::SeqCst) != 0 {
                continue;
            }
            self.half(number, Half::Parent).store(state.parent, Ordering::SeqCst);
            self.word(number, Word::Forked).store(state.forked, Ordering::SeqCst);
            self.word(number, Word::Mappings).store(state.mappings, Ordering::SeqCst);
            for word in [Word::LoaderEvents, Word::LastRemoval, Word::LoaderSeen] {
                self.word(number, word).store(0, Ordering::SeqCst);
            }
            self.half(number, Half::Late).store(state.late, Ordering::SeqCst);
            self.half(number, Half::Allocations).store(state.allocations, Ordering::SeqCst);
            self.half(number, Half::Number).store(number, Ordering::SeqCst);
            return number;
        }
        0
    }
}

/// The key of a process, `None` standing for whichever the probes reach.
fn key(tgid: Option<NonZeroU32>) -> u32 {
    tgid.map_or(ANY, NonZeroU32::get)
}

impl Tracer {
    /// Makes a process a traced one: the number of its image, `None` if there are too many. `allocations`: whether calls of
    /// its allocator are recorded.
    ///
    /// # Errors
    /// The table can't be written.
    pub fn add_process(&mut self, tgid: Option<NonZeroU32>, allocations: bool) -> Result<Option<u32>, KernelError> {
        let state = ProcessState { allocations: u32::from(allocations), ..ProcessState::new(0) };
        let number = self.processes.new_image(&state);
        if number == 0 {
            return Ok(None);
        }
        let name = maps::PROCESSES;
        let map = self.map_mut(name)?;
        let inserted = HashMap::try_from(map)
            .and_then(|mut map: HashMap<&mut MapData, u32, u32>| map.insert(key(tgid), number, 0));
        if let Err(error) = inserted {
            tracing::debug!("process {} found no room: {error}", key(tgid));
            self.processes.half(number, Half::Number).store(0, Ordering::SeqCst);
            return Ok(None);
        }
        Ok(Some(number))
    }

    /// The number of a process's image; `None` if it is not traced.
    ///
    /// # Errors
    /// The table can't be read.
    pub fn process_number(&self, tgid: Option<NonZeroU32>) -> Result<Option<u32>, KernelError> {
        let name = maps::PROCESSES;
        let map: HashMap<&MapData, u32, u32> =
            HashMap::try_from(self.map(name)?).map_err(|source| KernelError::Map { name, source })?;
        match map.get(&key(tgid), 0) {
            Ok(number) => Ok(Some(number)),
            Err(aya::maps::MapError::KeyNotFound) => Ok(None),
            Err(source) => Err(KernelError::Map { name, source }),
        }
    }

    /// Ends the tracing of a process that has ended, unless its id is another's by now.
    ///
    /// # Errors
    /// The table can't be written.
    pub fn remove_process(&mut self, tgid: Option<NonZeroU32>, number: u32) -> Result<(), KernelError> {
        if self.process_number(tgid)? != Some(number) {
            return Ok(());
        }
        let name = maps::PROCESSES;
        let map = self.map_mut(name)?;
        HashMap::try_from(map)
            .and_then(|mut map: HashMap<&mut MapData, u32, u32>| map.remove(&key(tgid)))
            .or_else(|error| if matches!(error, aya::maps::MapError::KeyNotFound) { Ok(()) } else { Err(error) })
            .map_err(|source| KernelError::Map { name, source })
    }

    /// Gives the place of an image free that no process has any more.
    pub fn free_image(&mut self, number: u32) {
        if self.processes.half(number, Half::Number).load(Ordering::SeqCst) == number {
            let list = MappingList::unpack(self.processes.word(number, Word::Mappings).load(Ordering::SeqCst));
            self.processes.half(number, Half::Number).store(0, Ordering::SeqCst);
            self.processes.segments.give_back(list.first, list.count);
        }
    }

    /// The number of the image that an image was forked off, and when (nanoseconds of `CLOCK_MONOTONIC`).
    pub fn forked_off(&self, number: u32) -> Option<(u32, u64)> {
        let parent = self.processes.half(number, Half::Parent).load(Ordering::SeqCst);
        (parent != 0).then(|| (parent, self.processes.word(number, Word::Forked).load(Ordering::SeqCst)))
    }

    /// Sets whether calls of an image's allocator are recorded.
    pub fn set_allocations(&self, number: u32, recorded: bool) {
        self.processes.half(number, Half::Allocations).store(u32::from(recorded), Ordering::SeqCst);
    }

    /// Says that the pages of an image present at the start have been looked at ([`memtrace_common::fault::Fault::late`]).
    pub fn set_late(&self, number: u32) {
        self.processes.half(number, Half::Late).store(1, Ordering::SeqCst);
    }

    /// How often the image's loader has reported changes so far: to be read before its mappings.
    pub fn loader_events(&self, number: u32) -> u64 {
        self.processes.word(number, Word::LoaderEvents).load(Ordering::SeqCst)
    }

    /// Says that the code mappings in force were read after `events` reports of the loader.
    pub fn set_loader_seen(&self, number: u32, events: u64) {
        self.processes.word(number, Word::LoaderSeen).store(events, Ordering::SeqCst);
    }

    /// Which of the reports counted by [`Self::loader_events`], from 1, was the last that libraries are being removed; 0
    /// if there was none.
    pub fn last_removal(&self, number: u32) -> u64 {
        self.processes.word(number, Word::LastRemoval).load(Ordering::SeqCst)
    }

    /// Puts a new list of code mappings of an image in force, at one moment for all walks; false if there is no room. They
    /// must be sorted and must not overlap; those beyond [`MAX_MAPPINGS`] are left out.
    ///
    /// # Errors
    /// The table can't be written.
    pub fn set_mappings(&mut self, number: u32, mappings: &[CodeMapping]) -> Result<bool, KernelError> {
        let used = &mappings[..mappings.len().min(MAX_MAPPINGS as usize)];
        let count = used.len() as u32;
        let processes = &mut self.processes;
        let images = &processes.images;
        let length = processes.length;
        let is_used = |first: u32, end: u32| {
            (1..length as usize).any(|place| {
                let number = images.half(place * STRIDE).load(Ordering::SeqCst);
                let list = images.word(place * STRIDE + Word::Mappings as usize * 8).load(Ordering::SeqCst);
                let list = MappingList::unpack(list);
                number != 0 && list.count > 0 && list.first < end && list.first + list.count > first
            })
        };
        let Some(first) = processes.segments.take(count, is_used) else { return Ok(false) };
        processes.generation += 1;
        let list = MappingList { generation: processes.generation, first, count };
        let name = maps::MAPPINGS;
        let map = self.map_mut(name)?;
        let mut array: Array<&mut MapData, CodeMapping> =
            Array::try_from(map).map_err(|source| KernelError::Map { name, source })?;
        for (number, mapping) in (first..).zip(used) {
            array.set(number, mapping, 0).map_err(|source| KernelError::Map { name, source })?;
        }
        let old = self.processes.word(number, Word::Mappings).swap(list.pack(), Ordering::SeqCst);
        let old = MappingList::unpack(old);
        self.processes.segments.give_back(old.first, old.count);
        Ok(true)
    }
}
