#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{fs, path::PathBuf, process::Command};

use object::{LittleEndian, U16, U32, U64, elf};

use super::*;
use crate::target::{Process, mappings, test_program::Workshop};

/// A symbol table of functions with these names.
fn table(names: impl Iterator<Item = String>) -> (Vec<elf::Sym64<LittleEndian>>, Vec<u8>) {
    const LE: LittleEndian = LittleEndian;
    let (mut symbols, mut strings) = (Vec::new(), vec![0]);
    for (number, name) in (1u64..).zip(names) {
        symbols.push(elf::Sym64 {
            st_name: U32::new(LE, strings.len() as u32),
            st_info: elf::STB_GLOBAL << 4 | elf::STT_FUNC,
            st_other: 0,
            st_shndx: U16::new(LE, 1),
            st_value: U64::new(LE, number * 16),
            st_size: U64::new(LE, 16),
        });
        strings.extend(name.as_bytes());
        strings.push(0);
    }
    (symbols, strings)
}

fn read(names: impl Iterator<Item = String>) -> Result<(Scan, usize), ModuleProblem> {
    let (symbols, strings) = table(names);
    let mut scan = Scan::default();
    let visited = Names::default().read(&mut scan.hits, Symbols::new(&symbols, &strings), false)?;
    Ok((scan, visited))
}

fn names(scan: &Scan) -> Vec<String> {
    scan.allocators().iter().map(|hit| String::from_utf8(hit.name()).unwrap()).collect()
}

/// However many functions are known, a table is gone through once, and nothing is kept of what is no allocator's.
#[test]
fn a_million_symbols_are_visited_once() {
    const COUNT: usize = 1_000_000;
    let allocator = ["_rjem_malloc", "_rjem_calloc", "_rjem_realloc", "_rjem_free", "_rjem_mallocx"];
    let others = (0..COUNT - allocator.len()).map(|number| format!("_ZN5crate6module{number}8functionE"));
    let (symbols, strings) = table(others.chain(allocator.iter().map(|name| (*name).to_owned())));
    let started = std::time::Instant::now();
    let mut scan = Scan::default();
    let visited = Names::default().read(&mut scan.hits, Symbols::new(&symbols, &strings), false).unwrap();
    println!("{:?}", started.elapsed());
    assert_eq!(visited, COUNT);
    assert_eq!(scan.hits.len(), allocator.len());
    assert_eq!(names(&scan), ["_rjem_malloc", "_rjem_calloc", "_rjem_realloc", "_rjem_free", "_rjem_mallocx"]);
}

#[test]
fn names_without_end_are_refused() {
    let many = (0..MAX_HITS + 1).map(|number| format!("f{number}_free"));
    assert!(matches!(read(many), Err(ModuleProblem::TooLarge(_))));
    let one = (0..MAX_HITS).map(|_| "malloc".to_owned());
    let (scan, _) = read(one).unwrap();
    assert_eq!(scan.hits.len(), MAX_HITS);
}

