//! Unwind tables: `.eh_frame` in a form that the kernel side can search.
//!
//! A module's table is a sequence of [`Row`]s sorted by `pc`; a row is valid up to the next one. An index over the rows
//! gives, for every block of [`BLOCK`] bytes of code, the number of the first row that a search has to look at, so that
//! a search takes at most [`SEARCH_STEPS`] steps. A pc beyond the last block has no row.
//!
//! A thread's innermost frame, and a frame that a signal interrupted (the caller of one with [`CfaRule::Signal`]), is
//! looked up with its pc; every other frame with its return address minus 1, since a call can be a function's last
//! instruction.

mod chain;

pub use chain::{Chain, Level, MAX_LEVELS, WINDOW, Walk};

/// Bytes of code per index entry. At most as many rows can begin in a block.
pub const BLOCK_SHIFT: u32 = 8;
/// Bytes of code per index entry.
pub const BLOCK: u64 = 1 << BLOCK_SHIFT;
/// Steps of a binary search among the rows of a block and the one before it.
pub const SEARCH_STEPS: u32 = 9;

/// How the canonical frame address (CFA: the stack pointer just before the call, AMD64 ABI 3.7) is found.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CfaRule {
    /// There is no unwind information for this code: a gap between functions, or the end of the table.
    NoInfo = 0,
    /// CFA = rsp + offset.
    Rsp = 1,
    /// CFA = rbp + offset.
    Rbp = 2,
    /// Procedure linkage table: CFA = rsp + 8, and 8 more from byte `cfa_offset` of each 16-byte entry on.
    Plt = 3,
    /// CFA = the word at rbp + offset (functions that realign their stack).
    DerefRbp = 4,
    /// CFA = the word at rsp + offset.
    DerefRsp = 5,
    /// Return from a signal handler: all registers are in the `ucontext` that rsp points at (offsets in
    /// [`ucontext`]).
    Signal = 6,
    /// The outermost frame: the return address is undefined (`_start`, the start of a thread).
    End = 7,
    /// A rule that this format can't express; `cfa_offset` is a number that tells the user side why.
    Unsupported = 8,
    /// CFA = the word at rsp + offset, plus 8: the saved stack pointer of functions that align their stack by hand
    /// (OpenSSL's assembly).
    DerefRspPlus8 = 9,
    /// CFA = the word at rbp + offset, plus 8.
    DerefRbpPlus8 = 10,
    /// CFA = rbx + offset (the dynamic loader's functions that are called at the first use of a symbol).
    Rbx = 12,
}

/// How the caller's rbp is found.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RbpRule {
    /// It is unchanged.
    Same = 0,
    /// The word at CFA + offset.
    Cfa = 1,
    /// The word at rbp + offset.
    Rbp = 2,
    /// It is lost.
    Undefined = 3,
}

/// How the caller's rbx is found. Only [`CfaRule::Rbx`] needs it, so that a walk notes the rule of every frame, and reads
/// rbx when it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RbxRule(u8);

impl RbxRule {
    /// It is unchanged.
    pub const SAME: Self = Self(0);
    /// It is lost, or saved at an unusual place.
    pub const LOST: Self = Self(7);
    /// It is in the `ucontext` of a signal frame. Not for rows: [`CfaRule::Signal`] implies it.
    pub const SIGNAL: Self = Self(8);

    /// Saved at CFA + `offset` words, if that is one of the six words below the return address, in which functions save
    /// their caller's registers.
    pub const fn saved(offset: i64) -> Self {
        if offset <= -2 && offset >= -7 { Self((-1 - offset) as u8) } else { Self::LOST }
    }

    /// Words from the CFA down to the saved value; `None` if it is not saved in the frame.
    pub const fn below_cfa(self) -> Option<u64> {
        if self.0 >= 1 && self.0 <= 6 { Some(self.0 as u64 + 1) } else { None }
    }

    /// The rule as a number of 4 bits.
    #[inline(always)]
    pub const fn raw(self) -> u8 {
        self.0
    }

    /// The rule numbered `raw`, of which 4 bits count.
    #[inline(always)]
    pub const fn from_raw(raw: u8) -> Self {
        Self(raw & 15)
    }
}

/// Offsets of the saved registers from a signal frame's `ucontext` (`struct ucontext` and `struct sigcontext` of x86-64,
/// arch/x86/include/uapi/asm).
pub mod ucontext {
    /// rbp.
    pub const RBP: u64 = 120;
    /// rbx.
    pub const RBX: u64 = 128;
    /// rsp.
    pub const RSP: u64 = 160;
    /// rip.
    pub const RIP: u64 = 168;
}

