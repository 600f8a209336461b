//! Tests of several processes in one profile.

#![allow(clippy::unwrap_used)]

use std::{
    fs::File,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    time::Duration,
};

use memtrace_common::stack::StackEnd;

use super::{
    tests::{frames, mappings, named, outer_address, profile, stack},
    *,
};
use crate::profile::{Amount, By, GroupKind, Leaf, Mapping, NameSources, NamedStack, ProcessState, Thread};

/// Processes whose code is all generated, and named by one map each.
fn generated(directory: &Path, maps: &[&str]) -> Vec<Process> {
    let process = |(number, map): (usize, &&str)| {
        let path = directory.join(format!("perf-{number}.map"));
        std::fs::write(&path, map).unwrap();
        let mapping = Mapping { start: 0x1000, end: 0x9000, offset: 0, name: String::new(), open: None };
        Process {
            mappings: vec![mapping],
            names: NameSources { perf_map: Some(path), ..NameSources::default() },
            ..Process::new(100 + number as u32, "app")
        }
    };
    maps.iter().enumerate().map(process).collect()
}

fn of(process: usize, stack: Stack) -> Stack {
    Stack { process, ..stack }
}

fn at(address: u64) -> Stack {
    stack(&[address], StackEnd::Complete)
}

fn of_thread(process: usize, thread: Option<usize>, address: u64) -> Stack {
    Stack { process, thread, ..at(address) }
}

fn several(processes: Vec<Process>, stacks: Vec<Stack>) -> Profile {
    Profile { processes, ..profile(stacks, Vec::new()) }
}

#[test]
fn one_address_is_other_code_in_another_process() {
    let directory = tempfile::tempdir().unwrap();
    let processes = generated(directory.path(), &["2000 100 first\n", "2000 100 second\n", ""]);
    let named = named(&several(processes, (0..3).map(|process| of(process, at(0x2010))).collect()));
    let names: Vec<&str> = named.stacks.iter().map(|stack| frames(stack)[0]).collect();
    assert_eq!(names, ["first", "second", "[unknown] ([anon]+0x1010)"]);
    // The same in a file: at another place of it, and mapped by one of them only.
    let own = outer_address();
    let mapping = mappings().into_iter().find(|mapping| (mapping.start..mapping.end).contains(&own)).unwrap();
    let elsewhere = Mapping { start: mapping.start + 0x1000, end: mapping.end + 0x1000, ..mapping.clone() };
    let process = |pid, mapping| Process { mappings: vec![mapping], ..Process::new(pid, "app") };
    let processes = vec![process(1, mapping), process(2, elsewhere), Process::new(3, "app")];
    let mut stacks: Vec<Stack> = (0..3).map(|process| of(process, at(own))).collect();
    stacks.push(of(1, at(own + 0x1000)));
    let named = super::tests::named(&several(processes, stacks));
    let names: Vec<&str> = named.stacks.iter().map(|stack| frames(stack)[0]).collect();
    assert_eq!(names.len(), 3, "{names:?}");
    assert_eq!(names[0], "memtrace::symbol::tests::outer");
    assert_ne!(names[1], names[0]);
    assert_eq!(names[2], format!("[unknown] ({own:#x})"));
    assert_eq!((named.stacks[0].recorded, named.stacks[0].process), (2, None));
}

/// Two hundred processes hold a file by a descriptor each, at addresses of their own.
#[test]
fn a_file_of_many_processes_is_read_once() {
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("copy");
    std::fs::copy("/proc/self/exe", &copy).unwrap();
    let own = outer_address();
    let mapping = mappings().into_iter().find(|mapping| (mapping.start..mapping.end).contains(&own)).unwrap();
    let (mut files, mut processes, mut stacks) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..200u64 {
        let file = File::open(&copy).unwrap();
        let open = Some(PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())));
        let (start, end) = (mapping.start + number * 0x1000, mapping.end + number * 0x1000);
        let mapping = Mapping { start, end, open, ..mapping.clone() };
        processes.push(Process { mappings: vec![mapping], ..Process::new(number as u32 + 1, "app") });
        stacks.push(of(number as usize, at(own + number * 0x1000)));
        stacks.push(of(number as usize, at(own + number * 0x1000 + 1 + number % 2)));
        files.push(file);
    }
    let profile = several(processes, stacks);
    let places: Vec<Places> = profile
        .processes
        .iter()
        .enumerate()
        .map(|(number, process)| {
            let own: Vec<&Stack> = profile.stacks.iter().filter(|stack| stack.process == number).collect();
            places_of(process, &own)
        })
        .collect();
    let plan = Plan::new(&profile.processes, &places);
    assert_eq!(plan.files.len(), 1);
    assert_eq!((plan.files[0].offsets.len(), plan.total), (3, 3));
    let mut last = (0, 0);
    let named = name(&profile, &Options::default(), &mut |done, total| last = (done, total));
    assert_eq!(last, (3, 3));
    assert_eq!(named.stacks.len(), 1);
    assert_eq!(frames(&named.stacks[0]), ["memtrace::symbol::tests::outer", "malloc"]);
    assert_eq!(named.stacks[0].recorded, 400);
    assert_eq!(named.problems, []);
    // A file that took its place is another one.
    std::fs::remove_file(&copy).unwrap();
    std::fs::copy("/proc/self/exe", &copy).unwrap();
    let mut processes = profile.processes.clone();
    processes[7].mappings[0].open = Some(copy);
    assert_eq!(Plan::new(&processes, &places).files.len(), 2);
}

