//! Names out of damaged files, and out of debug information made to take time, memory or the stack.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::{
    Names, demangle,
    module::{Answer, frames},
    perf_map::PerfMap,
    separate::Places,
};
use crate::target::{
    fuzz::{
        Random, SAMPLES, cuts,
        memory::{Taken, taken},
        mutant, structures,
    },
    image::Image,
    test_program::Workshop,
};

/// Most that may be taken for one of the samples, which have some 20 KiB.
const MOST: Taken = Taken { bytes: 2 << 20, calls: 20_000 };

fn named(path: &Path, offsets: &[u64]) -> (Answer, Vec<String>, Taken) {
    let mut names = Names::default();
    let places = Places::new(None, None);
    let (answer, taken) = taken(|| frames(path, path, offsets, &places, &mut names, &mut |_| {}));
    assert_eq!(answer.frames.len(), offsets.len());
    let found = answer.frames.iter().flatten().map(|frame| names.get(frame.name).to_string()).collect();
    (answer, found, taken)
}

#[test]
fn damaged_files() {
    let directory = tempfile::tempdir().unwrap();
    let (mut most, mut some) = (Taken::default(), 0);
    for sample in SAMPLES.iter() {
        let path = directory.path().join(sample.name);
        let parts = structures(&sample.bytes);
        let offsets: Vec<u64> = (0..sample.bytes.len() as u64).step_by(13).collect();
        let mut look = |bytes: &[u8], what: &dyn std::fmt::Debug| {
            fs::write(&path, bytes).unwrap();
            let (answer, found, taken) = named(&path, &offsets);
            assert!(taken.max(MOST) == MOST, "{} with {what:?}: {taken:?}", sample.name);
            most = most.max(taken);
            some += usize::from(!found.is_empty());
            for problem in &answer.problems {
                assert!(!problem.contains("its parser failed"), "{} with {what:?}: {problem}", sample.name);
            }
            found
        };
        let whole = look(&sample.bytes, &"nothing wrong");
        for name in ["malloc", "entry"] {
            assert!(whole.iter().any(|found| found == name), "{}: no {name}", sample.name);
        }
        for end in cuts(&sample.bytes, &parts) {
            look(&sample.bytes[..end], &end);
        }
        for seed in 0..120 {
            look(&mutant(&sample.bytes, &parts, seed), &seed);
        }
    }
    println!("{some} with names, at most {most:?}");
    assert!(some > 200, "hardly any file has names: {some}");
}

/// A library with a function `code` of 64 bytes and these sections; `information` is that of one unit up to the label `last`, if
/// there is one. Tags: compile unit 0x11, inlined subroutine 0x1d, subprogram
/// 0x2e. Attributes: name 3, statement list 0x10, low pc 0x11, high pc 0x12, abstract origin 0x31, external 0x3f, specification
/// 0x47, ranges 0x55. Forms: address 1, data8 7, ref4 0x13, section offset 0x17, flag present 0x19.
fn library(workshop: &Workshop, abbreviations: &str, information: &str, more: &str) -> PathBuf {
    let end = if information.contains("last:") { "" } else { "last:" };
    let source = format!(
        "
        .text
        .globl code
        .type code, @function
code:   .fill 64, 1, 0x90
end:    .size code, end - code
        .section .debug_abbrev
        {abbreviations}
        .byte 0
        .section .debug_info
        .long last - first
first:  .value 4
        .long 0
        .byte 8
        {information}
{end}
        {more}
        .section .note.GNU-stack
        "
    );
    assemble(workshop, &source)
}

fn assemble(workshop: &Workshop, source: &str) -> PathBuf {
    let (file, out) = (workshop.0.path().join("hostile.s"), workshop.0.path().join("hostile.so"));
    fs::write(&file, source).unwrap();
    let done = Command::new("cc")
        .args(["-nostdlib", "-shared", "-Wl,--build-id=none", "-x", "assembler"])
        .arg(&file)
        .arg("-o")
        .arg(&out)
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    out
}

