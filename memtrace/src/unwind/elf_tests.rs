#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::Write as _;

use memtrace_common::unwind::{CfaRule, RbpRule};

use super::*;
use crate::unwind::{
    Table,
    fixture::{Fixture, Random, check_invariants, mapped, rule_at, vdso},
};

const SOURCE: &str =
    "void g(void *); int f(int n) { char b[n]; g(b); return b[0]; } int h(int n) { return f(n) + f(n + 1); }";
const FLAGS: [&str; 5] = ["-shared", "-fPIC", "-O2", "-fomit-frame-pointer", "-nostdlib"];

fn small(flags: &[&str]) -> Fixture {
    Fixture::compile("small.c", SOURCE, &[&FLAGS[..], flags].concat())
}

fn read(bytes: &[u8]) -> Result<Table, UnwindError> {
    let table = Table::read(bytes)?;
    check_invariants(&table);
    Ok(table)
}

/// The same file without section headers.
fn without_section_headers(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    // e_shoff; e_shnum, e_shstrndx.
    bytes[40..48].fill(0);
    bytes[60..64].fill(0);
    bytes
}

#[test]
fn what_is_read_of_a_library() {
    let fixture = small(&[]);
    let sections = Sections::read(&File::open(&fixture.path).unwrap()).unwrap();
    assert_eq!(sections.base, 0);
    let symbols = fixture.symbols();
    assert!(sections.code.iter().any(|range| range.contains(&symbols["f"])));
    assert!(!sections.code.iter().any(|range| range.contains(&0)));
    assert!(sections.eh_frame.as_ref().is_some_and(|section| section.address > 0 && section.data.len() > 50));
    assert!(sections.eh_frame_hdr.is_none() && sections.debug_frame.is_none() && !sections.debug_frame_unread);
    let table = Table::build(&sections).unwrap();
    assert_eq!(rule_at(&table, symbols["f"]), (CfaRule::Rsp, 1, RbpRule::Same, 0));
    assert_eq!(read(&fixture.bytes()).unwrap(), table);
}

#[test]
fn programs_with_another_base() {
    let fixture = Fixture::compile("base.c", "int main(void) { return 0; }", &["-no-pie"]);
    let table = fixture.table();
    assert_eq!(table.base(), 0x40_0000);
    let symbols = fixture.symbols();
    assert_eq!(rule_at(&table, symbols["_start"]).0, CfaRule::End);
    assert_eq!(rule_at(&table, symbols["main"]), (CfaRule::Rsp, 1, RbpRule::Same, 0));
}

#[test]
fn without_section_headers_the_search_table_is_followed() {
    for path in [mapped("libc.so"), mapped("ld-linux"), mapped("libgcc_s.so")] {
        let whole = std::fs::read(path).unwrap();
        let stripped = without_section_headers(&whole);
        let sections = Sections::read(&stripped[..]).unwrap();
        assert!(sections.eh_frame_hdr.is_some());
        assert_eq!(Table::build(&sections).unwrap().rows(), read(&whole).unwrap().rows());
        // Without the search table, entries are followed to the terminator.
        let stripped_header = sections.eh_frame_hdr.clone().unwrap().data;
        let mut no_table = sections;
        no_table.eh_frame_hdr.as_mut().unwrap().data[2..4].fill(0xff);
        let table = Table::build(&no_table).unwrap();
        assert_eq!(table.rows(), read(&whole).unwrap().rows());
        assert_eq!(table.skipped().damaged, 0);
        // A search table that is cut off loses functions, which is counted.
        no_table.eh_frame_hdr.as_mut().unwrap().data[2..4].copy_from_slice(&stripped_header[2..4]);
        no_table.eh_frame_hdr.as_mut().unwrap().data.truncate(100);
        assert_eq!(Table::build(&no_table).unwrap().skipped().damaged, 1);
    }
    // Headers that have been cut off.
    let whole = small(&[]).bytes();
    let start = u64::from_le_bytes(whole[40..48].try_into().unwrap()) as usize;
    assert_eq!(read(&whole[..start + 100]).unwrap().rows(), read(&whole).unwrap().rows());
}

