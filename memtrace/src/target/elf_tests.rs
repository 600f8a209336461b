#![allow(clippy::unwrap_used)]

use std::{io::Write as _, time::Instant};

use super::*;

/// Everything that is read of a file.
fn read_all(file: &File) -> Result<usize, ModuleProblem> {
    let source = Source::new(file);
    let headers = source.headers()?;
    let functions = match source.dynamic()? {
        Some(dynamic) => dynamic.symbols.functions().count(),
        None => 0,
    };
    let slots = match source.dynamic()? {
        Some(dynamic) => source.function_slots(dynamic.symbols)?.len(),
        None => 0,
    };
    Ok(headers.segments.len() + functions + slots)
}

fn file_of(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// A small shared library of this machine.
fn small_library() -> Vec<u8> {
    let workshop = crate::target::test_program::Workshop::new();
    let flags = ["-shared", "-fPIC", "-nostdlib", "-Wl,-soname,libsmall.so.1", "-Wl,--build-id=0x0123456789"];
    let script = workshop.0.path().join("map");
    std::fs::write(&script, "SMALL_1 { global: malloc; free; local: *; };").unwrap();
    let script = format!("-Wl,--version-script={}", script.display());
    let source = "void *malloc(unsigned long n) { return 0; } void free(void *p) { } void hidden(void) { }";
    let library = workshop.compile("libsmall.so", source, &[&flags[..], &[&script]].concat());
    std::fs::read(library).unwrap()
}

#[test]
fn what_a_library_says() {
    let file = file_of(&small_library());
    let source = Source::new(&file);
    let headers = source.headers().unwrap();
    assert!(!headers.interpreter);
    assert_eq!(headers.build_id.as_deref(), Some(&[0x01, 0x23, 0x45, 0x67, 0x89][..]));
    assert!(headers.segments.iter().any(|segment| segment.executable));
    let dynamic = source.dynamic().unwrap().unwrap();
    assert_eq!(dynamic.soname, Some(&b"libsmall.so.1"[..]));
    assert!(!dynamic.symbolic && dynamic.needed.is_empty());
    assert!(dynamic.versions.contains(&&b"SMALL_1"[..]));
    let mut names: Vec<_> = dynamic.symbols.functions().map(|symbol| symbol.name).collect();
    names.sort_unstable();
    assert_eq!(names, [&b"free"[..], b"malloc"]);
    let malloc = dynamic.symbols.function("malloc").unwrap();
    assert!(malloc.size > 0 && !malloc.indirect);
    let code = headers.segments.iter().find(|segment| segment.executable).unwrap();
    let offset = code.file_offset(malloc.address).unwrap();
    assert_eq!(code.address_of(offset), Some(malloc.address));
    assert!(dynamic.symbols.function("hidden").is_none());
}

#[test]
fn this_program_has_an_interpreter() {
    let file = File::open("/proc/self/exe").unwrap();
    let headers = Source::new(&file).headers().unwrap();
    assert!(headers.interpreter);
    // malloc is only imported: that is no definition.
    assert!(Source::new(&file).dynamic().unwrap().unwrap().symbols.function("malloc").is_none());
}

#[test]
fn truncated_files_are_errors() {
    let bytes = small_library();
    let whole = read_all(&file_of(&bytes)).unwrap();
    assert!(whole > 0);
    for length in 0..bytes.len() {
        // The section headers are at the very end, so no cut leaves everything readable.
        assert!(read_all(&file_of(&bytes[..length])).is_err(), "{length}");
    }
    assert!(matches!(read_all(&file_of(b"")), Err(ModuleProblem::NotElf)));
    assert!(matches!(read_all(&file_of(b"\x7fELF\x02\x01")), Err(ModuleProblem::Malformed(_))));
    assert!(matches!(read_all(&file_of(b"\x7fELF\x01\x01")), Err(ModuleProblem::OtherMachine)));
    assert!(matches!(read_all(&file_of(b"#!/bin/sh\n")), Err(ModuleProblem::NotElf)));
}

#[test]
fn a_file_truncated_while_it_is_open() {
    let bytes = small_library();
    let file = file_of(&bytes);
    let source = Source::new(&file);
    source.headers().unwrap();
    file.set_len(100).unwrap();
    assert!(source.dynamic().is_err());
}

#[test]
fn flipped_bits_in_every_structure() {
    let mut bytes = small_library();
    let started = Instant::now();
    // All of it: headers, notes, dynamic section, symbols, strings, version definitions, section headers.
    for index in 0..bytes.len() {
        if bytes[index] == 0 && index % 7 != 0 {
            continue;
        }
        for value in [bytes[index] ^ 1, bytes[index] ^ 0x80, 0xff, 0] {
            let kept = std::mem::replace(&mut bytes[index], value);
            let _ = read_all(&file_of(&bytes));
            bytes[index] = kept;
        }
    }
    // A hostile length costs no more than reading that length.
    assert!(started.elapsed().as_secs() < 120);
}

/// Overwrites `count` bytes of a copy.
fn patched(bytes: &[u8], offset: usize, with: &[u8]) -> File {
    let mut copy = bytes.to_vec();
    copy[offset..offset + with.len()].copy_from_slice(with);
    file_of(&copy)
}

#[test]
fn hostile_sizes_in_a_sparse_file_of_a_tebibyte() {
    let bytes = small_library();
    let word = |offset: usize| u64::from_le_bytes(bytes[offset..offset + 8].try_into().unwrap()) as usize;
    let half = |offset: usize| usize::from(u16::from_le_bytes([bytes[offset], bytes[offset + 1]]));
    let (programs, sections) = (word(32), word(40));
    let mut hostile = Vec::new();
    // e_phnum = PN_XNUM, e_shnum = 0 with a huge sh_size of section 0.
    hostile.push(patched(&bytes, 56, &[0xff, 0xff]));
    hostile.push({
        let file = patched(&bytes, 60, &[0, 0]);
        file.write_all_at(&u64::MAX.to_le_bytes(), sections as u64 + 32).unwrap();
        file
    });
    for index in 0..half(56) {
        for size in [1u64 << 21, 1 << 30, 1 << 39, u64::MAX] {
            // p_filesz
            hostile.push(patched(&bytes, programs + index * 56 + 32, &size.to_le_bytes()));
        }
    }
    for index in 0..half(60) {
        for size in [1u64 << 27, 1 << 30, 1 << 39, u64::MAX] {
            // sh_size
            hostile.push(patched(&bytes, sections + index * 64 + 32, &size.to_le_bytes()));
        }
        // sh_link
        hostile.push(patched(&bytes, sections + index * 64 + 40, &[0xff; 4]));
    }
    for file in hostile {
        file.set_len(1 << 40).unwrap();
        let source = Source::new(&file);
        let _ = source.headers();
        let _ = source.dynamic();
        let spent = MAX_TOTAL - source.budget.get();
        assert!(spent <= MAX_TOTAL);
    }
}

#[test]
fn strings_that_overlap_cost_little() {
    // Symbols whose names are all of one endless string.
    let symbols = vec![
        elf::Sym64::<LittleEndian> {
            st_name: object::U32::new(LE, 0),
            st_info: elf::STT_FUNC,
            st_other: 0,
            st_shndx: object::U16::new(LE, 1),
            st_value: object::U64::new(LE, 0),
            st_size: object::U64::new(LE, 0),
        };
        1_000_000
    ];
    let strings = vec![b'a'; 1 << 26];
    let dynamic = Symbols { symbols: &symbols, strings: &strings };
    assert_eq!(dynamic.functions().count(), 0);
    assert_eq!(dynamic.string(u64::MAX), None);
}

#[test]
fn segments_translate_without_overflow() {
    let segment = Segment { offset: u64::MAX - 1, address: 0x1000, size: 16, executable: true };
    assert_eq!(segment.file_offset(0x1001), Some(u64::MAX));
    assert_eq!(segment.file_offset(0x1002), None);
    assert_eq!(segment.file_offset(0xfff), None);
    assert_eq!(segment.file_offset(0x1010), None);
    let segment = Segment { offset: 0, address: u64::MAX - 1, size: 16, executable: true };
    assert_eq!(segment.address_of(1), Some(u64::MAX));
    assert_eq!(segment.address_of(2), None);
}
