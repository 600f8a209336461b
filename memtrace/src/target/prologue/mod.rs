//! Where in a function its probe goes: the cheapest instruction at which everything the handlers need is still there.
//!
//! A probe costs one trap if the kernel can emulate the probed instruction and two if it has to single-step it
//! ([`Execution`]), so the search walks from the entry to the first emulated instruction. It goes on only while what
//! it passes leaves the arguments, the stack pointer, the return address and rbp (the caller's frame pointer) as they
//! were at the entry, and writes no memory: a write could be the very act of freeing. Every call has to hit the probe
//! exactly once, so the search stops at branches too:
//!
//! - It never goes past a branch target: code that comes back there would hit the probe again. The whole function is
//!   decoded to find them; a function that cannot be decoded to its end keeps its probe at the entry.
//! - It goes past a conditional branch only in a freeing function, and only if the branch leads straight to a `ret`:
//!   on that path nothing is freed. (`free(NULL)` is the usual case.) A probe *on* a conditional branch is hit on both
//!   ways and always fine.
//! - It never goes past anything else that does not simply continue: jumps, calls, returns, traps.
//!
//! An indirect jump is a switch or a tail call. Its targets are unknown, but they cannot be in the part that was
//! walked: the walk does not pass the jump, so the targets of interest would lie before it, between the entry and the
//! probe, and a compiler that lets a switch lead back into the function's first block, where nothing has been saved
//! yet, makes that block a loop, which other (direct) branches of the function show.
//!
//! A return probe replaces the word at rsp at the moment when the entry probe is hit, so allocating functions need
//! rsp to point at the return address there. Freeing functions have no return probe; the walk may pass instructions
//! that move rsp down by a known amount, which the site's cookie then tells the handler.

mod uprobe;

use std::collections::BTreeSet;

use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Formatter as _, GasFormatter, Instruction, InstructionInfoFactory, Mnemonic,
    OpAccess, OpKind, Register,
};
use memtrace_common::site::Arg;

use super::function::{Arguments, Role};
pub use uprobe::Execution;

/// A function's code.
#[derive(Clone, Copy, Debug)]
pub struct Code<'a> {
    /// From its first instruction.
    pub bytes: &'a [u8],
    /// Address of the first instruction, as the module's symbols number it (for the text of instructions only).
    pub address: u64,
    /// Whether `bytes` is all of the function.
    pub complete: bool,
}

/// Where a probe goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Bytes from the function's start to the probed instruction.
    pub offset: u64,
    /// That instruction, in AT&T syntax.
    pub instruction: String,
    /// What the kernel does with it.
    pub execution: Execution,
    /// Bytes from rsp, at the probed instruction, up to the return address; 0 for allocating functions.
    pub return_offset: u16,
    /// Why no better instruction could be taken; `None` if this is as good as it gets.
    pub reason: Option<String>,
}

/// Why no probe can be placed in a function at all: one sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no instruction at its start can be probed: {0}")]
pub struct Unplaceable(pub String);

/// Chooses the instruction of a function to probe.
///
/// # Errors
/// If the kernel would refuse every instruction that could be taken.
pub fn place(code: Code<'_>, role: Role, arguments: Arguments) -> Result<Placement, Unplaceable> {
    Walk::new(code, role, arguments).run()
}

/// An instruction that could be taken.
struct Candidate {
    offset: usize,
    instruction: Instruction,
    execution: Execution,
    return_offset: u16,
}

struct Walk<'a> {
    code: Code<'a>,
    role: Role,
    /// Registers that must keep their values.
    kept: Vec<Register>,
    /// Offsets inside the function that its branches lead to, or why they are not known.
    targets: Result<BTreeSet<usize>, String>,
    info: InstructionInfoFactory,
}

impl<'a> Walk<'a> {
    fn new(code: Code<'a>, role: Role, arguments: Arguments) -> Self {
        let mut kept = vec![Register::RSP, Register::RBP];
        kept.extend(arguments.used().filter_map(register));
        Self { code, role, kept, targets: branch_targets(code), info: InstructionInfoFactory::new() }
    }

    fn run(mut self) -> Result<Placement, Unplaceable> {
        let mut offset = 0;
        let mut return_offset = 0;
        let (mut emulated, mut nop, mut stepped) = (None, None, None);
        let mut refused = None;
        let reason = loop {
            let Some(instruction) = decode(self.code, offset) else {
                break format!("the instruction at +{offset:#x} cannot be decoded");
            };
            if offset != 0 {
                match &self.targets {
                    Err(reason) => break reason.clone(),
                    Ok(targets) if targets.contains(&offset) => break format!("a branch leads back to +{offset:#x}"),
                    Ok(_) => {}
                }
            }
            let bytes = &self.code.bytes[offset..offset + instruction.len()];
            let execution = uprobe::execution(bytes);
            let candidate = Candidate { offset, instruction, execution, return_offset };
            match execution {
                // Only the first instruction: see `is_five_byte_nop`.
                _ if offset != 0 && uprobe::is_five_byte_nop(bytes) => {}
                Execution::Emulated => emulated = Some(candidate),
                Execution::EmulatedSince616 => nop = nop.or(Some(candidate)),
                Execution::SingleStepped => stepped = stepped.or(Some(candidate)),
                Execution::Refused(why) => {
                    refused = refused.or_else(|| Some(format!("`{}`: {why}", self.text(&instruction))));
                }
            }
            if execution == Execution::Emulated && !self.leads_to_return(&instruction) {
                break String::new();
            }
            if offset == 0 && self.targets.as_ref().is_ok_and(|targets| targets.contains(&0)) {
                break "a branch leads back to the function's start".into();
            }
            match self.pass(&instruction, return_offset) {
                Ok(moved) => return_offset = moved,
                Err(why) => break format!("`{}` at +{offset:#x} {why}", self.text(&instruction)),
            }
            offset += instruction.len();
        };
        let Some(chosen) = emulated.or(nop).or(stepped) else {
            return Err(Unplaceable(refused.unwrap_or(reason)));
        };
        Ok(Placement {
            offset: chosen.offset as u64,
            instruction: self.text(&chosen.instruction),
            execution: chosen.execution,
            return_offset: chosen.return_offset,
            reason: (chosen.execution != Execution::Emulated).then_some(reason),
        })
    }

