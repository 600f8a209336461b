#![allow(clippy::unwrap_used)]

use super::*;
use crate::target::{
    Process,
    catalogue::{self, Family, Known},
    discover,
    elf::Source,
};

fn function(name: &str) -> &'static Known {
    catalogue::known(name.as_bytes()).unwrap()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn placed(name: &str, hex: &str) -> Placement {
    let function = function(name);
    let code = Code { bytes: &bytes(hex), address: 0x1000, complete: true };
    place(code, function.role, function.arguments).unwrap()
}

/// Asserts an emulated site at `offset`.
#[track_caller]
fn well(name: &str, hex: &str, offset: u64, instruction: &str) {
    let placement = placed(name, hex);
    let expected = Placement {
        offset,
        instruction: instruction.into(),
        execution: Execution::Emulated,
        return_offset: 0,
        reason: None,
    };
    assert_eq!(placement, expected, "{name}");
}

/// Asserts the fallback to the first instruction, for a reason that contains `reason`.
#[track_caller]
fn fallback(name: &str, hex: &str, reason: &str) {
    let placement = placed(name, hex);
    assert_eq!((placement.offset, placement.execution, placement.return_offset), (0, Execution::SingleStepped, 0));
    let given = placement.reason.unwrap();
    assert!(given.contains(reason), "{given}");
}

#[test]
fn glibc_2_36_of_debian() {
    // push %r12; push %rbp; push %rbx; mov %rdi, %rbx; sub $16, %rsp; …
    well("malloc", "4154 55 53 4889fb 4883ec10 803d461b140000 0f84f8010000 c3", 0, "push %r12");
    well("calloc", "4155 4889f8 4154 55 53 4883ec18 48f7e6 c3", 0, "push %r13");
    well("realloc", "4157 4156 4155 4154 55 4889f5 53 4889fb 4883ec28 c3", 0, "push %r15");
    // test %rdi, %rdi; je (to the ret at its end); push %rbp; …
    well("free", "4885ff 0f8409000000 55 488d77f0 53 5b 5d 90 c3", 9, "push %rbp");
    // cmpb $0, …(%rip); je; jmp
    well("memalign", "803d710e140000 7407 e932f6ffff 6690 4883ec18 c3", 7, "je 0x1010");
    // cmpb $0, …(%rip); push; …
    well("posix_memalign", "803d01021400 00 4154 4989d4 55 4889fd 53 4889f3 745a c3", 7, "push %r12");
    well("valloc", "803d310e140000 53 4889fb 741b 488b0534981300 4889de 5b e9dff5ffff", 7, "push %rbx");
    well("pvalloc", "803d010e140000 53 4889fb 742b 5b e99ef5ffff", 7, "push %rbx");
    // mov %rsi, %rax; mul %rdx; mov %rax, %rsi; jo; jmp realloc
    fallback("reallocarray", "4889f0 48f7e2 4889c6 7005 e940b8f8ff 31c0 c3", "`mul %rdx` at +0x3 changes rdx");
}

#[test]
fn code_for_control_flow_enforcement() {
    // endbr64; push
    well("malloc", "f30f1efa 4154 55 53 5b 5d 415c c3", 4, "push %r12");
    well("realloc", "f30f1efa 4157 4156 c3", 4, "push %r15");
    // endbr64; test; je to a ret; push
    well("free", "f30f1efa 4885ff 0f8403000000 55 5d 90 c3", 13, "push %rbp");
    // endbr64; test; je to a ret (short); lea -16(%rdi), %rsi; push
    well("free", "f30f1efa 4885ff 7407 488d77f0 55 5d 90 c3", 13, "push %rbp");
    // endbr64; sub $24, %rsp
    fallback("malloc", "f30f1efa 4883ec18 e800000000 4883c418 c3", "`sub $0x18, %rsp` at +0x4 changes rsp");
    // endbr64; jmp elsewhere
    well("aligned_alloc", "f30f1efa e932f6ffff", 4, "jmp 0x63b");
    well("aligned_alloc", "f30f1efa f2e932f6ffff", 4, "bnd jmp 0x63c");
}

