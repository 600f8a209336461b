//! Reads JSON reports.

use std::collections::BTreeMap;

use serde_json::Value;

use super::truth::{Amount, Path, Paths, amount, canonical};

/// What the tests look at.
#[derive(Debug)]
pub struct Report {
    /// What each call path holds in the view of the report, root first, the allocator function last.
    pub paths: Paths,
    /// By the name of their reason.
    pub losses: BTreeMap<String, Amount>,
    /// Whether the totals are said to be lower bounds.
    pub lower_bound: bool,
}

impl Report {
    /// Panics at anything that does not fit together.
    pub fn parse(text: &str) -> Self {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("no JSON: {error}: {text}"));
        let mut paths = Paths::new();
        let mut total = Amount::default();
        for stack in value["stacks"].as_array().expect("stacks") {
            let held = amount(stack);
            let (allocated, freed, unfreed) =
                (amount(&stack["allocated"]), amount(&stack["freed"]), amount(&stack["unfreed"]));
            assert!(allocated.bytes >= freed.bytes + unfreed.bytes, "{stack}");
            assert!(allocated.count >= freed.count + unfreed.count, "{stack}");
            total += held;
            if held != Amount::default() {
                assert!(paths.insert(path(stack), held).is_none(), "a second stack with these names: {stack}");
            }
        }
        assert_eq!(total, amount(&value["total"]), "the total is another than the sum");
        let losses = value["coverage"]["losses"].as_array().expect("losses");
        Self {
            paths,
            losses: losses
                .iter()
                .map(|loss| (loss["name"].as_str().expect("a name").to_owned(), amount(loss)))
                .collect(),
            lower_bound: value["lower_bound"].as_bool().expect("lower_bound"),
        }
    }
}

fn path(stack: &Value) -> Path {
    let frames = stack["frames"].as_array().expect("frames");
    let mut path: Path = frames.iter().map(|frame| frame.as_str().expect("a name").to_owned()).collect();
    if let Some(leaf) = path.last_mut() {
        *leaf = canonical(leaf).to_owned();
    }
    path
}
