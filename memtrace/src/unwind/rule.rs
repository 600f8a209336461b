//! One decoded row of call frame information to one [`Row`].

use gimli::{
    CfaRule as Cfa, Encoding, EndianSlice, LittleEndian, Operation, Register, RegisterRule, UnitOffset,
    UnwindContextStorage, UnwindExpression, UnwindSection, UnwindTableRow, X86_64,
};
use memtrace_common::unwind::{CfaRule, RbpRule, RbxRule, Row, ucontext};

pub(super) type Reader<'a> = EndianSlice<'a, LittleEndian>;

/// Longest expression looked at, bytes. The longest that has a [`CfaRule`] is that of the procedure linkage table, 11.
const MAX_EXPRESSION: usize = 32;
/// Most operations of an expression looked at; that of the procedure linkage table has 9.
const MAX_OPERATIONS: usize = 10;

/// The type of plain addresses.
const GENERIC: UnitOffset = UnitOffset(0);

/// Why a row is [`CfaRule::Unsupported`]; its number is the row's `cfa_offset`.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// The CFA is found from a register that is not unwound (r10 while a stack is being realigned, rax, rsi or r11 in
    /// assembly).
    Register = 0,
    /// The CFA is found by an expression that has no [`CfaRule`].
    Expression = 1,
    /// An offset is no multiple of 8, or out of range.
    Offset = 2,
    /// The return address is not at CFA - 8 (in a register: vfork).
    ReturnAddress = 3,
    /// The caller's rsp is not the CFA (longjmp).
    Rsp = 4,
    /// The caller's rbp is in another register, or found by an expression that has no [`RbpRule`].
    Rbp = 5,
    /// A signal frame with another layout than the kernel's for x86-64.
    SignalFrame = 6,
    /// The function's unwind information is damaged.
    Damaged = 7,
}

impl Reason {
    /// Every value, in order.
    pub const ALL: [Self; 8] = [
        Self::Register,
        Self::Expression,
        Self::Offset,
        Self::ReturnAddress,
        Self::Rsp,
        Self::Rbp,
        Self::SignalFrame,
        Self::Damaged,
    ];

    /// The row that stands for it.
    pub(super) fn row(self, pc: u32) -> Row {
        Row { cfa_offset: i32::from(self as u8), ..bare(pc, CfaRule::Unsupported) }
    }

    /// What a row of an [`CfaRule::Unsupported`] rule stands for; `None` for other rules.
    pub fn of(row: Row) -> Option<Self> {
        if row.cfa != CfaRule::Unsupported {
            return None;
        }
        Self::ALL.get(usize::try_from(row.cfa_offset).ok()?).copied()
    }

    /// As a phrase that can follow "the rows are not usable:".
    pub const fn text(self) -> &'static str {
        match self {
            Self::Register => "frame address found from another register than rsp, rbp and rbx",
            Self::Expression => "frame address found by an unusual expression",
            Self::Offset => "offset odd or out of range",
            Self::ReturnAddress => "return address in an unusual place",
            Self::Rsp => "caller's stack pointer in an unusual place",
            Self::Rbp => "caller's rbp in an unusual place",
            Self::SignalFrame => "signal frame of an unusual layout",
            Self::Damaged => "damaged",
        }
    }
}

/// A row whose rule has no parameters.
pub(super) fn bare(pc: u32, cfa: CfaRule) -> Row {
    Row { pc, cfa, cfa_offset: 0, rbp: RbpRule::Same, rbp_offset: 0, rbx: RbxRule::SAME }
}

/// What the rows of one function have in common.
pub(super) struct Converter<'s, S> {
    pub section: &'s S,
    pub encoding: Encoding,
    /// Whether its callers were interrupted rather than calling (augmentation `S`).
    pub signal: bool,
}

