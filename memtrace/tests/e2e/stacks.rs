//! Stacks of programs without frame pointers: those that are easily taken for one another, and those of unusual shape.
//!
//! Every path must be exactly what the program says, from the allocator's caller to the program's first function, and
//! from there on nothing but start code; where frames are missing, the report must say so.

use std::{collections::BTreeSet, num::NonZeroU32};

use memtrace::kernel::{
    Settings, Tracer,
    budget::Budget,
    source::uprobe::{AttachPoint, Reach, Role},
};
use object::{LittleEndian, Object as _, ObjectSegment as _, ObjectSymbol as _, read::elf::ElfFile64};

use crate::support::{
    build::Fixture,
    compare::{Unit, assert_exact},
    folded::{self, Folded},
    memtrace::Memtrace,
    root::turn,
    target::Target,
    trace::read,
    truth::{Path, Paths, Truth},
};

/// Frames outside `main` or a thread's function: start code of glibc. Nothing else may be there.
const START_CODE: [&str; 17] = [
    "_start",
    "__libc_start_main",
    "__libc_start_main_impl",
    "__libc_start_main@@GLIBC_2.34",
    "__libc_start_call_main",
    "start_thread",
    "clone",
    "clone3",
    "__clone3",
    // Constructors and destructors.
    "call_init",
    "_dl_init",
    "_dl_call_fini",
    "_dl_fini",
    "_dl_start_user",
    "__run_exit_handlers",
    "exit",
    // Of the fixture: where a stack begins that it switches to by hand.
    "asm_begin",
];

/// Why frames are missing at the root end, as memtrace says it.
pub const TRUNCATED: &str = "[truncated: ";

/// Most frames that memtrace keeps.
const MAX_FRAMES: usize = 127;

/// What is reported of calls by the program's own functions, start code taken off, and how many frames that had.
pub struct Reported {
    pub paths: Folded,
    pub start_frames: usize,
}

/// Traces one case and gives its truth and the report.
pub fn trace(fixture: Fixture, arguments: &[&str], options: &[&str]) -> (Truth, Folded) {
    let mut target = Target::start(fixture, arguments);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("all.folded");
    let mut command = vec!["memstacks".to_owned(), "-p".into(), target.pid().to_string(), "--all".into(), "-o".into()];
    command.push(file.display().to_string());
    command.extend(options.iter().map(|option| (*option).to_owned()));
    let memtrace = Memtrace::tracing(&command);
    target.go();
    let truth = target.truth();
    memtrace.interrupt().success();
    let ended = target.finish();
    assert!(ended.status.success(), "the fixture came to harm: {:?}\n{}", ended.status, ended.stderr);
    (truth, folded::parse(&read(&file), fixture.name()))
}

/// Whether a frame is glibc's return from a signal handler, which some installations have no name for.
fn returns_from_signal(frames: &[String], position: usize) -> bool {
    let name = frames[position].as_str();
    let next = frames.get(position + 1).map(String::as_str);
    next.is_some_and(|next| next.starts_with("handler")) && (name == "__restore_rt" || is_unnamed_libc(name))
}

/// A function without a name in the C library, which in static programs is the program.
fn is_unnamed_libc(frame: &str) -> bool {
    ["[unknown] (libc.so.6+", "[unknown] (stacks-s"].iter().any(|start| frame.starts_with(start))
}

fn is_start_code(frame: &str) -> bool {
    START_CODE.contains(&frame) || frame == "__start_context" || is_unnamed_libc(frame)
}

pub fn own(truth: &Truth, folded: &Folded, canonical: impl Fn(&str) -> String) -> Reported {
    let (roots, callers) = (truth.roots(), truth.callers());
    let mut reported = Reported { paths: Folded::new(), start_frames: 0 };
    for (path, bytes) in folded {
        let caller = path.iter().rev().nth(1).map(String::as_str).unwrap_or_default();
        if !callers.contains(caller) {
            continue;
        }
        let mut frames: Path = (0..path.len())
            .filter(|position| !returns_from_signal(path, *position))
            .map(|position| canonical(&path[position]))
            .collect();
        if frames[0].starts_with(TRUNCATED) {
            // What is left of the start code is not the program's.
            while is_start_code(&frames[1]) {
                frames.remove(1);
            }
        } else {
            let root = frames.iter().position(|frame| roots.contains(frame.as_str()));
            let root = root.unwrap_or_else(|| panic!("a call path without a root: {}", frames.join(";")));
            let (start, _) = frames.split_at(root);
            assert!(start.iter().all(|frame| is_start_code(frame)), "no start code: {}", frames.join(";"));
            assert!(!start.is_empty(), "the outermost frame is missing, and nothing says so: {}", frames.join(";"));
            if frames[root] == "main" {
                reported.start_frames = root;
            }
            frames.drain(..root);
        }
        *reported.paths.entry(frames).or_default() += bytes;
    }
    reported
}

