//! Profiles for tests: every kind of frame, loss and end, with numbers that can be checked by hand.

mod several;

use std::{sync::Arc, time::Duration};

use memtrace_common::{
    loss::{Loss, LossCount},
    stack::StackEnd,
};

use crate::profile::{
    Amount, By, Events, Function, LateCode, NameProblem, NamedProcess, NamedProfile, NamedStack, ProcessState,
    SourceLine, Subject, TraceEnd, UNKNOWN_CALL_PATH, UnwindProblem, Unwinding,
};

pub use several::several;

pub fn amount(bytes: u64, count: u64) -> Amount {
    Amount { bytes, count }
}

pub fn function(name: &str, module: &str) -> Function {
    Function { name: name.into(), module: module.into() }
}

/// A process that did nothing.
pub fn process(pid: u32, comm: &str) -> NamedProcess {
    NamedProcess {
        pid,
        comm: comm.into(),
        cgroup: None,
        parent: None,
        state: ProcessState::Running,
        since: Duration::ZERO,
        unseen: None,
        rss: None,
        inherited: None,
        allocated: amount(0, 0),
        freed: amount(0, 0),
        unfreed: amount(0, 0),
    }
}

/// A call path that freed everything but `unfreed`.
pub fn stack(frames: &[&str], allocated: Amount, unfreed: Amount) -> NamedStack {
    NamedStack {
        comm: "server".into(),
        group: None,
        process: Some(0),
        thread: None,
        frames: frames.iter().map(|frame| Arc::from(*frame)).collect(),
        lines: Vec::new(),
        truncated: None,
        recorded: 1,
        allocated,
        freed: amount(allocated.bytes - unfreed.bytes, allocated.count - unfreed.count),
        unfreed,
        oldest: (unfreed.count != 0).then(|| Duration::from_millis(58_250)),
        growth: Vec::new(),
        resident: None,
    }
}

fn with(stack: NamedStack, change: impl FnOnce(&mut NamedStack)) -> NamedStack {
    let mut stack = stack;
    change(&mut stack);
    stack
}

