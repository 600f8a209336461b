//! Tests of the whole stage, on this very test program.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{hint::black_box, path::PathBuf, time::Duration};

use memtrace_common::stack::StackEnd;

use super::*;
use crate::profile::{Amount, Events, Function, Leaf, Mapping, NamedStack, TraceEnd, UNKNOWN_CALL_PATH, Unwinding};

#[inline(never)]
fn outer(value: u64) -> u64 {
    black_box(value) + 1
}

mod nested {
    use std::hint::black_box;

    #[inline(never)]
    pub fn inner(value: u64) -> u64 {
        black_box(value) * 3
    }
}

/// A return address inside a function: its lookup lands on the function's first byte.
pub fn inside(function: usize) -> u64 {
    function as u64 + 1
}

pub fn outer_address() -> u64 {
    inside(outer as fn(u64) -> u64 as usize)
}

fn inner_address() -> u64 {
    inside(nested::inner as fn(u64) -> u64 as usize)
}

/// The executable mappings of this process.
pub fn mappings() -> Vec<Mapping> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter_map(|line| {
            let mut fields = line.splitn(6, ' ');
            let (start, end) = fields.next()?.split_once('-')?;
            let executable = fields.next()?.contains('x');
            let offset = fields.next()?;
            let name = fields.nth(2)?.trim_start();
            let hex = |text| u64::from_str_radix(text, 16).unwrap();
            executable.then(|| Mapping {
                start: hex(start),
                end: hex(end),
                offset: hex(offset),
                name: name.into(),
                open: name.starts_with('/').then(|| PathBuf::from(name)),
            })
        })
        .collect()
}

pub fn stack(frames: &[u64], end: StackEnd) -> Stack {
    Stack {
        process: 0,
        thread: None,
        leaf: Leaf::Function(0),
        resident: None,
        touch: None,
        frames: frames.to_vec(),
        end,
        allocated: Amount { bytes: 100, count: 10 },
        freed: Amount { bytes: 40, count: 4 },
        unfreed: Amount { bytes: 60, count: 6 },
        oldest: Some(Duration::from_secs(3)),
        growth: vec![10, 60],
    }
}

pub fn profile(stacks: Vec<Stack>, mappings: Vec<Mapping>) -> Profile {
    Profile {
        subject: Default::default(),
        memory: None,
        by: Default::default(),
        threads: Vec::new(),
        processes: vec![Process { mappings, ..Process::new(1, "test") }],
        duration: Duration::from_secs(10),
        end: TraceEnd::Duration,
        older: Duration::ZERO,
        everywhere: false,
        attached_late: Vec::new(),
        missed_more: 0,
        functions: vec![
            Function { name: "malloc".into(), module: "libc.so.6".into() },
            Function { name: "calloc".into(), module: "libc.so.6".into() },
        ],
        stacks,
        events: Events::default(),
        losses: Vec::new(),
        unwinding: Unwinding::default(),
    }
}

pub fn named(profile: &Profile) -> NamedProfile {
    name(profile, &Options::default(), &mut |_, _| {})
}

pub fn frames(stack: &NamedStack) -> Vec<&str> {
    stack.frames.iter().map(AsRef::as_ref).collect()
}

#[test]
fn names_own_functions_root_first() {
    let stacks = vec![stack(&[inner_address(), outer_address()], StackEnd::Complete)];
    let mut calls = Vec::new();
    let named = name(&profile(stacks, mappings()), &Options::default(), &mut |done, total| {
        calls.push((done, total));
    });
    assert_eq!(
        frames(&named.stacks[0]),
        ["memtrace::symbol::tests::outer", "memtrace::symbol::tests::nested::inner", "malloc"]
    );
    assert_eq!(named.stacks[0].truncated, None);
    assert_eq!(named.problems, []);
    assert_eq!(calls.first(), Some(&(0, 2)));
    assert_eq!(calls.last(), Some(&(2, 2)));
    named.check().unwrap();
}

#[inline(always)]
fn inlined_twice(value: u64) -> u64 {
    black_box(value).rotate_left(7)
}

#[inline(always)]
fn inlined_once(value: u64) -> u64 {
    inlined_twice(black_box(value)) ^ 5
}

#[inline(never)]
fn with_inlined_calls(value: u64) -> u64 {
    inlined_once(black_box(value)) + 1
}

