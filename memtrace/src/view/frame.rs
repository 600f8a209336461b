//! How one frame of a call path is written.

use std::borrow::Cow;

use crate::profile::NamedStack;

/// Names of at most so many characters are never shortened.
const SHORT_NAME: usize = 60;
/// Template and generic arguments of more bytes become `…`.
const SHORT_ARGUMENTS: usize = 24;
/// So do parameters.
const SHORT_PARAMETERS: usize = 32;
/// Deepest nesting of types that is looked into.
const MAX_DEPTH: u32 = 32;

/// The frame at a position, and where in the source it is if that is known: `push (list.c:12)`. Of the file's path only the
/// last part is there.
pub fn label(stack: &NamedStack, position: usize) -> Cow<'_, str> {
    let name: &str = &stack.frames[position];
    with_line(stack, position, Cow::Borrowed(name))
}

/// As [`label`], with a name that [`shorten`] has made short.
pub fn short_label(stack: &NamedStack, position: usize) -> Cow<'_, str> {
    with_line(stack, position, shorten(&stack.frames[position]))
}

fn with_line<'a>(stack: &'a NamedStack, position: usize, name: Cow<'a, str>) -> Cow<'a, str> {
    match stack.lines.get(position).and_then(Option::as_ref) {
        Some(line) => {
            let file = line.file.rsplit('/').find(|part| !part.is_empty()).unwrap_or("?");
            Cow::Owned(format!("{name} ({file}:{})", line.line))
        }
        None => name,
    }
}

/// A long C++ or Rust name with its long template arguments and parameters left out:
/// `std::vector<…>::push_back(…)`. Other names are as they were. Two names may become the same.
pub fn shorten(name: &str) -> Cow<'_, str> {
    if name.chars().count() <= SHORT_NAME || name.starts_with('[') {
        return Cow::Borrowed(name);
    }
    let mut out = String::with_capacity(name.len());
    match append(name, &mut out, MAX_DEPTH) {
        Some(()) => Cow::Owned(out),
        None => Cow::Borrowed(name),
    }
}

/// Appends a shortened part of a name; `None` if its brackets do not match.
fn append(text: &str, out: &mut String, depth: u32) -> Option<()> {
    let depth = depth.checked_sub(1)?;
    let mut rest = text;
    // Where an operator's name ends in `out`: its template arguments follow a space.
    let mut operator = None;
    while let Some(position) = rest.find(['<', '(', '>', ')', 'o', '-']) {
        let (before, at) = rest.split_at(position);
        out.push_str(before);
        let literal = literal(at, out.chars().next_back());
        if literal > 0 {
            out.push_str(&at[..literal]);
            operator = Some(out.len());
            rest = &at[literal..];
            continue;
        }
        let (open, limit) = match at.as_bytes().first()? {
            b'<' => ('<', SHORT_ARGUMENTS),
            b'(' => ('(', SHORT_PARAMETERS),
            b'o' | b'-' => {
                out.push_str(&at[..1]);
                rest = &at[1..];
                continue;
            }
            _ => return None,
        };
        let close = matching(at)?;
        let inside = &at[1..close];
        // In Rust, `<Type as Trait>::function` and `<Type>::function`.
        let named = out.chars().next_back().is_some_and(|c| c.is_alphanumeric() || "_:}]".contains(c));
        let of_operator = operator.is_some_and(|end| matches!(&out[end..], "" | " "));
        let qualified = open == '<' && !named && !of_operator;
        out.push(open);
        if qualified {
            append(inside, out, depth)?;
        } else if inside.len() > limit && inside != "anonymous namespace" {
            out.push('…');
        } else {
            out.push_str(inside);
        }
        out.push_str(&at[close..=close]);
        rest = &at[close + 1..];
    }
    out.push_str(rest);
    Some(())
}

/// Length of what `text` begins with, if it is something in which brackets do not mean brackets: an operator's name, an
/// arrow.
fn literal(text: &str, before: Option<char>) -> usize {
    const OPERATORS: [&str; 15] =
        ["<<=", ">>=", "<=>", "->*", "<<", ">>", "<=", ">=", "->", "()", "<", ">", "-=", "--", "-"];
    if text.starts_with("->") {
        return 2;
    }
    let Some(symbol) = text.strip_prefix("operator") else { return 0 };
    if before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
        return 0;
    }
    let length = OPERATORS.iter().find(|operator| symbol.starts_with(**operator)).map_or(0, |operator| operator.len());
    "operator".len() + length
}

