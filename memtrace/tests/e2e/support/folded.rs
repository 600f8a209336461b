//! Reads folded stacks.

use std::collections::BTreeMap;

use super::truth::{Path, canonical};

/// Values by call path, root first, without the command name.
pub type Folded = BTreeMap<Path, u64>;

/// Reads `comm;frame;…;leaf VALUE` lines. Panics at anything else, at another command name, and at two lines with one
/// path, which ought to have been one line.
pub fn parse(text: &str, comm: &str) -> Folded {
    let mut folded = Folded::new();
    for line in text.lines() {
        let (stack, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no value in folded line: {line}"));
        let value = value.parse().unwrap_or_else(|error| panic!("{error} in folded line: {line}"));
        let mut path: Path = stack.split(';').map(str::to_owned).collect();
        assert!(path.iter().all(|frame| !frame.is_empty()), "an empty frame in folded line: {line}");
        assert_eq!(path.remove(0), comm, "another command name in folded line: {line}");
        let leaf = path.pop().unwrap_or_else(|| panic!("no frame in folded line: {line}"));
        path.push(canonical(&leaf).to_owned());
        let before = folded.insert(path, value);
        assert!(before.is_none(), "two folded lines with one path: {line}");
    }
    folded
}
