//! Names of functions as their programmers wrote them.

use std::fmt;

/// Longest demangled name that is looked at, in bytes. Names refer back to earlier parts of themselves when they are
/// mangled, so that short ones can get very long.
const MAX_NAME: usize = 4096;

/// A demangled name.
pub struct Readable {
    /// With the types of its parameters.
    pub whole: String,
    /// Without them; equal to [`Self::whole`] for Rust.
    pub bare: String,
}

/// Demangles the name of a C++ or Rust symbol.
pub fn readable(symbol: &str) -> Option<Readable> {
    if let Ok(name) = rustc_demangle::try_demangle(symbol) {
        // The alternate form leaves out the hash of the crate.
        let whole = bounded(|out| fmt::write(out, format_args!("{name:#}")).is_ok())?;
        return Some(Readable { bare: whole.clone(), whole });
    }
    if !symbol.starts_with("_Z") {
        return None;
    }
    let name = cpp_demangle::Symbol::new(symbol).ok()?;
    let whole = cpp_demangle::DemangleOptions::new().no_return_type();
    let bare = cpp_demangle::DemangleOptions::new().no_return_type().no_params();
    Some(Readable {
        whole: bounded(|out| name.structured_demangle(out, &whole).is_ok())?,
        bare: bounded(|out| name.structured_demangle(out, &bare).is_ok())?,
    })
}

fn bounded(write: impl FnOnce(&mut Bounded) -> bool) -> Option<String> {
    let mut out = Bounded::default();
    (write(&mut out) && !out.0.is_empty()).then_some(out.0)
}

/// A string that fails to be written beyond [`MAX_NAME`].
#[derive(Default)]
struct Bounded(String);

impl fmt::Write for Bounded {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        if self.0.len() + part.len() > MAX_NAME {
            return Err(fmt::Error);
        }
        self.0.push_str(part);
        Ok(())
    }
}

/// What the mangled form of a name must contain: the function's own name. `None` where mangling abbreviates: in namespace
/// std, for operators, template arguments, lambdas.
pub fn fragment(name: &str) -> Option<&str> {
    let head = name.split('(').next().unwrap_or_default();
    let plain = head.chars().all(|character| character.is_alphanumeric() || matches!(character, '_' | ':'));
    if !plain || head.starts_with("std::") {
        return None;
    }
    head.rsplit(':').next().filter(|last| last.is_ascii() && !last.is_empty())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_languages() {
        for (symbol, whole, bare) in [
            ("_ZN5Arena8allocateEm", "Arena::allocate(unsigned long)", "Arena::allocate"),
            ("_ZN5ArenanwEm", "Arena::operator new(unsigned long)", "Arena::operator new"),
            ("_ZN5ArenadlEPvm", "Arena::operator delete(void*, unsigned long)", "Arena::operator delete"),
            ("_Z3getIiEPT_m", "get<int>(unsigned long)", "get<int>"),
            ("_ZN4pool3get17h0123456789abcdefE", "pool::get", "pool::get"),
        ] {
            let name = readable(symbol).unwrap();
            assert_eq!((name.whole.as_str(), name.bare.as_str()), (whole, bare), "{symbol}");
        }
        for symbol in ["pool_get", "", "_Z", "_ZN", "_RNv"] {
            assert!(readable(symbol).is_none(), "{symbol}");
        }
    }

    #[test]
    fn long_names_are_not_demangled() {
        let mut symbol = String::from("_Z1fI");
        for _ in 0..12 {
            symbol += "St4pairI";
        }
        assert!(readable(&symbol).is_none());
        // Each parameter is the pair of the one before: the length doubles.
        let mut doubling = String::from("_Z1fSt4pairIiiE");
        for number in 0..30u32 {
            let back = char::from_digit(number % 36, 36).unwrap().to_ascii_uppercase();
            doubling += &format!("S_IS{back}_S{back}_E");
        }
        assert!(readable(&doubling).is_none_or(|name| name.whole.len() <= MAX_NAME));
    }

    #[test]
    fn fragments_stand_in_the_mangled_name() {
        for (name, expected) in [
            ("Arena::allocate(unsigned long)", Some("allocate")),
            ("pool::get", Some("get")),
            ("Arena::operator new", None),
            ("std::get", None),
            ("get<int>(long)", None),
            ("", None),
        ] {
            assert_eq!(fragment(name), expected, "{name}");
        }
    }
}
