//! Compares what memtrace reported with what a fixture says.

use std::{collections::BTreeMap, fmt::Write as _, ops::AddAssign};

use super::{
    folded::Folded,
    start::{Unwind, assert_start},
    truth::{Amount, Path, Paths, Truth},
};

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Bytes,
    Count,
}

impl Unit {
    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Count => "count",
        }
    }

    pub fn of(self, amount: Amount) -> u64 {
        match self {
            Self::Bytes => amount.bytes,
            Self::Count => amount.count,
        }
    }
}

/// Reported call paths, told apart by who called the allocator.
#[derive(Debug)]
pub struct Split<V> {
    /// Called by the fixture's own functions: paths from `main`, a thread's function or a constructor on, start code
    /// taken off.
    pub own: BTreeMap<Path, V>,
    /// Called by others: the loader, the C or C++ library.
    pub foreign: BTreeMap<Path, V>,
}

/// Tells the paths of `reported` apart. Panics if a fixture's path is not rooted in one of the functions that it says
/// it begins with, or has anything but glibc's start code outside it.
pub fn split<V: Copy + Default + AddAssign>(reported: &BTreeMap<Path, V>, truth: &Truth, unwind: Unwind) -> Split<V> {
    let (roots, callers) = (truth.roots(), truth.callers());
    let mut split = Split { own: BTreeMap::new(), foreign: BTreeMap::new() };
    for (path, value) in reported {
        let caller = path.iter().rev().nth(1).map(String::as_str).unwrap_or_default();
        if !callers.contains(caller) {
            split.foreign.insert(path.clone(), *value);
            continue;
        }
        let root = path.iter().position(|frame| roots.contains(frame.as_str()));
        let root = root.unwrap_or_else(|| panic!("a call path without a root: {}", path.join(";")));
        assert_start(path, root, unwind);
        *split.own.entry(path[root..].to_vec()).or_default() += *value;
    }
    split
}

/// Panics unless `reported` is exactly what `truth` says, with what differs.
pub fn assert_exact(what: &str, truth: &Paths, unit: Unit, reported: &Folded) {
    let expected: Folded = truth
        .iter()
        .map(|(path, amount)| (path.clone(), unit.of(*amount)))
        // A path whose blocks have no bytes has nothing to show in bytes.
        .filter(|(_, value)| *value != 0)
        .collect();
    let reported: Folded =
        reported.iter().filter(|(_, value)| **value != 0).map(|(path, value)| (path.clone(), *value)).collect();
    let differences = differences(&expected, &reported);
    assert!(
        differences.is_empty(),
        "{what}, {}: {} of {} call paths differ (truth {}, reported {} in total):\n{}",
        unit.name(),
        differences.len(),
        expected.len(),
        expected.values().sum::<u64>(),
        reported.values().sum::<u64>(),
        listed(&differences)
    );
}

fn differences(expected: &Folded, reported: &Folded) -> BTreeMap<Path, (Option<u64>, Option<u64>)> {
    let mut differences = BTreeMap::new();
    for path in expected.keys().chain(reported.keys()) {
        let pair = (expected.get(path).copied(), reported.get(path).copied());
        if pair.0 != pair.1 {
            differences.insert(path.clone(), pair);
        }
    }
    differences
}

/// The first differences, one a line.
fn listed(differences: &BTreeMap<Path, (Option<u64>, Option<u64>)>) -> String {
    const MOST: usize = 40;
    let show = |value: Option<u64>| value.map_or("nothing".into(), |value| value.to_string());
    let mut text = String::new();
    for (path, (truth, reported)) in differences.iter().take(MOST) {
        // Writing to a string does not fail.
        let _ = writeln!(text, "  truth {}, reported {}: {}", show(*truth), show(*reported), path.join(";"));
    }
    if differences.len() > MOST {
        let _ = writeln!(text, "  … and {} more", differences.len() - MOST);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Path {
        text.split(';').map(str::to_owned).collect()
    }

    fn truth() -> Truth {
        Truth::parse(
            r#"{"paths":[{"path":["main","f"],"function":"malloc","bytes":10,"count":2}],
                "all":[{"path":["main","f"],"function":"malloc","bytes":10,"count":2}],"facts":{}}"#,
        )
    }

    #[test]
    fn start_code_is_taken_off_and_paths_are_added() {
        let folded = Folded::from([
            (path("__libc_start_call_main;main;f;malloc"), 4),
            (path("[truncated: no frame pointer];main;f;malloc"), 6),
            (path("main;f;dlopen;malloc"), 5),
        ]);
        let split = split(&folded, &truth(), Unwind::FramePointers);
        assert_eq!(split.own, Folded::from([(path("main;f;malloc"), 10)]));
        assert_eq!(split.foreign, Folded::from([(path("main;f;dlopen;malloc"), 5)]));
        assert_exact("unfreed", &truth().unfreed, Unit::Bytes, &split.own);
    }

    #[test]
    #[should_panic(expected = "truth 2, reported 3: main;f;malloc")]
    fn another_value_is_a_difference() {
        assert_exact("unfreed", &truth().unfreed, Unit::Count, &Folded::from([(path("main;f;malloc"), 3)]));
    }

    #[test]
    #[should_panic(expected = "truth nothing, reported 1: main;g;malloc")]
    fn one_path_more_is_a_difference() {
        let reported = Folded::from([(path("main;f;malloc"), 2), (path("main;g;malloc"), 1)]);
        assert_exact("unfreed", &truth().unfreed, Unit::Count, &reported);
    }

    #[test]
    #[should_panic(expected = "not glibc's start code")]
    fn other_frames_outside_the_root_are_refused() {
        split(&Folded::from([(path("g;main;f;malloc"), 1)]), &truth(), Unwind::FramePointers);
    }
}
