//! What a function calls: whether it is only another name for a function that is probed.

use std::{
    cell::RefCell,
    collections::{BTreeSet, HashMap},
};

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};

use crate::target::Module;

/// Longest function that is looked at.
const MAX_FUNCTION: usize = 64 * 1024;
/// An `endbr64` and a jump.
const BEGINNING: usize = 9;

/// What the code of a function shows.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Inner {
    /// Where its first instruction that does something jumps to.
    pub jump: Option<u64>,
    /// The functions that it calls or jumps to.
    pub calls: BTreeSet<u64>,
    /// Whether it uses variables of the thread, as a function does that takes blocks from a cache by itself.
    pub thread_local: bool,
}

impl Inner {
    /// Decodes a function. `slots` names the functions behind the words of the dynamic loader, `named` tells their
    /// addresses.
    pub fn of(module: &Module, address: u64, size: u64, names: &Names<'_>) -> Self {
        let mut inner = Self::default();
        // Of a function without a size only what it begins with is certain.
        let size = if size == 0 { BEGINNING } else { usize::try_from(size).unwrap_or(MAX_FUNCTION).min(MAX_FUNCTION) };
        let Ok(Some((_, bytes))) = module.code(address, size) else { return inner };
        let inside = |target: u64| target.wrapping_sub(address) < bytes.len() as u64;
        let mut first = true;
        for instruction in Decoder::with_ip(64, &bytes, address, DecoderOptions::NONE) {
            if instruction.is_invalid() {
                break;
            }
            if instruction.segment_prefix() == Register::FS && !is_canary(&instruction) {
                inner.thread_local = true;
            }
            let target = match instruction.flow_control() {
                FlowControl::UnconditionalBranch
                | FlowControl::ConditionalBranch
                | FlowControl::Call
                | FlowControl::IndirectBranch
                | FlowControl::IndirectCall => names.target(module, &instruction),
                _ => None,
            };
            let jump =
                matches!(instruction.flow_control(), FlowControl::UnconditionalBranch | FlowControl::IndirectBranch);
            if let Some(target) = target.filter(|target| !inside(*target)) {
                inner.calls.insert(target);
                if first && jump {
                    inner.jump = Some(target);
                }
            }
            first &= matches!(instruction.mnemonic(), Mnemonic::Endbr64 | Mnemonic::Nop);
        }
        inner
    }
}

/// Names that lead to functions of a module.
pub struct Names<'a> {
    /// Functions by the address of the word that the dynamic loader puts their address into.
    slots: &'a HashMap<u64, Vec<u8>>,
    /// Addresses of the module's own functions that other modules can refer to.
    exported: &'a HashMap<Vec<u8>, u64>,
    /// The entries of the procedure linkage table that were looked at, and what is not one.
    entries: RefCell<HashMap<u64, Option<u64>>>,
}

/// Most of these: an allocator calls some hundred functions.
const MAX_ENTRIES: usize = 1 << 14;

impl<'a> Names<'a> {
    pub fn new(slots: &'a HashMap<u64, Vec<u8>>, exported: &'a HashMap<Vec<u8>, u64>) -> Self {
        Self { slots, exported, entries: RefCell::default() }
    }

    /// The function that a branch or call leads to, through an entry of the procedure linkage table as well.
    fn target(&self, module: &Module, instruction: &Instruction) -> Option<u64> {
        if let Some(slot) = slot(instruction) {
            return self.behind(slot);
        }
        if !matches!(instruction.op0_kind(), OpKind::NearBranch64) {
            return None;
        }
        let target = instruction.near_branch_target();
        if self.slots.is_empty() {
            return Some(target);
        }
        let mut entries = self.entries.borrow_mut();
        if entries.len() >= MAX_ENTRIES && !entries.contains_key(&target) {
            return Some(target);
        }
        Some(entries.entry(target).or_insert_with(|| self.linkage(module, target)).unwrap_or(target))
    }

    /// The function behind an entry of the procedure linkage table.
    fn linkage(&self, module: &Module, address: u64) -> Option<u64> {
        /// `endbr64; bnd jmp *slot(%rip)` and what fills it up.
        const ENTRY: usize = 16;
        let (_, bytes) = module.code(address, ENTRY).ok()??;
        let mut instructions = Decoder::with_ip(64, &bytes, address, DecoderOptions::NONE).into_iter();
        let mut instruction = instructions.next()?;
        if instruction.mnemonic() == Mnemonic::Endbr64 {
            instruction = instructions.next()?;
        }
        (instruction.flow_control() == FlowControl::IndirectBranch).then(|| self.behind(slot(&instruction)?))?
    }

    fn behind(&self, slot: u64) -> Option<u64> {
        self.exported.get(self.slots.get(&slot)?).copied()
    }
}

/// The word that an indirect branch or call reads its target from.
fn slot(instruction: &Instruction) -> Option<u64> {
    instruction.is_ip_rel_memory_operand().then(|| instruction.ip_rel_memory_address())
}

/// The stack protector's value, at `fs:0x28` (System V ABI for AMD64, as GCC uses it).
fn is_canary(instruction: &Instruction) -> bool {
    instruction.memory_base() == Register::None
        && instruction.memory_index() == Register::None
        && instruction.memory_displacement64() == 0x28
}