#[test]
fn code_of_other_compilers() {
    // With frame pointers: push %rbp; mov %rsp, %rbp
    well("malloc", "55 4889e5 4156 53 5b 415e 5d c3", 0, "push %rbp");
    // mov %rdi, %rax; push: what is only copied stays
    well("valloc", "4889f8 53 5b c3", 3, "push %rbx");
    // xor %eax, %eax; lea 23(%rdi), %rcx; cmp; ja
    well("malloc", "31c0 488d4f17 4881f9ff030000 7701 c3 c3", 13, "ja 0x1010");
    // mov %fs:0x28, %rax reads memory; push
    well("malloc", "64488b042528000000 53 5b c3", 9, "push %rbx");
    // nop; call with the arguments untouched (mcount)
    well("malloc", "f30f1efa e800000000 c3", 4, "call 0x1009");
    well("malloc", "90 4883ec08 c3", 0, "nop");
}

#[test]
fn arguments_stay_in_their_registers() {
    // mov $64, %esi: the alignment and size of memalign, but nothing of malloc.
    well("malloc", "be40000000 53 5b c3", 5, "push %rbx");
    fallback("memalign", "be40000000 53 5b c3", "changes rsi");
    // Parts of a register count as well: mov $1, %dil.
    fallback("malloc", "40b701 53 5b c3", "changes rdi");
    // posix_memalign's alignment (rsi) is not used.
    well("posix_memalign", "be40000000 53 5b c3", 5, "push %rbx");
    fallback("posix_memalign", "31d2 53 5b c3", "changes rdx");
    fallback("posix_memalign", "31ff 53 5b c3", "changes rdi");
    // xchg, cmov and shifts by cl change registers too.
    fallback("malloc", "4887f8 53 c3", "changes rdi");
    fallback("malloc", "480f44f8 53 c3", "changes rdi");
    // xor %ebp, %ebp: the caller's frame pointer.
    fallback("malloc", "31ed 53 c3", "changes rbp");
    fallback("free", "31ed 53 c3", "changes rbp");
    // pop, leave, mov to rsp
    fallback("malloc", "c9 53 c3", "changes r");
    fallback("malloc", "5b 53 c3", "changes rsp");
    fallback("free", "4c89dc 53 c3", "changes rsp");
}

#[test]
fn memory_that_is_written_may_be_the_deed() {
    // mov %rax, (%rdi): the block goes on a free list.
    fallback("free", "488907 53 5b c3", "writes memory");
    fallback("free", "0fb117 53 5b c3", "writes memory");
    fallback("malloc", "48c7042400000000 53 c3", "writes memory");
    fallback("malloc", "48897c24f8 53 5b c3", "writes memory");
}

#[test]
fn conditional_branches() {
    // An allocating function: the probe is on the branch, which is hit on both ways.
    well("malloc", "4885ff 7402 53 5b c3", 3, "je 0x1007");
    // A freeing function whose branch leads to more than a return: likewise.
    well("free", "4885ff 7402 53 5b 31c0 c3", 3, "je 0x1007");
    // To code that was not given.
    well("free", "4885ff 7440 53 5b c3", 3, "je 0x1045");
    // Two ways out without freeing.
    well("free", "4885ff 740a 4881ffff0f0000 7601 53 c3", 14, "push %rbx");
    // Past the branch, nothing is emulated before an argument is gone: the branch is the best.
    well("free", "4885ff 7405 4889fb 31ff c3", 3, "je 0x100a");
    // Not emulated: jrcxz, loop.
    fallback("free", "e301 53 5b 31c0 c3", "may leave the straight way");
    fallback("malloc", "e301 53 5b 31c0 c3", "may leave the straight way");
    // jrcxz to a return is passed in a freeing function.
    well("free", "e301 53 c3", 2, "push %rbx");
    // With an operand-size prefix the kernel refuses the branch.
    let placement = placed("malloc", "4885ff 667402 53 5b c3");
    assert_eq!((placement.offset, placement.execution), (0, Execution::SingleStepped));
}

