#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::{Duration, Instant};

use memtrace_common::unwind::CfaRule;

use super::*;
use crate::unwind::{
    Sections, Table,
    fixture::{Fixture, Frames, Random, Rule, check_invariants, mapped, rule_at},
};

fn build(frames: Frames) -> Result<Table, UnwindError> {
    let table = Table::build(&frames.sections())?;
    check_invariants(&table);
    Ok(table)
}

fn cfa_at(table: &Table, address: u64) -> (CfaRule, i32) {
    let rule: Rule = rule_at(table, address);
    (rule.0, rule.1)
}

const DAMAGED: (CfaRule, i32) = (CfaRule::Unsupported, Reason::Damaged as i32);

#[test]
fn rows_before_damage_are_kept() {
    for eh in [true, false] {
        let mut frames = Frames::new(eh);
        let cie = frames.usual_cie();
        // DW_CFA_advance_loc 4, then a number that is none.
        frames.function(cie, 0x1000, 0x10, &[0x0e, 16, 0x44, 0x3f]);
        // A state that was never remembered; def_cfa_offset without its operand.
        frames.function(cie, 0x1020, 0x10, &[0x0b]);
        frames.function(cie, 0x1040, 0x10, &[0x44, 0x0e]);
        // Damage after the last pc does no harm.
        frames.function(cie, 0x1060, 0x10, &[0x0e, 24, 0x50, 0x3f]);
        let table = build(frames).unwrap();
        assert_eq!(cfa_at(&table, 0x1003), (CfaRule::Rsp, 2));
        assert_eq!(cfa_at(&table, 0x1004), DAMAGED);
        assert_eq!(cfa_at(&table, 0x1020), DAMAGED);
        assert_eq!(cfa_at(&table, 0x1040), (CfaRule::Rsp, 1));
        assert_eq!(cfa_at(&table, 0x1044), DAMAGED);
        assert_eq!(cfa_at(&table, 0x106f), (CfaRule::Rsp, 3));
        assert_eq!(table.skipped().damaged, 3);
    }
}

#[test]
fn damaged_entries_do_not_hide_others() {
    let mut frames = Frames::new(true);
    let cie = frames.usual_cie();
    frames.function(cie, 0x1000, 0x10, &[]);
    // An unknown version, then an unknown augmentation.
    let version = frames.usual_cie();
    frames.data[version + 8] = 9;
    frames.function(version, 0x1020, 0x10, &[]);
    let augmentation = frames.usual_cie();
    frames.data[augmentation + 9..][..2].copy_from_slice(b"q\0");
    frames.function(augmentation, 0x1040, 0x10, &[]);
    // A parent that is a function, and one outside of the section.
    let function = frames.function(cie, 0x1060, 0x10, &[]);
    frames.function(function, 0x1080, 0x10, &[]);
    let lost = frames.function(cie, 0x10a0, 0x10, &[]);
    frames.data[lost + 4..][..4].fill(0xff);
    // A terminator in the middle.
    frames.data.extend([0; 4]);
    frames.function(cie, 0x10c0, 0x10, &[]);
    // Too short for anything.
    frames.data.extend([2, 0, 0, 0, 1, 1]);
    frames.function(cie, 0x10e0, 0x10, &[]);
    // Longer than the section.
    frames.data.extend([0xf0, 0xff, 0, 0, 1, 1]);
    let table = build(frames).unwrap();
    for (address, known) in
        [(0x1000, true), (0x1020, false), (0x1040, false), (0x1060, true), (0x1080, false), (0x10a0, false)]
    {
        assert_eq!(cfa_at(&table, address).0 == CfaRule::Rsp, known, "{address:x}");
    }
    assert_eq!(cfa_at(&table, 0x10c0), (CfaRule::Rsp, 1));
    assert_eq!(cfa_at(&table, 0x10e0), (CfaRule::Rsp, 1));
    assert_eq!(table.skipped().damaged, 6);
}

#[test]
fn another_return_address_column_or_address_size() {
    let mut frames = Frames::new(false);
    let cie = frames.usual_cie();
    frames.data[cie + 12] = 15;
    frames.function(cie, 0x1000, 0x10, &[]);
    // Version 4 has an address size: 4 bytes.
    let instructions = [0x0c, 7, 8, 0x90, 1];
    let short = frames.data.len();
    let body = [&[0xff, 0xff, 0xff, 0xff, 4, 0, 4, 0, 1, 0x78, 16][..], &instructions].concat();
    frames.data.extend((body.len() as u32).to_le_bytes());
    frames.data.extend(body);
    frames.function(short, 0x20_0000_1020, 0, &[]);
    let table = build(frames).unwrap();
    assert_eq!(cfa_at(&table, 0x1000), (CfaRule::Unsupported, Reason::ReturnAddress as i32));
    assert_eq!(cfa_at(&table, 0x1020), DAMAGED);
}