#[test]
fn only_debug_frame() {
    let eh = small(&["-g"]);
    let flags = ["-g", "-fno-asynchronous-unwind-tables", "-fno-exceptions"];
    for compression in [&[][..], &["-Wl,--compress-debug-sections=zlib"]] {
        let debug = small(&[&flags[..], compression].concat());
        let sections = Sections::read(&debug.bytes()[..]).unwrap();
        assert!(sections.eh_frame.is_none_or(|section| section.data.len() < 8));
        assert!(sections.debug_frame.is_some());
        // The compiler says the same in both forms. Addresses may differ.
        let rules = |fixture: &Fixture| -> Vec<_> {
            let (table, start) = (fixture.table(), fixture.symbols()["f"]);
            (start..start + 0x200).map(|address| rule_at(&table, address)).collect()
        };
        assert!(rules(&debug).iter().any(|rule| rule.0 == CfaRule::Rbp));
        assert_eq!(rules(&debug), rules(&eh));
    }
    // A program whose start code has .eh_frame, while its own has not.
    let program = Fixture::compile("program.c", "int main(void) { return 0; }", &flags);
    let (table, symbols) = (program.table(), program.symbols());
    assert_eq!(rule_at(&table, symbols["_start"]).0, CfaRule::End);
    assert_eq!(rule_at(&table, symbols["main"]).0, CfaRule::Rsp);
}

#[test]
fn a_debug_frame_that_cannot_be_read_does_not_spoil_the_rest() {
    let fixture = small(&["-g", "-fno-asynchronous-unwind-tables", "-Wl,--compress-debug-sections=zlib"]);
    let bytes = fixture.bytes();
    let file = object::File::parse(&*bytes).unwrap();
    let section = object::Object::section_by_name(&file, ".debug_frame").unwrap();
    let (start, size) = object::ObjectSection::file_range(&section).unwrap();
    // The method; the size; each byte of the stream.
    for (offset, value) in
        [(0, 2u64), (8, 1 << 40), (8, 1 << 20), (8, 3)].into_iter().chain((24..size).map(|at| (at, 0)))
    {
        let mut changed = bytes.clone();
        let at = (start + offset) as usize;
        if offset < 24 {
            changed[at..][..8].copy_from_slice(&value.to_le_bytes());
        } else {
            changed[at] ^= 0x55;
        }
        let sections = Sections::read(&changed[..]).unwrap();
        let table = Table::build(&sections).unwrap();
        check_invariants(&table);
        // A size too small is taken for the truth.
        assert!(offset >= 24 || value == 3 || sections.debug_frame_unread);
        assert_eq!(table.skipped().debug_frame, sections.debug_frame_unread);
    }
}

#[test]
fn the_vdso() {
    let table = read(&vdso()).unwrap();
    assert!(table.rows().len() > 5);
    assert!(table.summary().unsupported.is_empty());
}

#[test]
fn linkage_tables() {
    let source = "void one(void); void two(void); int main(void) { one(); two(); return 0; }";
    let library = "-Wl,--unresolved-symbols=ignore-all";
    let address = |fixture: &Fixture, name: &str| {
        let bytes = fixture.bytes();
        let file = object::File::parse(&*bytes).unwrap();
        object::ObjectSection::address(&object::Object::section_by_name(&file, name).unwrap())
    };
    let plain = (CfaRule::Rsp, 1, RbpRule::Same, 0);
    let pushed = |words| (CfaRule::Rsp, words, RbpRule::Same, 0);
    for (flags, byte) in
        [(&["-fcf-protection=none", "-Wl,-z,lazy"][..], 11), (&["-fcf-protection=full", "-Wl,-z,lazy,-z,ibtplt"], 9)]
    {
        let fixture = Fixture::compile("lazy.c", source, &[flags, &[library]].concat());
        let (table, plt) = (fixture.table(), address(&fixture, ".plt"));
        assert_eq!((rule_at(&table, plt), rule_at(&table, plt + 5)), (pushed(2), pushed(2)));
        assert_eq!((rule_at(&table, plt + 6), rule_at(&table, plt + 15)), (pushed(3), pushed(3)));
        for entry in [16, 31, 32, 47] {
            assert_eq!(rule_at(&table, plt + entry), (CfaRule::Plt, byte, RbpRule::Same, 0));
        }
        if byte == 9 {
            assert_eq!(rule_at(&table, address(&fixture, ".plt.sec") + 10), plain);
        }
    }
    let flags = ["-fno-plt", "-Wl,-z,now", "-fcf-protection=none", library];
    let fixture = Fixture::compile("now.c", source, &flags);
    assert_eq!(rule_at(&fixture.table(), address(&fixture, ".plt.got")), plain);
}

