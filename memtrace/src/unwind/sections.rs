//! What a table is made from.

use std::ops::Range;

use super::UnwindError;

/// The contents of a section and where they are in the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Section {
    /// Virtual address; 0 for sections that are not loaded.
    pub address: u64,
    /// The bytes.
    pub data: Vec<u8>,
}

/// The unwind information of a module. All addresses are virtual addresses as the file numbers them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sections {
    /// The lowest `PT_LOAD` address.
    pub base: u64,
    /// Where there is code, in any order.
    pub code: Vec<Range<u64>>,
    /// `.eh_frame`.
    pub eh_frame: Option<Section>,
    /// `.eh_frame_hdr`, only if the end of `.eh_frame` is not known: its search table then tells the entries from what
    /// follows them.
    pub eh_frame_hdr: Option<Section>,
    /// `.debug_frame`, of this file or of the one with its debug information.
    pub debug_frame: Option<Section>,
    /// Procedure linkage tables: code that linkers write, some of them without a description.
    pub linkage_tables: Vec<Section>,
    /// Whether there is a `.debug_frame` that could not be read (damaged, too large, or compressed by another method
    /// than zlib).
    pub debug_frame_unread: bool,
}

/// Where a module has code, ready for looking up.
pub(super) struct Code {
    base: u64,
    /// By address, disjoint, within 4 GiB from `base`.
    ranges: Vec<Range<u64>>,
}

impl Code {
    /// # Errors
    /// [`UnwindError::TooFar`] and, for code below the base, [`UnwindError::Malformed`].
    pub fn new(sections: &Sections) -> Result<Self, UnwindError> {
        let base = sections.base;
        let mut given: Vec<_> = sections.code.iter().filter(|range| !range.is_empty()).cloned().collect();
        given.sort_unstable_by_key(|range| range.start);
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for range in given {
            if range.start < base {
                return Err(UnwindError::Malformed("code below the first segment"));
            }
            if range.end - base > u64::from(u32::MAX) {
                return Err(UnwindError::TooFar);
            }
            match ranges.last_mut() {
                Some(last) if range.start < last.end => last.end = last.end.max(range.end),
                _ => ranges.push(range),
            }
        }
        Ok(Self { base, ranges })
    }

    /// The part of a function that lies in the range of code where it starts, relative to the base. `None` if it starts
    /// in none, is empty, or wraps around.
    pub fn clamp(&self, start: u64, length: u64) -> Option<Range<u32>> {
        let next = self.ranges.partition_point(|range| range.end <= start);
        let range = self.ranges.get(next).filter(|range| range.start <= start)?;
        let end = start.checked_add(length)?.min(range.end);
        let relative = |address: u64| u32::try_from(address - self.base).ok();
        (start < end).then_some(relative(start)?..relative(end)?)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]

    use super::*;

    fn code(base: u64, ranges: &[Range<u64>]) -> Result<Code, UnwindError> {
        Code::new(&Sections { base, code: ranges.to_vec(), ..Sections::default() })
    }

    #[test]
    fn functions_are_clamped_to_code() {
        let code = code(0x1000, &[0x3000..0x3800, 0x2000..0x3000, 0x2000..0x2000, 0x5000..0x6000]).unwrap();
        assert_eq!(code.clamp(0x2000, 0x10), Some(0x1000..0x1010));
        assert_eq!(code.clamp(0x2ff0, 0x20), Some(0x1ff0..0x2000));
        assert_eq!(code.clamp(0x37f0, 1 << 60), Some(0x27f0..0x2800));
        assert_eq!(code.clamp(0x37f0, u64::MAX), None);
        assert_eq!(code.clamp(0x3800, 1), None);
        assert_eq!(code.clamp(0x1fff, 0x10), None);
        assert_eq!(code.clamp(0, 0x10), None);
        assert_eq!(code.clamp(u64::MAX, u64::MAX), None);
        assert_eq!(code.clamp(0x5000, 0), None);
        assert_eq!(code.clamp(0x5fff, 1), Some(0x4fff..0x5000));
    }

    #[test]
    fn code_out_of_range() {
        assert!(matches!(code(0x1000, &[0xfff..0x2000]), Err(UnwindError::Malformed(_))));
        assert!(code(0x1000, &[0x2000..0x1000 + u64::from(u32::MAX)]).is_ok());
        assert!(matches!(code(0x1000, &[0x2000..0x1001 + u64::from(u32::MAX)]), Err(UnwindError::TooFar)));
    }
}
