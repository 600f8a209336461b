//! What a probed instruction means, packed into the cookie of its probe, so that the handlers assume nothing about
//! the function they serve.

/// Position of an argument: the System V AMD64 integer registers in order (`rdi rsi rdx rcx r8 r9`), or none.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arg {
    /// First argument.
    A0 = 0,
    /// Second argument.
    A1 = 1,
    /// Third argument.
    A2 = 2,
    /// Fourth argument.
    A3 = 3,
    /// Fifth argument.
    A4 = 4,
    /// Sixth argument.
    A5 = 5,
    /// No argument: the site says it ([`Site::constant`]).
    Constant = 14,
    /// The function has no such argument.
    None = 15,
}

impl Arg {
    const fn from_nibble(raw: u64) -> Self {
        match raw & 15 {
            0 => Self::A0,
            1 => Self::A1,
            2 => Self::A2,
            3 => Self::A3,
            4 => Self::A4,
            5 => Self::A5,
            14 => Self::Constant,
            _ => Self::None,
        }
    }
}

/// How a function tells where the new block is, and whether there is one.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Answer {
    /// It returns the block's address. Null, -4095 to -1 (how system calls tell errors) and what lies beyond all user
    /// addresses stand for failure.
    #[default]
    Pointer = 0,
    /// It stores the address where an argument says and returns 0 for success (posix_memalign, `cuMemAlloc_v2`).
    Stored = 1,
    /// It stores the address where an argument says, whatever it returns; null stands for failure.
    StoredAny = 2,
    /// It resizes a block in place and returns the size that the block has then: at least the size asked for if that
    /// succeeded (jemalloc's xallocx); otherwise the block stays as it was.
    InPlace = 3,
}

impl Answer {
    const fn from_bits(raw: u64) -> Self {
        match raw & 3 {
            0 => Self::Pointer,
            1 => Self::Stored,
            2 => Self::StoredAny,
            _ => Self::InPlace,
        }
    }
}

/// Numbers in place of a site's for stacks that belong to no probe.
pub mod special {
    use crate::call::Call;

    /// Page faults.
    pub const FAULT: u16 = 0xff00;
    /// The first of the changes of the resident set: one number for each [`crate::resident::Member`].
    const RESIDENT: u16 = 0xff04;
    /// The first of the system calls.
    const CALLS: u16 = 0xff10;

    /// The number of changes of one counter of the resident set.
    #[inline(always)]
    pub const fn of_member(member: u32) -> u16 {
        RESIDENT + member as u16
    }

    /// The counter of the resident set with this number.
    pub const fn member(site: u16) -> Option<u32> {
        if site >= RESIDENT && site < RESIDENT + 4 { Some((site - RESIDENT) as u32) } else { None }
    }

    /// The number of a system call.
    #[inline(always)]
    pub const fn of_call(call: u32) -> u16 {
        CALLS + call as u16
    }

    /// The system call with this number.
    pub const fn call(site: u16) -> Option<Call> {
        if site < CALLS { None } else { Call::from_raw((site - CALLS) as u32) }
    }
}

/// Where the numbers of arguments are in a cookie: the lowest of four bits each.
pub mod place {
    /// [`super::Site::size`].
    pub const SIZE: u32 = 16;
    /// [`super::Site::count`].
    pub const COUNT: u32 = 20;
    /// [`super::Site::pointer`].
    pub const POINTER: u32 = 24;
    /// [`super::Site::out`].
    pub const OUT: u32 = 28;
}

/// A probed site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Site {
    /// Number of the site, assigned by the user side.
    pub index: u16,
    /// Bytes asked for.
    pub size: Arg,
    /// The same where they are always as many ([`Arg::Constant`]), at most [`Site::MAX_CONSTANT`]; else 0.
    pub constant: u32,
    /// Factor of `size` (calloc, reallocarray).
    pub count: Arg,
    /// Block that the call frees or resizes.
    pub pointer: Arg,
    /// Address at which the call stores the new block, if it does not return it. With [`Answer::InPlace`], the block
    /// itself.
    pub out: Arg,
    /// How the call tells where the new block is.
    pub answer: Answer,
    /// Whether a call that frees a block may do so by calling another probed function for the same block, which must not
    /// be counted twice.
    pub repeats: bool,
    /// Bytes from the stack pointer at the probed instruction up to the return address. 0 for allocating functions:
    /// their return probe needs it there.
    pub return_offset: u16,
    /// Of the image whose calls the probe records ([`Site::tag_of`]); 0: of every image that it reaches.
    pub tag: u8,
}