/// How to unwind a frame whose pc lies at or after [`Row::pc`] and before the next row's. The return address is at
/// CFA - 8 (except with [`CfaRule::Signal`] and [`CfaRule::End`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// ELF virtual address minus the module's lowest `PT_LOAD` address.
    pub pc: u32,
    /// The CFA's rule.
    pub cfa: CfaRule,
    /// Its offset in words of 8 bytes; for [`CfaRule::Plt`] a byte number. 13 bits, with [`CfaRule::Rsp`] 21 bits (see
    /// [`Row::fits`]).
    pub cfa_offset: i32,
    /// The rule of the caller's rbp.
    pub rbp: RbpRule,
    /// Its offset in words of 8 bytes.
    pub rbp_offset: i8,
    /// The rule of the caller's rbx.
    pub rbx: RbxRule,
}

/// Bits of a packed row's CFA offset.
pub const CFA_BITS: u32 = 13;
/// Number of [`CfaRule::Rsp`] in a packed row whose CFA offset takes 21 bits: frames of 32 KiB and more.
pub const FAR_RSP: u64 = 11;
/// Number in place of the [`RbpRule`]'s in such a row, if rbp is saved in the word that ends at CFA - 8. 12 numbers
/// from here on stand for this word and those below it: functions save the registers of their caller first.
pub const FAR_SAVED: i64 = 4;

impl Row {
    /// Packs a row: pc in bits 0 to 31, CFA offset in 32 to 44, rbx rule in 45 to 47, CFA rule in 48 to 51, rbp rule in
    /// 52 to 55, rbp offset in 56 to 63.
    ///
    /// If the CFA offset takes more than 13 bits, its bits 13 to 20 are in bits 56 to 63, and the rbp offset is part of
    /// the rbp rule's number. The row must be one that [fits](Row::fits).
    pub const fn pack(self) -> u64 {
        let (mut cfa, mut rbp, mut high) = (self.cfa as u64, self.rbp as u64, self.rbp_offset as u8 as u64);
        if self.is_far() {
            cfa = FAR_RSP;
            high = (self.cfa_offset >> CFA_BITS) as u8 as u64;
            if matches!(self.rbp, RbpRule::Cfa) {
                rbp = (FAR_SAVED - 2 - self.rbp_offset as i64) as u64;
            }
        }
        let low = self.cfa_offset as u64 & ((1 << CFA_BITS) - 1);
        (self.pc as u64) | low << 32 | (self.rbx.0 as u64 & 7) << 45 | cfa << 48 | rbp << 52 | high << 56
    }

    /// Whether the row can be packed: the CFA offset has 13 bits; or the rule is [`CfaRule::Rsp`], it has 21 bits, and
    /// rbp is unchanged, undefined, or saved in one of the words from CFA - 16 to CFA - 104.
    pub const fn fits(self) -> bool {
        if !self.is_far() {
            return true;
        }
        let rbp = match self.rbp {
            RbpRule::Same | RbpRule::Undefined => self.rbp_offset == 0,
            RbpRule::Cfa => self.rbp_offset <= -2 && self.rbp_offset >= -13,
            RbpRule::Rbp => false,
        };
        rbp && matches!(self.cfa, CfaRule::Rsp) && fits_in(self.cfa_offset, CFA_BITS + 8)
    }

    const fn is_far(self) -> bool {
        !fits_in(self.cfa_offset, CFA_BITS)
    }

    /// The CFA offset of a packed row that is not far.
    #[inline(always)]
    pub const fn packed_offset(packed: u64) -> i64 {
        (packed << 19) as i64 >> 51
    }

    /// The rule of the caller's rbx in a packed row.
    #[inline(always)]
    pub const fn packed_rbx(packed: u64) -> RbxRule {
        RbxRule((packed >> 45) as u8 & 7)
    }

