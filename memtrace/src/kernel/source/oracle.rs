//! The unwinder's test: walks with the registers and the memory that they were made from.

use aya::maps::{Array, MapData, RingBuf};
use memtrace_common::{
    maps,
    oracle::{CHUNK, CHUNKS, OracleControl, OracleSample},
    stack::MAX_FRAMES,
};

use super::uprobe::{AttachPoint, Reach, Role};
use crate::kernel::{
    multi::Place,
    object::program,
    tracer::{KernelError, Tracer},
};

/// One walk; see [`OracleSample`].
#[derive(Clone, Debug)]
pub struct Sample {
    /// Where it started: return address, stack pointer, frame pointer register.
    pub start: [u64; 3],
    /// Thread number.
    pub thread: u32,
    /// Frames taken over from the thread's last stack.
    pub kept: u32,
    /// Return addresses, outermost first.
    pub frames: Vec<u64>,
    /// A [`memtrace_common::stack::StackEnd`].
    pub end: u8,
    /// The memory from the stack pointer on.
    pub stack: Vec<u8>,
}

/// What was walked so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls walked.
    pub calls: u64,
    /// Samples that found no room.
    pub dropped: u64,
    /// Calls that could not be walked.
    pub unreadable: u64,
}

/// The stream of samples.
pub struct Samples {
    ring: RingBuf<MapData>,
}

impl Tracer {
    /// Attaches the program that hands walks over to the allocating functions among `points`, in place of those that
    /// record. Of `every` calls one gives a sample.
    ///
    /// # Errors
    /// As [`Tracer::attach_allocator`].
    pub fn attach_oracle(&mut self, points: &[AttachPoint], every: u32, reach: Reach) -> Result<(), KernelError> {
        let name = maps::ORACLE_CONTROL;
        Array::try_from(self.map_mut(name)?)
            .and_then(|mut array: Array<&mut MapData, u64>| array.set(OracleControl::Every as u32, u64::from(every), 0))
            .map_err(|source| KernelError::Map { name, source })?;
        let points = points.iter().filter(|point| point.role == Role::Allocate);
        self.attach_program(program::ORACLE_ENTRY, points, Place::Entry, reach)
    }

    /// Takes the stream of samples; `None` if it was taken before.
    ///
    /// # Errors
    /// The ring buffer can't be mapped.
    pub fn take_oracle(&mut self) -> Result<Option<Samples>, KernelError> {
        let name = maps::ORACLE;
        let Some(map) = self.take_map(name) else { return Ok(None) };
        let ring = RingBuf::try_from(map).map_err(|source| KernelError::Map { name, source })?;
        Ok(Some(Samples { ring }))
    }

    /// What was walked so far.
    ///
    /// # Errors
    /// The counters can't be read.
    pub fn oracle_counts(&self) -> Result<Counts, KernelError> {
        let name = maps::ORACLE_CONTROL;
        let array: Array<&MapData, u64> =
            Array::try_from(self.map(name)?).map_err(|source| KernelError::Map { name, source })?;
        let get =
            |entry: OracleControl| array.get(&(entry as u32), 0).map_err(|source| KernelError::Map { name, source });
        Ok(Counts {
            calls: get(OracleControl::Calls)?,
            dropped: get(OracleControl::Dropped)?,
            unreadable: get(OracleControl::Unreadable)?,
        })
    }
}

impl Samples {
    /// The next sample, if there is one.
    pub fn next_sample(&mut self) -> Option<Sample> {
        let item = self.ring.next()?;
        parse(&item)
    }
}

/// Reads a sample; `None` if the bytes are none.
fn parse(bytes: &[u8]) -> Option<Sample> {
    if bytes.len() != size_of::<OracleSample>() {
        return None;
    }
    let word = |at: usize| Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
    let half = |at: usize| Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
    const FRAMES: usize = 48;
    const STACK: usize = FRAMES + 8 * MAX_FRAMES;
    let len = (half(36)? as usize).min(MAX_FRAMES);
    let chunks = (half(44)? as usize).min(CHUNKS);
    Some(Sample {
        start: [word(0)?, word(8)?, word(16)?],
        thread: word(24)? as u32,
        kept: half(32)?,
        frames: (0..len).map(|number| word(FRAMES + 8 * number)).collect::<Option<_>>()?,
        end: u8::try_from(half(40)?).ok()?,
        stack: bytes.get(STACK..STACK + chunks * CHUNK)?.to_vec(),
    })
}