/// A compile unit and a function, both of all the code.
const USUAL: &str = "
        .byte 1, 0x11, 1, 0x11, 1, 0x12, 7, 0, 0
        .byte 2, 0x2e, 1, 0x11, 1, 0x12, 7, 0, 0";
const UNIT: &str = "
        .byte 1
        .quad code, end - code";
const FUNCTION: &str = "
        .byte 2
        .quad code, end - code";

/// What is said of the function, whose symbol has its name whatever debug information does.
fn survives(library: &Path) -> (Vec<String>, Taken) {
    let bytes = fs::read(library).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let section = object::Object::section_by_name(&file, ".text").unwrap();
    let start = object::ObjectSection::file_range(&section).unwrap().0;
    let offsets: Vec<u64> = (0..64).map(|inside| start + inside).collect();
    let (answer, found, taken) = named(library, &offsets);
    assert_eq!(found.iter().filter(|name| *name == "code").count(), 64, "{:?}", answer.problems);
    (answer.problems, taken)
}

#[test]
fn functions_inlined_into_each_other_without_end() {
    let workshop = Workshop::new();
    for (depth, problems) in [(200, 0), (1_000_000, 0)] {
        let inlined = ".byte 3, 0x1d, 1, 0, 0";
        let information = format!("{UNIT}\n{FUNCTION}\n.fill {depth}, 1, 3\n.fill {depth} + 2, 1, 0");
        let (found, taken) = survives(&library(&workshop, &format!("{USUAL}\n{inlined}"), &information, ""));
        assert_eq!(found.len(), problems, "{found:?}");
        assert!(taken.bytes < 64 << 20, "{taken:?}");
    }
}

#[test]
fn directories_that_take_no_bytes() {
    let workshop = Workshop::new();
    // Version 5: the path of a directory in the form "flag present".
    for form in ["0x19", "0x21"] {
        let lines = format!(
            "
        .section .debug_line
        .long line_last - line_first
line_first: .value 5
        .byte 8, 0
        .long line_program - line_header
line_header: .byte 1, 1, 1, 0xfb, 14, 1
        .byte 1, 1, {form}
        .byte 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f
        .byte 0, 0
line_program:
line_last:
        "
        );
        let abbreviations = "
        .byte 1, 0x11, 1, 0x11, 1, 0x12, 7, 0x10, 0x17, 0, 0
        .byte 2, 0x2e, 0, 0x11, 1, 0x12, 7, 0, 0";
        let information = format!("{UNIT}\n.long 0\n{FUNCTION}\n.byte 0");
        let (_, taken) = survives(&library(&workshop, abbreviations, &information, &lines));
        assert!(taken.bytes < 1 << 20, "{taken:?}");
    }
}

#[test]
fn ranges_that_many_functions_share() {
    let workshop = Workshop::new();
    let abbreviations = "
        .byte 1, 0x11, 1, 0x11, 1, 0x12, 7, 0, 0
        .byte 2, 0x2e, 0, 0x55, 0x17, 0, 0";
    let information = format!("{UNIT}\n.rept 20000\n.byte 2\n.long 0\n.endr\n.byte 0");
    let ranges = ".section .debug_ranges\n.rept 20000\n.quad 1, 2\n.endr\n.quad 0, 0";
    let (problems, taken) = survives(&library(&workshop, abbreviations, &information, ranges));
    // 400 million of them.
    assert!(taken.bytes < 64 << 20, "{taken:?}");
    assert!(problems.len() == 1 && problems[0].contains("very much time or memory; 0 of 64"), "{problems:?}");
}

