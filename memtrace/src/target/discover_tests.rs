#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::process::Command;

use memtrace_common::site::Arg;

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
    for function in &GLIBC {
        let named = discovery
            .sites
            .iter()
            .any(|site| site.function == function.name || site.aliases.iter().any(|alias| *alias == function.name));
        let missing = discovery
            .notes
            .iter()
            .any(|note| matches!(note, Note::Missing { functions, .. } if functions.contains(&function.name)));
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
    assert!(!discovery.notes.iter().any(|note| matches!(note, Note::OtherAllocator { .. })), "{:?}", discovery.notes);
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
    // In a position-independent static program glibc's malloc is local too.
    let program = workshop.compile("static", SLEEPER, &["-static-pie", other.to_str().unwrap()]);
    let running = Running::program(&program);
    let mallocs = match discover(&Process::open(running.pid()).unwrap()) {
        Ok(discovery) => discovery.sites.iter().filter(|site| site.function == "malloc").count(),
        Err(error) => {
            assert!(matches!(&error, TargetError::StaticProgram { .. }), "{error}");
            1
        }
    };
    assert_eq!(mallocs, 1);
}

#[test]
fn a_preloaded_allocator_may_shadow_glibc() {
    let workshop = Workshop::new();
    let library = workshop.compile("libown.so", OWN_MALLOC, &["-shared", "-fPIC"]);
    let program = workshop.compile("sleeper", SLEEPER, &[]);
    let running = Running::start(Command::new(&program).env("LD_PRELOAD", &library));
    let discovery = discovered(&running);
    assert!(!discovery.sites.is_empty());
    let note = Note::OtherAllocator { module: "libown.so".into(), executable: false };
    assert!(discovery.notes.contains(&note), "{:?}", discovery.notes);
    assert!(note.to_string().contains("may"));
}

#[test]
fn a_program_with_its_own_allocator_shadows_glibc() {
    let workshop = Workshop::new();
    let program = workshop.compile("own", &format!("{OWN_MALLOC}{SLEEPER}"), &["-rdynamic"]);
    let discovery = discovered(&Running::program(&program));
    let note = Note::OtherAllocator { module: "own".into(), executable: true };
    assert!(discovery.notes.contains(&note), "{:?}", discovery.notes);
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
    assert!(matches!(&error, TargetError::NoGlibc { found: None, .. }), "{error}");
    let with_musl = workshop.compile("musl", source, &[&flags[..], &[musl.to_str().unwrap()]].concat());
    let running = Running::program(&with_musl);
    let error = discover(&Process::open(running.pid()).unwrap()).unwrap_err();
    assert!(
        matches!(&error, TargetError::NoGlibc { found: Some(name), .. } if name == "ld-musl-x86_64.so.1"),
        "{error}"
    );
}

#[test]
fn names_of_c_libraries() {
    for name in ["ld-musl-x86_64.so.1", "libc.musl-x86_64.so.1", "ld-uClibc.so.1", "libc.so", "libc.so.0"] {
        assert!(is_other_c_library(name.as_bytes()), "{name}");
    }
    for name in ["libc.so.6", "libcrypto.so.3", "libcap.so.2", "ld-linux-x86-64.so.2", ""] {
        assert!(!is_other_c_library(name.as_bytes()), "{name}");
    }
}

#[test]
fn functions_that_cannot_share_an_address() {
    let index = |name: &str| GLIBC.iter().position(|function| function.name == name).unwrap();
    let entry =
        |names: &[&str]| Found { functions: names.iter().map(|name| index(name)).collect(), ..Found::default() };
    let (first, others) = split(&entry(&["aligned_alloc", "memalign", "memalign"]));
    assert_eq!((&*first.unwrap().name, others.len()), ("memalign", 0));
    let (first, others) = split(&entry(&["free", "malloc", "valloc"]));
    assert_eq!(first.unwrap().name, "malloc");
    assert_eq!(others.iter().map(|other| &*other.name).collect::<Vec<_>>(), ["free"]);
    assert!(split(&entry(&[])).0.is_none());
}

#[test]
fn notes_escape_what_they_quote() {
    let evil = "a\u{1b}[31m\nb".to_string();
    for note in [
        Note::OtherAllocator { module: evil.clone(), executable: true },
        Note::OtherAllocator { module: evil.clone(), executable: false },
        Note::Missing { module: evil.clone(), functions: vec!["cfree".into()] },
        Note::Unprobed { module: evil.clone(), function: "free".into(), reason: "no".into() },
        Note::Unreadable { module: evil, reason: "no".into() },
    ] {
        let text = note.to_string();
        assert!(!text.contains(['\u{1b}', '\n']), "{text}");
    }
}
