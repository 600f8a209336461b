//! Folded stacks: a line `comm;frame;…;leaf VALUE` for each call path.

use anyhow::{Context, Result};

/// One line: the frames, root first, without the command's name, and the value.
#[derive(Debug, PartialEq, Eq)]
pub struct Line<'a> {
    pub frames: Vec<&'a str>,
    pub value: u64,
}

/// Reads all lines. A name may hold spaces; the value follows the last one.
pub fn parse(text: &str) -> Result<Vec<Line<'_>>> {
    text.lines()
        .enumerate()
        .map(|(index, line)| parse_line(line).with_context(|| format!("line {}: {line:?}", index + 1)))
        .collect()
}

fn parse_line(line: &str) -> Result<Line<'_>> {
    let (stack, value) = line.rsplit_once(' ').context("no value")?;
    let value = value.parse().context("the value is no number")?;
    let frames = stack.split(';').skip(1).collect();
    Ok(Line { frames, value })
}

/// The call path from the outermost of `roots` down, frames joined by `;`: what calls that function is the C
/// library's, whose functions have other names on every system. The whole path if none of them is in it.
pub fn below_root(frames: &[&str], roots: &[&str]) -> String {
    let start = frames.iter().position(|frame| roots.contains(frame)).unwrap_or(0);
    frames[start..].join(";")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn names_with_spaces() {
        let lines = parse("a b;main;operator new(unsigned long) 12\nx;[unknown] (libx.so+0x10) 3\n");
        let lines = lines.unwrap();
        assert_eq!(lines[0].frames, ["main", "operator new(unsigned long)"]);
        assert_eq!(lines[0].value, 12);
        assert_eq!(lines[1].frames, ["[unknown] (libx.so+0x10)"]);
    }

    #[test]
    fn bad_lines_are_named() {
        for (text, words) in
            [("a;b", "line 1: \"a;b\": no value"), ("a;b 1\na;b x", "line 2: \"a;b x\": the value is no number")]
        {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.starts_with(words), "{error}");
        }
    }

    #[test]
    fn frames_above_the_root_are_left_out() {
        let frames = ["_start", "main", "serve", "main", "malloc"];
        assert_eq!(below_root(&frames, &["main"]), "main;serve;main;malloc");
        assert_eq!(below_root(&frames[2..3], &["main"]), "serve");
        assert_eq!(below_root(&[], &["main"]), "");
    }
}
