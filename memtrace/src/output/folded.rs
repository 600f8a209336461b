//! Folded stacks, the input of flame graph tools: `comm;frame;frame;… VALUE`, root first, one line for every call path,
//! sorted. What names may not contain is replaced as [`super::escape::folded`] says; call paths that are the same line
//! then are one line with the sum. Names are whole, however long; with source lines, a frame is `name (file.c:12)`.
//!
//! Where results are split, the root tells by what ([`view::groups::roots`]): `comm (PID);…`, `comm (PID);thread (TID);…` or
//! `[cgroup] /path;comm;…`.

use std::{
    borrow::Cow,
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
        let sum: &mut u64 = lines.entry(path(root(profile, stack), stack)).or_default();
        *sum = sum.saturating_add(value);
    }
    lines
}

/// What stands before the frames. Readers take a line that begins with `#` for a comment.
fn root(profile: &NamedProfile, stack: &NamedStack) -> String {
    let roots = view::groups::roots(profile, stack);
    let names: Vec<Cow<'_, str>> = roots.iter().map(|root| escape::folded(root)).collect();
    let root = names.join(";");
    match root.strip_prefix('#') {
        Some(rest) => format!("?{rest}"),
        None => root,
    }
}

fn path(root: String, stack: &NamedStack) -> String {
    let mut path = root;
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
