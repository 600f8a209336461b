//! Tests of where names come from when an address alone does not tell.

#![allow(clippy::unwrap_used)]

use std::{
    io::Write as _,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
};

use memtrace_common::stack::StackEnd;

use super::{
    tests::{frames, inside, mappings, named, outer_address, profile, stack},
    *,
};
use crate::{
    collect::modules::Modules,
    profile::{Mapping, NameProblem, NameSources},
    target::{self, rooted::Root},
};

fn at(start: u64, name: &str, open: Option<&str>) -> Mapping {
    Mapping { start, end: start + 0x1000, offset: 0x3000, name: name.into(), open: open.map(PathBuf::from) }
}

/// The one frame at `address`, with what else went wrong.
fn frame(mappings: Vec<Mapping>, address: u64) -> (String, Vec<NameProblem>) {
    let named = named(&profile(vec![stack(&[address], StackEnd::Complete)], mappings));
    (frames(&named.stacks[0])[0].to_owned(), named.problems)
}

#[test]
fn two_files_at_one_address_are_ambiguous() {
    let mut both = mappings();
    let own = outer_address();
    let (start, offset) = both
        .iter()
        .find(|mapping| (mapping.start..mapping.end).contains(&own))
        .map(|mapping| (mapping.start, mapping.offset))
        .unwrap();
    let own_name = place::module_name(both.iter().find(|mapping| mapping.start == start).unwrap()).into_owned();
    let code = tempfile::NamedTempFile::new().unwrap();
    code.as_file().write_all(&[0x90; 0x5000]).unwrap();
    let other = at(own - 0x10, "/opt/libother.so", code.path().to_str());
    let other = Mapping { end: own + 0x100, ..other };
    both.push(other.clone());
    let expected = format!("[ambiguous] ({own_name}+{:#x} or libother.so+0x3010)", own - start + offset);
    assert_eq!(frame(both.clone(), own).0, expected);
    // The first one has come back since.
    both.push(both.iter().find(|mapping| mapping.start == start).unwrap().clone());
    assert!(frame(both, own).0.starts_with("[ambiguous] ("));
    // Elsewhere there is nothing to doubt.
    let mut apart = mappings();
    apart.push(Mapping { start: own, end: own + 0x100, ..other });
    assert_eq!(frame(apart, own).0, "memtrace::symbol::tests::outer");
}

/// A return address follows a call: where only one of two files has a call, it is that one's.
#[test]
fn code_tells_files_apart() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, calls: &[usize]| {
        let mut code = [0x90; 0x5000];
        // `call rel32` before the offsets.
        calls.iter().for_each(|end| code[end - 5] = 0xe8);
        let path = directory.path().join(name);
        std::fs::write(&path, code).unwrap();
        at(0x10000, &format!("/opt/{name}"), path.to_str())
    };
    let mappings = || vec![file("liba.so", &[0x3020, 0x3040, 0x3060]), file("libb.so", &[0x3040, 0x3050])];
    let frames_of = |addresses: &[u64]| {
        let named = named(&profile(vec![stack(addresses, StackEnd::Complete)], mappings()));
        frames(&named.stacks[0]).iter().rev().skip(1).map(|frame| (*frame).to_owned()).collect::<Vec<_>>()
    };
    let (a, b) = ("[unknown] (liba.so+0x3020)", "[unknown] (libb.so+0x3050)");
    let both = |offset: &str| format!("[ambiguous] (liba.so+{offset} or libb.so+{offset})");
    assert_eq!(frames_of(&[0x10020, 0x10050]), [a, b]);
    assert_eq!(frames_of(&[0x10040, 0x10030]), [both("0x3040"), both("0x3030")]);
    // The first frame is that of a signal handler's return, so that the second need not follow a call.
    assert_eq!(frames_of(&[0x10030, 0x10020, 0x10050]), [both("0x3030"), both("0x3020"), b.to_owned()]);
}

/// A library that came and went between two reads of the memory map is in none.
#[test]
fn a_library_that_was_not_seen_may_have_been_anywhere_else() {
    let own = outer_address();
    let mut profile = profile(vec![stack(&[own], StackEnd::BrokenChain)], mappings());
    let at =
        profile.processes[0].mappings.iter().position(|mapping| (mapping.start..mapping.end).contains(&own)).unwrap();
    profile.processes[0].names.doubtful = (0..at).chain(at + 1..at + 2).collect();
    assert_eq!(frames(&named(&profile).stacks[0])[1], "memtrace::symbol::tests::outer");
    profile.processes[0].names.doubtful.insert(at, at);
    let named = named(&profile);
    let frames = frames(&named.stacks[0]);
    assert!(
        frames[1].starts_with("[ambiguous] (memtrace-") && frames[1].ends_with(" or a library that is gone)"),
        "{frames:?}"
    );
}

#[test]
fn one_file_in_several_mappings_is_not_ambiguous() {
    let mut twice = mappings();
    let own = outer_address();
    let mapping = twice.iter().find(|mapping| (mapping.start..mapping.end).contains(&own)).unwrap().clone();
    // A part of it, after mprotect, and under another name, after the file was deleted.
    let part = Mapping {
        start: mapping.start + 0x1000,
        offset: mapping.offset + 0x1000,
        name: format!("{} (deleted)", mapping.name),
        ..mapping
    };
    twice.push(part);
    assert_eq!(frame(twice, own).0, "memtrace::symbol::tests::outer");
}

