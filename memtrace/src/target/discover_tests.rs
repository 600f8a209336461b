#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{io::Write as _, process::Command};

use memtrace_common::site::{Answer, Arg};

use super::*;
use crate::target::{
    function::Role,
    test_program::{Running, SLEEPER, Workshop},
};

const OWN_MALLOC: &str = "
#include <stddef.h>
static char memory[1 << 20]; static size_t used;
void *malloc(size_t n) { void *p = memory + used; used += (n + 15) & ~15UL; return p; }
void *calloc(size_t a, size_t b) { return malloc(a * b); }
void *realloc(void *p, size_t n) { return malloc(n); }
void free(void *p) { }
";

fn discovered(running: &Running) -> Discovery {
    discover(&Process::open(running.pid()).unwrap()).unwrap()
}

#[test]
fn this_machines_libc() {
    let process = Process::open(std::process::id()).unwrap();
    let discovery = discover(&process).unwrap();
    let mappings = mappings::read(&process).unwrap();
    let libc = &discovery.modules[discovery.sites[0].module];
    let addresses: [(&str, usize); 5] = [
        ("malloc", libc::malloc as *const () as usize),
        ("calloc", libc::calloc as *const () as usize),
        ("realloc", libc::realloc as *const () as usize),
        ("posix_memalign", libc::posix_memalign as *const () as usize),
        ("free", libc::free as *const () as usize),
    ];
    for (name, address) in addresses {
        let address = address as u64;
        let mapping = mappings.iter().find(|mapping| (mapping.start..mapping.end).contains(&address)).unwrap();
        assert_eq!(discovery.module_of(mapping).unwrap().identity(), libc.identity());
        let site = discovery.sites.iter().find(|site| site.function == name).unwrap();
        assert_eq!(Some(site.function_offset), mapping.file_offset(address), "{name}");
        // The probe is at the start of an instruction of this process.
        assert_eq!(site.probe_offset, site.function_offset + site.placement.offset);
        assert!(site.placement.offset < 64, "{site:?}");
        assert_eq!(site.role == Role::Free, name == "free");
    }
    // Every name of the table is a site, another name of one, or missing.
    for function in catalogue::family(Family::C).take(9) {
        let named = discovery
            .sites
            .iter()
            .any(|site| site.function == function.name || site.aliases.iter().any(|alias| *alias == function.name));
        let missing = discovery
            .notes
            .iter()
            .any(|note| matches!(note, Note::Missing { functions, .. } if functions.iter().any(|name| name == function.name)));
        assert!(named != missing, "{}", function.name);
    }
    let mut offsets: Vec<_> = discovery.sites.iter().map(|site| site.probe_offset).collect();
    offsets.sort_unstable();
    offsets.dedup();
    assert_eq!(offsets.len(), discovery.sites.len(), "one probe at one place");

    let realloc = discovery.sites.iter().find(|site| site.function == "realloc").unwrap();
    let site = realloc.site(3);
    assert_eq!((site.index, site.size, site.pointer, site.out), (3, Arg::A1, Arg::A0, Arg::None));
    assert_eq!(site.return_offset, 0);
    let rows = discovery.rows();
    assert_eq!(rows.len(), discovery.sites.len());
    for row in &rows {
        println!("{row:?}");
        assert_eq!(row.module, libc.name());
        assert!(!row.instruction.is_empty());
        assert!(row.emulated == "yes" || row.reason.is_some());
    }
}

#[test]
fn the_loaders_hook() {
    let running =
        Running::start(Command::new("sh").args(["-c", "echo ready; read forever"]).stdin(std::process::Stdio::piped()));
    let discovery = discovered(&running);
    let hook = discovery.loader.unwrap();
    let loader = &discovery.modules[hook.module];
    assert!(loader.name().starts_with("ld-"), "{}", loader.name());
    assert!(loader.segments().iter().any(|segment| segment.executable && segment.address_of(hook.offset).is_some()));
    // glibc exports its description of the loaded libraries in every version.
    assert!(hook.state.is_some());
    assert_eq!(discovery.notes, []);
}

