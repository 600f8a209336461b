//! What the running kernel has, as `memtrace doctor` tells it: tests go by that, not by the kernel's version.

use serde_json::Value;

use super::memtrace;

/// Links that put a program's probes to all their sites at a time.
pub const MANY_SITES: &str = "uprobe links over many sites";

/// Whether the check `name` of `memtrace doctor` finds what it looks for.
pub fn has(name: &str) -> bool {
    let ended = memtrace::run(&["doctor", "--json"]).success();
    let report: Value = serde_json::from_str(&ended.stdout).expect("doctor's report");
    let checks = report["checks"].as_array().expect("checks");
    let check = checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no check {name}"));
    check["state"] == "ok"
}