impl<'d, S: UnwindSection<Reader<'d>>> Converter<'_, S> {
    /// Converts a row that begins at `pc`.
    pub fn convert<C: UnwindContextStorage<usize>>(&self, pc: u32, row: &UnwindTableRow<usize, C>) -> Row {
        self.try_convert(pc, row).unwrap_or_else(|reason| reason.row(pc))
    }

    fn try_convert<C: UnwindContextStorage<usize>>(
        &self,
        pc: u32,
        row: &UnwindTableRow<usize, C>,
    ) -> Result<Row, Reason> {
        let return_address = row.register(X86_64::RA);
        if return_address == Some(RegisterRule::Undefined) {
            return Ok(bare(pc, CfaRule::End));
        }
        if self.is_signal_frame(row) {
            return Ok(bare(pc, CfaRule::Signal));
        }
        if self.signal {
            // The frame below must be looked up with its very pc, which holds for CfaRule::Signal only.
            return Err(Reason::SignalFrame);
        }
        if return_address != Some(RegisterRule::Offset(-8)) {
            return Err(Reason::ReturnAddress);
        }
        if !matches!(row.register(X86_64::RSP), None | Some(RegisterRule::ValOffset(0))) {
            return Err(Reason::Rsp);
        }
        let (cfa, cfa_offset) = self.cfa(row.cfa())?;
        let (rbp, rbp_offset) = self.rbp(row.register(X86_64::RBP))?;
        let rbx = rbx(row.register(X86_64::RBX));
        let row = Row { pc, cfa, cfa_offset, rbp, rbp_offset, rbx };
        if row.fits() { Ok(row) } else { Err(Reason::Offset) }
    }

    fn cfa(&self, rule: &Cfa<usize>) -> Result<(CfaRule, i32), Reason> {
        let expression = match rule {
            Cfa::RegisterAndOffset { register: X86_64::RSP, offset } => return Ok((CfaRule::Rsp, words(*offset)?)),
            Cfa::RegisterAndOffset { register: X86_64::RBP, offset } => return Ok((CfaRule::Rbp, words(*offset)?)),
            Cfa::RegisterAndOffset { register: X86_64::RBX, offset } => return Ok((CfaRule::Rbx, words(*offset)?)),
            Cfa::RegisterAndOffset { .. } => return Err(Reason::Register),
            Cfa::Expression(expression) => self.operations(expression).ok_or(Reason::Expression)?,
        };
        let rule = expression.cfa().ok_or(Reason::Expression)?;
        Ok(match rule {
            Found::Plt(byte) => (CfaRule::Plt, byte.into()),
            Found::Deref(X86_64::RSP, offset, 0) => (CfaRule::DerefRsp, words(offset)?),
            Found::Deref(X86_64::RSP, offset, 8) => (CfaRule::DerefRspPlus8, words(offset)?),
            Found::Deref(X86_64::RBP, offset, 0) => (CfaRule::DerefRbp, words(offset)?),
            Found::Deref(X86_64::RBP, offset, 8) => (CfaRule::DerefRbpPlus8, words(offset)?),
            Found::Deref(..) => return Err(Reason::Expression),
        })
    }

    fn rbp(&self, rule: Option<RegisterRule<usize>>) -> Result<(RbpRule, i8), Reason> {
        let byte = |offset| i8::try_from(words(offset)?).map_err(|_| Reason::Offset);
        match rule {
            // rbp belongs to the caller (AMD64 ABI 3.2.1): with no rule of its own it is unchanged.
            None | Some(RegisterRule::SameValue) => Ok((RbpRule::Same, 0)),
            Some(RegisterRule::Offset(offset)) => Ok((RbpRule::Cfa, byte(offset)?)),
            Some(RegisterRule::Undefined) => Ok((RbpRule::Undefined, 0)),
            Some(RegisterRule::Expression(expression)) => match self.address(&expression) {
                Some((X86_64::RBP, offset)) => Ok((RbpRule::Rbp, byte(offset)?)),
                _ => Err(Reason::Rbp),
            },
            Some(_) => Err(Reason::Rbp),
        }
    }

    /// Whether the rules are those of a return from a signal handler, where rsp points at the `ucontext`.
    fn is_signal_frame<C: UnwindContextStorage<usize>>(&self, row: &UnwindTableRow<usize, C>) -> bool {
        let saved_at = |register, offset: u64| match row.register(register) {
            Some(RegisterRule::Expression(expression)) => {
                self.address(&expression) == Some((X86_64::RSP, offset as i64))
            }
            _ => false,
        };
        let cfa = match row.cfa() {
            Cfa::Expression(expression) => self.operations(expression).and_then(|expression| expression.cfa()),
            Cfa::RegisterAndOffset { .. } => None,
        };
        cfa == Some(Found::Deref(X86_64::RSP, ucontext::RSP as i64, 0))
            && saved_at(X86_64::RA, ucontext::RIP)
            && saved_at(X86_64::RBP, ucontext::RBP)
            && (row.register(X86_64::RSP).is_none() || saved_at(X86_64::RSP, ucontext::RSP))
    }

    /// The register and offset of an expression that does nothing but add them.
    fn address(&self, expression: &UnwindExpression<usize>) -> Option<(Register, i64)> {
        match self.operations(expression)?.as_slice() {
            [Operation::RegisterOffset { register, offset, base_type: GENERIC }] => Some((*register, *offset)),
            _ => None,
        }
    }

    fn operations(&self, expression: &UnwindExpression<usize>) -> Option<Operations<'d>> {
        if expression.length > MAX_EXPRESSION {
            return None;
        }
        let mut input = expression.get(self.section).ok()?.operations(self.encoding);
        let mut operations = Operations { list: [Operation::Nop; MAX_OPERATIONS], count: 0 };
        while let Some(operation) = input.next().ok()? {
            *operations.list.get_mut(operations.count)? = operation;
            operations.count += 1;
        }
        Some(operations)
    }
}

