//! Turning preemption off while a program on a uprobe runs, on kernels where the programs of one CPU share a stack: see
//! `preempt` in the eBPF sources.

use aya::Btf;
use aya_obj::{Object, btf::BtfKind, generated::bpf_insn};
use memtrace_common::settings::calls;

use super::{release::Release, tracer::KernelError};

/// The first release that gives programs of the kprobe type stacks of their own ("bpf, x86: Support private stack in
/// jit").
const FIRST_RELEASE: Release = Release::new(6, 13);

/// `call`, and whom: a helper, or a function of the kernel (include/uapi/linux/bpf.h).
const CALL: u8 = 0x85;
const HELPER: u8 = 0;
const KERNEL_FUNCTION: u8 = 2;

/// The kernel functions that turn preemption off and on, by their numbers in its type information.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreemptGuard {
    disable: i32,
    enable: i32,
}

impl PreemptGuard {
    /// Finds the functions; `None` where they are not needed.
    ///
    /// # Errors
    /// They are needed and the kernel's type information is missing or lacks them.
    pub fn find(release: Option<Release>, btf: impl FnOnce() -> Option<Btf>) -> Result<Option<Self>, KernelError> {
        if release.is_some_and(|release| release < FIRST_RELEASE) {
            return Ok(None);
        }
        let btf = btf();
        let number = |name: &str| {
            let number = btf.as_ref()?.id_by_type_name_kind(name, BtfKind::Func).ok()?;
            i32::try_from(number).ok()
        };
        match (number("bpf_preempt_disable"), number("bpf_preempt_enable")) {
            (Some(disable), Some(enable)) => Ok(Some(Self { disable, enable })),
            _ => Err(KernelError::NoPreemptGuard),
        }
    }

    /// Puts the functions in place of the calls that stand for them.
    pub fn put_into(self, object: &mut Object) {
        let instructions = object.functions.values_mut().flat_map(|function| &mut function.instructions);
        for instruction in instructions.filter(|instruction| is_helper_call(instruction)) {
            let number = match instruction.imm {
                calls::PREEMPT_DISABLE => self.disable,
                calls::PREEMPT_ENABLE => self.enable,
                _ => continue,
            };
            instruction.set_src_reg(KERNEL_FUNCTION);
            instruction.imm = number;
        }
    }
}

fn is_helper_call(instruction: &bpf_insn) -> bool {
    instruction.code == CALL && instruction.src_reg() == HELPER
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::kernel::object::{OBJECT, program};

    const EXIT: u8 = 0x95;
    const JUMP: u8 = 0x05;
    const FAR_JUMP: u8 = 0x06;
    const LOAD_64: u8 = 0x18;
    const MOVE: u8 = 0xbf;
    const FRAME_POINTER: u8 = 10;

    fn is_call(instruction: &bpf_insn, number: i32) -> bool {
        is_helper_call(instruction) && instruction.imm == number
    }

    /// Loads from the stack, stores to it, or takes its address.
    fn uses_stack(instruction: &bpf_insn) -> bool {
        match instruction.code & 7 {
            1 => instruction.src_reg() == FRAME_POINTER,
            2 | 3 => instruction.dst_reg() == FRAME_POINTER,
            _ => instruction.code == MOVE && instruction.src_reg() == FRAME_POINTER,
        }
    }

    /// Where the program can go on after instruction `at`.
    fn next(instructions: &[bpf_insn], at: usize) -> Vec<usize> {
        let instruction = &instructions[at];
        let jump = |offset: isize| (at + 1).checked_add_signed(offset).unwrap();
        match instruction.code {
            EXIT => vec![],
            JUMP => vec![jump(instruction.off.into())],
            FAR_JUMP => vec![jump(instruction.imm as isize)],
            LOAD_64 => vec![at + 2],
            code if matches!(code & 7, 5 | 6) && code != CALL => vec![at + 1, jump(instruction.off.into())],
            _ => vec![at + 1],
        }
    }

    /// Every instruction that can be reached from `start`, without those behind one for which `stop` holds.
    fn reached(instructions: &[bpf_insn], start: usize, stop: impl Fn(&bpf_insn) -> bool) -> BTreeSet<usize> {
        let mut reached = BTreeSet::new();
        let mut todo = vec![start];
        while let Some(at) = todo.pop() {
            if reached.insert(at) && !stop(&instructions[at]) {
                todo.extend(next(instructions, at));
            }
        }
        reached
    }

    /// The compiler decides where it puts a value on the stack: see that it does so only where preemption is off.
    #[test]
    fn stacks_are_used_only_with_preemption_off() {
        let object = Object::parse(OBJECT).unwrap();
        let mut guarded = 0;
        for name in program::UPROBES {
            let function = &object.functions[&object.programs[name].function_key()];
            let instructions = &function.instructions;
            let turns_off = |instruction: &bpf_insn| is_call(instruction, calls::PREEMPT_DISABLE);
            let turns_on = |instruction: &bpf_insn| is_call(instruction, calls::PREEMPT_ENABLE);
            if !instructions.iter().any(turns_off) {
                assert!(!instructions.iter().any(uses_stack), "{name}");
                continue;
            }
            guarded += 1;
            // Before: what leads from the start to the call. (What does not lead there is the program without guard.)
            for at in reached(instructions, 0, turns_off) {
                let leads_there = reached(instructions, at, turns_off).iter().any(|at| turns_off(&instructions[*at]));
                assert!(!leads_there || !uses_stack(&instructions[at]), "{name}: instruction {at} is before the guard");
            }
            for on in (0..instructions.len()).filter(|at| turns_on(&instructions[*at])) {
                for at in reached(instructions, on, |_| false) {
                    assert!(!uses_stack(&instructions[at]), "{name}: instruction {at} is after the guard");
                }
            }
            assert!(instructions.iter().any(turns_on), "{name}");
        }
        assert_eq!(guarded, 5);
    }

    #[test]
    fn calls_are_replaced() {
        let mut object = Object::parse(OBJECT).unwrap();
        PreemptGuard { disable: 7, enable: 8 }.put_into(&mut object);
        let instructions: Vec<bpf_insn> =
            object.functions.values().flat_map(|function| function.instructions.clone()).collect();
        let of = |number| {
            instructions.iter().filter(|i| i.code == CALL && i.src_reg() == KERNEL_FUNCTION && i.imm == number).count()
        };
        assert!(of(7) > 0 && of(8) > 0, "{} and {}", of(7), of(8));
        assert!(!instructions.iter().any(|i| is_call(i, calls::PREEMPT_DISABLE) || is_call(i, calls::PREEMPT_ENABLE)));
    }

    #[test]
    fn needed_only_where_stacks_are_shared() {
        assert!(matches!(PreemptGuard::find(Some(Release::new(6, 12)), || None), Ok(None)));
        assert!(matches!(PreemptGuard::find(Some(Release::new(6, 13)), || None), Err(KernelError::NoPreemptGuard)));
        assert!(matches!(PreemptGuard::find(None, || None), Err(KernelError::NoPreemptGuard)));
    }
}
