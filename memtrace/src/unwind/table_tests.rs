#![allow(clippy::unwrap_used, clippy::expect_used)]

use memtrace_common::unwind::{BLOCK, RbpRule, RbxRule};

use super::*;
use crate::unwind::{
    Section,
    fixture::{Fixture, Frames, Random, check_invariants, mapped, rule, table, vdso},
};

/// The row in force by looking at all rows from the start.
fn scan(table: &Table, pc: u64) -> Option<Row> {
    table.rows.iter().map(|row| Row::unpack(*row).unwrap()).take_while(|row| u64::from(row.pc) <= pc).last()
}

fn check_lookup(table: &Table, pc: u64) {
    let (found, scanned) = (table.lookup(pc), scan(table, pc));
    // After the index there is nothing, and the last row says so too.
    if pc >> BLOCK_SHIFT >= table.index.len().saturating_sub(1) as u64 {
        assert_eq!(found, None);
        assert!(scanned.is_none_or(|row| row.cfa == CfaRule::NoInfo));
    } else {
        assert_eq!(found, scanned, "{pc:x}");
    }
}

/// A table of rows at these pcs with two rules in turn, ended by a gap.
fn table_of(pcs: &[u32]) -> Table {
    let mut rows: Vec<u64> = Vec::new();
    for (number, pc) in pcs.iter().enumerate() {
        let row = Row {
            pc: *pc,
            cfa: CfaRule::Rsp,
            cfa_offset: 1 + number as i32 % 2,
            rbp: RbpRule::Same,
            rbp_offset: 0,
            rbx: RbxRule::SAME,
        };
        rows.push(row.pack());
    }
    if let Some(last) = pcs.last() {
        rows.push(bare(last + 1, CfaRule::NoInfo).pack());
    }
    Table { index: index(&rows), rows, ..Table::default() }
}

#[test]
fn an_empty_table() {
    let table = table_of(&[]);
    assert_eq!((table.rows().len(), table.index().len(), table.bytes()), (0, 0, 0));
    for pc in [0, 1, 255, 256, u64::MAX] {
        assert_eq!(table.lookup(pc), None);
    }
    assert_eq!(Table::build(&Sections::default()).unwrap(), table);
    assert_eq!(table.summary(), Summary::default());
}

#[test]
fn search_steps_suffice_for_the_densest_block() {
    let all: Vec<u32> = (0..3 * BLOCK as u32).collect();
    for pcs in [&all[..], &all[1..], &all[100..], &all[256..], &all[..256], &all[..257], &all[..1]] {
        let table = table_of(pcs);
        check_invariants(&table);
        for pc in 0..5 * BLOCK {
            check_lookup(&table, pc);
        }
    }
}

#[test]
fn lookup_equals_a_scan_on_random_tables() {
    let mut random = Random(7);
    for _ in 0..300 {
        // From a row a byte to a row in some thousand bytes.
        let spread = 1 << random.below(14);
        let mut pc = random.below(2000) as u32;
        let mut pcs = Vec::new();
        for _ in 0..random.below(400) {
            pcs.push(pc);
            pc += 1 + random.below(spread) as u32;
        }
        let table = table_of(&pcs);
        check_invariants(&table);
        for _ in 0..200 {
            check_lookup(&table, random.below(pc as usize + 600) as u64);
        }
        for pc in pcs.iter().flat_map(|pc| [pc.saturating_sub(1), *pc, pc + 1]) {
            check_lookup(&table, pc.into());
        }
    }
}

#[test]
fn lookup_equals_a_scan_on_real_tables() {
    let mut random = Random(8);
    let tables = [table(&mapped("libc.so")), table(&mapped("ld-linux")), Table::read(&vdso()[..]).unwrap()];
    for table in tables {
        check_invariants(&table);
        let rows: Vec<Row> = table.rows().iter().map(|row| Row::unpack(*row).unwrap()).collect();
        for (number, row) in rows.iter().enumerate() {
            let pc = u64::from(row.pc);
            assert_eq!(table.lookup(pc), Some(*row));
            assert_eq!(table.lookup(pc - 1), number.checked_sub(1).map(|before| rows[before]));
        }
        for _ in 0..300 {
            check_lookup(&table, random.below(rows.last().unwrap().pc as usize + 1000) as u64);
        }
        check_lookup(&table, u64::from(u32::MAX));
        check_lookup(&table, u64::MAX);
    }
}