/// A decoded expression.
struct Operations<'d> {
    list: [Operation<Reader<'d>>; MAX_OPERATIONS],
    count: usize,
}

/// What an expression for the CFA says.
#[derive(PartialEq)]
enum Found {
    /// [`CfaRule::Plt`], with its byte.
    Plt(u8),
    /// The word at register + offset, plus an addend.
    Deref(Register, i64, u64),
}

impl<'d> Operations<'d> {
    fn as_slice(&self) -> &[Operation<Reader<'d>>] {
        &self.list[..self.count]
    }

    fn cfa(&self) -> Option<Found> {
        const WORD: Operation<Reader<'_>> = Operation::Deref { base_type: GENERIC, size: 8, space: false };
        use Operation::{And, Ge, Plus, PlusConstant, RegisterOffset, Shl, UnsignedConstant};
        match *self.as_slice() {
            // What GNU ld and gold write for lazily bound entries: each pushes a word before it jumps on to the first
            // entry, from which byte on differs with the kind of entries.
            [
                RegisterOffset { register: X86_64::RSP, offset: 8, base_type: GENERIC },
                RegisterOffset { register: X86_64::RA, offset: 0, base_type: GENERIC },
                UnsignedConstant { value: 15 },
                And,
                UnsignedConstant { value: byte @ 0..=15 },
                Ge,
                UnsignedConstant { value: 3 },
                Shl,
                Plus,
            ] => Some(Found::Plt(byte as u8)),
            [RegisterOffset { register, offset, base_type: GENERIC }, WORD] => Some(Found::Deref(register, offset, 0)),
            [RegisterOffset { register, offset, base_type: GENERIC }, WORD, PlusConstant { value }] => {
                Some(Found::Deref(register, offset, value))
            }
            _ => None,
        }
    }
}

/// Where the caller's rbx is. It belongs to the caller as rbp does.
fn rbx(rule: Option<RegisterRule<usize>>) -> RbxRule {
    match rule {
        None | Some(RegisterRule::SameValue) => RbxRule::SAME,
        Some(RegisterRule::Offset(offset)) if offset % 8 == 0 => RbxRule::saved(offset / 8),
        Some(_) => RbxRule::LOST,
    }
}

/// An offset in words.
fn words(offset: i64) -> Result<i32, Reason> {
    if offset % 8 != 0 {
        return Err(Reason::Offset);
    }
    i32::try_from(offset / 8).map_err(|_| Reason::Offset)
}

#[cfg(test)]
#[path = "rule_tests.rs"]
mod tests;