#[test]
fn a_statically_linked_program() {
    let workshop = Workshop::new();
    for flags in [&["-static"][..], &["-static-pie"]] {
        let running = Running::program(&workshop.compile("static", SLEEPER, flags));
        let discovery = discovered(&running);
        for function in ["malloc", "calloc", "realloc", "free"] {
            assert!(discovery.sites.iter().any(|site| site.function == function), "{function}");
        }
        assert_eq!(discovery.notes, []);
        let running = Running::program(&workshop.compile("stripped", SLEEPER, &[flags, &["-s"]].concat()));
        let error = discover(&Process::open(running.pid()).unwrap()).unwrap_err();
        assert!(matches!(&error, TargetError::StaticProgram { .. }), "{error}");
        assert!(error.to_string().contains("statically linked"), "{error}");
    }
}

/// Only one object file's functions of these names can be meant: local ones of several are none, and those for all take
/// precedence.
#[test]
fn functions_of_one_name_in_a_static_program() {
    let workshop = Workshop::new();
    let local = "static __attribute__((used, noinline)) void *malloc(unsigned long n) { return (void *)n; }";
    let other = workshop.0.path().join("other.o");
    let object = workshop.compile("part", local, &["-c", "-fno-builtin"]);
    std::fs::rename(object, &other).unwrap();
    let program = workshop.compile("static", SLEEPER, &["-static", other.to_str().unwrap()]);
    let discovery = discovered(&Running::program(&program));
    assert_eq!(discovery.sites.iter().filter(|site| site.function == "malloc").count(), 1);
    // In a position-independent static program glibc's malloc is local too: then glibc's other names for it decide.
    let program = workshop.compile("static", SLEEPER, &["-static-pie", other.to_str().unwrap()]);
    let discovery = discovered(&Running::program(&program));
    assert_eq!(sites_of(&discovery, "static")[..3], ["__malloc", "__calloc", "__realloc"]);
}

/// Names of the sites of a module.
fn sites_of<'a>(discovery: &'a Discovery, module: &str) -> Vec<&'a str> {
    let is = |site: &&ProbeSite| discovery.modules[site.module].name() == module;
    discovery.sites.iter().filter(is).map(|site| &*site.function).collect()
}

fn shadowing<'a>(discovery: &'a Discovery, module: &str) -> Option<(&'a str, Vec<&'a str>)> {
    discovery.notes.iter().find_map(|note| match note {
        Note::Shadowed { module: shadowed, by, functions } if shadowed == module => {
            Some((by.as_str(), functions.iter().map(|name| &**name).collect()))
        }
        _ => None,
    })
}

#[test]
fn a_preloaded_allocator_shadows_glibc() {
    let workshop = Workshop::new();
    let library = workshop.compile("libown.so", OWN_MALLOC, &["-shared", "-fPIC"]);
    let program = workshop.compile("sleeper", SLEEPER, &[]);
    let running = Running::start(Command::new(&program).env("LD_PRELOAD", &library));
    let discovery = discovered(&running);
    assert_eq!(sites_of(&discovery, "libown.so"), ["malloc", "calloc", "realloc", "free"]);
    assert_eq!(shadowing(&discovery, "libc.so.6"), Some(("libown.so", vec!["malloc", "calloc", "realloc", "free"])));
    // What only glibc has still hands out blocks of glibc; reallocarray calls realloc, whoever has it.
    let rest = sites_of(&discovery, "libc.so.6");
    assert!(rest.contains(&"pvalloc") && rest.contains(&"posix_memalign"), "{rest:?}");
    for dead in ["malloc", "calloc", "realloc", "reallocarray", "free", "cfree"] {
        assert!(!rest.contains(&dead), "{dead}");
    }
}

#[test]
fn a_program_with_its_own_allocator_shadows_glibc() {
    let workshop = Workshop::new();
    let source = format!("{OWN_MALLOC}{SLEEPER}");
    let program = workshop.compile("own", &source, &["-rdynamic"]);
    let discovery = discovered(&Running::program(&program));
    assert_eq!(sites_of(&discovery, "own"), ["malloc", "calloc", "realloc", "free"]);
    assert!(!sites_of(&discovery, "libc.so.6").contains(&"malloc"));
    // What the program does not export is for itself: the C library uses its own.
    let hidden = workshop.compile("hidden", &source, &["-fvisibility=hidden"]);
    let discovery = discovered(&Running::program(&hidden));
    assert_eq!(sites_of(&discovery, "hidden"), ["malloc", "calloc", "realloc", "free"]);
    assert!(sites_of(&discovery, "libc.so.6").contains(&"malloc"));
    assert_eq!(shadowing(&discovery, "libc.so.6"), None);
    let stripped = workshop.compile("stripped", &source, &["-fvisibility=hidden", "-s"]);
    assert_eq!(sites_of(&discovered(&Running::program(&stripped)), "stripped"), [""; 0]);
}

