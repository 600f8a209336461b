//! Where what is in an ELF file, and how it can be damaged.

use std::{collections::BTreeSet, ops::Range};

use object::{
    LittleEndian, elf,
    read::elf::{FileHeader as _, ProgramHeader as _, SectionHeader as _},
};

use super::Random;

const LE: LittleEndian = LittleEndian;

/// Offset and size of each field.
type Fields = &'static [(usize, usize)];

const HEADER: Fields = &[
    (4, 1),
    (5, 1),
    (0x10, 2),
    (0x12, 2),
    (0x18, 8),
    (0x20, 8),
    (0x28, 8),
    (0x34, 2),
    (0x36, 2),
    (0x38, 2),
    (0x3a, 2),
    (0x3c, 2),
    (0x3e, 2),
];
const PROGRAM_HEADER: Fields = &[(0, 4), (4, 4), (8, 8), (16, 8), (24, 8), (32, 8), (40, 8), (48, 8)];
const SECTION_HEADER: Fields = &[(0, 4), (4, 4), (8, 8), (16, 8), (24, 8), (32, 8), (40, 4), (44, 4), (48, 8), (56, 8)];
const SYMBOL: Fields = &[(0, 4), (4, 1), (5, 1), (6, 2), (8, 8), (16, 8)];
const DYNAMIC: Fields = &[(0, 8), (8, 8)];

/// A part of a file.
#[derive(Clone, Debug)]
pub struct Structure {
    pub range: Range<usize>,
    /// Fields of one entry, and an entry's size; none where the content has no fixed form.
    fields: Fields,
    entry: usize,
}

/// All parts of a whole file: its headers, each by itself, and the contents of its sections.
pub fn structures(bytes: &[u8]) -> Vec<Structure> {
    let header = elf::FileHeader64::<LittleEndian>::parse(bytes).unwrap();
    let mut found = vec![Structure { range: 0..64, fields: HEADER, entry: 64 }];
    let mut add = |start: u64, size: usize, fields, entry| {
        let start = start as usize;
        found.push(Structure { range: start..start + size, fields, entry });
    };
    let programs = header.program_headers(LE, bytes).unwrap();
    (0..programs.len()).for_each(|number| add(header.e_phoff(LE) + number as u64 * 56, 56, PROGRAM_HEADER, 56));
    let sections = header.section_headers(LE, bytes).unwrap();
    (0..sections.len()).for_each(|number| add(header.e_shoff(LE) + number as u64 * 64, 64, SECTION_HEADER, 64));
    for segment in programs.iter().filter(|segment| segment.p_type(LE) == elf::PT_NOTE) {
        add(segment.p_offset(LE), segment.p_filesz(LE) as usize, &[], 1);
    }
    for section in sections.iter().filter(|section| section.sh_type(LE) != elf::SHT_NOBITS && section.sh_size(LE) > 0) {
        let (fields, entry): (Fields, usize) = match section.sh_type(LE) {
            elf::SHT_SYMTAB | elf::SHT_DYNSYM => (SYMBOL, 24),
            elf::SHT_DYNAMIC => (DYNAMIC, 16),
            _ => (&[], 1),
        };
        add(section.sh_offset(LE), section.sh_size(LE) as usize, fields, entry);
    }
    found.retain(|structure| structure.range.end <= bytes.len() && !structure.range.is_empty());
    found
}

/// Where a whole file is to be cut off: at every boundary between its parts, and a byte before and after.
pub fn cuts(whole: &[u8], structures: &[Structure]) -> BTreeSet<usize> {
    let boundaries = structures.iter().flat_map(|structure| [structure.range.start, structure.range.end]);
    boundaries.flat_map(|end| [end.saturating_sub(1), end, end + 1]).filter(|end| *end < whole.len()).collect()
}

/// A damaged copy of a whole file whose parts are `structures`: up to four things are wrong with it.
pub fn mutant(whole: &[u8], structures: &[Structure], seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = whole.to_vec();
    for _ in 0..=random.below(4) {
        let structure = random.of(structures);
        match random.below(8) {
            0..=2 if !structure.fields.is_empty() => set_field(&mut bytes, structure, whole, &mut random),
            3 => {
                let end = random.below(bytes.len()).max(1);
                bytes.truncate(end);
            }
            4 => overlay(&mut bytes, structure, random.of(structures), &mut random),
            5 => repeat_word(&mut bytes, structure, &mut random),
            _ => flip(&mut bytes, structure, &mut random),
        }
    }
    bytes
}

/// Sets a field to a number that parsers may stumble over.
fn set_field(bytes: &mut [u8], structure: &Structure, whole: &[u8], random: &mut Random) {
    let entries = structure.range.len() / structure.entry;
    let entry = structure.range.start + random.below(entries.max(1)) * structure.entry;
    let (offset, size) = *random.of(structure.fields);
    let field = entry + offset..entry + offset + size;
    let Some(target) = bytes.get_mut(field.clone()) else { return };
    let mut own = [0; 8];
    own[..size].copy_from_slice(&whole[field]);
    let (own, length) = (u64::from_le_bytes(own), whole.len() as u64);
    let numbers = [
        0,
        1,
        own.wrapping_sub(1),
        own.wrapping_add(1),
        own.wrapping_mul(2),
        own ^ 1 << random.below(size * 8),
        length,
        length - 1,
        entry as u64,
        0x7fff_ffff,
        0xffff_ffff,
        1 << 40,
        i64::MAX as u64,
        u64::MAX - 7,
        u64::MAX,
        random.next(),
    ];
    let number = *random.of(&numbers);
    target.copy_from_slice(&number.to_le_bytes()[..size]);
}

/// Puts a part of one structure over another.
fn overlay(bytes: &mut [u8], over: &Structure, from: &Structure, random: &mut Random) {
    let most = over.range.len().min(from.range.len());
    let length = if random.below(2) == 0 { most } else { random.below(most) + 1 };
    if over.range.start + length <= bytes.len() && from.range.start + length <= bytes.len() {
        bytes.copy_within(from.range.start..from.range.start + length, over.range.start);
    }
}

/// Puts one word of a structure over another: references then lead back, to themselves, or to something else.
fn repeat_word(bytes: &mut [u8], structure: &Structure, random: &mut Random) {
    let size = *random.of(&[1, 4, 8]);
    let Some(places) = structure.range.len().checked_sub(size).filter(|places| *places > 0) else { return };
    let (from, to) = (structure.range.start + random.below(places), structure.range.start + random.below(places));
    if from.max(to) + size <= bytes.len() {
        bytes.copy_within(from..from + size, to);
    }
}

/// Changes single bytes, most of them to such as end numbers, strings and lists, or do not.
fn flip(bytes: &mut [u8], structure: &Structure, random: &mut Random) {
    for _ in 0..=random.below(8) {
        let place = structure.range.start + random.below(structure.range.len());
        if let Some(byte) = bytes.get_mut(place) {
            let next = random.next() as u8;
            *byte = *random.of(&[0, 1, 0x7f, 0x80, 0xff, *byte ^ 1 << (next % 8), byte.wrapping_add(1), next]);
        }
    }
}