/// The pcs and CFA rules of a module's rows, with the offset in bytes.
fn rules(sections: &Sections) -> Vec<(u32, CfaRule, i32)> {
    let table = Table::build(sections).unwrap();
    check_invariants(&table);
    table.rows().iter().map(|row| Row::unpack(*row).unwrap()).map(|row| (row.pc, row.cfa, row.cfa_offset * 8)).collect()
}

/// `DW_CFA_def_cfa_offset`.
fn offset(bytes: u8) -> [u8; 2] {
    [0x0e, bytes]
}

const fn advance(bytes: u8) -> u8 {
    0x40 | bytes
}

#[test]
fn functions_side_by_side_and_apart() {
    let mut frames = Frames::new(true);
    let cie = frames.usual_cie();
    let body = [advance(4), 0x0e, 16, advance(4), 0x0e, 8];
    // Not in the order of addresses.
    frames.function(cie, 0x1040, 0x10, &body);
    frames.function(cie, 0x1000, 0x10, &body);
    frames.function(cie, 0x1010, 0x10, &offset(24));
    frames.function(cie, 0x1020, 0x10, &offset(24));
    let expected = [
        (0x1000, CfaRule::Rsp, 8),
        (0x1004, CfaRule::Rsp, 16),
        (0x1008, CfaRule::Rsp, 8),
        (0x1010, CfaRule::Rsp, 24),
        (0x1030, CfaRule::NoInfo, 0),
        (0x1040, CfaRule::Rsp, 8),
        (0x1044, CfaRule::Rsp, 16),
        (0x1048, CfaRule::Rsp, 8),
        (0x1050, CfaRule::NoInfo, 0),
    ];
    assert_eq!(rules(&frames.clone().sections()), expected);
    // Relative to the base.
    let table = Table::build(&Sections { base: 0x800, ..frames.sections() }).unwrap();
    assert_eq!((table.base(), table.lookup(0x7ff), table.lookup(0x800).unwrap().pc), (0x800, None, 0x800));
}

#[test]
fn overlapping_functions() {
    let mut frames = Frames::new(true);
    let cie = frames.usual_cie();
    frames.function(cie, 0x1000, 0x100, &offset(16));
    // Inside of the first, which does not go on after it.
    frames.function(cie, 0x1040, 0x10, &offset(24));
    // The same start: of these the first counts, and its end.
    frames.function(cie, 0x1080, 0x08, &offset(32));
    frames.function(cie, 0x1080, 0x40, &offset(40));
    // Over the end of the first.
    frames.function(cie, 0x10f0, 0x20, &offset(48));
    let expected = [
        (0x1000, CfaRule::Rsp, 16),
        (0x1040, CfaRule::Rsp, 24),
        (0x1050, CfaRule::NoInfo, 0),
        (0x1080, CfaRule::Rsp, 32),
        (0x1088, CfaRule::NoInfo, 0),
        (0x10f0, CfaRule::Rsp, 48),
        (0x1110, CfaRule::NoInfo, 0),
    ];
    let sections = frames.sections();
    assert_eq!(rules(&sections), expected);
    assert_eq!(Table::build(&sections).unwrap().skipped(), Skipped { overlapping: 1, ..Skipped::default() });
}