#[test]
fn files_of_other_kinds() {
    let bytes = small(&[]).bytes();
    let patched = |at: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        read(&bytes)
    };
    assert!(matches!(read(b""), Err(UnwindError::NotElf)));
    assert!(matches!(read(b"#!/bin/sh\n"), Err(UnwindError::NotElf)));
    assert!(matches!(read(b"\x7fELF\x02\x01"), Err(UnwindError::Malformed(_))));
    // 32 bits, big endian, an object file, AArch64; no program headers.
    assert!(matches!(patched(4, 1), Err(UnwindError::OtherMachine)));
    assert!(matches!(patched(5, 2), Err(UnwindError::OtherMachine)));
    assert!(matches!(patched(16, 1), Err(UnwindError::OtherMachine)));
    assert!(matches!(patched(18, 183), Err(UnwindError::OtherMachine)));
    assert!(matches!(patched(56, 0), Err(UnwindError::Malformed(_))));
    let missing = File::open("/").unwrap();
    assert!(matches!(Table::read(&missing), Err(UnwindError::Io(_))));
}

#[test]
fn truncated_files() {
    let bytes = small(&[]).bytes();
    for length in 0..bytes.len() {
        let _ = read(&bytes[..length]);
    }
}

#[test]
fn a_file_truncated_while_it_is_open() {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&small(&[]).bytes()).unwrap();
    /// A file that shrinks after its headers have been read.
    struct Shrinking(File);
    impl ReadAt for Shrinking {
        fn size(&self) -> io::Result<u64> {
            Ok(1 << 20)
        }
        fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            FileExt::read_exact_at(&self.0, buffer, offset)?;
            self.0.set_len(4096)
        }
    }
    assert!(matches!(Table::read(&Shrinking(file)), Err(UnwindError::Io(_))));
}

#[test]
fn flipped_bits_in_every_header() {
    let mut bytes = small(&["-g", "-fno-asynchronous-unwind-tables"]).bytes();
    let sections = u64::from_le_bytes(bytes[40..48].try_into().unwrap()) as usize;
    // File header and program headers; section names and headers at the end.
    let headers = (0..0x300).chain(sections.saturating_sub(0x200)..bytes.len());
    for index in headers {
        for value in [bytes[index] ^ 1, bytes[index] ^ 0x80, 0xff, 0] {
            let kept = std::mem::replace(&mut bytes[index], value);
            let _ = read(&bytes);
            let _ = read(&without_section_headers(&bytes));
            bytes[index] = kept;
        }
    }
    let mut random = Random(11);
    for _ in 0..2000 {
        let mut changed = bytes.clone();
        for _ in 0..1 << random.below(8) {
            let index = if random.below(2) == 0 {
                random.below(0x300)
            } else {
                sections + random.below(bytes.len() - sections)
            };
            changed[index] = random.next() as u8;
        }
        let _ = read(&changed);
    }
}

#[test]
fn hostile_sizes_in_a_sparse_file() {
    let bytes = small(&[]).bytes();
    let start = u64::from_le_bytes(bytes[40..48].try_into().unwrap()) as usize;
    // Every section is as large as its field can say, in a file in which all of it could be read.
    for size in [u64::MAX, 1 << 40, (64 << 20) + 1, 64 << 20] {
        let mut changed = bytes.clone();
        for header in changed[start..].chunks_exact_mut(64) {
            header[32..40].copy_from_slice(&size.to_le_bytes());
        }
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&changed).unwrap();
        file.set_len(1 << 41).unwrap();
        let _ = Table::read(&file);
        let mut changed = bytes.clone();
        for header in changed[64..][..10 * 56].chunks_exact_mut(56) {
            header[32..48].copy_from_slice(&[size.to_le_bytes(), size.to_le_bytes()].concat());
        }
        file.set_len(0).unwrap();
        FileExt::write_all_at(&file, &without_section_headers(&changed), 0).unwrap();
        file.set_len(1 << 41).unwrap();
        let _ = Table::read(&file);
    }
}