#[test]
fn inlined_functions_are_frames_of_their_own() {
    let start = inside(with_inlined_calls as fn(u64) -> u64 as usize);
    let stacks = (0..128).map(|distance| stack(&[start + distance], StackEnd::Complete)).collect();
    let named = named(&profile(stacks, mappings()));
    // Small debug information (`line-tables-only`) names inlined functions without their module.
    let bare = |frame: &Arc<str>| frame.rsplit("::").next().unwrap_or_default().to_owned();
    let expected = ["with_inlined_calls", "inlined_once", "inlined_twice"];
    let found = named.stacks.iter().any(|stack| {
        let names: Vec<String> = stack.frames.iter().take(3).map(bare).collect();
        names == expected
    });
    assert!(found, "{:#?}", named.stacks);
}

#[test]
fn names_functions_of_libraries() {
    let address = inside(libc::qsort as *const () as usize);
    let named = named(&profile(vec![stack(&[address], StackEnd::Complete)], mappings()));
    let name = frames(&named.stacks[0])[0];
    assert!(name.contains("qsort"), "{name}");
}

#[test]
fn a_file_that_is_only_held_open_is_enough() {
    use std::os::fd::AsRawFd as _;

    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("copy");
    std::fs::copy("/proc/self/exe", &copy).unwrap();
    let file = std::fs::File::open(&copy).unwrap();
    std::fs::remove_file(&copy).unwrap();
    let mut mappings = mappings();
    let own = outer_address();
    let mapping = mappings.iter_mut().find(|mapping| (mapping.start..mapping.end).contains(&own)).unwrap();
    mapping.open = Some(PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())));
    let named = named(&profile(vec![stack(&[own], StackEnd::Complete)], mappings));
    assert_eq!(frames(&named.stacks[0]), ["memtrace::symbol::tests::outer", "malloc"]);
}

#[test]
fn unknown_addresses_tell_where_they_are() {
    let mapping = |start, name: &str, open: Option<&str>| Mapping {
        start,
        end: start + 0x1000,
        offset: 0x3000,
        name: name.into(),
        open: open.map(PathBuf::from),
    };
    let mappings = vec![
        mapping(0x10000, "/opt/lib/libfoo.so (deleted)", None),
        mapping(0x20000, "[vdso]", None),
        mapping(0x30000, "", None),
        mapping(0x40000, "/opt/lib/libgone.so", Some("/nonexistent/file")),
    ];
    let stacks = vec![stack(&[0x9999_0000, 0x10234, 0x20001, 0x31000, 0x40010], StackEnd::Complete)];
    let named = named(&profile(stacks, mappings));
    assert_eq!(
        frames(&named.stacks[0]),
        [
            "[unknown] (libgone.so+0x3010)",
            "[unknown] ([anon]+0x4000)",
            "[unknown] ([vdso]+0x3001)",
            "[unknown] (libfoo.so+0x3234)",
            "[unknown] (0x99990000)",
            "malloc"
        ]
    );
    let problems: Vec<&str> = named.problems.iter().map(|p| p.module.as_str()).collect();
    assert_eq!(problems, ["libgone.so", "libfoo.so"]);
}

#[test]
fn garbage_files_give_unknown_names() {
    let directory = tempfile::tempdir().unwrap();
    let own = std::fs::read("/proc/self/exe").unwrap();
    let mut damaged = own.clone();
    // The section headers, which the file header says are at the end.
    let headers = u64::from_le_bytes(own[0x28..0x30].try_into().unwrap()) as usize;
    for (position, byte) in damaged[headers..].iter_mut().enumerate() {
        *byte = (position as u8).wrapping_mul(37);
    }
    let cut = own[..own.len() / 3].to_vec();
    let noise: Vec<u8> = b"\x7fELF\x02\x01\x01"
        .iter()
        .copied()
        .chain((0..4000u32).map(|value| (value.wrapping_mul(2_654_435_761) >> 24) as u8))
        .collect();
    let cases = [
        ("empty", Vec::new()),
        ("text", b"#!/bin/sh\n".to_vec()),
        ("noise", noise),
        ("damaged", damaged),
        ("cut", cut),
    ];
    for (case, content) in cases {
        let path = directory.path().join(case);
        std::fs::write(&path, content).unwrap();
        let mapping =
            Mapping { start: 0x10000, end: 0x20000, offset: 0x1000, name: format!("/x/{case}"), open: Some(path) };
        let stacks = vec![stack(&[0x10100], StackEnd::Complete)];
        let named = named(&profile(stacks, vec![mapping]));
        assert_eq!(frames(&named.stacks[0]), [format!("[unknown] ({case}+0x1100)").as_str(), "malloc"]);
        assert_eq!(named.problems.len(), 1, "{case}");
    }
}