/// A server that leaks, churns and caches, traced for a minute without losses.
pub fn plain() -> NamedProfile {
    let root = ["_start", "__libc_start_main", "main"];
    let path = |inner: &[&'static str]| [&root[..], inner].concat();
    let megabyte = 1 << 20;
    let profile = NamedProfile {
        subject: Subject::Heap,
        processes: vec![NamedProcess {
            rss: Some((412 * megabyte, 530 * megabyte + megabyte / 2)),
            ..process(4242, "server")
        }],
        threads: Vec::new(),
        by: By::None,
        groups: Vec::new(),
        duration: Duration::from_secs(60),
        end: TraceEnd::Duration,
        older: Duration::ZERO,
        everywhere: false,
        attached_late: Vec::new(),
        missed_more: 0,
        functions: vec![
            function("malloc", "libc.so.6"),
            function("calloc", "libc.so.6"),
            function("realloc", "libc.so.6"),
            function("free", "libc.so.6"),
            function("malloc", "libother.so"),
        ],
        through: [720, 3, 0, 0, 0].map(|megabytes| amount(megabytes * megabyte, megabytes)).into(),
        stacks: vec![
            with(
                stack(
                    &path(&["serve", "parse(Request const&)", "operator new(unsigned long)", "malloc"]),
                    amount(700 * megabyte, 700_000),
                    amount(0, 0),
                ),
                |stack| stack.growth = vec![0, 4096, 0, 4096, 0, 0, 0, 0],
            ),
            with(
                stack(
                    &path(&[
                        "serve",
                        "Cache::insert(Key const&)",
                        "void std::vector<Entry, std::allocator<Entry> >::_M_realloc_insert<Entry>(Entry&&)",
                        "operator new(unsigned long)",
                        "malloc",
                    ]),
                    amount(20 * megabyte, 2_000),
                    amount(12 * megabyte, 1_200),
                ),
                |stack| {
                    stack.growth = (1..=8).map(|sample| sample * 12 * megabyte / 8).collect();
                    stack.recorded = 3;
                },
            ),
            with(
                stack(&path(&["load_config", "calloc"]), amount(3 * megabyte, 40), amount(3 * megabyte, 30)),
                |stack| {
                    stack.growth = vec![3 * megabyte; 8];
                    stack.oldest = Some(Duration::from_secs(59));
                },
            ),
            stack(&path(&["touch", "malloc"]), amount(0, 7), amount(0, 7)),
        ],
        events: Events {
            allocations: 702_047,
            frees: 700_900,
            frees_unknown: 90,
            frees_inherited: 0,
            nested: 12,
            failed: 0,
        },
        losses: Vec::new(),
        unwinding: Unwinding::default(),
        memory: None,
        problems: Vec::new(),
    };
    of_one_process(profile)
}

/// Sets what the only process has done.
fn of_one_process(mut profile: NamedProfile) -> NamedProfile {
    let process = &mut profile.processes[0];
    (process.allocated, process.freed, process.unfreed) = Default::default();
    for stack in &mut profile.stacks {
        stack.comm = Arc::clone(&process.comm);
        process.allocated = process.allocated.plus(stack.allocated);
        process.freed = process.freed.plus(stack.freed);
        process.unfreed = process.unfreed.plus(stack.unfreed);
    }
    profile
}

/// Everything that can go wrong or be hostile in one profile.
pub fn hostile() -> NamedProfile {
    let mut profile = plain();
    profile.processes[0].comm = "# \u{1b}[31mevil\n;fake;line 99".into();
    profile.end = TraceEnd::TargetExecuted;
    profile.older = Duration::from_millis(2500);
    profile.functions.push(function("malloc\u{1b}]0;x\u{7}", "lib\ttab.so"));
    profile.losses = vec![
        (Loss::BlocksFull, LossCount { count: 17, bytes: 2048 }),
        (Loss::Conflict, LossCount { count: 1, bytes: 16 }),
        (Loss::RingFull, LossCount { count: 2, bytes: 0 }),
    ];
    profile.problems = vec![NameProblem {
        module: "libfoo\u{202e}.so".into(),
        problem: "not a usable 64-bit ELF file: \u{9b}2Jbad".into(),
    }];
    profile.unwinding = Unwinding {
        problems: vec![UnwindProblem {
            module: "lib\tjit\u{1b}[0m.so".into(),
            problem: "there was no room for its table; it is followed by frame pointers".into(),
        }],
        left_out: 3,
        late: LateCode { mappings: 4, longest: Duration::from_micros(1234), stacks: 1, allocated: amount(50, 1) },
    };
    profile.processes[0].rss = Some((10 << 20, 9 << 20));
    let broken = |stack| {
        with(stack, |stack| {
            stack.truncated = Some(StackEnd::BrokenChain);
        })
    };
    profile.stacks = vec![
        broken(stack(&["[truncated: no frame pointer]", "a;b\nc 5", "malloc"], amount(1000, 10), amount(400, 4))),
        // Differs from the one above only in what an output may not print.
        broken(stack(&["[truncated: no frame pointer]", "a:b\u{7}c 5", "malloc"], amount(100, 1), amount(100, 1))),
        with(
            stack(&["[truncated: deeper than 127 frames]", "recurse", "malloc"], amount(50, 1), amount(50, 1)),
            |stack| stack.truncated = Some(StackEnd::Depth),
        ),
        stack(&[UNKNOWN_CALL_PATH], amount(30, 3), amount(20, 2)),
        stack(
            &["", "  ", "<script>alert('&amp;')</script>", "\u{fffe}\u{1b}[2J\u{85}", "calloc"],
            amount(64, 2),
            amount(64, 2),
        ),
        stack(&["main", "operator new 12", "malloc 34"], amount(8, 1), amount(8, 1)),
        // Young blocks are neither freed nor counted.
        with(stack(&["main", "young", "malloc"], amount(500, 5), amount(0, 0)), |stack| stack.freed = amount(200, 2)),
    ];
    of_one_process(profile)
}

/// With source lines, in files of harmless and of hostile names. Two paths differ only in a line.
pub fn lined() -> NamedProfile {
    let mut profile = plain();
    let lines = |frames: &[&str], places: &[Option<(&str, u32)>]| {
        with(stack(frames, amount(64, 4), amount(32, 2)), |stack| {
            let line = |(file, line): (&str, u32)| SourceLine { file: file.into(), line };
            stack.lines = places.iter().map(|place| place.map(line)).collect();
        })
    };
    profile.stacks = vec![
        lines(&["main", "load", "malloc"], &[Some(("/src/main.c", 12)), Some(("src/load.c", 7)), None]),
        lines(&["main", "load", "malloc"], &[Some(("/src/main.c", 13)), Some(("src/load.c", 7)), None]),
        lines(&["main", "evil", "malloc"], &[None, Some(("/x/\u{1b}[31m<&;\n a \u{202e}.c 5", u32::MAX)), None]),
        lines(&["main", "slash", "malloc"], &[None, Some(("/", 1)), None]),
    ];
    of_one_process(profile)
}

/// A trace that saw nothing while memory grew.
pub fn empty() -> NamedProfile {
    let mut profile = plain();
    profile.stacks.clear();
    profile.events = Events::default();
    profile.end = TraceEnd::Interrupted;
    of_one_process(profile)
}
