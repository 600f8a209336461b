#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::process::Command;

use memtrace_common::site::{Answer, Arg};

use super::{super::parse, *};
use crate::target::{
    discover,
    elf::Symbols,
    image::Image,
    test_program::{Running, SLEEPER, Workshop},
};

/// A pool in a library, and functions of the program's own, some of them mangled. What is noinline would be gone otherwise.
const LIBRARY: &str = r#"
#include <stdlib.h>
#define OWN __attribute__((noinline, visibility("default")))
OWN void *pool_get(void *pool, size_t size) { return malloc(size + (pool != 0)); }
OWN void *pool_get_zeroed(void *pool, size_t size) { return calloc(1, size + (pool != 0)); }
OWN void pool_put(void *block) { free(block); }
extern __typeof(pool_put) pool_release __attribute__((alias("pool_put")));
"#;
const PROGRAM: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
void *pool_get(void *, size_t);
void pool_put(void *);
void *arena_new(size_t size) __asm__("_ZN5ArenanwEm");
void *arena_more(size_t size, size_t align) __asm__("_ZN5Arena8allocateEmm");
void *arena_less(size_t size) __asm__("_ZN5Arena8allocateEm");
void *arena_new(size_t size) { return malloc(size); }
void *arena_more(size_t size, size_t align) { return malloc(size + align); }
void *arena_less(size_t size) { return malloc(size + 2); }
static __attribute__((noinline)) void *hidden(size_t size) { return malloc(size + 3); }
int main(int argc, char **argv) {
    pool_put(pool_get(0, argc));
    free(hidden(argc));
    puts("ready");
    fflush(stdout);
    for (;;) pause();
}
"#;

const SPLIT: &str = r#"
#include <stdio.h>
#include <unistd.h>
static __attribute__((noinline)) void hidden_put(void *block) { __asm__ volatile("" : : "r"(block)); }
int main(void) { hidden_put(0); puts("ready"); fflush(stdout); for (;;) pause(); }
"#;

struct World {
    _workshop: Workshop,
    process: Process,
    modules: Vec<Module>,
    program: std::path::PathBuf,
    _running: Running,
}

impl World {
    fn new() -> Self {
        Self::of(false)
    }

    fn of(stripped: bool) -> Self {
        let workshop = Workshop::new();
        let library =
            workshop.compile("libpool.so.1.2", LIBRARY, &["-O1", "-shared", "-fPIC", "-Wl,-soname,libpoolsoname.so"]);
        std::os::unix::fs::symlink(&library, library.with_file_name("libpoolsoname.so")).unwrap();
        let directory = library.parent().unwrap().to_str().unwrap();
        let rpath = format!("-Wl,-rpath,{directory}");
        let program = workshop.compile("program", PROGRAM, &["-O1", library.to_str().unwrap(), &rpath]);
        let mut started = program.clone();
        if stripped {
            started = program.with_file_name("stripped");
            let done = Command::new("strip").arg(&program).arg("-o").arg(&started).status().unwrap();
            assert!(done.success());
        }
        let running = Running::program(&started);
        let process = Process::open(running.pid()).unwrap();
        let modules = discover::modules(&process).unwrap().modules;
        Self { _workshop: workshop, process, modules, program, _running: running }
    }

    fn resolve(&self, specs: &[Spec]) -> Result<Resolved, CustomError> {
        resolve(&self.process, specs, &self.modules, 0)
    }

    /// The names of what one text stands for.
    fn names(&self, role: Role, text: &str) -> Vec<String> {
        let specs = [parse(role, text).unwrap()];
        let resolved = self.resolve(&specs).unwrap();
        assert_eq!(resolved.matched, [resolved.sites.len()]);
        resolved.sites.iter().map(|found| found.site.function.clone().into_owned()).collect()
    }

    fn check(&self, text: &str) -> Result<Vec<usize>, CustomError> {
        let specs = [parse(Role::Free, text).unwrap()];
        check(&self.process, &specs, &self.resolve(&specs).unwrap(), &self.modules)
    }

    /// Address of a function, as the symbols of the program that was not stripped say.
    fn address(&self, name: &str) -> u64 {
        let image = Image::open(&self.program).unwrap();
        let table = image.symbol_tables().find(|table| !table.dynamic).unwrap();
        Symbols::new(table.symbols, table.strings).function(name).unwrap().address
    }
}