#[test]
fn never_past_a_branch_target() {
    // mov %rdi, %rax; +3: push; …; jmp +3
    fallback("malloc", "4889f8 53 5b ebfc c3", "a branch leads back to +0x3");
    // The same for a target on the way, and a conditional branch.
    fallback("malloc", "4889f8 4889f1 53 5b 75f9 c3", "a branch leads back to +0x3");
    // A loop over the whole function.
    fallback("malloc", "4889f8 53 5b ebf9 c3", "back to the function's start");
    // A probe at the start does not mind.
    well("malloc", "53 5b ebfc c3", 0, "push %rbx");
    // A branch into the middle of an instruction is no obstacle to those before.
    well("malloc", "4889f8 53 48c7c000000000 75f8 5b c3", 3, "push %rbx");
    // A call of the function itself is a call, one of its second instruction is not.
    well("malloc", "4889f8 53 e8f7ffffff 5b c3", 3, "push %rbx");
    fallback("malloc", "4889f8 53 e8faffffff 5b c3", "a branch leads back to +0x3");
    // An indirect jump after the probe says nothing about the part before it.
    well("free", "4885ff 7404 53 5b ffe0 c3", 5, "push %rbx");
}

#[test]
fn never_past_what_does_not_continue() {
    fallback("malloc", "4889f8 c3 53", "ends the function");
    fallback("malloc", "4889f8 ffe0 53 c3", "does not simply continue");
    fallback("malloc", "4889f8 ffd0 53 c3", "does not simply continue");
    fallback("malloc", "4889f8 0f05 53 c3", "does not simply continue");
    fallback("malloc", "4889f8 0f0b 53 c3", "does not simply continue");
    fallback("malloc", "4889f8 cc 53 c3", "does not simply continue");
    fallback("malloc", "c3", "ends the function");
}

#[test]
fn freeing_functions_may_move_the_stack_pointer() {
    // glibc 2.31: endbr64; sub $24, %rsp; mov __free_hook@got, %rax; mov (%rax), %rax; test %rax, %rax; jne
    let placement = placed("free", "f30f1efa 4883ec18 488b0501020300 488b00 4885c0 7505 4883c418 c3");
    assert_eq!((placement.offset, placement.return_offset), (21, 24));
    assert_eq!((placement.instruction.as_str(), placement.execution), ("jne 0x101c", Execution::Emulated));
    assert_eq!(placement.reason, None);
    // A push that the kernel does not emulate (REX.W), then one that it does.
    let placement = placed("free", "4853 55 5d 5b c3");
    assert_eq!((placement.offset, placement.return_offset), (2, 8));
    // An allocating function may not: its return probe needs the return address at rsp.
    fallback("malloc", "4853 55 5d 5b c3", "changes rsp");
    // A large frame: sub $0x10000, %rsp
    fallback("free", "4881ec00000100 55 5d c3", "changes rsp");
    // sub $-128, %rsp moves it up.
    fallback("free", "4883ec80 55 5d c3", "changes rsp");
    // sub %rax, %rsp
    fallback("free", "4829c4 55 5d c3", "changes rsp");
    // Sums of frames that do not fit.
    fallback("free", "4881ecffff0000 6a01 55 c3", "moves the stack pointer too far");
    // and $-16, %rsp
    fallback("free", "4883e4f0 55 c3", "changes rsp");
}

