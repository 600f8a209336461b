//! A place to probe.

use std::borrow::Cow;

use memtrace_common::site::{Answer, Arg, Site};

use super::{
    function::{Arguments, Role},
    prologue::Placement,
};

/// One probe to attach: the functions that start at one address of one module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeSite {
    /// Index of its module in [`super::Discovery::modules`].
    pub module: usize,
    /// Name of the function.
    pub function: Cow<'static, str>,
    /// Other exported names of the same code, at most 8. Escape before printing.
    pub aliases: Vec<String>,
    /// What the function does.
    pub role: Role,
    /// Where its arguments are.
    pub arguments: Arguments,
    /// Bytes of every block that it allocates, if no argument tells them.
    pub constant: Option<u32>,
    /// Whether it frees blocks by calling another probed function.
    pub repeats: bool,
    /// File offset of its first instruction.
    pub function_offset: u64,
    /// File offset of the instruction to probe, and for allocating functions also of the return probe.
    pub probe_offset: u64,
    /// Why there.
    pub placement: Placement,
}

impl ProbeSite {
    /// What the kernel side is told about the site, under the number `index`.
    pub fn site(&self, index: u16) -> Site {
        Site {
            index,
            size: if self.constant.is_some() { Arg::Constant } else { self.arguments.size },
            constant: self.constant.unwrap_or(0),
            count: self.arguments.count,
            pointer: self.arguments.pointer,
            out: if self.arguments.answer == Answer::InPlace { self.arguments.pointer } else { self.arguments.out },
            answer: self.arguments.answer,
            repeats: self.repeats,
            return_offset: self.placement.return_offset,
            tag: 0,
        }
    }

    /// The site as a line of a table; `module` is the name of its module.
    pub fn row(&self, module: &str) -> ProbeRow {
        ProbeRow {
            module: module.to_owned(),
            function: self.function.clone().into_owned(),
            aliases: self.aliases.clone(),
            function_offset: self.function_offset,
            offset: self.placement.offset,
            instruction: self.placement.instruction.clone(),
            emulated: self.placement.execution.emulated(),
            reason: self.placement.reason.clone(),
        }
    }
}

/// A probe site for people. Escape the names before printing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeRow {
    /// File name of the module.
    pub module: String,
    /// Name of the function.
    pub function: String,
    /// Its other names.
    pub aliases: Vec<String>,
    /// File offset of the function's first instruction.
    pub function_offset: u64,
    /// Bytes from there to the probed instruction.
    pub offset: u64,
    /// The probed instruction, in AT&T syntax.
    pub instruction: String,
    /// Whether the kernel emulates it: `yes`, `no`, or since which version.
    pub emulated: &'static str,
    /// Why no better instruction could be taken.
    pub reason: Option<String>,
}
