//! The checks, each of which tells what it saw or what is wrong.

use std::{
    collections::BTreeMap,
    io,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{MEMTRACE, WITH_FRAME_POINTERS, WITHOUT_FRAME_POINTERS, target::Target, truth};
use crate::{folded, tracer::Tracer, workload::Workload};

/// A check and its name.
pub type Named = (&'static str, fn() -> Result<String>);

/// What is checked where memtrace can work.
pub const ALL: [Named; 5] = [
    ("doctor", doctor),
    ("memstacks --unwind fp", || memstacks("fp", WITH_FRAME_POINTERS)),
    ("memstacks --unwind auto", || memstacks("auto", WITHOUT_FRAME_POINTERS)),
    ("killed while tracing", killed),
    ("selftest", selftest),
];

/// What is checked where it can't.
pub const REFUSAL: [Named; 2] = [("doctor refuses", doctor_refuses), ("memstacks refuses", memstacks_refuses)];

/// First functions of the fixture's threads.
const ROOTS: [&str; 2] = ["main", "worker"];
/// How long after its start memtrace is killed.
const KILL_AFTER: [u64; 4] = [30, 250, 700, 1500];
/// How long after it has begun to record.
const KILL_RECORDING_AFTER: [u64; 4] = [0, 10, 100, 500];

/// Runs memtrace to its end: status, standard output and standard error.
fn memtrace(arguments: &[&str]) -> Result<(Option<i32>, String, String)> {
    let output = Command::new(MEMTRACE).args(arguments).stdin(Stdio::null()).output().context(MEMTRACE)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((output.status.code(), text(&output.stdout), text(&output.stderr)))
}

/// Every program loads: the verifier differs from kernel to kernel.
fn doctor() -> Result<String> {
    let (status, output, words) = memtrace(&["doctor", "--json"])?;
    let in_state = names_in_state(&output).with_context(|| format!("status {status:?}: {words}"))?;
    let missing = in_state("missing");
    if status != Some(0) || !missing.is_empty() {
        bail!("status {status:?}; missing: {}; {words}", missing.join("; "));
    }
    let degraded = in_state("degraded");
    Ok(if degraded.is_empty() { "nothing missing".to_owned() } else { format!("degraded: {}", degraded.join("; ")) })
}

/// Reads doctor's document: a function from a state to the names and details of the checks that are in it.
fn names_in_state(document: &str) -> Result<impl Fn(&str) -> Vec<String>> {
    let document: Value = serde_json::from_str(document).context("doctor's document")?;
    let checks = document["checks"].as_array().context("no checks in doctor's document")?.clone();
    Ok(move |state: &str| {
        let of_state = checks.iter().filter(|check| check["state"] == state);
        let text = |check: &Value, member: &str| check[member].as_str().unwrap_or_default().to_owned();
        of_state.map(|check| format!("{} ({})", text(check, "name"), text(check, "detail"))).collect()
    })
}

/// The numbers are exact. (The cost is of no interest under emulation.)
fn selftest() -> Result<String> {
    let (status, output, words) = memtrace(&["selftest", "--json", "--exact-only"])?;
    let document: Value =
        serde_json::from_str(&output).with_context(|| format!("status {status:?}: {output}{words}"))?;
    if status != Some(0) || document["exact"] != true {
        bail!("status {status:?}, not exact: {}; {words}", document["exactness"]);
    }
    let total = &document["exactness"]["total"]["seen"];
    Ok(format!("exact: {} blocks, {} unfreed", total["allocated_count"], total["unfreed_count"]))
}

/// Folded stacks are exactly the fixture's truth, and each goes down to the thread's first function.
fn memstacks(unwind: &str, fixture: &str) -> Result<String> {
    let mut workload = Workload::start(Path::new(fixture), &["paths"])?;
    let pid = workload.pid().to_string();
    let file = format!("/tmp/{unwind}.folded");
    let arguments = ["memstacks", "-p", &pid, "--unwind", unwind, "--all", "--unfreed", "-o", &file];
    let tracer = Tracer::start(Path::new(MEMTRACE), &arguments, true)?;
    let answer = workload.ask("go")?;
    tracer.finish()?;
    drop(workload);
    let truth = truth(&answer)?;
    let mut paths = 0;
    for (view, expected) in [("all", &truth.all), ("unfreed", &truth.unfreed)] {
        let text = super::read(&format!("/tmp/{unwind}.{view}.folded"))?;
        compare(&text, expected).with_context(|| format!("{view} allocations"))?;
        paths += expected.len();
    }
    Ok(format!("{paths} call paths are equal"))
}

/// Compares folded stacks with the bytes of each call path.
fn compare(text: &str, expected: &BTreeMap<String, u64>) -> Result<()> {
    let mut found = BTreeMap::<String, u64>::new();
    for line in folded::parse(text)? {
        *found.entry(folded::below_root(&line.frames, &ROOTS)).or_default() += line.value;
    }
    if found == *expected {
        return Ok(());
    }
    let rows = |side: &BTreeMap<String, u64>, other: &BTreeMap<String, u64>| {
        let rows = side.iter().filter(|(path, bytes)| other.get(*path) != Some(bytes));
        rows.map(|(path, bytes)| format!("{path} {bytes}")).collect::<Vec<_>>().join(", ")
    };
    bail!("expected [{}], found [{}]", rows(expected, &found), rows(&found, expected))
}

/// Killed at any moment, memtrace leaves its target running and its code as it was.
fn killed() -> Result<String> {
    let mut target = Target::start(WITH_FRAME_POINTERS)?;
    // The target keeps all CPUs busy: memtrace would take long to start beside it.
    let _hurry = Hurry::begin()?;
    let arguments = ["memstacks".to_owned(), "-p".to_owned(), target.pid().to_string()];
    for milliseconds in KILL_AFTER {
        let mut child = Command::new(MEMTRACE)
            .args(&arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context(MEMTRACE)?;
        thread::sleep(Duration::from_millis(milliseconds));
        child.kill()?;
        child.wait()?;
        target.goes_on().with_context(|| format!("killed {milliseconds} ms after its start"))?;
    }
    for milliseconds in KILL_RECORDING_AFTER {
        let tracer = Tracer::start(Path::new(MEMTRACE), &arguments, true)?;
        thread::sleep(Duration::from_millis(milliseconds));
        // Kills it.
        drop(tracer);
        target.goes_on().with_context(|| format!("killed {milliseconds} ms after it recorded"))?;
    }
    target.is_as_before()?;
    let rounds = target.finish()?;
    Ok(format!(
        "{} kills; the target made {rounds} blocks and exited with 0",
        KILL_AFTER.len() + KILL_RECORDING_AFTER.len()
    ))
}

/// As long as this lives, what is started gets more of the CPUs than what runs already.
struct Hurry;

impl Hurry {
    fn begin() -> Result<Self> {
        set_priority(-10)?;
        Ok(Self)
    }
}

impl Drop for Hurry {
    fn drop(&mut self) {
        // Only the time that the next checks take depends on it.
        let _ = set_priority(0);
    }
}

/// Sets this thread's, which its children inherit.
fn set_priority(nice: libc::c_int) -> Result<()> {
    // SAFETY: takes no pointers.
    if unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) } != 0 {
        return Err(io::Error::last_os_error()).context("setting the priority");
    }
    Ok(())
}

fn doctor_refuses() -> Result<String> {
    let (status, output, words) = memtrace(&["doctor", "--json"])?;
    let missing = names_in_state(&output).with_context(|| format!("status {status:?}: {words}"))?("missing");
    if status != Some(1) || !missing.iter().any(|check| check.starts_with("helper ")) {
        bail!("status {status:?}; missing: {}; {words}", missing.join("; "));
    }
    Ok(format!("missing: {}", missing.join("; ")))
}

/// On a kernel that is too old the error names the next step, and the target goes on.
fn memstacks_refuses() -> Result<String> {
    let mut target = Target::start(WITH_FRAME_POINTERS)?;
    let (status, _, words) = memtrace(&["memstacks", "-p", &target.pid().to_string(), "-d", "1"])?;
    if status != Some(1) || !words.contains("memtrace doctor") {
        bail!("status {status:?}: {words}");
    }
    target.goes_on()?;
    target.is_as_before()?;
    target.finish()?;
    Ok(words.lines().next().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn differences_are_told() {
        let expected = BTreeMap::from([("main;f;malloc".to_owned(), 30), ("worker;g;malloc".to_owned(), 4)]);
        let text = "x;_start;main;f;malloc 10\nx;start;main;f;malloc 20\nx;worker;g;malloc 4\n";
        assert!(compare(text, &expected).is_ok());
        let text = "x;main;f;malloc 30\nx;g;malloc 4\n";
        let error = compare(text, &expected).unwrap_err().to_string();
        assert_eq!(error, "expected [worker;g;malloc 4], found [g;malloc 4]");
        assert!(compare("", &expected).is_err());
    }

    #[test]
    fn states_of_a_document() {
        let document =
            r#"{"checks":[{"name":"a","state":"ok","detail":"x"},{"name":"b","state":"missing","detail":"y"}]}"#;
        assert_eq!(names_in_state(document).unwrap()("missing"), ["b (y)"]);
        assert!(names_in_state("{}").is_err());
    }
}
