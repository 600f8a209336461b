//! Unwinding by tables against the true stack, at every instruction of programs.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use object::{Object as _, ObjectSymbol as _, SymbolKind};

use super::{
    Reason,
    fixture::{Fixture, from_compiler},
    stepping::{End, Known, Stepped},
};

/// Everything that is special about stacks in one C program.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <alloca.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>
#define NOINLINE __attribute__((noinline, noclone))

static volatile int sink;
NOINLINE static void use(volatile char *p) { p[0] = 1; sink += p[0]; free(malloc(24)); }

NOINLINE static void with_alloca(int n) { volatile char *p = alloca(n); use(p); }
NOINLINE static void with_large_frame(int n) { volatile char b[300 * 1024]; use(b + n); if (n) with_large_frame(n - 1); }
NOINLINE static int with_very_large_frame(int a, int b, int c) {
    volatile char buffer[3 << 20];
    use(buffer + a);
    int d = rand() % 2, e = rand() % 2, f = rand() % 2;
    use(buffer + b);
    return a + b + c + d + e + f;
}
NOINLINE static void realigned(int n) { _Alignas(32) volatile char v[64]; volatile char *p = alloca(n); use(p); use(v); }
NOINLINE static int deep(int n) { volatile char b[16]; use(b); return n ? deep(n - 1) + b[0] : 0; }

static jmp_buf buffer;
NOINLINE static __attribute__((noreturn)) void leave(int n) { with_alloca(n); longjmp(buffer, n); }
NOINLINE static void ends_with_a_call(int n) { volatile char b[40]; use(b); leave(n); }
NOINLINE static void after(void) { sink++; }

static int compare(const void *a, const void *b) { volatile char c[8]; use(c); return *(const int *)a - *(const int *)b; }

static void on_signal(int number) { with_alloca(number); }
static void on_fault(int number, siginfo_t *info, void *context) {
    with_alloca(number);
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP] += 2;
    use((char *)alloca(8));
}

/* Its first instruction faults; what lies before it belongs to another function with another frame. */
void faults_at_once(void);
/* Saves rbp late and below the frame; keeps the stack pointer in memory, as hand-aligned code does. */
void by_hand(void (*call)(volatile char *), volatile char *argument);
__asm__(
    ".text\n"
    ".type faults_at_once, @function\n .type by_hand, @function\n"
    "before: .cfi_startproc\n .cfi_def_cfa_offset 4096\n nop\n .cfi_endproc\n"
    "faults_at_once: .cfi_startproc\n ud2\n ret\n .cfi_endproc\n"
    "by_hand: .cfi_startproc\n"
    "  mov %rsp, %rax\n .cfi_def_cfa_register rax\n"
    "  mov %rbp, -56(%rax)\n .cfi_offset rbp, -64\n"
    "  sub $64, %rsp\n"
    "  and $-64, %rsp\n"
    "  sub $64, %rsp\n"
    "  mov %rax, 16(%rsp)\n"
    /* CFA = the word at rsp + 16, plus 8. rbp is at CFA - 64. */
    "  .cfi_escape 0x0f, 5, 0x77, 16, 0x06, 0x23, 8\n"
    "  xor %ebp, %ebp\n"
    "  mov %rdi, %rax\n mov %rsi, %rdi\n call *%rax\n"
    "  mov 16(%rsp), %rax\n"
    "  mov -56(%rax), %rbp\n .cfi_restore rbp\n"
    "  mov %rax, %rsp\n .cfi_def_cfa rsp, 8\n"
    "  ret\n .cfi_endproc\n");