#[test]
fn memory_without_a_file_is_not_ambiguous() {
    let mappings = vec![at(0x10000, "", None), Mapping { start: 0xf000, ..at(0x10000, "", None) }];
    assert_eq!(frame(mappings, 0x10010).0, "[unknown] ([anon]+0x4010)");
    let mappings = vec![at(0x10000, "", None), at(0x10000, "/memfd:a (deleted)", None)];
    assert_eq!(frame(mappings, 0x10010).0, "[ambiguous] ([anon]+0x3010 or memfd:a+0x3010)");
}

/// Two files that agree on the name, such as two versions of one library.
#[test]
fn files_that_agree_are_not_ambiguous() {
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("copy");
    std::fs::copy("/proc/self/exe", &copy).unwrap();
    let mut both = mappings();
    let own = outer_address();
    let mapping = both.iter().find(|mapping| (mapping.start..mapping.end).contains(&own)).unwrap().clone();
    both.push(Mapping { open: Some(copy), ..mapping });
    assert_eq!(Places::of(&both, &[&stack(&[own], StackEnd::Complete)]).len(), 2);
    assert_eq!(frame(both, own).0, "memtrace::symbol::tests::outer");
}

#[test]
fn many_files_at_one_address() {
    let mappings = (0..100).map(|number| at(0x10000, &format!("/lib{number}.so"), None)).collect();
    let (name, _) = frame(mappings, 0x10010);
    assert_eq!(name.matches(" or ").count(), 7, "{name}");
}

#[test]
fn generated_code_is_named_by_its_map() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("perf-1.map");
    std::fs::write(&path, "20000 100 LazyCompile:~leak /app/a.js:3:7\n30ff0 100 <&\u{1b}[31m;evil\n").unwrap();
    let mappings = vec![
        at(0x20000, "", None),
        at(0x30000, "/memfd:jit (deleted)", None),
        at(0x31000, "/memfd:jit (deleted)", None),
        at(0x40000, "/opt/libgone.so", None),
    ];
    let stacks = vec![stack(&[0x20100, 0x20101, 0x31000, 0x31090, 0x40010, 0x50000], StackEnd::Complete)];
    let mut profile = profile(stacks, mappings);
    profile.processes[0].names = NameSources { perf_map: Some(path), ..NameSources::default() };
    let named = named(&profile);
    let evil = "<&\u{1b}[31m;evil";
    let expected = [
        "[truncated: no frame pointer]",
        "[unknown] (libgone.so+0x3010)",
        evil,
        evil,
        "[unknown] ([anon]+0x3101)",
        "LazyCompile:~leak /app/a.js:3:7",
        "malloc",
    ];
    assert_eq!(frames(&named.stacks[0]), expected);
    let problems: Vec<&str> = named.problems.iter().map(|problem| problem.module.as_str()).collect();
    assert_eq!(problems, ["libgone.so"]);
}

#[test]
fn mappings_that_were_not_kept_are_said() {
    let mut profile = profile(Vec::new(), Vec::new());
    profile.processes[0].names.left_out = 3;
    let problems = named(&profile).problems;
    assert_eq!(problems.len(), 1);
    assert!(problems[0].problem.starts_with("at least 3 code mappings"), "{problems:?}");
}

/// Of this very process, read the way a target's is.
#[test]
fn functions_of_the_vdso_have_names() {
    let process = target::Process::open(std::process::id()).unwrap();
    let mut modules = Modules::default();
    modules.refresh(&process).unwrap();
    let vdso = modules.mappings().iter().find(|mapping| mapping.name == "[vdso]").unwrap();
    assert!(vdso.open.is_some());
    // SAFETY: looks up a value that the kernel handed over at the start.
    let base = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) };
    assert_eq!(base, vdso.start);
    // SAFETY: the mapping is of this process, and stays.
    let image = unsafe { std::slice::from_raw_parts(base as *const u8, (vdso.end - vdso.start) as usize) };
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().write_all(image).unwrap();
    let elf = crate::target::image::Image::open(file.path()).unwrap();
    let address = |function: &str| {
        let symbols = elf.symbol_tables().find(|table| table.dynamic).unwrap();
        let name = |offset: u32| symbols.strings[offset as usize..].split(|byte| *byte == 0).next().unwrap();
        let symbol =
            symbols.symbols.iter().find(|symbol| name(symbol.st_name.get(object::LittleEndian)) == function.as_bytes());
        base + symbol.unwrap().st_value.get(object::LittleEndian)
    };
    let frames_of = |address: u64| frame(modules.mappings().to_vec(), inside(address as usize)).0;
    assert_eq!(frames_of(address("__vdso_getcpu")), "__vdso_getcpu");
    assert_eq!(frames_of(address("__vdso_clock_gettime")), "__vdso_clock_gettime");
}

#[test]
fn a_file_cut_off_while_it_is_mapped_is_survived_and_said() {
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("copy");
    std::fs::copy("/proc/self/exe", &copy).unwrap();
    let image = crate::target::image::Image::open(&copy).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&copy).unwrap();
    file.set_len(4096).unwrap();
    assert_eq!(symbols::Symbols::of(&[&image]).find(outer_address()), None);
    assert!(image.was_truncated());
}

/// What is looked up below the target's root is found after the target has ended.
#[test]
fn a_root_is_usable_by_its_path() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("file"), "x").unwrap();
    let root = Root::at(directory.path()).unwrap();
    assert!(root.path().starts_with("/proc/self/fd"));
    let opened = Root::at(&root.path()).unwrap().open(Path::new("/file")).unwrap();
    assert!(opened.as_raw_fd() >= 0);
}
