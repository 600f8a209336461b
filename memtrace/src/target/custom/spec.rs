//! What the user says of a function: which one, and where its arguments are.
//!
//! ```text
//! [MODULE:]FUNCTION[:KEY=VALUE,…]
//! ```
//!
//! FUNCTION is the name of a symbol, which may have `*` and `?` in it; a demangled C++ or Rust name in double quotes; or
//! the address, as `nm` prints it, of the first instruction (`0x1234` or `+0x1234`), for which MODULE is needed. MODULE is a
//! file name, which may have `*` and `?` in it, or `exe` for the program itself. What has an `=` outside of quotes are the
//! keys.

use std::ops::Range;

use memtrace_common::site::{Answer, Arg};
use wildmatch::WildMatch;

use super::{
    super::function::{Arguments, Role},
    ParseError,
};

/// Longest text.
const MAX_TEXT: usize = 4096;
/// Largest fixed size, in bytes.
pub const MAX_CONSTANT: u32 = 1 << 20;

/// A custom allocator function, or several.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    pub(super) text: String,
    pub(super) role: Role,
    pub(super) module: Option<Name>,
    pub(super) function: Target,
    pub(super) arguments: Arguments,
    pub(super) constant: Option<u32>,
}

/// What a name must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Name {
    Exact(String),
    Like(WildMatch),
}

impl Name {
    fn new(text: &str) -> Self {
        if text.contains(['*', '?']) { Self::Like(WildMatch::new(text)) } else { Self::Exact(text.to_owned()) }
    }

    /// Whether it is this one.
    pub fn is(&self, name: &str) -> bool {
        match self {
            Self::Exact(exact) => exact == name,
            Self::Like(pattern) => pattern.matches(name),
        }
    }

    /// As it was written.
    pub fn text(&self) -> String {
        match self {
            Self::Exact(exact) => exact.clone(),
            Self::Like(pattern) => pattern.to_string(),
        }
    }
}

/// The function that is meant.
#[derive(Clone, Debug, PartialEq)]
pub enum Target {
    /// By its symbol.
    Symbol(Name),
    /// By its demangled name, or by its symbol.
    Readable(String),
    /// By its virtual address, as the module's symbols number it.
    Address(u64),
}

impl Spec {
    /// As it was written. Escape before printing.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What the functions do.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Whether it names the module, so that it can wait for it to be loaded.
    pub fn names_module(&self) -> bool {
        self.module.is_some()
    }
}

/// Parses the text of a custom function.
///
/// # Errors
/// [`ParseError`] says which part is wrong, and shows an example.
pub fn parse(role: Role, text: &str) -> Result<Spec, ParseError> {
    let error = |range: Range<usize>, message: &str| ParseError::new(role, text, range, message);
    if text.len() > MAX_TEXT {
        return Err(ParseError::new(role, "", 0..0, format!("must not be longer than {MAX_TEXT} bytes")));
    }
    let mut parts = split(text, 0..text.len(), ':');
    if let Some(open) = text.find('"').filter(|_| text.matches('"').count() % 2 == 1) {
        return Err(error(open..text.len(), "the closing quote is missing"));
    }
    let keys = match parts.as_slice() {
        [_, .., last] if !split(text, last.clone(), '=')[1..].is_empty() => parts.pop(),
        _ => None,
    };
    let (module, function) = match parts.as_slice() {
        [function] => (None, function.clone()),
        [module, function] => (Some(module.clone()), function.clone()),
        _ => {
            return Err(error(0..text.len(), "too many colons: a name with colons in it must stand in double quotes"));
        }
    };
    let function = target(role, text, function, module.is_some())?;
    let module = match module {
        Some(range) if unquoted(&text[range.clone()]).is_empty() => {
            return Err(error(range, "the name of the module is missing"));
        }
        Some(range) => Some(Name::new(unquoted(&text[range]))),
        None => None,
    };
    let mut reader = Keys { role, text, arguments: Arguments::NONE, constant: None, any: None, seen: Vec::new() };
    match &keys {
        Some(keys) => reader.read(keys.clone())?,
        None if role == Role::Allocate => {
            return Err(error(text.len()..text.len(), "the size is missing: add :size=arg0, say"));
        }
        None => {}
    }
    reader.finish(keys.unwrap_or(text.len()..text.len()))?;
    let Keys { arguments, constant, .. } = reader;
    Ok(Spec { text: text.to_owned(), role, module, function, arguments, constant })
}

/// The parts of a range between the separators that stand outside of quotes: at least one.
fn split(text: &str, range: Range<usize>, separator: char) -> Vec<Range<usize>> {
    let mut parts = Vec::new();
    let mut quoted = false;
    let mut start = range.start;
    for (index, character) in text[range.clone()].char_indices() {
        if character == '"' {
            quoted = !quoted;
        } else if character == separator && !quoted {
            parts.push(start..range.start + index);
            start = range.start + index + 1;
        }
    }
    parts.push(start..range.end);
    parts
}

fn unquoted(text: &str) -> &str {
    text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text)
}