#[test]
fn nops() {
    // Passed on the way to something better.
    well("malloc", "0f1f4000 53 5b c3", 4, "push %rbx");
    // A 5-byte nop is taken at the function's first instruction only, …
    let placement = placed("malloc", "0f1f440000 4883ec08 4883c408 c3");
    assert_eq!((placement.offset, placement.execution), (0, Execution::EmulatedSince616));
    assert!(placement.reason.unwrap().contains("changes rsp"));
    // … never later, also not as a fallback.
    well("malloc", "f30f1efa 0f1f440000 53 5b c3", 9, "push %rbx");
    fallback("malloc", "f30f1efa 0f1f440000 4883ec08 c3", "changes rsp");
    // Other nops later are fine.
    let placement = placed("malloc", "f30f1efa 0f1f4000 4883ec08 c3");
    assert_eq!((placement.offset, placement.execution), (4, Execution::EmulatedSince616));
    // Hot-patch padding: xchg %ax, %ax is refused by old kernels, so the next one is taken.
    let placement = placed("malloc", "6690 4883ec08 c3");
    assert_eq!((placement.offset, placement.execution), (2, Execution::SingleStepped));
    // The kernel would take this for a nop; it exchanges r8 and rax.
    well("malloc", "4990 53 5b c3", 2, "push %rbx");
}

#[test]
fn instructions_that_cannot_be_probed() {
    // int3, or an instruction that is refused, at the start, and no way past it.
    let unplaceable = |hex: &str| {
        let code = bytes(hex);
        let code = Code { bytes: &code, address: 0, complete: true };
        let malloc = function("malloc");
        place(code, malloc.role, malloc.arguments).unwrap_err().to_string()
    };
    assert!(unplaceable("cc c3").contains("int3"));
    assert!(unplaceable("f4 c3").contains("hlt"));
    assert!(unplaceable("0f05 c3").contains("syscall"));
    assert!(unplaceable("f0ff07 53 c3").contains("lock"));
    assert!(unplaceable("").contains("+0x0 cannot be decoded"));
    assert!(unplaceable("06").contains("+0x0 cannot be decoded"));
    assert!(unplaceable("ec 53 5b c3").contains("in"));
    // Past it: a load through the data segment that says so, then a push.
    well("malloc", "3e488b07 53 5b c3", 4, "push %rbx");
}

#[test]
fn code_that_is_not_known_to_its_end() {
    let malloc = function("malloc");
    let whole = bytes("f30f1efa 4154 55 53 5b 5d 415c c3");
    for length in 1..=whole.len() {
        let code = |complete| Code { bytes: &whole[..length], address: 0, complete };
        let placed = place(code(true), malloc.role, malloc.arguments);
        match length {
            1..4 => assert!(placed.is_err(), "{length}"),
            // Cut inside an instruction, behind which anything could follow; or before the first emulated one.
            4 | 5 | 11 => {
                let placement = placed.unwrap();
                assert_eq!(placement.offset, 0, "{length}");
                assert!(placement.reason.unwrap().contains("cannot be decoded"), "{length}");
            }
            _ => assert_eq!(placed.unwrap().offset, 4, "{length}"),
        }
        if length >= 4 {
            let placement = place(code(false), malloc.role, malloc.arguments).unwrap();
            assert_eq!((placement.offset, placement.execution), (0, Execution::SingleStepped));
        }
    }
    // If the first instruction is emulated nothing else matters.
    let code = Code { bytes: &[0x53, 0x06], address: 0, complete: false };
    assert_eq!(place(code, malloc.role, malloc.arguments).unwrap().offset, 0);
}

