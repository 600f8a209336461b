//! What is wrong with a custom allocator function.

use std::{fmt, ops::Range};

use super::super::{TargetError, function::Role};

/// Why the text of a custom function is not understood. Shows the text with a mark under the wrong part, and an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    text: String,
    wrong: Range<usize>,
    message: String,
    role: Role,
}

impl ParseError {
    /// `wrong` is the wrong part, in bytes of `text`.
    pub(super) fn new(role: Role, text: &str, wrong: Range<usize>, message: impl Into<String>) -> Self {
        Self { text: text.to_owned(), wrong, message: message.into(), role }
    }
}

impl std::error::Error for ParseError {}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |range: Range<usize>| escaped(self.text.get(range).unwrap_or_default());
        let before = part(0..self.wrong.start);
        let marks = part(self.wrong.clone()).chars().count().max(1);
        let example = match self.role {
            Role::Allocate => "--alloc 'pool_get:size=arg1,ptr=ret'",
            Role::Free => "--free 'pool_put:ptr=arg0'",
        };
        let indent = before.chars().count();
        writeln!(f, "{}", self.message)?;
        writeln!(f, "  {}", escaped(&self.text))?;
        writeln!(f, "  {:indent$}{}", "", "^".repeat(marks))?;
        write!(f, "  example: {example}")
    }
}

/// One column for every character.
fn escaped(text: &str) -> String {
    text.chars().map(|character| if character.is_control() { '\u{fffd}' } else { character }).collect()
}

/// Why custom functions cannot be traced in a process. Every message is one sentence with the next step.
#[derive(Debug, thiserror::Error)]
pub enum CustomError {
    /// No function of that name.
    #[error(
        "no function of process {pid} is what {text:?} asks for{}: list the names with `nm -D` or `nm` on the module{}",
        Near(near),
        if *with_module { "" } else { "; if a module loaded later has it, name that module: 'libplugin.so:FUNCTION:…'" }
    )]
    NoFunction {
        /// The process.
        pid: u32,
        /// What was asked for.
        text: String,
        /// Names that are similar.
        near: Vec<String>,
        /// Whether a module was named.
        with_module: bool,
    },
    /// Functions were found, but none can be probed.
    #[error("what {text:?} asks for in process {pid} can't be traced: {reason}")]
    NotProbed {
        /// The process.
        pid: u32,
        /// What was asked for.
        text: String,
        /// Why, in one sentence.
        reason: String,
    },
    /// A pattern that is too wide.
    #[error(
        "{text:?} stands for more than {most} functions, such as {}: make the pattern narrower, or name the functions one by one",
        examples.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
    )]
    TooMany {
        /// What was asked for.
        text: String,
        /// How many may be meant.
        most: usize,
        /// Some of them.
        examples: Vec<String>,
    },
    /// Two that stand for the same function and say different things of it.
    #[error(
        "both {first:?} and {second:?} stand for {function:?} in {module:?}, and say different things of it: leave one out"
    )]
    Conflict {
        /// The one given first.
        first: String,
        /// The other one.
        second: String,
        /// The function.
        function: String,
        /// File name of its module.
        module: String,
    },
    /// The process cannot be looked into.
    #[error(transparent)]
    Target(#[from] TargetError),
}

struct Near<'a>(&'a [String]);

impl fmt::Display for Near<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, name) in self.0.iter().enumerate() {
            let before = if index == 0 { " (similar names: " } else { ", " };
            write!(f, "{before}{name:?}")?;
        }
        if self.0.is_empty() { Ok(()) } else { f.write_str(")") }
    }
}
