//! What the kernel does with a probed instruction, judged by its bytes.
//!
//! From `arch/x86/kernel/uprobes.c`: `branch_setup_xol_ops`, `push_setup_xol_ops` (what is emulated), and
//! `uprobe_init_insn`, `is_prefix_bad`, the tables of good instructions and `insn_masking_exception` (what is refused),
//! Linux 5.10 to 6.18. Where versions differ, the answer is one that is right for all of them.

/// What the kernel does after the probe's program has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Execution {
    /// It does the instruction's work itself: one trap a hit.
    Emulated,
    /// As [`Self::Emulated`] since Linux 6.16, [`Self::SingleStepped`] before: a multi-byte nop.
    EmulatedSince616,
    /// It runs a copy of the instruction in single-step mode: a second trap.
    SingleStepped,
    /// It refuses to put a probe there, or a probe there would change what the program does.
    Refused(&'static str),
}

impl Execution {
    /// For people: whether the instruction is emulated.
    pub const fn emulated(self) -> &'static str {
        match self {
            Self::Emulated => "yes",
            Self::EmulatedSince616 => "since Linux 6.16",
            Self::SingleStepped | Self::Refused(_) => "no",
        }
    }
}

/// Multi-byte nops that are emulated since Linux 6.16: `x86_nops` of arch/x86/kernel/alternative.c (those of 9 to 11
/// bytes have a prefix that is refused).
const NOPS: [&[u8]; 6] = [
    &[0x0f, 0x1f, 0x00],
    &[0x0f, 0x1f, 0x40, 0x00],
    &[0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00],
    &[0x0f, 0x1f, 0x80, 0x00, 0x00, 0x00, 0x00],
    &[0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00],
    &[0x0f, 0x1f, 0x44, 0x00, 0x00],
];

/// One-byte opcodes that 64-bit programs may not be probed at: invalid ones, port input and output, interrupts, far
/// jumps and calls, hlt, cli, sti. 0x62 (EVEX) and 0xd5 (REX2) start instructions that uprobes does not know.
const BAD: [u8; 40] = [
    0x06, 0x07, 0x0e, 0x16, 0x17, 0x1e, 0x1f, 0x27, 0x2f, 0x37, 0x3f, 0x60, 0x61, 0x62, 0x6c, 0x6d, 0x6e, 0x6f, 0x82,
    0x9a, 0xcc, 0xcd, 0xce, 0xcf, 0xd4, 0xd5, 0xd6, 0xe4, 0xe5, 0xe6, 0xe7, 0xea, 0xec, 0xed, 0xee, 0xef, 0xf1, 0xf4,
    0xfa, 0xfb,
];

/// Second bytes of two-byte opcodes likewise: system instructions, system calls, ud2, and group 15.
const BAD_TWO_BYTE: [u8; 16] =
    [0x00, 0x01, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0b, 0x0c, 0x30, 0x34, 0x35, 0x37, 0x78, 0x79, 0xae];

const OPERAND_SIZE: u8 = 0x66;

/// Whether this is a 5-byte nop of any encoding, which Linux 6.18 and later rewrite to a call that pushes its return
/// address (`can_optimize`): below rsp, where the red zone is in use once the function has begun.
pub fn is_five_byte_nop(instruction: &[u8]) -> bool {
    instruction.len() == 5 && matches!(split(instruction), Some(Parts { opcode: [0x90] | [0x0f, 0x1f, ..], .. }))
}

struct Parts<'a> {
    prefixes: &'a [u8],
    /// Directly before the opcode, or it has no effect.
    rex: Option<u8>,
    /// The rest.
    opcode: &'a [u8],
}

fn split(instruction: &[u8]) -> Option<Parts<'_>> {
    let is_prefix = |byte: &u8| matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3);
    let length = instruction.iter().position(|byte| !is_prefix(byte))?;
    let (prefixes, rest) = instruction.split_at(length);
    let (rex, opcode) = match rest {
        [rex @ 0x40..=0x4f, opcode @ ..] => (Some(*rex), opcode),
        opcode => (None, opcode),
    };
    (!opcode.is_empty()).then_some(Parts { prefixes, rex, opcode })
}