#[test]
fn libraries_are_searched_in_the_order_they_are_asked_for() {
    let workshop = Workshop::new();
    let flags = ["-shared", "-fPIC"];
    let first = workshop.compile("libfirst.so", OWN_MALLOC, &flags);
    let second = workshop.compile("libsecond.so", OWN_MALLOC, &flags);
    let link = |name: &str, libraries: [&std::path::Path; 2]| {
        let libraries = libraries.map(|path| path.to_str().unwrap());
        workshop.compile(name, SLEEPER, &[&["-Wl,--no-as-needed"][..], &libraries].concat())
    };
    for (program, used, other) in [
        (link("forward", [&first, &second]), "libfirst.so", "libsecond.so"),
        (link("backward", [&second, &first]), "libsecond.so", "libfirst.so"),
    ] {
        let discovery = discovered(&Running::program(&program));
        assert_eq!(sites_of(&discovery, used).len(), 4);
        assert_eq!(sites_of(&discovery, other), [""; 0]);
        assert_eq!(shadowing(&discovery, other).map(|(by, _)| by), Some(used));
        assert!(!sites_of(&discovery, "libc.so.6").contains(&"malloc"));
    }
}

/// jemalloc's native functions and those of a prefix are an allocator's by themselves; wrappers are not.
#[test]
fn allocators_with_names_of_their_own() {
    let workshop = Workshop::new();
    let source = r#"
        #include <stddef.h>
        #define F __attribute__((used, noinline))
        F void *_rjem_mallocx(size_t n, int f) { return (void *)(n + f); }
        F size_t _rjem_xallocx(void *p, size_t n, size_t e, int f) { return n; }
        F void _rjem_sdallocx(void *p, size_t n, int f) { (void)*(volatile char *)p; }
        F void *zzmalloc(size_t n) { return (void *)n; }
        F void *zzcalloc(size_t n, size_t m) { return (void *)(n * m); }
        F void *zzrealloc(void *p, size_t n) { return p; }
        F void zzfree(void *p) { (void)*(volatile char *)p; }
        F void *mi_malloc(size_t n) { return (void *)n; }
        F void *mi_heap_realloc_aligned(void *h, void *p, size_t n, size_t a) { return p; }
        F void mi_free(void *p) { (void)*(volatile char *)p; }
    "#;
    let program = workshop.compile("native", &format!("{source}{SLEEPER}"), &["-O1"]);
    let discovery = discovered(&Running::program(&program));
    let mut names = sites_of(&discovery, "native");
    names.sort_unstable();
    let expected =
        ["_rjem_mallocx", "_rjem_sdallocx", "_rjem_xallocx", "mi_free", "mi_heap_realloc_aligned", "mi_malloc"];
    assert_eq!(names, expected);
    let site = |name: &str| discovery.sites.iter().find(|site| site.function == name).unwrap().site(0);
    assert_eq!(site("_rjem_xallocx").answer, Answer::InPlace);
    assert_eq!((site("_rjem_xallocx").pointer, site("_rjem_xallocx").out), (Arg::A0, Arg::A0));
    let realloc = site("mi_heap_realloc_aligned");
    assert_eq!((realloc.pointer, realloc.size, realloc.answer), (Arg::A1, Arg::A2, Answer::Pointer));
    assert!(sites_of(&discovery, "libc.so.6").contains(&"malloc"));
    let aligned = format!("{source} F void *zzmemalign(size_t a, size_t n) {{ return (void *)(a + n); }}");
    let program = workshop.compile("aligning", &format!("{aligned}{SLEEPER}"), &["-O1"]);
    assert!(sites_of(&discovered(&Running::program(&program)), "aligning").contains(&"zzmalloc"));
}