#[test]
fn debug_frame_fills_what_eh_frame_leaves() {
    let mut frames = Frames::new(true);
    let cie = frames.usual_cie();
    frames.function(cie, 0x1000, 0x10, &offset(16));
    frames.function(cie, 0x1040, 0x10, &offset(16));
    let mut debug = Frames::new(false);
    let cie = debug.usual_cie();
    debug.function(cie, 0, 0x2000, &offset(64));
    debug.function(cie, 0x1000, 0x10, &offset(24));
    debug.function(cie, 0x1038, 0x10, &offset(24));
    debug.function(cie, 0x104f, 0x10, &offset(24));
    debug.function(cie, 0x1010, 0x10, &offset(32));
    debug.function(cie, 0x1050, 0x10, &offset(32));
    let sections = Sections { debug_frame: debug.clone().sections().debug_frame, ..frames.sections() };
    let expected = [
        (0x1000, CfaRule::Rsp, 16),
        (0x1010, CfaRule::Rsp, 32),
        (0x1020, CfaRule::NoInfo, 0),
        (0x1040, CfaRule::Rsp, 16),
        (0x1050, CfaRule::Rsp, 32),
        (0x1060, CfaRule::NoInfo, 0),
    ];
    assert_eq!(rules(&sections), expected);
    let skipped = Skipped { outside: 1, overlapping: 3, ..Skipped::default() };
    assert_eq!(Table::build(&sections).unwrap().skipped(), skipped);
    // Alone, it is all there is.
    assert_eq!(rules(&debug.sections()).first(), Some(&(0x1000, CfaRule::Rsp, 24)));
}

#[test]
fn linkage_tables_without_functions() {
    let entry = *b"\xff\x25\x52\x22\0\0\x68\0\0\0\0\xe9\xe0\xff\xff\xff";
    let table = |address, count| Section { address, data: [&entry[..]].repeat(count).concat() };
    let mut frames = Frames::new(true);
    let cie = frames.usual_cie();
    frames.function(cie, 0x1018, 0x10, &offset(16));
    // Entries overlapped by the function are left to it, those outside of the code are left out.
    let linkage_tables = vec![table(0x1000, 4), table(0x2008, 4), table(0x8fe0, 4), table(u64::MAX - 15, 4)];
    let expected = [
        (0x1000, CfaRule::Plt, 88),
        (0x1010, CfaRule::NoInfo, 0),
        (0x1018, CfaRule::Rsp, 16),
        (0x1028, CfaRule::NoInfo, 0),
        (0x1030, CfaRule::Plt, 88),
        (0x1040, CfaRule::NoInfo, 0),
        (0x8fe0, CfaRule::Plt, 88),
        (0x9000, CfaRule::NoInfo, 0),
    ];
    assert_eq!(rules(&Sections { linkage_tables, ..frames.sections() }), expected);
}

#[test]
fn a_summary_of_rows() {
    let mut frames = Frames::new(true);
    let cie = frames.usual_cie();
    frames.function(cie, 0x1000, 0x10, &[advance(4), 0x0e, 16, advance(2), 0x0c, 10, 0, advance(2), 0x0e, 8]);
    frames.function(cie, 0x1020, 0x10, &[0x0e, 12]);
    let table = Table::build(&frames.sections()).unwrap();
    let summary = table.summary();
    assert_eq!(summary.usable, Share { rows: 2, bytes: 6 });
    assert_eq!(summary.gaps, Share { rows: 2, bytes: 0x10 });
    let unsupported =
        vec![(Reason::Register, Share { rows: 1, bytes: 10 }), (Reason::Offset, Share { rows: 1, bytes: 0x10 })];
    assert_eq!(summary.unsupported, unsupported);
    assert_eq!(table.bytes(), 6 * 8 + (0x11 + 1) * 4);
    assert_eq!(table.lookup(0x1006).map(rule), Some((CfaRule::Unsupported, 0, RbpRule::Same, 0)));
}

#[test]
fn a_call_that_does_not_return_ends_a_function() {
    // The return address of the call is the next function's first: only its predecessor belongs to the caller.
    let fixture = Fixture::assemble(
        "f: .cfi_startproc\nsub $24, %rsp\n.cfi_def_cfa_offset 32\ncall g\n.cfi_endproc\n\
         g: .cfi_startproc\nud2\n.cfi_endproc\nh: nop",
    );
    let (table, symbols) = (fixture.table(), fixture.symbols());
    let at = |address: u64| table.lookup(address - table.base()).map(rule);
    assert_eq!(at(symbols["g"] - 1), Some((CfaRule::Rsp, 4, RbpRule::Same, 0)));
    assert_eq!(at(symbols["g"]), Some((CfaRule::Rsp, 1, RbpRule::Same, 0)));
    assert_eq!(at(symbols["h"]), Some((CfaRule::NoInfo, 0, RbpRule::Same, 0)));
}