#[test]
fn what_makes_an_allocator() {
    let of = |list: &[&str]| names(&read(list.iter().map(|name| (*name).to_owned())).unwrap().0);
    let four = |prefix: &str| ["malloc", "calloc", "realloc", "free"].map(|name| format!("{prefix}{name}"));
    for (prefix, is) in [("", true), ("je_", true), ("jemalloc_", true), ("z", false), ("__libc_", false)] {
        let list = four(prefix);
        let found = of(&list.each_ref().map(String::as_str));
        assert_eq!(found, if is { list.to_vec() } else { Vec::new() }, "{prefix}");
    }
    assert_eq!(of(&["rpmalloc", "rpcalloc", "rprealloc", "rpfree", "rpaligned_alloc"]).len(), 5);
    // Some of the names are no allocator's.
    assert_eq!(of(&["malloc", "free"]), [""; 0]);
    assert_eq!(of(&["_rjem_malloc", "_rjem_free"]), [""; 0]);
    assert_eq!(of(&["_rjem_mallocx", "_rjem_sdallocx"]).len(), 2);
    // C++'s functions need an allocator beside them, mimalloc's are one.
    assert_eq!(of(&["_Znwm", "_ZdlPv"]), [""; 0]);
    assert_eq!(of(&["_Znwm", "mi_free", "mi_new"]), ["mi_new", "mi_free", "_Znwm"]);
    assert_eq!(of(&["_Znwm", "mi_new"]), [""; 0]);
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

const SOURCE: &str = r#"
    #include <stddef.h>
    __attribute__((used, noinline)) void *_rjem_mallocx(size_t n, int f) { return (void *)(n + f); }
    __attribute__((used, noinline)) void _rjem_dallocx(void *p, int f) { (void)*(volatile char *)p; }
    const char *volatile text = "<jemalloc>: Error";
    int main(void) { return 0; }
"#;

/// What a file says, as if the process of this test had mapped it.
fn scan(path: &PathBuf, root: Option<&Root>) -> Scan {
    let process = Process::open(std::process::id()).unwrap();
    let file = fs::File::open(path).unwrap();
    // SAFETY: a private mapping of a file that stays as it is, read by nobody.
    let map = unsafe { memmap2::MmapOptions::new().map_exec(&file).unwrap() };
    let mappings = mappings::read(&process).unwrap();
    let mapping = mappings.iter().find(|mapping| mapping.start == map.as_ptr() as u64).unwrap();
    let module = Module::open(&process, mapping).unwrap();
    Scan::of(&module, path, root, true).unwrap()
}

fn run(command: &mut Command) {
    assert!(command.status().expect("binutils and xz are installed").success());
}

#[test]
fn symbols_of_stripped_programs() {
    let workshop = Workshop::new();
    let directory = workshop.0.path();
    let program = workshop.compile("program", SOURCE, &["-Wl,--build-id=0xabcdef01"]);
    let all = scan(&program, None);
    assert_eq!(names(&all), ["_rjem_mallocx", "_rjem_dallocx"]);
    assert_eq!((all.text, all.has_symbols), (None, true));

    let stripped = directory.join("stripped");
    run(Command::new("strip").arg("-o").arg(&stripped).arg(&program));
    let nothing = scan(&stripped, None);
    assert_eq!((names(&nothing), nothing.text), (Vec::new(), Some("jemalloc")));

    // In the program, compressed: as Fedora's build tools put it there.
    let (mini, packed) = (directory.join("mini"), directory.join("mini.xz"));
    run(Command::new("objcopy").args(["--only-keep-debug"]).arg(&program).arg(&mini));
    run(Command::new("xz").args(["--keep"]).arg(&mini));
    let with_mini = directory.join("with-mini");
    let section = format!(".gnu_debugdata={}", packed.display());
    run(Command::new("objcopy").args(["--add-section", &section]).arg(&stripped).arg(&with_mini));
    let found = scan(&with_mini, None);
    assert_eq!(names(&found), names(&all));
    assert_eq!(found.hits[0].address, all.hits[0].address);

    // In a debug file, by build ID, below the target's root.
    let place = directory.join("root/usr/lib/debug/.build-id/ab");
    fs::create_dir_all(&place).unwrap();
    fs::copy(&mini, place.join("cdef01.debug")).unwrap();
    let root = Root::at(&directory.join("root")).unwrap();
    assert_eq!(names(&scan(&stripped, Some(&root))), names(&all));

    // Damaged, it is a problem of which the user is told.
    fs::write(&packed, b"no xz").unwrap();
    run(Command::new("objcopy").args(["--add-section", &section]).arg(&stripped).arg(&with_mini));
    assert!(scan(&with_mini, None).problem.is_some());
}

#[test]
fn damaged_programs() {
    let workshop = Workshop::new();
    let program = workshop.compile("program", SOURCE, &[]);
    let whole = fs::read(&program).unwrap();
    let mut random = 1u64;
    let mut next = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    let process = Process::open(std::process::id()).unwrap();
    let damaged = workshop.0.path().join("damaged");
    for round in 0..200 {
        let mut bytes = whole.clone();
        for _ in 0..=round % 20 {
            let position = next(bytes.len());
            bytes[position] = next(256) as u8;
        }
        // What is mapped stays, so that the kernel shows it; what is read is another length.
        fs::write(&damaged, &bytes).unwrap();
        let file = fs::File::options().read(true).write(true).open(&damaged).unwrap();
        // SAFETY: as in `scan`.
        let map = unsafe { memmap2::MmapOptions::new().map_exec(&file).unwrap() };
        if round % 3 == 0 {
            file.set_len(next(bytes.len()) as u64 + 1).unwrap();
        }
        let mappings = mappings::read(&process).unwrap();
        let mapping = mappings.iter().find(|mapping| mapping.start == map.as_ptr() as u64).unwrap();
        if let Ok(module) = Module::open(&process, mapping)
            && let Ok(scan) = Scan::of(&module, &damaged, None, true)
        {
            let hits = scan.allocators();
            let _ = super::super::sites::resolve(&module, 0, &scan, &hits);
        }
    }
}
