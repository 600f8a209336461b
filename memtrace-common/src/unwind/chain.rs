//! Walks, and what is kept of a thread's last one.

use super::{CodeMapping, RbxRule};

/// Most frames of a thread's last stack that are kept for its next walk: a power of two above
/// [`crate::stack::MAX_FRAMES`].
pub const MAX_LEVELS: usize = 128;

/// Words of stack read at a time: a power of two.
pub const WINDOW: usize = 128;

/// One frame of an unwound stack: the state in which the walk was at it, and where it went on from there.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Level {
    /// Stack pointer in this frame: after its callee has returned.
    pub sp: u64,
    /// Frame pointer register in this frame.
    pub fp: u64,
    /// Which words led to the caller's state: see [`Level::slots`] and [`Level::rbx`].
    pub slots: u64,
}

impl Level {
    /// The step can't be repeated from memory words alone.
    pub const OPAQUE: i16 = i16::MIN;

    /// Packs what [`Level::slots`] and [`Level::rbx`] give back.
    #[inline(always)]
    pub const fn pack_slots(fp_slot: i16, cfa_slot: i16, rbx: RbxRule) -> u64 {
        fp_slot as u16 as u64 | (cfa_slot as u16 as u64) << 16 | (rbx.raw() as u64) << 32
    }

    /// Where the caller's rbx is.
    #[inline(always)]
    pub const fn rbx(&self) -> RbxRule {
        RbxRule::from_raw((self.slots >> 32) as u8)
    }

    /// Where the caller's frame pointer was read, in words from the caller's stack pointer (0: the register had kept its
    /// value; or [`Level::OPAQUE`]); and where the caller's stack pointer was read, in words from this frame's frame
    /// pointer (0: it was computed).
    #[inline(always)]
    pub const fn slots(&self) -> (i16, i16) {
        (self.slots as i16, (self.slots >> 16) as i16)
    }
}

/// A walk in progress. It is kept in map memory, where the verifier follows no values: on the BPF stack it would tell
/// apart more states than it can look at.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Walk {
    /// Return address of the frame that the walk is at.
    pub pc: u64,
    /// Stack pointer there.
    pub sp: u64,
    /// Frame pointer register there.
    pub fp: u64,
    /// rbx where the walk started.
    pub bx: u64,
    /// The mapping found last: frames next to each other are often in the same one.
    pub code: CodeMapping,
    /// [`crate::settings::Control::Mappings`] for this walk.
    pub mappings: u64,
    /// Address of the words in [`Chain::window`].
    pub window: u64,
    /// Bytes there, a multiple of 8.
    pub window_bytes: u64,
    /// [`crate::settings::Control::Unwind`] for this walk.
    pub mode: u32,
    /// Frames found in this walk, in the scratch arrays.
    pub found: u32,
    /// Frames of the kept chain that the walk may still meet: those numbered below.
    pub kept: u32,
    /// Frames of the kept chain that the walk ends with: those numbered below.
    pub joined: u32,
    /// The kept frame from which the walk goes on by itself; `u32::MAX` if there is none.
    pub adopted: u32,
    /// A [`crate::stack::StackEnd`].
    pub end: u32,
    /// Whether the end follows from the state at the last frame alone, so that the chain can be kept: 0 or 1.
    pub keep: u32,
    /// Whether the walk is to tell if the thread's pending call still lasts: 0 or 1; [`Self::PASSED_OVER`] if it cannot.
    pub unclear: u32,
    /// Whether libraries were removed since the list of mappings was made: 0 or 1.
    pub stale: u32,
    /// Where a number goes that the verifier is to forget.
    pub forget: u32,
}

impl Walk {
    /// A frame pointer, followed in code without unwind information, led past the pending call's frame.
    pub const PASSED_OVER: u32 = 2;
}

/// How a thread's last stack was unwound. Frame numbers are those of [`crate::stack::StackRecord::frames`]: outermost
/// first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Chain {
    /// [`crate::settings::Control::Mappings`] at that time: another value makes the chain useless.
    pub mappings: u64,
    /// Whether the next walk may use it: 0 or 1.
    pub keep: u64,
    /// The walk in progress.
    pub walk: Walk,
    /// Words of the target's stack, read many at a time while a kept chain is compared.
    pub window: [u64; WINDOW],
    /// The frames.
    pub levels: [Level; MAX_LEVELS],
    /// Return addresses found in a walk, innermost first, until they are put into the record.
    pub scratch: [u64; MAX_LEVELS],
    /// The levels of those.
    pub scratch_levels: [Level; MAX_LEVELS],
}

const _: () = assert!(size_of::<Level>() == 24);
const _: () = assert!(size_of::<Walk>() == 136);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_round_trip() {
        for rule in [RbxRule::SAME, RbxRule::saved(-2), RbxRule::saved(-7), RbxRule::LOST, RbxRule::SIGNAL] {
            for slots in [(0, 0), (-2, 0), (-1, -2), (i16::MAX, i16::MIN), (Level::OPAQUE, 1)] {
                let level = Level { slots: Level::pack_slots(slots.0, slots.1, rule), ..Level::default() };
                assert_eq!((level.slots(), level.rbx()), (slots, rule));
            }
        }
    }
}
