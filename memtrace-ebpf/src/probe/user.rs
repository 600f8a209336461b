//! The user registers saved at the kernel's entry, from which tracepoints walk.

use aya_ebpf::helpers::{
    bpf_get_current_pid_tgid, bpf_probe_read_kernel,
    generated::{bpf_get_current_task_btf, bpf_task_pt_regs},
};

use memtrace_common::process::ProcessState;

use crate::{maps, unwind::Start};

/// Words of `struct pt_regs` on x86-64 (arch/x86/include/asm/ptrace.h).
pub const REGISTERS: usize = 21;

/// Positions in it.
mod position {
    pub const RBP: usize = 4;
    pub const RBX: usize = 5;
    pub const R10: usize = 7;
    pub const R8: usize = 9;
    pub const RDX: usize = 12;
    pub const RSI: usize = 13;
    pub const RDI: usize = 14;
    pub const ORIG_RAX: usize = 15;
    pub const RIP: usize = 16;
    pub const RSP: usize = 19;
}

/// The registers.
pub struct User {
    words: [u64; REGISTERS],
}

impl User {
    /// Reads them from `regs` in kernel memory.
    #[inline(always)]
    pub fn read(regs: u64) -> Option<Self> {
        // SAFETY: the helper checks the address.
        let words = unsafe { bpf_probe_read_kernel(regs as *const [u64; REGISTERS]) }.ok()?;
        Some(Self { words })
    }

    /// Those of the current thread at its last entry into the kernel.
    #[inline(always)]
    pub fn of_current() -> Option<Self> {
        // SAFETY: the current task always has registers saved; the second helper takes what the first returns.
        let regs = unsafe { bpf_task_pt_regs(bpf_get_current_task_btf()) };
        Self::read(regs as u64)
    }

    /// The first five arguments of the system call.
    #[inline(always)]
    pub fn arguments(&self) -> [u64; 5] {
        [
            self.words[position::RDI],
            self.words[position::RSI],
            self.words[position::RDX],
            self.words[position::R10],
            self.words[position::R8],
        ]
    }

    /// Where a walk starts: as if the current instruction were a caller. Return addresses point behind an instruction, an
    /// interrupted one's address points at it: 1 more makes up for the byte that is taken off when it is looked up. After
    /// a system call the address points behind the instruction.
    #[inline(always)]
    pub fn start(&self) -> Start {
        let in_call = self.words[position::ORIG_RAX] as i64 >= 0;
        Start {
            pc: self.words[position::RIP].wrapping_add(u64::from(!in_call)),
            sp: self.words[position::RSP],
            fp: self.words[position::RBP],
            bx: self.words[position::RBX],
        }
    }
}

/// The current thread's process, if it is traced and the trace runs.
#[inline(always)]
pub fn traced<'a>() -> Option<&'a ProcessState> {
    let process = current()?;
    maps::running().then_some(process)
}

/// The current thread's process, if it is traced. What happens in the kernel can't be filtered by probes, so that processes have to
/// be told apart.
#[inline(always)]
pub fn current<'a>() -> Option<&'a ProcessState> {
    if maps::any_process() {
        return None;
    }
    // SAFETY: a map value, which lasts for as long as the program runs; its words are read whole.
    maps::process((bpf_get_current_pid_tgid() >> 32) as u32).map(|process| unsafe { &*process })
}
