//! System calls of the target that change its address space.

use std::os::fd::{AsRawFd, RawFd};

use aya::maps::{MapData, RingBuf};
use memtrace_common::{
    call::{ARGUMENTS, CallEvent},
    maps,
};

use crate::kernel::{
    object::program,
    tracer::{KernelError, Tracer},
};

/// The stream of system calls. Readable when there are any.
pub struct Calls {
    ring: RingBuf<MapData>,
}

impl Tracer {
    /// Attaches the programs that report system calls. They need to know the processes' numbers, and
    /// [`super::super::Settings::calls`].
    ///
    /// # Errors
    /// The kernel has no such tracepoints or refuses the programs.
    pub fn attach_calls(&mut self) -> Result<(), KernelError> {
        // An exit without its entry is not reported, an entry without its exit would be.
        self.attach_raw_tracepoint(program::CALL_EXIT, "sys_exit")?;
        self.attach_raw_tracepoint(program::CALL_ENTRY, "sys_enter")
    }

    /// Takes the stream of system calls; `None` if it was taken before.
    ///
    /// # Errors
    /// The ring buffer can't be mapped.
    pub fn take_calls(&mut self) -> Result<Option<Calls>, KernelError> {
        let name = maps::CALLS;
        let Some(map) = self.take_map(name) else { return Ok(None) };
        let ring = RingBuf::try_from(map).map_err(|source| KernelError::Map { name, source })?;
        Ok(Some(Calls { ring }))
    }
}

impl Calls {
    /// The next message, if there is one.
    pub fn next_call(&mut self) -> Option<CallEvent> {
        loop {
            let item = self.ring.next()?;
            // Anything of another size is not from this object file; there is no such thing, but bytes are bytes.
            if let Some(event) = parse(&item) {
                return Some(event);
            }
        }
    }
}

impl AsRawFd for Calls {
    fn as_raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}

fn parse(bytes: &[u8]) -> Option<CallEvent> {
    if bytes.len() != size_of::<CallEvent>() {
        return None;
    }
    let word = |at: usize| Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
    let half = |at: usize| Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
    let mut arguments = [0; ARGUMENTS];
    for (position, argument) in arguments.iter_mut().enumerate() {
        *argument = word(16 + 8 * position)?;
    }
    Some(CallEvent {
        call: half(0)?,
        exit: half(4)?,
        process: half(8)?,
        tid: half(12)?,
        arguments,
        result: word(56)? as i64,
        stack: half(64)?,
        flags: half(68)?,
        time: word(72)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_as_they_lie_in_memory() {
        let event = CallEvent {
            call: 1,
            exit: 2,
            process: 3,
            tid: 4,
            arguments: [5, 6, 7, 8, 9],
            result: -10,
            stack: 11,
            flags: 12,
            time: 13,
        };
        // SAFETY: repr(C) without padding, so every byte is set.
        let bytes: [u8; size_of::<CallEvent>()] = unsafe { std::mem::transmute(event) };
        assert_eq!(parse(&bytes), Some(event));
        assert_eq!(parse(&bytes[1..]), None);
    }
}