/// Functions that only jump to another one are that one; those that call another free twice. C++'s operators are probed
/// unless they do nothing but call malloc.
#[test]
fn functions_that_lead_to_others() {
    let workshop = Workshop::new();
    let source = r#"
        __asm__(".globl valloc; .type valloc, @function; valloc: jmp malloc; .size valloc, .-valloc");
        __asm__(".globl cfree; .type cfree, @function; cfree: endbr64; jmp free; .size cfree, .-cfree");
        __attribute__((noinline)) void free_sized(void *p, size_t n) { free(p); __asm__ volatile("" ::: "memory"); }
        __thread void *cache;
        void *_Znwm(size_t n) { void *p = NEW; while (!p) p = malloc(n); return p; }
        void _ZdlPv(void *p) { free(p); __asm__ volatile("" ::: "memory"); }
    "#;
    let operators = |discovery: &Discovery, module| {
        let sites = sites_of(discovery, module);
        sites.iter().filter(|name| name.starts_with("_Z")).map(|name| (*name).to_owned()).collect::<Vec<_>>()
    };
    let flags = ["-shared", "-fPIC", "-O1", "-fno-builtin", "-fno-optimize-sibling-calls", "-ftls-model=initial-exec"];
    let plain =
        workshop.compile("libplain.so", &format!("{OWN_MALLOC}{source}"), &[&flags[..], &["-DNEW=malloc(n)"]].concat());
    let cached =
        workshop.compile("libcached.so", &format!("{OWN_MALLOC}{source}"), &[&flags[..], &["-DNEW=cache"]].concat());
    let program = workshop.compile("sleeper", SLEEPER, &[]);
    let discovery = discovered(&Running::start(Command::new(&program).env("LD_PRELOAD", &plain)));
    let site = |name: &str| {
        discovery
            .sites
            .iter()
            .find(|site| site.function == name && discovery.modules[site.module].name() == "libplain.so")
    };
    assert!(site("malloc").unwrap().aliases.contains(&"valloc".to_owned()));
    assert!(site("free").unwrap().aliases.contains(&"cfree".to_owned()));
    assert!(site("valloc").is_none() && site("cfree").is_none());
    assert!(site("free_sized").unwrap().repeats && !site("free").unwrap().repeats);
    assert_eq!(operators(&discovery, "libplain.so"), [""; 0]);
    let discovery = discovered(&Running::start(Command::new(&program).env("LD_PRELOAD", &cached)));
    assert_eq!(operators(&discovery, "libcached.so"), ["_Znwm", "_ZdlPv"]);
}

#[test]
fn libraries_that_are_opened_later() {
    let workshop = Workshop::new();
    let library = workshop.compile("libown.so", OWN_MALLOC, &["-shared", "-fPIC"]);
    let source = r#"
        #include <dlfcn.h>
        #include <stdio.h>
        #include <unistd.h>
        int main(int n, char **v) {
            puts("ready"); fflush(stdout);
            char c;
            if (read(0, &c, 1) != 1 || !dlopen(v[1], RTLD_NOW)) return 1;
            for (;;) pause();
        }
    "#;
    let program = workshop.compile("opener", source, &[]);
    let mut running = Running::start(Command::new(&program).arg(&library).stdin(std::process::Stdio::piped()));
    let process = Process::open(running.pid()).unwrap();
    let mut discovery = discover(&process).unwrap();
    let before = discovery.sites.clone();
    let mappings = mappings::read(&process).unwrap();
    assert_eq!(look_again(&process, &mut discovery, &mappings).unwrap(), before.len()..before.len());
    running.0.stdin.take().unwrap().write_all(b"x").unwrap();
    let opened = || mappings::read(&process).unwrap();
    let mut mappings = opened();
    while !mappings.iter().any(|mapping| mapping.executable && mapping.file_name() == "libown.so") {
        std::thread::yield_now();
        mappings = opened();
    }
    let new = look_again(&process, &mut discovery, &mappings).unwrap();
    assert_eq!((new.len(), &discovery.sites[..before.len()]), (4, &before[..]));
    assert_eq!(sites_of(&discovery, "libown.so"), ["malloc", "calloc", "realloc", "free"]);
    assert!(new.clone().all(|index| discovery.modules[discovery.sites[index].module].name() == "libown.so"));
    assert!(look_again(&process, &mut discovery, &mappings).unwrap().is_empty());
    // One that looks for the first time finds both too: what was opened later is not shadowed, and shadows nothing.
    let discovery = discovered(&running);
    assert_eq!(sites_of(&discovery, "libown.so").len(), 4);
    assert!(sites_of(&discovery, "libc.so.6").contains(&"malloc"));
}