/// The truth as it is to be reported: of paths with more frames than are kept, the inner ones.
pub fn expected(truth: &Truth, start_frames: usize) -> Paths {
    let mut paths = Paths::new();
    for (path, amount) in &truth.all {
        let frames = path.len() - 1;
        let mut shown = path.clone();
        if frames + start_frames > MAX_FRAMES {
            shown.drain(..frames.saturating_sub(MAX_FRAMES));
            shown.insert(0, format!("{TRUNCATED}deeper than {MAX_FRAMES} frames]"));
        }
        *paths.entry(shown).or_default() += *amount;
    }
    paths
}

fn exact_in(fixture: Fixture, arguments: &[&str], options: &[&str]) {
    let _turn = turn();
    let case = arguments.join(" ");
    let (truth, folded) = trace(fixture, arguments, options);
    let reported = own(&truth, &folded, str::to_owned);
    assert_exact(&case, &expected(&truth, reported.start_frames), Unit::Bytes, &reported.paths);
}

/// Both with frame pointers allowed where there are no rows, and by rows alone.
fn exact(case: &str) {
    exact_in(Fixture::Stacks, &[case], &[]);
    exact_in(Fixture::Stacks, &[case], &["--unwind", "dwarf"]);
}

/// The same, and with an rbp that is the same each time, so that most walks start from the last stack.
fn exact_chain(case: &str) {
    exact(case);
    exact_in(Fixture::Stacks, &[case, "steady"], &[]);
}

#[test]
fn two_callers_with_frames_of_one_size() {
    exact_chain("two-callers");
}

#[test]
fn indirect_calls_of_functions_with_the_same_frames() {
    exact_chain("many-callers");
}

#[test]
fn stacks_that_differ_in_any_number_of_frames() {
    exact_chain("each-word");
}

#[test]
fn recursion_of_changing_depth() {
    exact_chain("recursion");
}

#[test]
fn stacks_around_the_largest_depth() {
    exact_chain("deep");
    exact_chain("deep-steps");
}

#[test]
fn frames_whose_size_changes() {
    exact_chain("alloca");
}

#[test]
fn frames_that_move_while_those_below_stay() {
    exact_chain("moving-frames");
}

#[test]
fn jumps_out_of_deep_stacks() {
    exact("jumps");
}

#[test]
fn coroutines() {
    exact("coroutines");
}

#[test]
fn coroutines_switched_by_hand() {
    exact_chain("coroutines-by-hand");
}

/// A signal after every instruction: of a function at its first call, from the linkage table through the loader, and of
/// the kernel's code. What is between the program's call and the handler has names of others; everything outside it must be
/// there each time.
#[test]
fn any_instruction_of_the_loader_and_of_the_kernels_code() {
    let _turn = turn();
    for fixture in [Fixture::Stacks, Fixture::StacksNow, Fixture::StacksTracked, Fixture::StacksStatic] {
        let (truth, folded) = trace(fixture, &["steps"], &[]);
        let mut reported = Folded::new();
        let mut between = BTreeSet::new();
        for (path, bytes) in &folded {
            let mut path = path.clone();
            let call = path.iter().position(|frame| frame == "asm_stepped");
            let handler = path.iter().position(|frame| frame == "handler_of_steps");
            if let (Some(call), Some(handler)) = (call, handler) {
                between.extend(path.drain(call + 1..handler));
            }
            *reported.entry(path).or_default() += *bytes;
        }
        let reported = own(&truth, &reported, str::to_owned);
        let name = fixture.name();
        assert_exact(name, &expected(&truth, reported.start_frames), Unit::Bytes, &reported.paths);
        let steps = truth.all.values().map(|amount| amount.count).sum::<u64>();
        println!("{name}: {steps} instructions, at {} places of others", between.len());
        assert!(steps > 30, "{steps}");
        assert_eq!(between.iter().any(|frame| frame.starts_with("_dl_fixup")), fixture.binds_late(), "{between:?}");
        assert!(between.iter().any(|frame| frame.contains("vdso")), "{between:?}");
    }
}

#[test]
fn threads_on_the_stacks_of_dead_ones() {
    exact("threads");
}

#[test]
fn signal_handlers_on_the_same_stack() {
    exact("signals");
}

#[test]
fn signal_handlers_on_another_stack() {
    exact("signals-other-stack");
}

#[test]
fn forks_between_allocations() {
    exact("forks");
}

#[test]
fn large_frames() {
    exact("large-frames");
}

#[test]
fn frames_that_are_realigned() {
    exact("aligned-frames");
}

#[test]
fn assembly_with_call_frame_information() {
    exact("assembly");
}

