//! A function to trace: what it does with blocks, and where its arguments are.

use std::borrow::Cow;

use memtrace_common::site::{Answer, Arg};

/// What a function does with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// It returns a block (and may take one, as realloc does): traced at entry and at return.
    Allocate,
    /// It only gives a block back: traced at entry.
    Free,
}

/// Positions of the arguments that matter; [`Arg::None`] where the function has no such argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arguments {
    /// Bytes asked for.
    pub size: Arg,
    /// Factor of `size`.
    pub count: Arg,
    /// Block to free or resize.
    pub pointer: Arg,
    /// Where the block's address is stored, if it is not returned.
    pub out: Arg,
    /// How it tells where the new block is.
    pub answer: Answer,
}

impl Arguments {
    /// A function without arguments, which returns a block.
    pub const NONE: Self =
        Self { size: Arg::None, count: Arg::None, pointer: Arg::None, out: Arg::None, answer: Answer::Pointer };

    /// The arguments that the function has.
    pub fn used(self) -> impl Iterator<Item = Arg> {
        [self.size, self.count, self.pointer, self.out].into_iter().filter(|argument| *argument != Arg::None)
    }
}

/// A function to trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Name of its symbol.
    pub name: Cow<'static, str>,
    /// What it does.
    pub role: Role,
    /// Where its arguments are.
    pub arguments: Arguments,
}