/// Before the loader has run there is no list of modules in the process's memory: what it will be follows from the files.
#[test]
fn a_program_that_is_starting() {
    let workshop = Workshop::new();
    let library = workshop.compile("libown.so", OWN_MALLOC, &["-shared", "-fPIC"]);
    let program = workshop.compile("sleeper", SLEEPER, &["-Wl,--no-as-needed", library.to_str().unwrap()]);
    let mut launched = crate::target::launch::Launched::spawn(&[program.into_os_string()]).unwrap();
    let process = Process::open(launched.pid()).unwrap();
    launched.run_until(|| mappings::read(&process).is_ok_and(|mappings| mappings::maps_libc(&mappings))).unwrap();
    let discovery = discover(&process).unwrap();
    assert_eq!(sites_of(&discovery, "libown.so").len(), 4);
    assert_eq!(shadowing(&discovery, "libc.so.6").map(|(by, _)| by), Some("libown.so"));
    launched.kill();
}

#[test]
fn a_program_started_through_the_loader() {
    let workshop = Workshop::new();
    let program = workshop.compile("sleeper", SLEEPER, &[]);
    let loader = "/lib64/ld-linux-x86-64.so.2";
    let discovery = discovered(&Running::start(Command::new(loader).arg(&program)));
    assert!(discovery.sites.iter().any(|site| site.function == "malloc"));
}

#[test]
fn a_program_that_maps_no_libc() {
    let source = r#"
        static long call(long n, long a, const void *b, long c) {
            long result;
            __asm__ volatile("syscall" : "=a"(result) : "a"(n), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
            return result;
        }
        void _start(void) { call(1, 1, "ready\n", 6); for (;;) call(34, 0, 0, 0); }
    "#;
    let workshop = Workshop::new();
    let library = "void nothing(void) { }";
    let musl = workshop.compile("ld-musl-x86_64.so.1", library, &["-shared", "-fPIC", "-nostdlib"]);
    let flags =
        ["-nostdlib", "-pie", "-fPIE", "-Wl,--dynamic-linker=/lib64/ld-linux-x86-64.so.2", "-Wl,--no-as-needed"];
    let bare = workshop.compile("bare", source, &flags);
    let running = Running::program(&bare);
    let error = discover(&Process::open(running.pid()).unwrap()).unwrap_err();
    assert!(matches!(&error, TargetError::NoAllocator { found: None, .. }), "{error}");
    let with_musl = workshop.compile("musl", source, &[&flags[..], &[musl.to_str().unwrap()]].concat());
    let running = Running::program(&with_musl);
    let error = discover(&Process::open(running.pid()).unwrap()).unwrap_err();
    assert!(
        matches!(&error, TargetError::NoAllocator { found: Some(name), .. } if name == "ld-musl-x86_64.so.1"),
        "{error}"
    );
}

#[test]
fn notes_escape_what_they_quote() {
    let evil = "a\u{1b}[31m\nb".to_string();
    for note in [
        Note::OtherAllocator { module: evil.clone(), executable: true, allocator: evil.clone().into() },
        Note::OtherAllocator { module: evil.clone(), executable: false, allocator: "malloc".into() },
        Note::Shadowed { module: evil.clone(), by: evil.clone(), functions: vec!["malloc".into()] },
        Note::Missing { module: evil.clone(), functions: vec!["cfree".into()] },
        Note::Unprobed { module: evil.clone(), function: evil.clone().into(), reason: "no".into() },
        Note::Unreadable { module: evil, reason: "no".into() },
    ] {
        let text = note.to_string();
        assert!(!text.contains(['\u{1b}', '\n']), "{text}");
    }
}