/// What is wrong with a file is said once, however many processes map it.
#[test]
fn problems_are_said_once() {
    let directory = tempfile::tempdir().unwrap();
    let bad = directory.path().join("bad");
    std::fs::write(&bad, "no ELF file").unwrap();
    let mapping = |start, name: &str, open| Mapping { start, end: start + 0x1000, offset: 0, name: name.into(), open };
    let process = |pid| Process {
        mappings: vec![mapping(0x1000, "/lib/bad", Some(bad.clone())), mapping(0x2000, "/lib/closed", None)],
        names: NameSources {
            perf_map: Some("/nonexistent/map".into()),
            left_out: u64::from(pid),
            ..NameSources::default()
        },
        ..Process::new(pid, "app")
    };
    let frames = [0x1010, 0x2010];
    let stacks = (0..3).map(|process| of(process, stack(&frames, StackEnd::Complete))).collect();
    let problems = named(&several(vec![process(1), process(2), process(3)], stacks)).problems;
    let modules: Vec<&str> = problems.iter().map(|problem| problem.module.as_str()).collect();
    assert_eq!(modules, ["bad", "perf map", "closed", "mappings"]);
    assert!(problems[3].problem.starts_with("at least 6 code mappings of 3 of the processes"), "{problems:?}");
}

/// Two servers with two threads each, one of which has ended, and a program with another name.
fn servers(by: By) -> NamedProfile {
    let directory = tempfile::tempdir().unwrap();
    let map = "2000 100 f\n3000 100 g\n";
    let mut processes = generated(directory.path(), &[map, map, map]);
    processes[0].cgroup = Some("/a".into());
    processes[1].state = ProcessState::Ended;
    processes[2].comm = "other".into();
    processes[2].cgroup = Some("/a".into());
    let thread = |process, tid, name: &str| Thread { process, tid, name: name.into() };
    let threads = vec![thread(0, 100, "app"), thread(0, 110, "worker"), thread(1, 101, "app"), thread(1, 111, "")];
    let all = |stack: Stack| Stack { unfreed: Amount::default(), freed: stack.allocated, oldest: None, ..stack };
    let mut stacks = vec![
        of_thread(0, Some(0), 0x2010),
        of_thread(0, Some(1), 0x2020),
        of_thread(0, Some(1), 0x3010),
        all(of_thread(1, Some(2), 0x2010)),
        all(of_thread(1, Some(3), 0x2010)),
        of_thread(2, None, 0x2010),
    ];
    // As the kernel side does: threads are told apart only if that is asked for.
    if by != By::Thread {
        stacks.iter_mut().for_each(|stack| stack.thread = None);
    }
    let threads = if by == By::Thread { threads } else { Vec::new() };
    named(&Profile { by, threads, ..several(processes, stacks) })
}

/// Command name, outermost frame, group, process, thread, and how many recorded stacks.
type Row<'a> = (&'a str, &'a str, Option<usize>, Option<usize>, Option<usize>, u64);

fn summary(named: &NamedProfile) -> Vec<Row<'_>> {
    let row = |stack: &'_ NamedStack| (stack.group, stack.process, stack.thread, stack.recorded);
    let all = named.stacks.iter().map(|stack| (&*stack.comm, frames(stack)[0], row(stack)));
    all.map(|(comm, frame, (group, process, thread, recorded))| (comm, frame, group, process, thread, recorded))
        .collect()
}

#[test]
fn processes_of_one_name_have_their_paths_together() {
    let named = servers(By::None);
    let expected = [
        ("app", "f", None, None, None, 4),
        ("app", "g", None, Some(0), None, 1),
        ("other", "f", None, Some(2), None, 1),
    ];
    assert_eq!(summary(&named), expected);
    assert_eq!(named.groups, []);
    assert_eq!(named.stacks[0].allocated, Amount { bytes: 400, count: 40 });
    assert_eq!(named.stacks[0].unfreed, Amount { bytes: 120, count: 12 });
    named.check().unwrap();
}

#[test]
fn split_by_process() {
    let named = servers(By::Process);
    let expected = [
        ("app", "f", Some(0), Some(0), None, 2),
        ("app", "g", Some(0), Some(0), None, 1),
        ("app", "f", Some(1), Some(1), None, 2),
        ("other", "f", Some(2), Some(2), None, 1),
    ];
    assert_eq!(summary(&named), expected);
    let labels: Vec<&str> = named.groups.iter().map(|group| group.label.as_str()).collect();
    assert_eq!(labels, ["app (pid 100)", "app (pid 101)", "other (pid 102)"]);
}

