//! `cargo xtask demo`: attaches to a running program that leaks in a known way, and compares.

mod compare;

use std::{ffi::OsStr, fs, path::Path, thread, time::Duration};

use anyhow::{Context, Result, bail};

use crate::{
    build, run,
    tracer::Tracer,
    workload::{self, Workload},
};

const SAMPLE: &str = include_str!("sample.c");
/// The first functions of the sample's threads.
const ROOTS: [&str; 2] = ["main", "worker"];
/// How long the sample runs before memtrace attaches.
const BEFORE: Duration = Duration::from_secs(1);
const LEAKING_SECONDS: u32 = 4;

/// Builds everything, traces the sample and fails unless every number is the sample's own.
pub fn demo() -> Result<()> {
    run::need_root("the demo needs")?;
    let memtrace = build::memtrace()?;
    let root = run::root()?;
    let directory = build::target_directory()?.join("demo");
    let program = workload::compile(&directory, "sample", SAMPLE, "-O1")?;
    let outputs = [root.join("demo.svg"), directory.join("demo.folded"), directory.join("demo.json")];

    let mut sample = Workload::start(&program, &[])?;
    let pid = sample.pid().to_string();
    eprintln!("the sample program runs as process {pid}, and leaks and churns");
    thread::sleep(BEFORE);
    // Nothing may leak while memtrace attaches: only the sample could tell which of it came after.
    sample.ask("quiet")?;

    let mut arguments: Vec<&OsStr> = ["memstacks", "-p", &pid, "-o", "-"].map(OsStr::new).to_vec();
    for output in &outputs {
        arguments.extend([OsStr::new("-o"), output.as_os_str()]);
    }
    let tracer = Tracer::start(&memtrace, &arguments, false)?;
    eprintln!("the sample leaks for {LEAKING_SECONDS} seconds while it churns");
    let truth = sample.ask(&format!("leak {LEAKING_SECONDS}"))?;
    let finished = tracer.finish()?;
    drop(sample);

    let [picture, stacks, json] = outputs;
    let expected = compare::truth(&truth)?;
    let found = read(&json, |text| compare::found(text, &ROOTS))?;
    let rows = compare::rows(&expected, &found);
    let folded = read(&stacks, |text| compare::folded_bytes(text, &ROOTS))?;

    println!("{}", finished.output);
    println!("What the sample says it leaked, and what memtrace found:\n");
    print!("{}", compare::table(&rows));
    println!("\nFlame graph: {}", picture.display());
    let different = rows.iter().filter(|row| !row.is_equal()).count();
    if different > 0 {
        bail!("{different} of {} call paths differ", rows.len());
    }
    if folded != compare::bytes(&expected) {
        bail!("{} differs from the sample's truth", stacks.display());
    }
    println!("All {} call paths are equal.", rows.len());
    Ok(())
}

fn read<T>(path: &Path, parse: impl Fn(&str) -> Result<T>) -> Result<T> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    parse(&text).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_sample_leaks_on_every_path_and_tells_it() {
        let directory = build::target_directory().unwrap().join("xtask-tests/demo");
        let program = workload::compile(&directory, "sample", SAMPLE, "-O1").unwrap();
        let mut sample = Workload::start(&program, &[]).unwrap();
        assert_eq!(sample.ask("quiet").unwrap(), "quiet");
        let truth = compare::truth(&sample.ask("leak 1").unwrap()).unwrap();
        assert_eq!(truth.len(), 7);
        for (path, amount) in truth {
            assert!(ROOTS.contains(&path.split(';').next().unwrap()), "{path}");
            assert!(amount.blocks > 0 && amount.bytes >= amount.blocks, "{path}: {amount:?}");
        }
    }
}
