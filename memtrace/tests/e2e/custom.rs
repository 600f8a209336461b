//! Allocators that the user describes.

use std::process::Command;

use crate::support::{
    build::Fixture,
    compare::Unit,
    memtrace::{self, Memtrace},
    root::turn,
    start::Unwind,
    target::Target,
    trace::{Trace, Traced},
};

/// All functions of the fixture but the one that has no name.
const NAMED: [&str; 16] = [
    "--alloc",
    "pool_get:size=arg1,ptr=ret",
    "--alloc",
    "exe:pool_arra?:size=arg0*arg2",
    "--alloc",
    "pool_store:size=arg2,ptr=*arg1",
    "--alloc",
    "alloc_custom:pool_store_any:size=arg4,ptr=*arg5,ok=any",
    "--alloc",
    "\"node_get\":size=48",
    "--alloc",
    "pool_resize:old=arg1,size=arg2",
    "--free",
    "pool_put",
    "--free",
    "node_put:ptr=arg1",
];

/// The address of the function without a name, as the fixture's symbols would have it.
fn hidden() -> String {
    let output = Command::new(Fixture::Custom.path()).arg("address").output().expect("the fixture starts");
    String::from_utf8(output.stdout).expect("text").trim().to_owned()
}

fn trace(options: &[&str], unwind: Unwind, unit: Unit) -> Traced {
    Trace { fixture: Fixture::Custom, arguments: &[], options, unwind }.run(unit)
}

/// Blocks of a pool count once: not the memory too that the pool has from malloc, and those that it hands on to malloc
/// and free not twice.
#[test]
fn what_custom_functions_allocate_is_counted_exactly() {
    let _turn = turn();
    let hidden = format!("exe:{}:size=arg0", hidden());
    let options: Vec<_> = NAMED.into_iter().chain(["--alloc", &hidden]).collect();
    for (unwind, unit) in [(Unwind::Auto, Unit::Bytes), (Unwind::FramePointers, Unit::Count)] {
        let traced = trace(&options, unwind, unit);
        traced.assert_own_exact();
        traced.assert_nothing_else();
        traced.assert_no_losses();
    }
}

/// Without the description, the pool's memory is malloc's: whole slabs, by whoever needed the next one.
#[test]
fn without_a_description_malloc_is_seen_as_always() {
    let _turn = turn();
    let traced = trace(&[], Unwind::Auto, Unit::Bytes);
    let usual = |paths: &crate::support::truth::Paths| {
        let path = ["main", "usual", "malloc"].map(str::to_owned).to_vec();
        *paths.get(&path).expect("the path of the usual calls")
    };
    assert_eq!(usual(&traced.all.json.own), usual(&traced.truth.all));
    assert_eq!(usual(&traced.unfreed.json.own), usual(&traced.truth.unfreed));
    assert!(traced.unfreed.json.foreign.keys().any(|path| path.ends_with(&["take".to_owned(), "malloc".to_owned()])));
}

#[test]
fn allocations_that_nothing_frees_are_warned_of() {
    let _turn = turn();
    let traced = trace(&["--alloc", "node_get:size=48"], Unwind::Auto, Unit::Bytes);
    assert!(traced.memtrace.stderr.contains("--alloc without --free"), "{}", traced.memtrace.stderr);
}

#[test]
fn a_function_that_is_not_there_is_an_error_with_the_next_step() {
    let _turn = turn();
    let target = Target::start(Fixture::Custom, &[] as &[&str]);
    let pid = target.pid().to_string();
    for (free, expected) in [
        ("pool_pu", "(similar names: \"pool_put\""),
        ("exe:pool_pu", "(similar names: \"pool_put\""),
        ("*", "more than 64 functions"),
        ("exe:0x0", "there is no code at its address"),
    ] {
        let ended = memtrace::run(&["memstacks", "-p", &pid, "-d", "1", "--free", free]);
        assert_eq!(ended.code(), 1, "{free}: {}", ended.stderr);
        assert!(ended.stderr.contains(expected), "{free}: {}", ended.stderr);
        assert!(!ended.traced());
    }
}

/// A module that is named may come later.
#[test]
fn a_module_that_is_not_there_is_waited_for() {
    let _turn = turn();
    let mut target = Target::start(Fixture::Custom, &[] as &[&str]);
    let pid = target.pid().to_string();
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid, "--free", "libplugin.so:pool_put"]);
    target.go();
    target.truth();
    let ended = memtrace.interrupt().success();
    assert!(ended.stderr.contains("libplugin.so:pool_put"), "{}", ended.stderr);
}

#[test]
fn what_is_not_understood_is_marked() {
    let ended = memtrace::run(&["memstacks", "--alloc", "pool_get:size=arg9", "--", "true"]);
    assert_eq!(ended.code(), 2, "{}", ended.stderr);
    assert!(ended.stderr.contains("\n  pool_get:size=arg9\n                ^^^^\n"), "{}", ended.stderr);
}