#[test]
fn a_frame_outside_all_code_cuts_the_stack() {
    let stacks = vec![stack(&[inner_address(), 0x1000, outer_address()], StackEnd::Complete)];
    let named = named(&profile(stacks, mappings()));
    assert_eq!(
        frames(&named.stacks[0]),
        ["[truncated: no frame pointer]", "memtrace::symbol::tests::nested::inner", "malloc"]
    );
    assert_eq!(named.stacks[0].truncated, Some(StackEnd::BrokenChain));
}

#[test]
fn every_end_but_complete_marks_the_root() {
    for (end, mark) in [
        (StackEnd::BrokenChain, "[truncated: no frame pointer]"),
        (StackEnd::Unreadable, "[truncated: stack memory unreadable]"),
        (StackEnd::Depth, "[truncated: deeper than 127 frames]"),
    ] {
        let named = named(&profile(vec![stack(&[outer_address()], end)], mappings()));
        assert_eq!(frames(&named.stacks[0])[0], mark);
        assert_eq!(named.stacks[0].truncated, Some(end));
    }
}

/// A name of its own in this program's symbol table, like the one of a thread's start function.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn __clone_for_tests(value: u64) -> u64 {
    black_box(value)
}

#[test]
fn stacks_that_reach_start_code_are_whole() {
    let start = inside(__clone_for_tests as extern "C" fn(u64) -> u64 as usize);
    for end in [StackEnd::BrokenChain, StackEnd::Unreadable] {
        // The frame pointer left by start code leads nowhere.
        for outside in [vec![], vec![0x1000, outer_address()]] {
            let mut addresses = vec![outer_address(), start];
            addresses.extend(outside);
            let named = named(&profile(vec![stack(&addresses, end)], mappings()));
            assert_eq!(frames(&named.stacks[0]), ["__clone_for_tests", "memtrace::symbol::tests::outer", "malloc"]);
            assert_eq!(named.stacks[0].truncated, None);
        }
    }
}

unsafe extern "C" {
    /// The entry point that the compiler generates for this test program.
    fn main(argc: i32, argv: *const *const u8) -> i32;
}

/// A stripped C library does not name the function that calls `main`.
#[test]
fn an_unnamed_caller_of_main_in_the_c_library_is_start_code() {
    let entry = inside(main as *const () as usize);
    for (module, whole) in [("/lib/libc.so.6", true), ("/lib/libc-2.31.so", true), ("/lib/libother.so", false)] {
        let mut mappings = mappings();
        mappings.push(Mapping { start: 0x10000, end: 0x11000, offset: 0, name: module.into(), open: None });
        let broken = |frames: &[u64]| stack(frames, StackEnd::BrokenChain);
        let stacks = vec![broken(&[outer_address(), entry, 0x10010]), broken(&[outer_address(), 0x10020])];
        let named = named(&profile(stacks, mappings));
        assert_eq!(named.stacks[0].truncated.is_none(), whole, "{module}");
        assert!(named.stacks[1].truncated.is_some());
    }
}

#[test]
fn stacks_with_the_same_names_are_merged() {
    // Two calls in one function.
    let mut younger = stack(&[outer_address() + 1], StackEnd::Complete);
    younger.oldest = Some(Duration::from_secs(8));
    younger.growth = vec![1, 2, 3];
    let mut other_function = stack(&[outer_address()], StackEnd::Complete);
    other_function.leaf = Leaf::Function(1);
    let stacks = vec![
        stack(&[outer_address()], StackEnd::Complete),
        younger,
        stack(&[outer_address()], StackEnd::BrokenChain),
        other_function,
    ];
    let named = named(&profile(stacks, mappings()));
    assert_eq!(named.stacks.len(), 3);
    let merged = &named.stacks[0];
    assert_eq!(merged.recorded, 2);
    assert_eq!(merged.allocated, Amount { bytes: 200, count: 20 });
    assert_eq!(merged.unfreed, Amount { bytes: 120, count: 12 });
    assert_eq!(merged.freed, Amount { bytes: 80, count: 8 });
    assert_eq!(merged.oldest, Some(Duration::from_secs(8)));
    assert_eq!(merged.growth, [1, 12, 63]);
    named.check().unwrap();
}

#[test]
fn calls_without_a_stack_are_one_pseudo_frame() {
    let mut lost = stack(&[], StackEnd::Complete);
    lost.leaf = Leaf::Unknown;
    let named = named(&profile(vec![lost], Vec::new()));
    assert_eq!(frames(&named.stacks[0]), [UNKNOWN_CALL_PATH]);
    assert_eq!(named.stacks[0].truncated, None);
}