/// A thread that has ended is a group of its own, even when its name could not be read any more, and so is its process.
#[test]
fn split_by_thread() {
    let named = servers(By::Thread);
    let expected = [
        ("app", "f", Some(0), Some(0), Some(0), 1),
        ("app", "f", Some(1), Some(0), Some(1), 1),
        ("app", "g", Some(1), Some(0), Some(1), 1),
        ("app", "f", Some(2), Some(1), Some(2), 1),
        ("app", "f", Some(3), Some(1), Some(3), 1),
        ("other", "f", Some(4), Some(2), None, 1),
    ];
    assert_eq!(summary(&named), expected);
    let labels: Vec<&str> = named.groups.iter().map(|group| group.label.as_str()).collect();
    let expected = [
        "app (pid 100), app (tid 100)",
        "app (pid 100), worker (tid 110)",
        "app (pid 101), app (tid 101)",
        "app (pid 101), [no name] (tid 111)",
        "other (pid 102), [unknown thread]",
    ];
    assert_eq!(labels, expected);
    assert_eq!(named.groups[4].kind, GroupKind::Thread { process: 2, thread: None });
    assert_eq!(named.stacks[4].allocated, Amount { bytes: 100, count: 10 });
    assert_eq!(named.stacks[4].unfreed, Amount::default());
}

#[test]
fn split_by_control_group() {
    let named = servers(By::Cgroup);
    let expected = [
        ("app", "f", Some(0), Some(0), None, 2),
        ("app", "g", Some(0), Some(0), None, 1),
        ("app", "f", Some(1), Some(1), None, 2),
        ("other", "f", Some(0), Some(2), None, 1),
    ];
    assert_eq!(summary(&named), expected);
    let kinds: Vec<&GroupKind> = named.groups.iter().map(|group| &group.kind).collect();
    assert_eq!(kinds, [&GroupKind::Cgroup(Some("/a".into())), &GroupKind::Cgroup(None)]);
}

/// Every split adds up to the same, and so do the processes.
#[test]
fn nothing_is_lost_by_a_split() {
    let sum = |amounts: &mut dyn Iterator<Item = Amount>| amounts.fold(Amount::default(), Amount::plus);
    for by in By::ALL {
        let named = servers(by);
        named.check().unwrap();
        let parts: [fn(&NamedStack) -> Amount; 3] =
            [|stack| stack.allocated, |stack| stack.freed, |stack| stack.unfreed];
        let of_processes: [fn(&NamedProcess) -> Amount; 3] =
            [|process| process.allocated, |process| process.freed, |process| process.unfreed];
        let whole = [(600, 60), (360, 36), (240, 24)].map(|(bytes, count)| Amount { bytes, count });
        for ((part, of_process), whole) in parts.into_iter().zip(of_processes).zip(whole) {
            assert_eq!(sum(&mut named.stacks.iter().map(part)), whole, "{by:?}");
            assert_eq!(sum(&mut named.processes.iter().map(of_process)), whole, "{by:?}");
        }
        assert_eq!(named.through, [Amount { bytes: 600, count: 60 }, Amount::default()]);
    }
}

/// Ten thousand processes of one program, each with stacks of its own: the work grows with their number, not with its square.
#[test]
fn many_processes() {
    const PROCESSES: usize = 10_000;
    let directory = tempfile::tempdir().unwrap();
    let [one] = <[Process; 1]>::try_from(generated(directory.path(), &["2000 100 f\n"])).unwrap();
    let process = |number: usize| Process { pid: number as u32 + 1, ..one.clone() };
    let stacks = (0..5 * PROCESSES).map(|number| of_thread(number % PROCESSES, Some(number), 0x2010)).collect();
    let threads = (0..5 * PROCESSES)
        .map(|number| Thread { process: number % PROCESSES, tid: number as u32, name: "t".into() })
        .collect();
    let mut profile = Profile { threads, ..several((0..PROCESSES).map(process).collect(), stacks) };
    for (by, groups, paths) in [
        (By::None, 0, 1),
        (By::Thread, 5 * PROCESSES, 5 * PROCESSES),
        (By::Process, PROCESSES, PROCESSES),
        (By::Cgroup, 1, 1),
    ] {
        profile.by = by;
        let named = named(&profile);
        assert_eq!((named.groups.len(), named.stacks.len()), (groups, paths), "{by:?}");
        assert_eq!(frames(&named.stacks[0]), ["f", "malloc"]);
    }
}

#[test]
fn placeholders_are_of_their_process_too() {
    let lost = |process| Stack { leaf: Leaf::Unknown, frames: Vec::new(), ..of(process, at(0)) };
    let processes = vec![Process::new(1, "a"), Process::new(2, "b")];
    let named = named(&Profile { duration: Duration::ZERO, ..several(processes, vec![lost(0), lost(1)]) });
    assert_eq!(named.stacks.iter().map(|stack| &*stack.comm).collect::<Vec<_>>(), ["a", "b"]);
}