#[test]
fn sixty_four_bit_entries() {
    for eh in [true, false] {
        let mut frames = Frames::new(eh);
        let cie = frames.usual_cie();
        let at = frames.data.len();
        // In .eh_frame the CIE pointer stays at 4 bytes.
        let pointer = if eh { (at + 12 - cie).to_le_bytes() } else { cie.to_le_bytes() };
        let pointer = if eh { &pointer[..4] } else { &pointer[..] };
        let body = [pointer, &0x1000u64.to_le_bytes(), &0x10u64.to_le_bytes(), &[0x0e, 16]].concat();
        frames.data.extend([0xff; 4]);
        frames.data.extend((body.len() as u64).to_le_bytes());
        frames.data.extend(body);
        frames.function(cie, 0x1010, 0x10, &[]);
        if eh {
            let table = build(frames).unwrap();
            assert_eq!((cfa_at(&table, 0x1000), cfa_at(&table, 0x1010)), ((CfaRule::Rsp, 2), (CfaRule::Rsp, 1)));
        } else {
            // Its CIE would have to be of the same format (DWARF 5, 7.4).
            assert_eq!(cfa_at(&build(frames).unwrap(), 0x1010), (CfaRule::Rsp, 1));
        }
    }
}

#[test]
fn remembered_states() {
    // Nested 12 deep; each state has an offset of its own.
    let mut instructions = Vec::new();
    for depth in 0..12u8 {
        instructions.extend([0x0a, 0x41, 0x0e, 16 + 8 * depth]);
    }
    instructions.extend([0x41, 0x0b].repeat(12));
    let mut frames = Frames::new(true);
    let cie = frames.usual_cie();
    frames.function(cie, 0x1000, 0x100, &instructions);
    // More than any compiler makes.
    frames.function(cie, 0x1200, 0x100, &[0x0a; 100]);
    let table = build(frames).unwrap();
    for depth in 0..12u64 {
        assert_eq!(cfa_at(&table, 0x1001 + depth), (CfaRule::Rsp, 2 + depth as i32));
        let words = if depth == 11 { 1 } else { 12 - depth as i32 };
        assert_eq!(cfa_at(&table, 0x100d + depth), (CfaRule::Rsp, words));
    }
    assert_eq!(cfa_at(&table, 0x1200), DAMAGED);
}

#[test]
fn functions_that_wrap_around_or_lie_outside() {
    let mut frames = Frames::new(true);
    let cie = frames.usual_cie();
    for (start, length) in [(0x1000, u64::MAX), (u64::MAX, 2), (0, 0x1000), (0x9000, 1), (0x1000, 0)] {
        frames.function(cie, start, length, &[]);
    }
    frames.function(cie, 0x8ff0, 0x20, &[0x02, 0xff, 0x0e, 16]);
    let table = build(frames).unwrap();
    assert_eq!(table.skipped().outside, 5);
    assert_eq!((cfa_at(&table, 0x8fff), cfa_at(&table, 0x9000)), ((CfaRule::Rsp, 1), (CfaRule::NoInfo, 0)));
}

#[test]
fn positions_cannot_go_back_or_overflow() {
    let mut frames = Frames::new(true);
    let cie = frames.usual_cie();
    // DW_CFA_set_loc to before the function; to far behind it; advance_loc4 by 4 GiB again and again.
    frames.function(cie, 0x1000, 0x10, &[&[0x42, 0x01][..], &0xfffu64.to_le_bytes()].concat());
    frames.function(cie, 0x1020, 0x10, &[&[0x0e, 16, 0x01][..], &u64::MAX.to_le_bytes(), &[0x0e, 24]].concat());
    frames.function(cie, 0x1040, 0x10, &[0x04, 0xff, 0xff, 0xff, 0xff, 0x0e, 32].repeat(100));
    let table = build(frames).unwrap();
    assert_eq!((cfa_at(&table, 0x1001), cfa_at(&table, 0x1002)), ((CfaRule::Rsp, 1), DAMAGED));
    assert_eq!(cfa_at(&table, 0x102f), (CfaRule::Rsp, 2));
    assert_eq!(cfa_at(&table, 0x104f), (CfaRule::Rsp, 1));
}

/// As many functions as `count` of one byte each, over and over.
fn many(frames: &mut Frames, cie: usize, count: usize, instructions: &[u8]) {
    for number in 0..count {
        frames.function(cie, 0x1000 + number as u64 % 0x8000, 1, instructions);
    }
}

