//! Loading the unwind tables of a process with many libraries.

use std::{fs, path::Path, process::Command, thread, time::Duration};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::measure::Bench;
use crate::run;

/// Libraries of the process.
const LIBRARIES: usize = 200;
const LIBRARY: &str = include_str!("library.S");

/// What it took to attach to a process with [`LIBRARIES`] libraries.
pub struct Load {
    /// Seconds from memtrace's start until it recorded.
    pub attach: f64,
    /// Bytes of the kernel side's unwind tables, with room for more.
    pub table_bytes: u64,
    /// Rows, by `memtrace doctor --unwind`.
    pub rows: u64,
    /// The longest time for which the process did not run, in milliseconds: by itself, and while memtrace attached.
    pub pauses: [f64; 2],
}

#[derive(Deserialize)]
struct Answer {
    longest_pause_ns: u64,
}

#[derive(Deserialize)]
struct Report {
    modules: Vec<Module>,
}

#[derive(Deserialize)]
struct Module {
    rows: u64,
}

/// Measures once.
pub fn load(bench: &Bench) -> Result<Load> {
    let directory = bench.directory().join("libraries");
    prepare(&directory)?;
    let mut workload = bench.start("loaded", &[&directory.display().to_string()])?;
    let pid = workload.pid();
    let seconds = if bench.quick() { 0.5 } else { 3.0 };
    let ask = format!("run {seconds}");
    let alone = pause(&workload.ask(&ask)?)?;
    let (answer, attached) = thread::scope(|scope| {
        let running = scope.spawn(|| workload.ask(&ask));
        // The loop has begun by then, and goes on for longer than attaching takes.
        thread::sleep(Duration::from_millis(100));
        let attached = bench.trace(pid).and_then(|tracer| {
            let (attach, bytes) = (tracer.attach.as_secs_f64(), table_bytes(tracer.pid())?);
            tracer.finish()?;
            Ok((attach, bytes))
        });
        (running.join(), attached)
    });
    let Ok(answer) = answer else { bail!("the thread that waits for the program failed") };
    let (attach, table_bytes) = attached?;
    let mut doctor = Command::new(bench.memtrace());
    doctor.args(["doctor", "--unwind", "--json", "-p", &pid.to_string()]);
    let report: Report = serde_json::from_str(&run::output(&mut doctor)?).context("memtrace doctor --unwind --json")?;
    Ok(Load {
        attach,
        table_bytes,
        rows: report.modules.iter().map(|module| module.rows).sum(),
        pauses: [alone, pause(&answer?)?],
    })
}

fn pause(answer: &str) -> Result<f64> {
    let answer: Answer = serde_json::from_str(answer).with_context(|| answer.to_owned())?;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    Ok(answer.longest_pause_ns as f64 / 1e6)
}

/// Makes the libraries, each a file of its own.
fn prepare(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    let (source, library) = (directory.with_extension("S"), directory.with_extension("so"));
    fs::write(&source, LIBRARY).with_context(|| source.display().to_string())?;
    run::output(Command::new("cc").args(["-shared", "-nostdlib", "-o"]).args([&library, &source]))?;
    for number in 0..LIBRARIES {
        let copy = directory.join(format!("lib{number}.so"));
        fs::copy(&library, &copy).with_context(|| copy.display().to_string())?;
    }
    Ok(())
}

/// Memory of the arrays of 8-byte rows and 4-byte index entries that a process holds (`/proc/PID/fdinfo`, kernel/bpf/syscall.c).
fn table_bytes(pid: u32) -> Result<u64> {
    const ARRAY: u64 = 2;
    /// Smaller arrays are counters and switches.
    const FEWEST: u64 = 1000;
    let directory = format!("/proc/{pid}/fdinfo");
    let mut seen = std::collections::BTreeMap::new();
    for entry in fs::read_dir(&directory).with_context(|| directory.clone())? {
        let text = fs::read_to_string(entry?.path()).unwrap_or_default();
        let field = |name: &str| -> Option<u64> {
            text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t")?.parse().ok())
        };
        let table = field("map_type") == Some(ARRAY)
            && matches!(field("value_size"), Some(4 | 8))
            && field("max_entries").is_some_and(|entries| entries >= FEWEST);
        if let (true, Some(id), Some(bytes)) = (table, field("map_id"), field("memlock")) {
            seen.insert(id, bytes);
        }
    }
    Ok(seen.values().sum())
}
