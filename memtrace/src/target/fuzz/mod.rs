//! Damaged files for tests: made from whole ones by rules, the same in every run.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod elf;
pub mod memory;
mod tests;

use std::{path::Path, process::Command, sync::LazyLock};

use super::test_program::Workshop;

pub use elf::{cuts, mutant, structures};

/// A whole file.
pub struct Sample {
    pub name: &'static str,
    pub bytes: Vec<u8>,
}

/// Random numbers that are the same in every run (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        // Small seeds are alike in their first numbers.
        let mut random = Self((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        random.next();
        random
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// From 0 to below `limit`, which is not 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    pub fn of<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

/// A C library of a few functions, which has inlined ones and one in two parts.
const SOURCE: &str = "
typedef unsigned long size_t;
static char area[65536];
static size_t used;
static inline __attribute__((always_inline)) void *bump(size_t size) { used += size; return area + used % 65536; }
static inline __attribute__((always_inline)) void *twice(size_t size) { bump(size); return bump(size); }
void *malloc(size_t size) { return twice(size); }
void free(void *block) { used -= (size_t)block; }
void *calloc(size_t count, size_t size) { return malloc(count * size); }
void *realloc(void *block, size_t size) { free(block); return malloc(size); }
int posix_memalign(void **block, size_t alignment, size_t size) { *block = malloc(size + alignment); return 0; }
struct point { int x, y; };
__attribute__((noinline)) static int sum(const struct point *points, int count) {
    int result = 0;
    for (int index = 0; index < count; index++) result += points[index].x * points[index].y;
    return result;
}
int entry(const struct point *points, int count) { return sum(points, count) + (int)(size_t)malloc(count); }
";

/// One of each kind of file that matters.
pub static SAMPLES: LazyLock<Vec<Sample>> = LazyLock::new(|| {
    let workshop = Workshop::new();
    let library = ["-shared", "-fPIC", "-nostdlib", "-O1", "-ffunction-sections", "-Wl,-z,noseparate-code"];
    let script = workshop.0.path().join("versions");
    std::fs::write(&script, "GLIBC_2.2.5 { global: *; }; GLIBC_PRIVATE { global: none; };").unwrap();
    let script = format!("-Wl,--version-script={}", script.display());
    let compile = |name: &'static str, flags: &[&str]| {
        let path = workshop.compile(name, SOURCE, &[&library[..], flags].concat());
        Sample { name, bytes: std::fs::read(path).unwrap() }
    };
    let mut samples = vec![
        compile("libc.so.6", &["-g", "-Wl,-soname,libc.so.6", &script]),
        compile("dwarf4.so", &["-gdwarf-4", "-fno-asynchronous-unwind-tables", "-Wl,-soname,liballoc.so.1"]),
        compile("packed.so", &["-g", "-gz=zlib"]),
    ];
    samples.push(stripped(&workshop, &workshop.0.path().join("libc.so.6")));
    samples
});

/// A stripped library with a small symbol table, a debug link and a link to a continuation.
fn stripped(workshop: &Workshop, library: &Path) -> Sample {
    let run = |command: &mut Command| {
        let done = command.output().unwrap();
        assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
        done.stdout
    };
    let path = |name: &str| workshop.0.path().join(name);
    run(Command::new("objcopy").arg("--only-keep-debug").arg(library).arg(path("debug")));
    run(Command::new("strip").arg("-g").arg("-o").arg(path("small")).arg(library));
    std::fs::write(path("mini"), run(Command::new("xz").arg("-c").arg(path("small")))).unwrap();
    std::fs::write(path("alt"), b"/usr/lib/debug/.dwz/common\0\x12\x34\x56\x78").unwrap();
    run(Command::new("strip").arg("-o").arg(path("stripped")).arg(library));
    let section = |name: &str, file: &str| format!("--add-section={name}={}", path(file).display());
    run(Command::new("objcopy")
        .arg(section(".gnu_debugdata", "mini"))
        .arg(section(".gnu_debugaltlink", "alt"))
        .arg(format!("--add-gnu-debuglink={}", path("debug").display()))
        .arg(path("stripped"))
        .arg(path("linked")));
    Sample { name: "stripped.so", bytes: std::fs::read(path("linked")).unwrap() }
}