#[test]
fn functions_of_a_library() {
    let world = World::new();
    let specs = [
        parse(Role::Allocate, "pool_get:size=arg1").unwrap(),
        parse(Role::Allocate, "libpool.so:pool_get_*:size=64,ptr=*arg0").unwrap(),
        parse(Role::Free, "pool_release").unwrap(),
    ];
    let resolved = world.resolve(&specs).unwrap();
    assert_eq!((&resolved.matched[..], &resolved.searched[1..2]), (&[1, 1, 1][..], &[1][..]));
    assert!(resolved.notes.is_empty(), "{:?}", resolved.notes);
    assert!(check(&world.process, &specs, &resolved, &world.modules).unwrap().is_empty());
    let [get, zeroed, put] = resolved.sites.as_slice() else { panic!("{resolved:?}") };
    for found in [get, zeroed, put] {
        assert_eq!(world.modules[found.site.module].name(), "libpool.so.1.2");
        assert_eq!(found.site.probe_offset, found.site.function_offset + found.site.placement.offset);
        assert_eq!(found.site.role, specs[found.spec].role());
    }
    assert_eq!(
        (&*get.site.function, get.site.arguments.size, get.site.constant, get.spec),
        ("pool_get", Arg::A1, None, 0)
    );
    assert_eq!((&*zeroed.site.function, zeroed.site.constant, zeroed.spec), ("pool_get_zeroed", Some(64), 1));
    assert_eq!((zeroed.site.arguments.out, zeroed.site.arguments.answer), (Arg::A0, Answer::Stored));
    assert_eq!((&*put.site.function, &put.site.aliases[..]), ("pool_release", &["pool_put".to_owned()][..]));
    assert!(put.site.repeats && !get.site.repeats);
}

#[test]
fn modules_by_name_soname_pattern_or_as_the_program() {
    let world = World::new();
    for module in ["libpool", "libpool.so", "libpool.so.1", "libpool.so.1.2", "libpoolsoname.so", "libpool*", "*"] {
        assert_eq!(world.names(Role::Free, &format!("{module}:pool_put")), ["pool_put"], "{module}");
    }
    for module in ["exe", "libpoo", "libpool.so.1.2.", "program"] {
        let expected: &[&str] = &[];
        assert_eq!(world.names(Role::Free, &format!("{module}:pool_put")), expected, "{module}");
    }
    for module in ["exe", "program", ""] {
        let text = format!("{module}{}hidden", if module.is_empty() { "" } else { ":" });
        assert_eq!(world.names(Role::Free, &text), ["hidden"], "{module}");
    }
}

#[test]
fn demangled_names() {
    let world = World::new();
    for (text, expected) in [
        ("\"Arena::operator new(unsigned long)\"", &["Arena::operator new(unsigned long)"][..]),
        ("\"Arena::operator new\"", &["Arena::operator new(unsigned long)"]),
        ("\"_ZN5ArenanwEm\"", &["Arena::operator new(unsigned long)"]),
        ("_ZN5ArenanwEm", &["Arena::operator new(unsigned long)"]),
        ("exe:\"Arena::allocate(unsigned long)\"", &["Arena::allocate(unsigned long)"]),
        ("\"pool_put\"", &["pool_put"]),
        ("\"Arena::allocat\"", &[]),
        ("exe:\"allocate\"", &[]),
    ] {
        assert_eq!(world.names(Role::Free, text), expected, "{text}");
    }
    let mut both = world.names(Role::Free, "\"Arena::allocate\"");
    both.sort();
    assert_eq!(both, ["Arena::allocate(unsigned long)", "Arena::allocate(unsigned long, unsigned long)"]);
}

#[test]
fn a_stripped_function_by_its_address() {
    let world = World::of(true);
    let address = world.address("hidden");
    assert_eq!(world.names(Role::Allocate, "exe:hidden:size=arg0"), [] as [&str; 0], "the name is gone");
    let specs = [parse(Role::Allocate, &format!("exe:{address:#x}:size=arg0")).unwrap()];
    let resolved = world.resolve(&specs).unwrap();
    let [found] = resolved.sites.as_slice() else { panic!("{resolved:?}") };
    assert_eq!(found.site.function, format!("{address:#x}"));
    assert_eq!(Some(found.site.function_offset), world.modules[found.site.module].file_offset(address));
    // With symbols, it has its name.
    let world = World::new();
    assert_eq!(world.names(Role::Allocate, &format!("exe:+{address:#x}:size=arg0")), ["hidden"]);
    for elsewhere in ["0x0", "0xffffffffffffffff", "0x7fffffff0000"] {
        let error = world.check(&format!("exe:{elsewhere}")).unwrap_err();
        assert!(matches!(error, CustomError::NotProbed { .. }), "{error}");
    }
}

#[test]
fn what_matches_nothing() {
    let world = World::new();
    let error = world.check("pool_putt").unwrap_err();
    let CustomError::NoFunction { near, with_module: false, .. } = &error else { panic!("{error}") };
    assert_eq!(near[0], "pool_put", "{near:?}");
    assert!(error.to_string().contains("(similar names: \"pool_put\""), "{error}");
    let error = world.check("libpool.so:\"Pool::put(int)\"").unwrap_err();
    assert!(matches!(error, CustomError::NoFunction { with_module: true, .. }), "{error}");
    assert_eq!(world.check("libplugin.so:pool_put").unwrap(), [0], "it may be loaded later");
    assert!(world.check("pool_put").unwrap().is_empty());
    let specs = [parse(Role::Free, "pool_put").unwrap()];
    let later = resolve(&world.process, &specs, &world.modules, world.modules.len()).unwrap();
    assert_eq!((&later.matched[..], &later.searched[..]), (&[0][..], &[0][..]));
}

