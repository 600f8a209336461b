//! Rows for procedure linkage tables without call frame information.
//!
//! GNU ld and gold describe the tables that they make; LLVM's lld does not. Its entries are recognized by their bytes
//! (which are those of the AMD64 ABI, 5.2, and of its extension for indirect branch tracking, 13.2).

use memtrace_common::unwind::{CfaRule, Row};

use super::rule::bare;

/// Bytes of an entry.
pub(super) const ENTRY: usize = 16;

/// `endbr64`.
const ENDBR: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// The rows of an entry that begins at `pc`, and where the second of them begins; `None` for other code.
pub(super) fn rows(entry: &[u8; ENTRY], pc: u32) -> Option<(Row, Option<Row>)> {
    let row = |offset, cfa, cfa_offset| Row { cfa_offset, ..bare(pc + offset, cfa) };
    match entry {
        // The first entry: push the module; jmp *resolver. The entry that jumped here has pushed a word before.
        [0xff, 0x35, _, _, _, _, 0xff, 0x25, ..] => Some((row(0, CfaRule::Rsp, 2), Some(row(6, CfaRule::Rsp, 3)))),
        // jmp *slot; push number; jmp first.
        [0xff, 0x25, _, _, _, _, 0x68, _, _, _, _, 0xe9, ..] => Some((row(0, CfaRule::Plt, 11), None)),
        // endbr64; push number; jmp first.
        [a, b, c, d, 0x68, _, _, _, _, 0xe9, ..] if [*a, *b, *c, *d] == ENDBR => Some((row(0, CfaRule::Plt, 9), None)),
        // endbr64; jmp *slot.
        [a, b, c, d, 0xff, 0x25, ..] if [*a, *b, *c, *d] == ENDBR => Some((row(0, CfaRule::Rsp, 1), None)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offsets(entry: &[u8; ENTRY]) -> Option<[(u32, CfaRule, i32); 2]> {
        let (one, two) = rows(entry, 0x40)?;
        let two = two.unwrap_or(one);
        Some([one, two].map(|row| (row.pc, row.cfa, row.cfa_offset)))
    }

    #[test]
    fn entries_as_lld_makes_them() {
        let first = b"\xff\x35\x52\x22\0\0\xff\x25\x54\x22\0\0\x0f\x1f\x40\0";
        assert_eq!(offsets(first), Some([(0x40, CfaRule::Rsp, 2), (0x46, CfaRule::Rsp, 3)]));
        let entry = b"\xff\x25\x52\x22\0\0\x68\0\0\0\0\xe9\xe0\xff\xff\xff";
        assert_eq!(offsets(entry), Some([(0x40, CfaRule::Plt, 11); 2]));
        let tracked = b"\xf3\x0f\x1e\xfa\x68\0\0\0\0\xe9\xe2\xff\xff\xff\x66\x90";
        assert_eq!(offsets(tracked), Some([(0x40, CfaRule::Plt, 9); 2]));
        let second = b"\xf3\x0f\x1e\xfa\xff\x25\x4e\x22\0\0\x66\x0f\x1f\x44\0\0";
        assert_eq!(offsets(second), Some([(0x40, CfaRule::Rsp, 1); 2]));
        assert_eq!(offsets(&[0x90; 16]), None);
        assert_eq!(offsets(b"\xf3\x0f\x1e\xfb\x68\0\0\0\0\xe9\xe2\xff\xff\xff\x66\x90"), None);
    }
}