    /// Whether the walk may go past `instruction`: the new distance from rsp to the return address, or what forbids it.
    fn pass(&mut self, instruction: &Instruction, return_offset: u16) -> Result<u16, String> {
        match instruction.flow_control() {
            // What only the kernel may do (hlt, in, out) ends a program.
            FlowControl::Next if instruction.is_privileged() => return Err("does not simply continue".into()),
            FlowControl::Next => {}
            FlowControl::ConditionalBranch if self.leads_to_return(instruction) => return Ok(return_offset),
            FlowControl::ConditionalBranch => return Err("may leave the straight way".into()),
            FlowControl::Return => return Err("ends the function".into()),
            _ => return Err("does not simply continue".into()),
        }
        let moved = if self.role == Role::Free { stack_growth(instruction) } else { None };
        let info = self.info.info(instruction);
        let writes = |access| {
            matches!(access, OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite)
        };
        for used in info.used_registers() {
            let register = used.register().full_register();
            if writes(used.access()) && self.kept.contains(&register) && !(register == Register::RSP && moved.is_some())
            {
                return Err(format!("changes {}", format!("{register:?}").to_lowercase()));
            }
        }
        // What a push writes is below the return address.
        if moved.is_none() && info.used_memory().iter().any(|memory| writes(memory.access())) {
            return Err("writes memory".into());
        }
        return_offset.checked_add(moved.unwrap_or(0)).ok_or_else(|| "moves the stack pointer too far".into())
    }

    /// Whether this is a conditional branch of a freeing function whose taken way is an immediate return.
    fn leads_to_return(&self, instruction: &Instruction) -> bool {
        self.role == Role::Free
            && instruction.flow_control() == FlowControl::ConditionalBranch
            && target(self.code, instruction)
                .and_then(|target| decode(self.code, target))
                .is_some_and(|there| there.mnemonic() == Mnemonic::Ret && there.op_count() == 0)
    }

    fn text(&self, instruction: &Instruction) -> String {
        let mut formatter = GasFormatter::new();
        let options = formatter.options_mut();
        options.set_space_after_operand_separator(true);
        options.set_uppercase_hex(false);
        options.set_branch_leading_zeros(false);
        let mut text = String::new();
        formatter.format(instruction, &mut text);
        text
    }
}

/// Bytes by which an instruction moves rsp down and does nothing else that matters: a push of a register or constant,
/// or `sub $N, %rsp`.
fn stack_growth(instruction: &Instruction) -> Option<u16> {
    let growth = match instruction.mnemonic() {
        Mnemonic::Push => i64::from(instruction.stack_pointer_increment()).checked_neg()?,
        Mnemonic::Sub if instruction.op0_register() == Register::RSP && is_immediate(instruction.op1_kind()) => {
            instruction.immediate(1) as i64
        }
        _ => return None,
    };
    u16::try_from(growth).ok()
}

fn is_immediate(kind: OpKind) -> bool {
    matches!(kind, OpKind::Immediate8to64 | OpKind::Immediate32to64)
}

/// The 64-bit register of an argument (System V AMD64 ABI, 3.2.3).
fn register(argument: Arg) -> Option<Register> {
    match argument {
        Arg::A0 => Some(Register::RDI),
        Arg::A1 => Some(Register::RSI),
        Arg::A2 => Some(Register::RDX),
        Arg::A3 => Some(Register::RCX),
        Arg::A4 => Some(Register::R8),
        Arg::A5 => Some(Register::R9),
        Arg::Constant | Arg::None => None,
    }
}

/// The whole instruction at an offset.
fn decode(code: Code<'_>, offset: usize) -> Option<Instruction> {
    let bytes = code.bytes.get(offset..)?;
    let mut decoder = Decoder::with_ip(64, bytes, code.address.wrapping_add(offset as u64), DecoderOptions::NONE);
    if !decoder.can_decode() {
        return None;
    }
    let instruction = decoder.decode();
    (!instruction.is_invalid()).then_some(instruction)
}

/// Offset that a direct branch or call leads to, if it is inside the function.
fn target(code: Code<'_>, instruction: &Instruction) -> Option<usize> {
    if !matches!(instruction.op0_kind(), OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64) {
        return None;
    }
    let offset = usize::try_from(instruction.near_branch_target().wrapping_sub(code.address)).ok()?;
    (offset < code.bytes.len()).then_some(offset)
}

/// Every offset inside the function that one of its own branches leads to, or why they cannot be known.
fn branch_targets(code: Code<'_>) -> Result<BTreeSet<usize>, String> {
    if !code.complete {
        return Err("the function's length is unknown, so a branch could lead back behind its start".into());
    }
    let mut targets = BTreeSet::new();
    let mut offset = 0;
    while offset < code.bytes.len() {
        let Some(instruction) = decode(code, offset) else {
            return Err(format!("the function cannot be decoded at +{offset:#x}, so a branch could lead back"));
        };
        // A call of the function's own start is a call like any other.
        let own_call = instruction.flow_control() == FlowControl::Call;
        if let Some(target) = target(code, &instruction).filter(|target| !(own_call && *target == 0)) {
            targets.insert(target);
        }
        offset += instruction.len();
    }
    Ok(targets)
}

#[cfg(test)]
mod tests;