/// What holds for every placement, checked without the code under test.
fn check(code: &[u8], address: u64, role: Role, placement: &Placement) {
    let offset = usize::try_from(placement.offset).unwrap();
    let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    let mut branches = 0;
    while decoder.position() < offset {
        let passed = decoder.decode();
        assert!(!passed.is_invalid());
        match passed.flow_control() {
            FlowControl::Next => {}
            FlowControl::ConditionalBranch => branches += 1,
            other => panic!("{other:?} was passed"),
        }
    }
    assert_eq!(decoder.position(), offset, "not at the start of an instruction");
    let probed = decoder.decode();
    assert!(!probed.is_invalid());
    let bytes = &code[offset..offset + probed.len()];
    assert!(offset == 0 || !(bytes.len() == 5 && bytes.starts_with(&[0x0f, 0x1f])), "a 5-byte nop");
    if role == Role::Allocate {
        assert_eq!((placement.return_offset, branches), (0, 0));
    }
    match placement.execution {
        Execution::Emulated => {
            let first = bytes.iter().position(|byte| !matches!(byte, 0x40..=0x4f | 0x64 | 0x65 | 0x67 | 0xf2 | 0xf3));
            assert!(matches!(bytes[first.unwrap()], 0x50..=0x57 | 0x70..=0x7f | 0x90 | 0xe8 | 0xe9 | 0xeb | 0x0f));
            assert_eq!(placement.reason, None);
        }
        Execution::Refused(why) => panic!("{why}"),
        _ => assert!(!placement.reason.as_ref().unwrap().is_empty()),
    }
}

/// xorshift64: the same numbers in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

#[test]
fn random_bytes_are_survived() {
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let seeds: Vec<_> = [
        "4154 55 53 4889fb 4883ec10 803d461b140000 0f84f8010000 c3",
        "f30f1efa 4885ff 0f8403000000 55 5d 90 c3",
        "4889f0 48f7e2 4889c6 7005 e940b8f8ff 31c0 c3",
        "f30f1efa 4883ec18 488b0501020300 488b00 4885c0 7505 4883c418 c3",
        "f30f1efa 0f1f440000 53 5b c3",
    ]
    .map(bytes)
    .into();
    let mut placed = 0;
    let functions: Vec<_> = catalogue::family(Family::C).collect();
    for round in 0..60_000 {
        let mut code = if round % 2 == 0 {
            (0..random.next() % 48).map(|_| random.next() as u8).collect()
        } else {
            seeds[random.next() as usize % seeds.len()].clone()
        };
        for _ in 0..random.next() % 4 {
            let length = code.len();
            if let Some(byte) = code.get_mut(random.next() as usize % length.max(1)) {
                *byte = random.next() as u8;
            }
        }
        let function = functions[random.next() as usize % functions.len()];
        // Addresses at which offsets wrap around, too.
        let address = [0, 0x1000, u64::MAX - 8][round % 3];
        let complete = !random.next().is_multiple_of(8);
        let given = Code { bytes: &code, address, complete };
        if let Ok(placement) = place(given, function.role, function.arguments) {
            check(&code, address, function.role, &placement);
            placed += 1;
        }
    }
    assert!(placed > 20_000, "{placed}");
}

#[test]
fn every_exported_function_of_this_machines_libc() {
    let process = Process::open(std::process::id()).unwrap();
    let discovery = discover(&process).unwrap();
    let libc = &discovery.modules[discovery.sites[0].module];
    let source = Source::new(libc.file());
    let dynamic = source.dynamic().unwrap().unwrap();
    let (mut functions, mut emulated) = (0, 0);
    for symbol in dynamic.symbols.functions().filter(|symbol| symbol.size > 0 && !symbol.indirect) {
        let size = usize::try_from(symbol.size).unwrap();
        let (_, code) = libc.code(symbol.address, size).unwrap().unwrap();
        for name in ["posix_memalign", "free"] {
            let function = function(name);
            let given = Code { bytes: &code, address: symbol.address, complete: code.len() == size };
            if let Ok(placement) = place(given, function.role, function.arguments) {
                check(&code, symbol.address, function.role, &placement);
                functions += 1;
                emulated += usize::from(placement.execution == Execution::Emulated);
            }
        }
    }
    assert!(functions > 1000, "{functions}");
    // The search is worth something.
    assert!(emulated * 2 > functions, "{emulated} of {functions}");
}