fn target(role: Role, text: &str, range: Range<usize>, with_module: bool) -> Result<Target, ParseError> {
    let error = |message: &str| ParseError::new(role, text, range.clone(), message);
    let name = &text[range.clone()];
    if let Some(digits) = name.strip_prefix('+').unwrap_or(name).strip_prefix("0x") {
        // from_str_radix takes a sign, too.
        let hexadecimal = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        return match u64::from_str_radix(digits, 16).ok().filter(|_| hexadecimal) {
            None => Err(error("is no address: write it as nm does, after 0x")),
            Some(_) if !with_module => Err(error("an address needs its module: exe:0x1234 or libpool.so:0x1234")),
            Some(address) => Ok(Target::Address(address)),
        };
    }
    if name.starts_with('+') {
        return Err(error("is no address: write it as nm does, after 0x"));
    }
    let bare = unquoted(name);
    if bare.is_empty() {
        return Err(error("the name of the function is missing"));
    }
    if bare.contains('"') {
        return Err(error("quotes must stand around the whole name"));
    }
    if bare.len() != name.len() {
        return Ok(Target::Readable(bare.to_owned()));
    }
    if name.contains(['(', ')', ' ', '=', ',']) {
        return Err(error("is no name of a symbol: a demangled name must stand in double quotes"));
    }
    Ok(Target::Symbol(Name::new(name)))
}

/// What has been read of the keys.
struct Keys<'a> {
    role: Role,
    text: &'a str,
    arguments: Arguments,
    constant: Option<u32>,
    /// Where `ok=any` stands.
    any: Option<Range<usize>>,
    seen: Vec<&'a str>,
}

impl<'a> Keys<'a> {
    fn error(&self, range: Range<usize>, message: impl Into<String>) -> ParseError {
        ParseError::new(self.role, self.text, range, message)
    }

    fn read(&mut self, keys: Range<usize>) -> Result<(), ParseError> {
        for pair in split(self.text, keys, ',') {
            let text = self.text;
            let Some((key, _)) = text[pair.clone()].split_once('=') else {
                return Err(self.error(pair, "must be KEY=VALUE"));
            };
            let value = pair.start + key.len() + 1..pair.end;
            if self.seen.contains(&key) {
                return Err(self.error(pair, format!("{key} is given twice")));
            }
            self.seen.push(key);
            match (self.role, key) {
                (Role::Allocate, "size") => self.size(value)?,
                (Role::Allocate, "ptr") => self.result(value)?,
                (Role::Allocate, "old") => self.arguments.pointer = self.argument(value)?,
                (Role::Allocate, "ok") if &text[value.clone()] == "any" => self.any = Some(pair),
                (Role::Allocate, "ok") => {
                    return Err(self.error(value, "must be any: the block counts whatever the function returns"));
                }
                (Role::Free, "ptr") => self.arguments.pointer = self.argument(value)?,
                (Role::Allocate, _) => {
                    let key = pair.start..value.start - 1;
                    return Err(self.error(key, "is no key of an allocating function: those are size, ptr, old and ok"));
                }
                (Role::Free, _) => {
                    let key = pair.start..value.start - 1;
                    return Err(self.error(key, "is no key of a freeing function, which has only ptr"));
                }
            }
        }
        Ok(())
    }

    /// `argN`, `argN*argM` or a number.
    fn size(&mut self, value: Range<usize>) -> Result<(), ParseError> {
        let text = &self.text[value.clone()];
        if text.starts_with(|first: char| first.is_ascii_digit()) && !text.contains("arg") {
            let number = match text.strip_prefix("0x") {
                Some(digits) => u32::from_str_radix(digits, 16),
                None => text.parse(),
            };
            return match number {
                Ok(size) if (1..=MAX_CONSTANT).contains(&size) => {
                    self.constant = Some(size);
                    Ok(())
                }
                _ => Err(self.error(value, format!("a fixed size is a number of bytes from 1 to {MAX_CONSTANT}"))),
            };
        }
        match split(self.text, value.clone(), '*').as_slice() {
            [size] => self.arguments.size = self.argument(size.clone())?,
            [count, size] => {
                self.arguments.count = self.argument(count.clone())?;
                self.arguments.size = self.argument(size.clone())?;
            }
            _ => return Err(self.error(value, "a size is argN, argN*argM or a number of bytes")),
        }
        Ok(())
    }

    /// `ret` or `*argN`.
    fn result(&mut self, value: Range<usize>) -> Result<(), ParseError> {
        let text = &self.text[value.clone()];
        if text == "ret" {
            return Ok(());
        }
        if !text.starts_with('*') {
            let message = "must be ret (the function returns the block) or *argN (it stores the block's address there)";
            return Err(self.error(value, message));
        }
        self.arguments.out = self.argument(value.start + 1..value.end)?;
        self.arguments.answer = Answer::Stored;
        Ok(())
    }

    fn argument(&self, range: Range<usize>) -> Result<Arg, ParseError> {
        match &self.text[range.clone()] {
            "arg0" => Ok(Arg::A0),
            "arg1" => Ok(Arg::A1),
            "arg2" => Ok(Arg::A2),
            "arg3" => Ok(Arg::A3),
            "arg4" => Ok(Arg::A4),
            "arg5" => Ok(Arg::A5),
            _ => Err(self.error(range, "is no argument: the six that are passed in registers are arg0 to arg5")),
        }
    }

    fn finish(&mut self, keys: Range<usize>) -> Result<(), ParseError> {
        let arguments = &mut self.arguments;
        match self.role {
            Role::Free if arguments.pointer == Arg::None => arguments.pointer = Arg::A0,
            Role::Allocate if arguments.size == Arg::None && self.constant.is_none() => {
                return Err(self.error(keys, "the size is missing: add size=arg0, say"));
            }
            _ => {}
        }
        if let Some(any) = &self.any {
            if self.arguments.answer != Answer::Stored {
                let message = "ok=any needs ptr=*argN: a returned null always stands for failure";
                return Err(self.error(any.clone(), message));
            }
            self.arguments.answer = Answer::StoredAny;
        }
        let mut used: Vec<_> = self.arguments.used().map(|argument| argument as u8).collect();
        used.sort_unstable();
        if used.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(self.error(keys, "one argument can't be two things"));
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "spec_tests.rs"]
mod tests;