#[test]
fn patterns_that_are_too_wide() {
    let world = World::new();
    let specs = [parse(Role::Free, "*").unwrap()];
    let error = world.resolve(&specs).unwrap_err();
    let CustomError::TooMany { examples, .. } = &error else { panic!("{error}") };
    assert_eq!(examples.len(), LISTED);
    assert!(examples.iter().all(|name| !name.is_empty()), "{error}");
}

#[test]
fn two_that_contradict_each_other() {
    let world = World::new();
    let specs = [parse(Role::Allocate, "pool_*:size=arg1").unwrap(), parse(Role::Free, "pool_put").unwrap()];
    let error = world.resolve(&specs).unwrap_err();
    assert!(matches!(&error, CustomError::Conflict { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("\"pool_put\" in \"libpool.so.1.2\""), "{text}");
    // The same said twice is fine, and counts for the first.
    let specs = [parse(Role::Free, "pool_put").unwrap(), parse(Role::Free, "pool_release").unwrap()];
    let resolved = world.resolve(&specs).unwrap();
    assert_eq!((resolved.sites.len(), &resolved.matched[..]), (1, &[1, 1][..]));
}

#[test]
fn the_user_knows_better_than_discovery() {
    let world = World::new();
    let mut discovery = discover(&world.process).unwrap();
    let before = discovery.sites.len();
    let specs = [parse(Role::Allocate, "libc.so.6:malloc:size=32").unwrap()];
    let resolved = resolve(&world.process, &specs, &discovery.modules, 0).unwrap();
    assert_eq!(resolved.sites.len(), 1);
    overrule(&mut discovery.sites, &resolved.sites);
    assert_eq!(discovery.sites.len(), before - 1);
    assert!(discovery.sites.iter().all(|site| site.function != "malloc"));
}

#[test]
fn split_off_parts_are_not_what_patterns_mean() {
    let spec = parse(Role::Free, "pool_*").unwrap();
    let dotted = parse(Role::Free, "pool_*.part.?").unwrap();
    let symbol =
        |name: &'static str| Symbol { name: name.as_bytes(), address: 1, size: 1, indirect: false, local: true };
    for (name, plain, with_dot) in [
        ("pool_put", true, false),
        ("pool_put.cold", false, false),
        ("pool_put.part.0", false, true),
        ("put", false, false),
    ] {
        assert_eq!(is_function(&spec, &symbol(name)), plain, "{name}");
        assert_eq!(is_function(&dotted, &symbol(name)), with_dot, "{name}");
    }
}

/// The error says so only where the module was named: otherwise it is one of many.
#[test]
fn a_module_whose_tables_cannot_be_read() {
    let workshop = Workshop::new();
    let program = workshop.compile("sleeper", SLEEPER, &[]);
    let running = Running::program(&program);
    let process = Process::open(running.pid()).unwrap();
    let modules = discover::modules(&process).unwrap().modules;
    let specs = [parse(Role::Free, "exe:main").unwrap(), parse(Role::Free, "main").unwrap()];
    let mut resolved = resolve(&process, &specs, &modules, 0).unwrap();
    assert_eq!(resolved.matched, [1, 1]);
    // As if the program's tables had been damaged.
    resolved.matched = vec![0, 0];
    let problem = ModuleProblem::Malformed("test".into());
    unreadable(&mut resolved, &[0, 1], &modules[0], &problem);
    let error = check(&process, &specs, &resolved, &modules).unwrap_err();
    assert!(matches!(&error, CustomError::NotProbed { reason, .. } if reason.contains("test")), "{error}");
    resolved.matched = vec![1, 0];
    let error = check(&process, &specs, &resolved, &modules).unwrap_err();
    assert!(matches!(error, CustomError::NoFunction { .. }), "{error}");
}

#[test]
fn names_that_only_a_debug_file_has() {
    let workshop = Workshop::new();
    let program = workshop.compile("program", SPLIT, &["-g"]);
    let run = |arguments: &[&str]| {
        let done = Command::new("objcopy").args(arguments).current_dir(program.parent().unwrap()).status().unwrap();
        assert!(done.success(), "{arguments:?}");
    };
    run(&["--only-keep-debug", "program", "program.debug"]);
    run(&["--strip-all", "--add-gnu-debuglink=program.debug", "program", "split"]);
    let running = Running::program(&program.with_file_name("split"));
    let process = Process::open(running.pid()).unwrap();
    let modules = discover::modules(&process).unwrap().modules;
    let specs = [parse(Role::Free, "exe:hidden_put").unwrap()];
    let resolved = resolve(&process, &specs, &modules, 0).unwrap();
    assert_eq!((&*resolved.sites[0].site.function, resolved.sites.len()), ("hidden_put", 1));
}
