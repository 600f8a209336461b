//! Folded stacks, the input of flame graph tools: `comm;frame;frame;… VALUE`, root first, one line for every call path,
//! sorted. What names may not contain is replaced as [`super::escape::folded`] says; call paths that are the same line
//! then are one line with the sum. Names are whole, however long; with source lines, a frame is `name (file.c:12)`.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use crate::{
    profile::{NamedProfile, NamedStack},
    view,
};

use super::{ViewOptions, escape};

/// Writes the lines.
pub fn write(profile: &NamedProfile, options: &ViewOptions, out: &mut dyn Write) -> io::Result<()> {
    for (path, value) in lines(profile, options) {
        writeln!(out, "{path} {value}")?;
    }
    Ok(())
}

/// Call path and value of every line, in order.
pub fn lines(profile: &NamedProfile, options: &ViewOptions) -> BTreeMap<String, u64> {
    let mut lines = BTreeMap::new();
    for (stack, value) in view::flame(profile, options.which, options.unit) {
        let sum: &mut u64 = lines.entry(path(&comm(&stack.comm), stack)).or_default();
        *sum = sum.saturating_add(value);
    }
    lines
}

/// The first frame. Readers take a line that begins with `#` for a comment.
fn comm(comm: &str) -> String {
    let name = escape::folded(comm);
    match name.strip_prefix('#') {
        Some(rest) => format!("?{rest}"),
        None => name.into_owned(),
    }
}

fn path(comm: &str, stack: &NamedStack) -> String {
    let mut path = String::from(comm);
    for position in 0..stack.frames.len() {
        path.push(';');
        path.push_str(&escape::folded(&view::frame::label(stack, position)));
    }
    // A number at the end would be read as a value of its own, as in the lines that compare two profiles.
    if let Some(space) = path.rfind(' ')
        && path[space + 1..].chars().all(|character| character.is_ascii_digit() || character == '.')
    {
        path.replace_range(space..=space, "_");
    }
    path
}