int main(void) {
    struct sigaction action = { .sa_handler = on_signal };
    struct sigaction fault = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
    int numbers[8] = { 5, 3, 8, 1, 9, 2, 7, 4 };
    volatile char byte[16];
    struct timespec now;
    sigaction(SIGUSR1, &action, 0);
    sigaction(SIGILL, &fault, 0);
    with_alloca(100);
    with_large_frame(2);
    with_very_large_frame(1, 2, 3);
    realigned(33);
    deep(5);
    if (!setjmp(buffer)) ends_with_a_call(7);
    after();
    qsort(numbers, 8, sizeof *numbers, compare);
    raise(SIGUSR1);
    faults_at_once();
    by_hand(use, byte);
    clock_gettime(CLOCK_MONOTONIC, &now);
    printf("%d %s\n", sink, strerror(7));
    char *text = strdup("text");
    text = realloc(text, 5000);
    free(text);
    return fflush(stdout) != 0;
}
"#;

const CXX_PROGRAM: &str = r#"
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>
struct Guard { std::vector<int> v; Guard() : v(10) {} ~Guard() { v.push_back(1); } };
__attribute__((noinline)) static int thrower(int n) {
    Guard guard;
    if (n == 0) throw std::runtime_error(std::string(100, 'x'));
    int result = thrower(n - 1);
    guard.v.push_back(result);
    return result + guard.v.back();
}
int main() {
    std::map<std::string, std::vector<int>> map;
    for (int i = 0; i < 3; i++) map["a long enough key, number " + std::to_string(i)].resize(i);
    try { thrower(2); } catch (const std::exception &error) { return error.what()[0] != 'x'; }
    return 1;
}
"#;

/// Where walks could not go on: how often that was at the innermost frame, and how often further out.
type Broken = BTreeMap<(String, Why), (u64, u64)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Why {
    NoRow,
    Unsupported(Reason),
}

/// Steps to the program's end. At each instruction the unwound frames must be the true ones, and all of them unless the
/// walk says why it could not go on; then the function there must be one of those expected, and with `true` in a frame
/// further out too.
fn check(program: &Path, start: Option<u64>, expected: &[(&str, Why, bool)]) {
    // Where stepping begins later, calls are to be bound before.
    let mut stepped = Stepped::start(program, start.is_some());
    if let Some(address) = start {
        stepped.run_to(address);
    }
    let mut broken = Broken::new();
    let (mut frames, mut instructions, mut complete, mut misled, mut replaced) = (0, 0, 0, 0, 0);
    loop {
        let (truth, known_to) = stepped.truth();
        let whole = known_to == Known::Start;
        let (unwound, end) = stepped.unwind();
        frames += unwound.len();
        instructions += 1;
        let known = unwound.len().min(truth.len());
        let right = unwound[..known] == truth[..known] && end != End::Unreadable;
        if !right && function(&stepped.place(), program) == "realigned" {
            // At the last instruction rbp has been restored already, which gcc does not say.
            assert_eq!(unwound.first(), truth.first());
            misled += 1;
        } else {
            assert!(right, "{unwound:x?} {truth:x?} {end:?} at {:x?}", stepped.place());
            match end {
                End::Unreadable => unreachable!(),
                _ if known_to == Known::Replaced => replaced += 1,
                End::Outermost => {
                    assert!(unwound.len() == truth.len() || !whole && unwound.len() > truth.len());
                    complete += 1;
                }
                // The dynamic loader's start code is the outermost frame too, but says nothing about it.
                End::NoRule((path, _), None)
                    if whole && unwound.len() == truth.len() && path.to_string_lossy().contains("ld-linux") =>
                {
                    complete += 1;
                }
                End::NoRule(place, reason) => {
                    let why = reason.map_or(Why::NoRow, Why::Unsupported);
                    let count = broken.entry((function(&place, program), why)).or_default();
                    if unwound.is_empty() { count.0 += 1 } else { count.1 += 1 }
                }
            }
        }
        if !stepped.step() {
            break;
        }
    }
    println!("{instructions} instructions, {complete} whole stacks, {frames} frames; {misled} {replaced} {broken:?}");
    assert!(instructions > 5_000 && complete > instructions * 8 / 10);
    assert!(misled <= 2 && replaced <= instructions / 50);
    for ((function, why), (_, outer)) in broken {
        let allowed = expected.iter().find(|(name, reason, _)| *name == function && *reason == why);
        let outer_too = allowed.unwrap_or_else(|| panic!("{function} {why:?}")).2;
        assert!(outer == 0 || outer_too, "{function} {why:?}");
    }
}

