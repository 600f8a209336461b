//! The sample's truth beside what memtrace found.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::folded;

/// Bytes, and blocks.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
pub struct Amount {
    pub bytes: u64,
    pub blocks: u64,
}

/// One call path.
#[derive(Debug, PartialEq, Eq)]
pub struct Row {
    pub path: String,
    pub expected: Amount,
    pub found: Amount,
}

impl Row {
    pub fn is_equal(&self) -> bool {
        self.expected == self.found
    }
}

/// Reads what the sample answers.
pub fn truth(text: &str) -> Result<BTreeMap<String, Amount>> {
    #[derive(Deserialize)]
    struct Leak {
        path: String,
        #[serde(flatten)]
        amount: Amount,
    }
    let leaks: Vec<Leak> = serde_json::from_str(text).with_context(|| format!("the sample's truth: {text}"))?;
    Ok(leaks.into_iter().map(|leak| (leak.path, leak.amount)).collect())
}

/// Adds up what memtrace's JSON says is unfreed, by call path below the outermost of `roots`.
pub fn found(json: &str, roots: &[&str]) -> Result<BTreeMap<String, Amount>> {
    #[derive(Deserialize)]
    struct Trace {
        stacks: Vec<Stack>,
    }
    #[derive(Deserialize)]
    struct Stack {
        /// Names, root first; the last is the allocator function's.
        frames: Vec<String>,
        unfreed: Unfreed,
    }
    #[derive(Deserialize)]
    struct Unfreed {
        bytes: u64,
        count: u64,
    }
    let trace: Trace = serde_json::from_str(json)?;
    let mut found = BTreeMap::<String, Amount>::new();
    for Stack { frames, unfreed } in trace.stacks.iter().filter(|stack| stack.unfreed.count > 0) {
        let frames: Vec<&str> = frames.iter().map(String::as_str).collect();
        let amount = found.entry(folded::below_root(&frames, roots)).or_default();
        amount.bytes += unfreed.bytes;
        amount.blocks += unfreed.count;
    }
    Ok(found)
}

/// Adds up the bytes of folded stacks in the same way.
pub fn folded_bytes(text: &str, roots: &[&str]) -> Result<BTreeMap<String, u64>> {
    let mut bytes = BTreeMap::new();
    for line in folded::parse(text)? {
        *bytes.entry(folded::below_root(&line.frames, roots)).or_default() += line.value;
    }
    Ok(bytes)
}

/// The bytes alone.
pub fn bytes(amounts: &BTreeMap<String, Amount>) -> BTreeMap<String, u64> {
    let bytes = amounts.iter().map(|(path, amount)| (path.clone(), amount.bytes));
    bytes.collect()
}

/// A row for every path of either side, the one with the most bytes first.
pub fn rows(expected: &BTreeMap<String, Amount>, found: &BTreeMap<String, Amount>) -> Vec<Row> {
    let paths: BTreeSet<&String> = expected.keys().chain(found.keys()).collect();
    let amount = |side: &BTreeMap<String, Amount>, path| side.get(path).copied().unwrap_or_default();
    let mut rows: Vec<Row> = paths
        .into_iter()
        .map(|path| Row { path: path.clone(), expected: amount(expected, path), found: amount(found, path) })
        .collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.expected.bytes.max(row.found.bytes)));
    rows
}

/// The rows for people to read.
pub fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:>10} {:>7}  {:>10} {:>7}  {:<9}  {}\n{:>10} {:>7}  {:>10} {:>7}\n",
        "leaked", "", "found", "", "", "call path", "bytes", "blocks", "bytes", "blocks"
    );
    for row in rows {
        text.push_str(&format!(
            "{:>10} {:>7}  {:>10} {:>7}  {:<9}  {}\n",
            row.expected.bytes,
            row.expected.blocks,
            row.found.bytes,
            row.found.blocks,
            if row.is_equal() { "equal" } else { "NOT EQUAL" },
            row.path
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const TRUTH: &str = r#"[{"path":"main;f;malloc","bytes":30,"blocks":3},
                            {"path":"main;g;calloc","bytes":50,"blocks":1}]"#;

    fn compare(stacks: &str) -> Vec<Row> {
        let json = format!("{{\"stacks\":[{stacks}]}}");
        rows(&truth(TRUTH).unwrap(), &found(&json, &["main"]).unwrap())
    }

    #[test]
    fn the_same_path_from_several_stacks() {
        let rows = compare(
            r#"{"frames":["_start","main","f","malloc"],"unfreed":{"bytes":10,"count":1}},
               {"frames":["main","f","malloc"],"unfreed":{"bytes":20,"count":2}},
               {"frames":["main","h","malloc"],"unfreed":{"bytes":0,"count":0}},
               {"frames":["main","g","calloc"],"unfreed":{"bytes":50,"count":1}}"#,
        );
        assert_eq!(rows.len(), 2);
        assert!(rows.iter().all(Row::is_equal), "{rows:?}");
        assert_eq!(rows[0].path, "main;g;calloc");
    }

    #[test]
    fn too_few_blocks_a_missing_path_and_one_too_many() {
        let rows = compare(
            r#"{"frames":["main","f","malloc"],"unfreed":{"bytes":30,"count":2}},
               {"frames":["h","malloc"],"unfreed":{"bytes":7,"count":1}}"#,
        );
        assert_eq!(rows.iter().filter(|row| !row.is_equal()).count(), 3);
        let table = table(&rows);
        assert_eq!(table.matches("NOT EQUAL").count(), 3, "{table}");
        assert_eq!(rows[2].path, "h;malloc");
        assert_eq!(rows[2].expected, Amount::default());
    }

    #[test]
    fn folded_stacks_add_up_too() {
        let text = "x;_start;main;f;malloc 10\nx;start;main;f;malloc 20\n";
        let bytes = folded_bytes(text, &["main"]).unwrap();
        assert_eq!(bytes.into_iter().collect::<Vec<_>>(), [("main;f;malloc".to_owned(), 30)]);
    }

    #[test]
    fn an_answer_that_is_no_truth() {
        let error = truth("quiet").unwrap_err().to_string();
        assert!(error.contains("quiet"), "{error}");
    }
}