#[test]
fn attributes_that_take_no_bytes() {
    let workshop = Workshop::new();
    let many = "\n.byte 3, 0x34, 0\n.rept 100000\n.byte 0x3f, 0x19\n.endr\n.byte 0, 0";
    let information = format!("{UNIT}\n{FUNCTION}\n.byte 0\n.fill 1000000, 1, 3\n.byte 0");
    let (_, taken) = survives(&library(&workshop, &format!("{USUAL}{many}"), &information, ""));
    assert!(taken.bytes < 1 << 20, "{taken:?}");
}

/// Units that share a table of abbreviations share the work.
#[test]
fn abbreviations_that_many_units_share() {
    let workshop = Workshop::new();
    let many = "\nnumber = 128\n.rept 10000\n.uleb128 number\nnumber = number + 1\n.byte 0x34, 0, 3, 8, 0, 0\n.endr";
    let unit = ".long 7\n.value 4\n.long 0\n.byte 8\n";
    let information = format!("{UNIT}\n{FUNCTION}\n.byte 0, 0\nlast:\n.rept 10000\n{unit}.endr");
    let (problems, taken) = survives(&library(&workshop, &format!("{USUAL}{many}"), &information, ""));
    assert!(taken.bytes < 64 << 20, "{taken:?}");
    assert_eq!(problems, [""; 0]);
}

#[test]
fn references_that_lead_in_circles() {
    let workshop = Workshop::new();
    for attribute in ["0x31", "0x47"] {
        let abbreviations = format!(
            "{USUAL}
        .byte 3, 0x2e, 1, 0x11, 1, 0x12, 7, {attribute}, 0x13, 0, 0
        .byte 4, 0x1d, 1, 0x11, 1, 0x12, 7, {attribute}, 0x13, 0, 0"
        );
        // To itself, and each to the other.
        for (one, other) in [("one", "other"), ("other", "one"), ("one", "one")] {
            let information = format!(
                "{UNIT}
one:    .byte 3
        .quad code, end - code
        .long {one} - first + 4
other:  .byte 4
        .quad code, end - code
        .long {other} - first + 4
        .byte 0, 0, 0"
            );
            let (problems, taken) = survives(&library(&workshop, &abbreviations, &information, ""));
            assert!(taken.bytes < 1 << 20, "{taken:?}");
            assert_eq!(problems, [""; 0]);
        }
    }
}

/// Notes are searched up to a limit, however many sections and segments have them.
#[test]
fn notes_without_end() {
    let workshop = Workshop::new();
    let build_id = |junk: usize| {
        let source = format!(
            ".section .note.a, \"a\", @note\n.fill {junk}, 1, 0\n.section .note.b, \"a\", @note\n.long 4, 4, 3\n.asciz \
             \"GNU\"\n.long 7\n"
        );
        let path = assemble(&workshop, &source);
        Image::open(&path).unwrap().build_id().map(<[u8]>::to_vec)
    };
    assert_eq!(build_id(1200), Some(vec![7, 0, 0, 0]));
    assert_eq!(build_id(6 << 20), None);
}

/// Naming looks at every symbol a fixed number of times: ten times as many take ten times the memory, and hardly more calls of
/// the allocator.
#[test]
fn very_many_symbols() {
    let workshop = Workshop::new();
    let take = |count: usize| {
        let source = format!(
            ".text\n.altmacro\n.macro one number\n.globl function_\\number\n.type function_\\number, @function\n\
             function_\\number: ret\n.size function_\\number, 1\n.endm\nnumber = 0\n.rept {count}\none %number\n\
             number = number + 1\n.endr\n.section .note.GNU-stack\n"
        );
        let out = assemble(&workshop, &source);
        let image = Image::open(&out).unwrap();
        let (symbols, taken) = taken(|| super::symbols::Symbols::of(&[&image]));
        let bytes = fs::read(&out).unwrap();
        let elf = object::File::parse(&*bytes).unwrap();
        let last = object::Object::symbol_by_name(&elf, &format!("function_{}", count - 1)).unwrap();
        let address = object::ObjectSymbol::address(&last);
        assert_eq!(symbols.find(address), Some(format!("function_{}", count - 1).as_bytes()));
        taken
    };
    let (few, many) = (take(2_000), take(20_000));
    // Both tables have every symbol, of 40 bytes each, and lists grow by doubling.
    assert!(many.bytes < 20_000 * 2 * (40 + 8) * 4, "{many:?}");
    assert!(many.calls < few.calls + 20, "{few:?} {many:?}");
}