#[test]
fn assembly_with_a_frame_pointer_only() {
    exact_in(Fixture::Stacks, &["assembly-frame-pointer"], &[]);
}

#[test]
fn the_first_call_through_the_linkage_table_and_immediate_binding() {
    for fixture in [Fixture::StacksNow, Fixture::StacksFixed] {
        for case in ["two-callers", "jumps", "threads", "signals"] {
            exact_in(fixture, &[case], &[]);
        }
    }
}

/// The C library's functions that call malloc are never missing, under whichever of their names.
#[test]
fn functions_of_the_c_library_that_allocate() {
    let _turn = turn();
    let (truth, folded) = trace(Fixture::Stacks, &["library-calls"], &[]);
    let callers = ["strdup", "strndup", "wcsdup"];
    let canonical = |frame: &str| {
        let bare = frame.trim_start_matches("__GI_").trim_start_matches('_');
        if callers.contains(&bare) { bare } else { frame }.to_owned()
    };
    let renamed = folded.into_iter().map(|(path, bytes)| (path.iter().map(|frame| canonical(frame)).collect(), bytes));
    let reported = own(&truth, &renamed.collect(), str::to_owned);
    assert_exact("library calls", &expected(&truth, reported.start_frames), Unit::Bytes, &reported.paths);
}

#[test]
fn static_code_at_fixed_addresses() {
    exact_without_libraries(Fixture::StacksStatic);
}

#[test]
fn static_code_at_any_address() {
    exact_without_libraries(Fixture::StacksStaticPie);
}

fn exact_without_libraries(fixture: Fixture) {
    for case in [
        "two-callers",
        "recursion",
        "deep",
        "alloca",
        "jumps",
        "coroutines",
        "threads",
        "signals",
        "signals-other-stack",
        "large-frames",
        "aligned-frames",
        "assembly",
    ] {
        exact_in(fixture, &[case], &[]);
    }
}

/// Nobody can know who called a function that has neither call frame information nor a frame pointer.
#[test]
fn assembly_without_anything_ends_the_stack_and_says_so() {
    let _turn = turn();
    for options in [&[][..], &["--unwind", "dwarf"]] {
        let (truth, folded) = trace(Fixture::Stacks, &["assembly-undescribed"], options);
        let bytes: u64 = truth.all.values().map(|amount| amount.bytes).sum();
        let inner = ["asm_undescribed", "leaf", "malloc"].map(str::to_owned);
        let (path, reported) = folded.iter().next().expect("a path");
        assert_eq!((folded.len(), *reported), (1, bytes), "{folded:#?}");
        assert!(path[0].starts_with(TRUNCATED) && path[1..] == inner, "{path:?}");
    }
}

/// Return probes of another tracer on functions in the middle of the stacks, one of which calls itself: their return
/// addresses are replaced, and the kernel knows the true ones.
#[test]
fn return_addresses_replaced_for_return_probes() {
    let _turn = turn();
    let fixture = Fixture::Stacks;
    let mut target = Target::start(fixture, &["recursion", "steady"]);
    let pid = NonZeroU32::new(target.pid()).expect("a process");
    let mut other = Tracer::load(&Settings::plain(Budget::from_mebibytes(1))).expect("another tracer");
    let points: Vec<AttachPoint> = ["twin_a", "twin_c", "leaf"]
        .map(|function| AttachPoint {
            role: Role::Allocate,
            path: fixture.path(),
            offset: offset_of(&fixture.path(), function),
            cookie: 0,
            name: function.to_owned(),
        })
        .into();
    other.attach_empty(&points, Reach { pid: Some(pid), image: 0 }).expect("return probes");
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("all.folded");
    let command = ["memstacks", "-p", &pid.to_string(), "--all", "-o", file.to_str().expect("a path")];
    let memtrace = Memtrace::tracing(&command);
    target.go();
    let truth = target.truth();
    memtrace.interrupt().success();
    assert!(target.finish().status.success(), "the fixture came to harm");
    other.detach().expect("the other tracer detaches");
    let reported = own(&truth, &folded::parse(&read(&file), fixture.name()), str::to_owned);
    assert_exact("return probes", &expected(&truth, reported.start_frames), Unit::Bytes, &reported.paths);
}

/// File offset of a function.
fn offset_of(program: &std::path::Path, function: &str) -> u64 {
    let data = std::fs::read(program).expect("the program's file");
    let elf = ElfFile64::<LittleEndian>::parse(&*data).expect("an ELF file");
    let symbol = elf.symbols().find(|symbol| symbol.name() == Ok(function)).expect("the function's symbol");
    let segment = elf
        .segments()
        .find(|segment| (segment.address()..segment.address() + segment.size()).contains(&symbol.address()));
    let segment = segment.expect("the function's segment");
    symbol.address() - segment.address() + segment.file_range().0
}