    /// Unpacks a row; `None` if a rule has no such number.
    pub const fn unpack(packed: u64) -> Option<Self> {
        let cfa = match packed >> 48 & 15 {
            0 => CfaRule::NoInfo,
            1 => CfaRule::Rsp,
            2 => CfaRule::Rbp,
            3 => CfaRule::Plt,
            4 => CfaRule::DerefRbp,
            5 => CfaRule::DerefRsp,
            6 => CfaRule::Signal,
            7 => CfaRule::End,
            8 => CfaRule::Unsupported,
            9 => CfaRule::DerefRspPlus8,
            10 => CfaRule::DerefRbpPlus8,
            12 => CfaRule::Rbx,
            FAR_RSP => return Self::unpack_far(packed),
            _ => return None,
        };
        let rbp = match packed >> 52 & 15 {
            0 => RbpRule::Same,
            1 => RbpRule::Cfa,
            2 => RbpRule::Rbp,
            3 => RbpRule::Undefined,
            _ => return None,
        };
        let (cfa_offset, rbx) = (Self::packed_offset(packed) as i32, Self::packed_rbx(packed));
        Some(Self { pc: packed as u32, cfa, cfa_offset, rbp, rbp_offset: (packed >> 56) as i8, rbx })
    }

    const fn unpack_far(packed: u64) -> Option<Self> {
        let number = (packed >> 52 & 15) as i64;
        let (rbp, rbp_offset) = match number {
            FAR_SAVED.. => (RbpRule::Cfa, (FAR_SAVED - 2 - number) as i8),
            0 => (RbpRule::Same, 0),
            3 => (RbpRule::Undefined, 0),
            _ => return None,
        };
        let low = (packed >> 32) as i32 & ((1 << CFA_BITS) - 1);
        let cfa_offset = (((packed >> 56) as i8 as i32) << CFA_BITS) | low;
        Some(Self { pc: packed as u32, cfa: CfaRule::Rsp, cfa_offset, rbp, rbp_offset, rbx: Self::packed_rbx(packed) })
    }
}

/// Whether a number has no more than `bits` bits, its sign among them.
const fn fits_in(number: i32, bits: u32) -> bool {
    number << (32 - bits) >> (32 - bits) == number
}

/// A mapping of code, as the kernel side looks it up by address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CodeMapping {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// Run-time address of the module's lowest `PT_LOAD` address: a pc minus this is comparable with [`Row::pc`].
    pub base: u64,
    /// Number of the module's first row in the table of all rows.
    pub first_row: u32,
    /// Number of rows; 0: no table, frame pointers are followed, or with [`CodeMapping::CUT`] stacks are cut.
    pub rows: u32,
    /// Number of the module's first index entry in the table of all index entries. Entry `i` holds the number
    /// (relative to `first_row`) of the first row whose pc is at or after `i * BLOCK`; there is one more entry than
    /// blocks.
    pub first_block: u32,
    /// Number of index entries; and [`CodeMapping::REMOVABLE`] and [`CodeMapping::CUT`].
    pub blocks: u32,
}

impl CodeMapping {
    /// Flag in [`CodeMapping::blocks`]: the target can unmap this code (it is neither the program, nor the C library, nor
    /// the dynamic loader).
    pub const REMOVABLE: u32 = 1 << 31;

    /// Flag in [`CodeMapping::blocks`]: the code has unwind information, but no table here. It was compiled without frame
    /// pointers then, most likely: to follow them would lead past frames.
    pub const CUT: u32 = 1 << 30;

    /// Number of index entries.
    #[inline(always)]
    pub const fn index_entries(&self) -> u32 {
        self.blocks & !(Self::REMOVABLE | Self::CUT)
    }

    /// Whether stacks are cut in this code.
    #[inline(always)]
    pub const fn is_cut(&self) -> bool {
        self.blocks & Self::CUT != 0
    }

    /// Whether the target can unmap this code.
    #[inline(always)]
    pub const fn is_removable(&self) -> bool {
        self.blocks & Self::REMOVABLE != 0
    }
}

/// Most code mappings of a process that the kernel side knows.
pub const MAX_MAPPINGS: u32 = 4096;

/// The list of code mappings in force. The `MAPPINGS` table has room for two: one in force, one being written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MappingList {
    /// Number of this list, counted from the start of the trace: no other has it, so that what was found by one list is
    /// never taken for found by another (28 bits).
    pub generation: u64,
    /// Number of its first mapping in the table (20 bits).
    pub first: u32,
    /// How many mappings, at most [`MAX_MAPPINGS`].
    pub count: u32,
}

impl MappingList {
    /// Packs a list into a word, so that a walk sees the old list or the new one.
    pub const fn pack(self) -> u64 {
        self.generation << 36 | (self.first as u64 & 0xf_ffff) << 16 | self.count as u64
    }