/// Names that are mangled, damaged, or made to be long, deep or large.
#[test]
fn mangled_names() {
    let whole = [
        "_ZNSt6vectorIN3app5EntryESaIS1_EE17_M_realloc_insertIJRKS1_EEEvN9__gnu_cxx17__normal_iteratorIPS1_S3_EEDpOT_",
        "_ZZN3app5serveERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEENKUlvE_clEv",
        "_ZN4core3ptr85drop_in_place$LT$std..rt..lang_start$LT$$LP$$RP$$GT$..$u7b$$u7b$closure$u7d$$u7d$$GT$17h0123456789abcdefE",
        "_RNvXs5_NtCs1234_7mycrate3fooINtB5_3BarpEINtB7_5TraitmE6method",
        "_RINvNtCsabc_4core3ptr13drop_in_placeNtNtNtCs1_3std2io5error5ErrorEB4_",
    ];
    let deep = ["P", "N", "I", "J", "F", "L", "S_", "DpT_", "X", "cv", "T", "B", "R", "_R", "dn"];
    let mut names: Vec<String> = deep.iter().map(|part| format!("_Z1fI{}", part.repeat(16_000 / part.len()))).collect();
    names.extend(deep.iter().map(|part| format!("_RNv{}", part.repeat(8000))));
    // Each parameter repeats all before it twice.
    names
        .push(format!("_Z1f1AI{}E", (0..60).map(|number| format!("1BIS{number:X}_S{number:X}_E")).collect::<String>()));
    names.push(format!("_RIC0{}E", "TB3_B3_E".repeat(60)));
    for seed in 0..20_000 {
        let mut random = Random::new(seed);
        let mut name = random.of(&whole).as_bytes().to_vec();
        for _ in 0..=random.below(4) {
            let (from, to) = (random.below(name.len()), random.below(name.len()));
            match random.below(3) {
                0 => name[to] = *random.of(b"_ZNSTIEJKLRBPDX0129$.sav"),
                1 => name.truncate(to.max(2)),
                _ => {
                    let part = name[from.min(to)..from.max(to)].to_vec();
                    name.splice(to..to, part);
                }
            }
        }
        names.push(String::from_utf8(name).unwrap());
    }
    let mut most = Taken::default();
    for name in &names {
        let (readable, taken) = taken(|| demangle::readable(name).into_owned());
        assert!(readable.len() <= demangle::MAX_NAME + "…".len(), "{name}");
        assert!(taken.bytes < 16 << 20 && taken.calls < 200_000, "{taken:?}: {name}");
        most = most.max(taken);
    }
    println!("at most {most:?}");
}

#[test]
fn damaged_maps_of_generated_code() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("map");
    let whole: String =
        (0..200u64).map(|line| format!("{:x} {:x} function {line}\n", line * 64, 8 + line % 80)).collect();
    let addresses: Vec<u64> = (0..12_800).step_by(7).collect();
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let mut text = whole.as_bytes().to_vec();
        for _ in 0..=random.below(40) {
            let place = random.below(text.len());
            let other = random.next() as u8;
            text[place] = *random.of(&[b'\n', b' ', b'f', b'0', b'-', b'x', 0, 0xff, other]);
        }
        fs::write(&path, &text).unwrap();
        let (names, taken) = taken(|| PerfMap::read(&path).unwrap().names(&addresses));
        assert_eq!(names.len(), addresses.len());
        assert!(names.iter().flatten().count() > 1000, "{seed}");
        assert!(taken.bytes < 1 << 20, "{seed}: {taken:?}");
    }
}