#[test]
fn too_many_rows() {
    // Two bytes for an address each, 4 for a row: a function of 17 MB.
    let mut frames = Frames::new(true);
    let cie = frames.usual_cie();
    let body = [0x41, 0x0e, 16, 0x41, 0x0e, 8].repeat(MAX_ROWS / 2 + 1);
    frames.function(cie, 0x1000, 1 << 30, &body);
    let sections = Sections { code: std::iter::once(0x1000..0x8000_0000).collect(), ..frames.sections() };
    let started = Instant::now();
    assert!(matches!(Table::build(&sections), Err(UnwindError::TooManyRows { limit: MAX_ROWS })));
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_long_cie_repeated_by_many_functions() {
    let mut frames = Frames::new(true);
    let cie = frames.cie(&[0x0c, 7, 8, 0x90, 1].repeat(50_000));
    many(&mut frames, cie, 20_000, &[]);
    let started = Instant::now();
    assert!(matches!(build(frames), Err(UnwindError::TooComplex)));
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[test]
fn many_cies_that_are_found_bad_only_at_their_ends() {
    let mut frames = Frames::new(true);
    // An augmentation that never ends, in which another CIE begins at each multiple of 4.
    let start = frames.data.len();
    for _ in 0..50_000 {
        frames.data.extend(400_000u32.to_le_bytes());
        frames.data.extend([0, 0, 0, 0, 1, b'z', b'S', b'S']);
    }
    for number in 0..50_000 {
        frames.function(start + number * 12, 0x1000, 1, &[]);
    }
    let started = Instant::now();
    let _ = build(frames);
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[test]
fn the_slowest_instructions_take_seconds_at_most() {
    // Remembering and restoring a state with as many registers as are kept.
    let mut initial = vec![0x0c, 7, 8, 0x90, 1];
    (17..40).for_each(|register| initial.extend([0x05, register, 1]));
    let mut frames = Frames::new(true);
    let cie = frames.cie(&initial);
    let body = [0x0a, 0x0b].repeat(500);
    many(&mut frames, cie, 4000, &body);
    let (size, started) = (frames.data.len(), Instant::now());
    build(frames).unwrap();
    println!("{size} bytes in {:?}", started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[test]
fn flipped_bytes_in_every_place() {
    let fixture = Fixture::compile(
        "small.c",
        "void g(void *); int f(int n) { char b[n]; g(b); return b[0]; } int h(int n) { return f(n) + f(n + 1); }",
        &["-shared", "-fPIC", "-O2", "-fomit-frame-pointer", "-nostdlib"],
    );
    let sections = Sections::read(&fixture.bytes()[..]).unwrap();
    let whole = Table::build(&sections).unwrap();
    assert!(whole.rows().len() > 10);
    let section = sections.eh_frame.clone().unwrap();
    for index in 0..section.data.len() {
        for bit in 0..8 {
            let mut changed = sections.clone();
            changed.eh_frame.as_mut().unwrap().data[index] ^= 1 << bit;
            check_invariants(&Table::build(&changed).unwrap());
        }
        let mut cut = sections.clone();
        cut.eh_frame.as_mut().unwrap().data.truncate(index);
        check_invariants(&Table::build(&cut).unwrap());
        // As .debug_frame it makes no sense at all.
        let debug = Section { address: 0, data: section.data[index..].to_vec() };
        check_invariants(&Table::build(&Sections { eh_frame: None, debug_frame: Some(debug), ..cut }).unwrap());
    }
}

#[test]
fn random_damage_to_large_sections() {
    let mut random = Random(9);
    for library in ["ld-linux", "libc.so"] {
        let sections = Sections::read(&std::fs::File::open(mapped(library)).unwrap()).unwrap();
        for round in 0..60 {
            let mut changed = sections.clone();
            let data = &mut changed.eh_frame.as_mut().unwrap().data;
            for _ in 0..1 << (round % 12) {
                let index = random.below(data.len());
                data[index] = random.next() as u8;
            }
            if round % 5 == 0 {
                data.truncate(random.below(data.len()));
            }
            check_invariants(&Table::build(&changed).unwrap());
        }
    }
}

#[test]
fn noise() {
    let mut random = Random(10);
    for round in 0..500 {
        let data: Vec<u8> = (0..random.below(4000)).map(|_| (random.next() >> (round % 50)) as u8).collect();
        let section = Section { address: random.next(), data };
        let sections = Sections { code: std::iter::once(0..1 << 31).collect(), ..Sections::default() };
        let eh = Sections { eh_frame: Some(section.clone()), ..sections.clone() };
        let header = Some(Section { address: section.address, data: section.data[section.data.len() / 2..].to_vec() });
        let found = Sections { eh_frame_hdr: header, ..eh.clone() };
        let debug = Sections { debug_frame: Some(section), ..sections };
        for sections in [eh, found, debug] {
            check_invariants(&Table::build(&sections).unwrap());
        }
    }
}