/// What the kernel does with the one whole instruction in `instruction`.
pub fn execution(instruction: &[u8]) -> Execution {
    use Execution::{Emulated, EmulatedSince616, Refused, SingleStepped};
    let Some(Parts { prefixes, rex, opcode }) = split(instruction) else {
        return Refused("it is not an instruction");
    };
    if prefixes.iter().any(|prefix| matches!(prefix, 0x26 | 0x2e | 0x36 | 0x3e | 0xf0)) {
        return Refused("uprobes refuse its segment, branch-hint or lock prefix");
    }
    let branch = if prefixes.contains(&OPERAND_SIZE) {
        Refused("uprobes refuse branches with an operand-size prefix")
    } else {
        Emulated
    };
    match *opcode {
        [0x50..=0x57] if prefixes.is_empty() && matches!(rex, None | Some(0x41)) => Emulated,
        // `push_setup_xol_ops` knows no other prefix.
        [0x50..=0x57] => SingleStepped,
        // With REX.B this exchanges r8 and rax, but the kernel looks at the opcode alone and does nothing: a probe
        // there changes what the program computes (seen on Linux 6.18).
        [0x90] if rex.is_some_and(|rex| rex & 1 != 0) => Refused("uprobes take this exchange for a nop"),
        [0x90] if prefixes.contains(&OPERAND_SIZE) => Refused("kernels before Linux 6.2 refuse a nop with a prefix"),
        [0x90] if prefixes.is_empty() && rex.is_none() => Emulated,
        [0x70..=0x7f | 0xe8 | 0xe9 | 0xeb, ..] | [0x0f, 0x80..=0x8f, ..] => branch,
        [0x8e, modrm, ..] if modrm >> 3 & 7 == 2 => Refused("uprobes refuse to load the stack segment"),
        [0x0f, second, ..] if BAD_TWO_BYTE.contains(&second) => Refused("uprobes refuse this system instruction"),
        [0x0f, ..] if NOPS.contains(&instruction) => EmulatedSince616,
        // The kernel looks up the opcode after a VEX prefix among the one-byte opcodes.
        [0xc5, _, inner, ..] | [0xc4, _, _, inner, ..] if BAD.contains(&inner) => {
            Refused("uprobes do not know this vector instruction")
        }
        [first, ..] if BAD.contains(&first) => Refused("uprobes refuse this instruction"),
        // A prefix after REX: nothing emits this, and decoders differ about it.
        [0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3, ..] => {
            Refused("its prefixes are in an odd order")
        }
        _ => SingleStepped,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Execution::{Emulated, EmulatedSince616, SingleStepped};

    fn refused(instruction: &[u8]) -> bool {
        matches!(execution(instruction), Execution::Refused(_))
    }

    #[test]
    fn emulated_instructions() {
        for register in 0x50..=0x57 {
            assert_eq!(execution(&[register]), Emulated);
            assert_eq!(execution(&[0x41, register]), Emulated);
            // Prefixes without a meaning to push.
            assert_eq!(execution(&[0x48, register]), SingleStepped);
            assert_eq!(execution(&[0x66, register]), SingleStepped);
            assert_eq!(execution(&[0xf2, register]), SingleStepped);
        }
        for condition in 0..16 {
            assert_eq!(execution(&[0x70 | condition, 5]), Emulated);
            assert_eq!(execution(&[0x0f, 0x80 | condition, 5, 0, 0, 0]), Emulated);
            assert!(refused(&[0x66, 0x70 | condition, 5]));
            assert!(refused(&[0x66, 0x0f, 0x80 | condition, 5, 0, 0, 0]));
            assert!(refused(&[0x2e, 0x70 | condition, 5]), "branch hint");
            assert!(refused(&[0x3e, 0x70 | condition, 5]), "branch hint");
        }
        for branch in [&[0xeb, 1][..], &[0xe9, 1, 0, 0, 0], &[0xe8, 1, 0, 0, 0], &[0xf2, 0xe9, 1, 0, 0, 0]] {
            assert_eq!(execution(branch), Emulated);
            assert!(refused(&[&[0x66], branch].concat()));
        }
    }

    #[test]
    fn nops() {
        assert_eq!(execution(&[0x90]), Emulated);
        for nop in NOPS {
            assert_eq!(execution(nop), EmulatedSince616, "{nop:x?}");
        }
        assert!(refused(&[0x66, 0x90]));
        assert!(refused(&[0x41, 0x90]), "xchg r8d, eax");
        assert!(refused(&[0x49, 0x90]), "xchg r8, rax");
        assert_eq!(execution(&[0xf3, 0x90]), SingleStepped, "pause");
        assert!(refused(&[0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0]));
        // A nop with an odd operand is no nop that every kernel knows.
        assert_eq!(execution(&[0x0f, 0x1f, 0xc0]), SingleStepped);

        assert!(is_five_byte_nop(&[0x0f, 0x1f, 0x44, 0, 0]));
        assert!(is_five_byte_nop(&[0x66, 0x0f, 0x1f, 0x40, 0]));
        assert!(is_five_byte_nop(&[0x66, 0x66, 0x66, 0x66, 0x90]));
        assert!(!is_five_byte_nop(&[0x0f, 0x1f, 0x40, 0]));
        assert!(!is_five_byte_nop(&[0xe9, 0, 0, 0, 0]));
    }

    #[test]
    fn single_stepped_instructions() {
        for instruction in [
            &[0xf3, 0x0f, 0x1e, 0xfa][..],               // endbr64
            &[0x48, 0x85, 0xff],                         // test rdi, rdi
            &[0x48, 0x83, 0xec, 0x18],                   // sub rsp, 24
            &[0x48, 0x89, 0xfb],                         // mov rbx, rdi
            &[0x48, 0x8d, 0x77, 0xf0],                   // lea rsi, [rdi-16]
            &[0xc3],                                     // ret
            &[0xf3, 0xc3],                               // rep ret
            &[0x80, 0x3d, 1, 2, 3, 4, 0],                // cmp byte [rip+…], 0
            &[0x64, 0x48, 0x8b, 0x04, 0x25, 0, 0, 0, 0], // mov rax, fs:0
            &[0xff, 0x25, 0, 0, 0, 0],                   // jmp [rip]
            &[0xff, 0x75, 0x08],                         // push [rbp+8]
            &[0x6a, 0x01],                               // push 1
            &[0xe3, 0x05],                               // jrcxz
        ] {
            assert_eq!(execution(instruction), SingleStepped, "{instruction:x?}");
        }
    }

    #[test]
    fn refused_instructions() {
        for instruction in [
            &[0xcc][..],
            &[0xcd, 0x80],
            &[0xf4],
            &[0xe4, 1],
            &[0xec],
            &[0x6c],
            &[0xfa],
            &[0xf0, 0x48, 0x0f, 0xb1, 0x0f], // lock cmpxchg
            &[0x0f, 0x05],                   // syscall
            &[0x0f, 0x0b],                   // ud2
            &[0x62, 0xf1, 0x7c, 0x48, 0x58, 0xc1],
            &[0xc5, 0xfe, 0x6f, 0x07], // vmovdqu
            &[0x8e, 0xd0],             // mov ss, eax
            &[0x48, 0x66, 0x90],
            &[0x66],
            &[],
        ] {
            assert!(refused(instruction), "{instruction:x?}");
        }
    }
}