impl Site {
    /// Most bytes that fit, 1 MiB: 21 bits, of which 16 take the place of [`Self::return_offset`].
    pub const MAX_CONSTANT: u32 = 1 << 20;

    /// Packs the site into a cookie.
    pub const fn cookie(self) -> u64 {
        let (low, high) = match self.size {
            Arg::Constant => (self.constant as u64 & 0xffff, self.constant as u64 >> 16 & 0x1f),
            _ => (self.return_offset as u64, 0),
        };
        (self.index as u64)
            | (self.size as u64) << place::SIZE
            | (self.count as u64) << place::COUNT
            | (self.pointer as u64) << place::POINTER
            | (self.out as u64) << place::OUT
            | low << 32
            | (self.answer as u64) << 48
            | (self.repeats as u64) << 50
            | high << 51
            | (self.tag as u64) << Self::TAG_SHIFT
    }

    const TAG_SHIFT: u32 = 56;

    /// Tells an image from those that a process had shortly before: their probes, which reach it too, go some time after the new
    /// ones are there.
    #[inline(always)]
    pub const fn tag_of(image: u32) -> u8 {
        (1 + image % 255) as u8
    }

    /// The cookie of the same site for the image `image`; 0: for all.
    pub const fn cookie_for(cookie: u64, image: u32) -> u64 {
        let tag = if image == 0 { 0 } else { Self::tag_of(image) };
        cookie & !(0xff << Self::TAG_SHIFT) | (tag as u64) << Self::TAG_SHIFT
    }

    /// Whether the probe records the calls of the image `image`.
    #[inline(always)]
    pub const fn is_of(&self, image: u32) -> bool {
        self.tag == 0 || self.tag == Self::tag_of(image)
    }

    /// Reads a cookie back. Total: every u64 gives a site.
    #[inline(always)]
    pub const fn from_cookie(cookie: u64) -> Self {
        let size = Arg::from_nibble(cookie >> place::SIZE);
        let (constant, return_offset) = match size {
            Arg::Constant => ((cookie >> 32 & 0xffff | (cookie >> 51 & 0x1f) << 16) as u32, 0),
            _ => (0, (cookie >> 32) as u16),
        };
        Self {
            index: cookie as u16,
            size,
            constant,
            count: Arg::from_nibble(cookie >> place::COUNT),
            pointer: Arg::from_nibble(cookie >> place::POINTER),
            out: Arg::from_nibble(cookie >> place::OUT),
            return_offset,
            answer: Answer::from_bits(cookie >> 48),
            repeats: cookie >> 50 & 1 != 0,
            tag: (cookie >> Self::TAG_SHIFT) as u8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_are_of_one_image_or_of_all() {
        let site = Site { size: Arg::Constant, constant: Site::MAX_CONSTANT, return_offset: 0, ..Site::from_cookie(7) };
        let of = |image| Site::from_cookie(Site::cookie_for(site.cookie(), image));
        assert_eq!(of(0), Site { tag: 0, ..site });
        assert!(of(0).is_of(1) && of(0).is_of(u32::MAX));
        for image in [1, 254, 255, 256, 1000, u32::MAX] {
            assert!(of(image).is_of(image) && !of(image).is_of(image - 1), "{image}");
            assert_eq!(Site { tag: 0, ..of(image) }, Site { tag: 0, ..site });
        }
    }

    #[test]
    fn cookie_round_trip() {
        for answer in [Answer::Pointer, Answer::Stored, Answer::StoredAny, Answer::InPlace] {
            for (size, count) in [(Arg::A2, Arg::A1), (Arg::A4, Arg::A3), (Arg::A5, Arg::None)] {
                let site = Site {
                    index: 513,
                    size,
                    constant: 0,
                    count,
                    pointer: Arg::A0,
                    out: Arg::None,
                    answer,
                    repeats: answer == Answer::Stored,
                    return_offset: 0xfedc,
                    tag: 0x81,
                };
                assert_eq!(Site::from_cookie(site.cookie()), site);
            }
        }
        for constant in [1, 64, 0xffff, 0x1_0000, Site::MAX_CONSTANT] {
            let site = Site { size: Arg::Constant, constant, return_offset: 0, ..Site::from_cookie(0) };
            assert_eq!(Site::from_cookie(site.cookie()), site);
        }
        let all = Site::from_cookie(u64::MAX);
        assert_eq!((all.index, all.size, all.answer, all.repeats), (u16::MAX, Arg::None, Answer::InPlace, true));
    }
}