    /// Unpacks a list.
    #[inline(always)]
    pub const fn unpack(packed: u64) -> Self {
        Self { generation: packed >> 36, first: (packed >> 16) as u32 & 0xf_ffff, count: packed as u16 as u32 }
    }
}

const _: () = assert!(size_of::<CodeMapping>() == 40);

#[cfg(feature = "user")]
mod pod {
    // SAFETY: repr(C), only integers, no padding (size asserted above): any bit pattern is a value.
    unsafe impl aya::Pod for super::CodeMapping {}
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn packing_round_trip() {
        let row = Row {
            pc: 0xfedc_ba98,
            cfa: CfaRule::DerefRbp,
            cfa_offset: -4096,
            rbp: RbpRule::Cfa,
            rbp_offset: -128,
            rbx: RbxRule::saved(-7),
        };
        assert_eq!(Row::unpack(row.pack()), Some(row));
        let row = Row {
            pc: 0,
            cfa: CfaRule::Unsupported,
            cfa_offset: 4095,
            rbp: RbpRule::Undefined,
            rbp_offset: 127,
            rbx: RbxRule::LOST,
        };
        assert_eq!(Row::unpack(row.pack()), Some(row));
        assert_eq!(Row::unpack(u64::MAX), None);
    }

    #[test]
    fn places_of_rbx() {
        for offset in -7..=-2i64 {
            let rule = RbxRule::saved(offset);
            assert_eq!(rule.below_cfa(), Some(offset.unsigned_abs()));
            assert_eq!(Row::packed_rbx(Row { rbx: rule, ..Row::unpack(0).unwrap() }.pack()), rule);
        }
        for offset in [-8, -1, 0, 1, i64::MIN, i64::MAX] {
            assert_eq!(RbxRule::saved(offset), RbxRule::LOST);
        }
        for rule in [RbxRule::SAME, RbxRule::LOST, RbxRule::SIGNAL] {
            assert_eq!(rule.below_cfa(), None);
            assert_eq!(RbxRule::from_raw(rule.raw()), rule);
        }
    }

    #[test]
    fn lists_alternate_and_are_told_apart() {
        let list = MappingList { generation: 7, first: (1 << 20) - 1, count: MAX_MAPPINGS };
        assert_eq!(MappingList::unpack(list.pack()), list);
        let later = MappingList { generation: 9, ..list };
        assert_ne!(later.pack(), list.pack());
        assert_eq!(MappingList::unpack(0), MappingList::default());
    }

    #[test]
    fn packing_large_frames() {
        let rbx = RbxRule::saved(-3);
        let row = |cfa_offset, rbp, rbp_offset| Row { pc: 7, cfa: CfaRule::Rsp, cfa_offset, rbp, rbp_offset, rbx };
        for cfa_offset in [4096, 4097, 8191, 8192, 65_535, 1_048_575, -4097, -8192, -1_048_576] {
            for saved in -13..=-2 {
                let row = row(cfa_offset, RbpRule::Cfa, saved);
                assert!(row.fits());
                assert_eq!(Row::unpack(row.pack()), Some(row));
            }
            for rule in [RbpRule::Same, RbpRule::Undefined] {
                let row = row(cfa_offset, rule, 0);
                assert!(row.fits());
                assert_eq!(Row::unpack(row.pack()), Some(row));
            }
            assert!(!row(cfa_offset, RbpRule::Cfa, -14).fits());
            assert!(!row(cfa_offset, RbpRule::Cfa, -1).fits());
            assert!(!row(cfa_offset, RbpRule::Rbp, 0).fits());
            assert!(!Row { cfa: CfaRule::Rbp, ..row(cfa_offset, RbpRule::Same, 0) }.fits());
        }
        assert!(!row(1_048_576, RbpRule::Same, 0).fits());
        assert!(row(4095, RbpRule::Rbp, 100).fits());
    }

    #[test]
    fn every_packed_row_unpacks_to_one_that_packs_the_same() {
        // All rules with offsets at the edges; rows that no `pack` makes may unpack, but then to something that fits.
        for rules in 0..256u64 {
            for high in [0u64, 1, 0x7f, 0x80, 0xff] {
                for low in [0u64, 1, 0x7fff, 0x8000, 0xffff] {
                    if let Some(row) = Row::unpack(0xffff_ffff | low << 32 | rules << 48 | high << 56) {
                        assert!(row.fits());
                        assert_eq!(Row::unpack(row.pack()), Some(row));
                    }
                }
            }
        }
    }
}