/// Position of the bracket that closes the one `text` begins with.
fn matching(text: &str) -> Option<usize> {
    let mut open: Vec<u8> = Vec::new();
    let mut position = 0;
    while position < text.len() {
        let before = text[..position].chars().next_back();
        let skipped = literal(&text[position..], before);
        if skipped > 0 {
            position += skipped;
            continue;
        }
        match text.as_bytes()[position] {
            byte @ (b'<' | b'(') => open.push(byte),
            byte @ (b'>' | b')') => {
                let expected = if byte == b'>' { b'<' } else { b'(' };
                if open.pop() != Some(expected) {
                    return None;
                }
                if open.is_empty() {
                    return Some(position);
                }
            }
            _ => {}
        }
        position += text[position..].chars().next().map_or(1, char::len_utf8);
    }
    None
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        profile::SourceLine,
        view::sample::{amount, stack},
    };

    #[test]
    fn short_names_stay() {
        for name in ["main", "void std::vector<int, std::allocator<int> >::f<int>(int&&)", "[unknown] (libx.so+0x10)"] {
            assert_eq!(shorten(name), name);
        }
        let unknown = format!("[ambiguous] ({})", "libabcdefghijklmnop.so+0x123 or ".repeat(3));
        assert_eq!(shorten(&unknown), unknown);
    }

    #[test]
    fn long_arguments_go() {
        let cases = [
            (
                "std::vector<std::string, std::allocator<std::string> >::push_back(std::string const&, std::allocator<int>)",
                "std::vector<…>::push_back(…)",
            ),
            (
                "void std::vector<Entry, std::allocator<Entry> >::_M_realloc_insert<Entry>(Entry&&)",
                "void std::vector<…>::_M_realloc_insert<Entry>(Entry&&)",
            ),
            (
                "(anonymous namespace)::Cache<std::map<int, std::string>, 16>::find(std::pair<int const, std::string> const&) const",
                "(anonymous namespace)::Cache<…>::find(…) const",
            ),
            (
                "<alloc::vec::Vec<some::quite::long::Type<u8>> as core::clone::Clone>::clone::{closure#0}",
                "<alloc::vec::Vec<…> as core::clone::Clone>::clone::{closure#0}",
            ),
            (
                "app::operator<< <std::char_traits<char>, std::allocator<char> >(std::ostream&, app::Item<int> const&)",
                "app::operator<< <…>(…)",
            ),
            (
                "std::function<void (std::vector<int, std::allocator<int> >)>::operator()(std::vector<int, std::allocator<int> >) const",
                "std::function<…>::operator()(…) const",
            ),
            (
                "app::run(std::vector<int, std::allocator<int> >&)::{lambda(std::pair<int, int> const&, unsigned long)#1}::operator()(int) const",
                "app::run(…)::{lambda(…)#1}::operator()(int) const",
            ),
            (
                "core::iter::adapters::map::map_fold::<u32, alloc::string::String, (), fn(u32) -> alloc::string::String>::{closure}",
                "core::iter::adapters::map::map_fold::<…>::{closure}",
            ),
        ];
        for (name, short) in cases {
            assert_eq!(shorten(name), short);
        }
    }

    #[test]
    fn names_that_are_none_stay() {
        for part in ["a<b", "a>b", "(<)", ")(", "x<(y>)", "é<", "operator", "->"] {
            let name = part.repeat(40);
            let short = shorten(&name);
            assert!(short == name || short.len() < name.len(), "{short}");
        }
        let deep = format!("{}x{}", "<".repeat(5000), ">".repeat(5000));
        assert_eq!(shorten(&deep), deep);
    }

    #[test]
    fn lines_follow_names() {
        let mut stack = stack(&["main", "f", "malloc"], amount(1, 1), amount(1, 1));
        let line = |file: &str, line| Some(SourceLine { file: Arc::from(file), line });
        assert_eq!(label(&stack, 1), "f");
        stack.lines = vec![line("/src/a b.c", 7), line("///", 1), None];
        assert_eq!(label(&stack, 0), "main (a b.c:7)");
        assert_eq!(label(&stack, 1), "f (?:1)");
        assert_eq!(label(&stack, 2), "malloc");
        assert_eq!(short_label(&stack, 0), "main (a b.c:7)");
    }
}
