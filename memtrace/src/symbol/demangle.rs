//! Readable names of bounded length.
//!
//! The mangling schemes refer back to earlier parts of a name, so that 200 bytes of a hostile symbol table can ask for
//! gigabytes of output. All output goes through a writer that refuses to go beyond a limit.

use std::{borrow::Cow, fmt};

/// Longest name kept, in bytes.
pub const MAX_NAME: usize = 16 * 1024;

/// The name as its programmer wrote it, if it is a mangled C++ or Rust name; otherwise unchanged. Mangled names that
/// would get longer than [`MAX_NAME`] stay mangled, so that they stay distinct. The unlikely part of a function, which
/// compilers move away under a symbol of its own, has the function's name.
pub fn readable(symbol: &str) -> Cow<'_, str> {
    let symbol = without_cold(symbol);
    if symbol.len() <= MAX_NAME
        && let Some(name) = rust(symbol).or_else(|| cpp(symbol))
    {
        return Cow::Owned(name);
    }
    bounded(symbol)
}

/// Drops GCC's and LLVM's `.cold` and `.cold.1`.
fn without_cold(symbol: &str) -> &str {
    match symbol.rsplit_once(".cold") {
        Some((function, "")) => function,
        Some((function, number))
            if number.len() > 1 && number.starts_with('.') && number[1..].bytes().all(|byte| byte.is_ascii_digit()) =>
        {
            function
        }
        _ => symbol,
    }
}

/// Cuts a name that is too long, with a mark.
pub fn bounded(name: &str) -> Cow<'_, str> {
    if name.len() <= MAX_NAME {
        return Cow::Borrowed(name);
    }
    let end = (0..=MAX_NAME).rev().find(|end| name.is_char_boundary(*end));
    Cow::Owned(format!("{}…", &name[..end.unwrap_or(0)]))
}

fn rust(symbol: &str) -> Option<String> {
    let name = rustc_demangle::try_demangle(symbol).ok()?;
    let mut out = Bounded::default();
    // The alternate form leaves out the hash of the crate.
    fmt::write(&mut out, format_args!("{name:#}")).ok()?;
    out.finish()
}

fn cpp(symbol: &str) -> Option<String> {
    let name = cpp_demangle::Symbol::new(symbol).ok()?;
    let mut out = Bounded::default();
    let options = cpp_demangle::DemangleOptions::default();
    name.structured_demangle(&mut out, &options).ok()?;
    out.finish()
}

/// A string that fails to be written beyond [`MAX_NAME`].
#[derive(Default)]
struct Bounded(String);

impl Bounded {
    fn finish(self) -> Option<String> {
        (!self.0.is_empty()).then_some(self.0)
    }
}

impl fmt::Write for Bounded {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        if self.0.len() + part.len() > MAX_NAME {
            return Err(fmt::Error);
        }
        self.0.push_str(part);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_schemes() {
        assert_eq!(readable("main"), "main");
        assert_eq!(readable("_ZN4core9panicking9panic_fmt17h5f1a6fd39197ad62E"), "core::panicking::panic_fmt");
        assert_eq!(readable("_RNvCs1234_7mycrate3foo"), "mycrate::foo");
        assert_eq!(readable("_ZN5space3fooEibc"), "space::foo(int, bool, char)");
        assert_eq!(readable("_Znwm"), "operator new(unsigned long)");
        assert_eq!(readable("_Zbroken"), "_Zbroken");
        assert_eq!(readable(""), "");
        assert_eq!(readable("load.cold"), "load");
        assert_eq!(readable("_Z4loadi.cold.12"), "load(int)");
        assert_eq!(readable("ice.colder"), "ice.colder");
    }

    /// A template whose every argument is the previous one twice: n levels give 2^n times the text.
    #[test]
    fn doubling_is_refused() {
        let mut symbol = String::from("_Z1f1AIiiE");
        for level in 0..60 {
            let digit = std::char::from_digit(level % 36, 36).unwrap_or('0');
            let previous = match level {
                0..=35 => format!("S{}_", digit.to_ascii_uppercase()),
                _ => format!("S1{}_", digit.to_ascii_uppercase()),
            };
            symbol.push_str(&format!("S_I{previous}{previous}E"));
        }
        assert_eq!(readable(&symbol), symbol);
    }

    #[test]
    fn long_names_are_cut() {
        let long = "é".repeat(MAX_NAME);
        let name = readable(&long);
        assert!(name.len() <= MAX_NAME + "…".len() && name.ends_with('…'));
    }
}