/// The program's function at or before an address, or another file's name.
fn function((path, address): &(PathBuf, u64), program: &Path) -> String {
    if path != program {
        return path.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
    }
    let bytes = std::fs::read(path).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let before = file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.address() <= *address);
    before.max_by_key(|symbol| symbol.address()).unwrap().name().unwrap().to_owned()
}

/// The start files of gcc come without unwind information; two of the functions call others.
const START_FILES: [(&str, Why, bool); 6] = [
    ("_init", Why::NoRow, false),
    ("_fini", Why::NoRow, false),
    ("frame_dummy", Why::NoRow, true),
    ("register_tm_clones", Why::NoRow, false),
    ("deregister_tm_clones", Why::NoRow, false),
    ("__do_global_dtors_aux", Why::NoRow, true),
];

const C_PROGRAM: [(&str, Why, bool); 4] = [
    // While the stack is being realigned the frame is found from another register.
    ("realigned", Why::Unsupported(Reason::Register), false),
    ("by_hand", Why::Unsupported(Reason::Register), false),
    // longjmp.
    ("libc.so.6", Why::Unsupported(Reason::ReturnAddress), false),
    ("__longjmp", Why::Unsupported(Reason::ReturnAddress), false),
];

const OPTIONS: [&str; 3] = ["-O2", "-fomit-frame-pointer", "-mavx2"];

#[test]
fn lazy_binding() {
    let expected = [&START_FILES[..], &C_PROGRAM].concat();
    for flags in [&["-fcf-protection=none", "-Wl,-z,lazy"][..], &["-fcf-protection=full", "-Wl,-z,lazy,-z,ibtplt"]] {
        let fixture = Fixture::compile("program.c", PROGRAM, &[&OPTIONS[..], flags].concat());
        check(&fixture.path, None, &expected);
    }
}

#[test]
fn immediate_binding() {
    let expected = [&START_FILES[..], &C_PROGRAM].concat();
    for flags in [&["-Wl,-z,now"][..], &["-Wl,-z,now", "-fno-plt"]] {
        let fixture = Fixture::compile("program.c", PROGRAM, &[&OPTIONS[..], flags].concat());
        check(&fixture.path, None, &expected);
    }
}

#[test]
fn static_programs() {
    let expected = [&START_FILES[..], &C_PROGRAM].concat();
    for flags in [&["-static-pie"][..], &["-static"]] {
        let fixture = Fixture::compile("program.c", PROGRAM, &[&OPTIONS[..], flags].concat());
        check(&fixture.path, None, &expected);
    }
}

#[test]
fn exceptions() {
    let fixture = Fixture::compile("program.cc", CXX_PROGRAM, &["-O2", "-fomit-frame-pointer", "-Wl,-z,now"]);
    let main = fixture.symbols()["main"];
    let libraries = ["libgcc_s.so.1", "libm.so.6", "libstdc++.so.6"].map(from_compiler);
    let names = libraries.each_ref().map(|path| path.file_name().unwrap().to_string_lossy());
    // Start files are in each of them; the compiler's library changes stacks when an exception is thrown.
    let mut expected = START_FILES.to_vec();
    for name in &names {
        expected.push((name, Why::NoRow, true));
    }
    expected.push((&names[0], Why::Unsupported(Reason::Register), false));
    expected.push((&names[0], Why::Unsupported(Reason::ReturnAddress), false));
    check(&fixture.path, Some(main), &expected);
}

#[test]
fn frame_pointers_and_only_debug_frame() {
    let flags = ["-O1", "-fno-omit-frame-pointer", "-mavx2", "-g", "-fno-asynchronous-unwind-tables", "-Wl,-z,now"];
    let fixture = Fixture::compile("program.c", PROGRAM, &flags);
    let main = fixture.symbols()["main"];
    check(&fixture.path, Some(main), &[&START_FILES[..], &C_PROGRAM].concat());
}
