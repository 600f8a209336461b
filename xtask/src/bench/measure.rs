//! The single measurements.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use crate::{
    tracer::Tracer,
    workload::{self, Workload},
};

/// What all the C programs begin with.
const HEADER: &str = include_str!("workload.h");
const PROGRAMS: [(&str, &str); 5] = [
    ("faults", include_str!("faults.c")),
    ("pairs", include_str!("pairs.c")),
    ("mixed", include_str!("mixed.c")),
    ("paced", include_str!("paced.c")),
    ("loaded", include_str!("loaded.c")),
];

/// Allocations a second that must be recorded without a loss.
const RATE: &str = "300000";

/// A program whose operations are timed.
pub struct Program {
    pub name: &'static str,
    program: &'static str,
    arguments: &'static [&'static str],
    /// Frames of every stack, if they are all alike.
    pub frames: Option<u32>,
}

/// The first has the shallow stacks for which a limit is set.
pub const WORKLOADS: [Program; 5] = [
    Program { name: "malloc(64)/free pair, 4 frames", program: "pairs", arguments: &["4"], frames: Some(4) },
    Program { name: "malloc(64)/free pair, 10 frames", program: "pairs", arguments: &["10"], frames: Some(10) },
    Program { name: "malloc(64)/free pair, 30 frames", program: "pairs", arguments: &["30"], frames: Some(30) },
    Program { name: "malloc(64)/free pair, 100 frames", program: "pairs", arguments: &["100"], frames: Some(100) },
    Program { name: "mixed call, 4 threads, 4 to 33 frames", program: "mixed", arguments: &[], frames: None },
];

/// What traces the program meanwhile.
#[derive(Clone, Copy)]
pub enum Mode {
    Untraced,
    /// Programs that do nothing, on the sites that memstacks would probe.
    Empty,
    Traced,
    /// Every stack is walked from its innermost frame by searches, without the thread's last one.
    PlainWalks,
}

impl Mode {
    pub const COUNT: usize = 4;
    pub const ALL: [Self; Self::COUNT] = [Self::Untraced, Self::Empty, Self::Traced, Self::PlainWalks];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Untraced => "untraced",
            Self::Empty => "empty probes",
            Self::Traced => "traced",
            Self::PlainWalks => "plain walks",
        }
    }
}

/// What a workload answers.
#[derive(Deserialize)]
pub struct Reading {
    /// Pairs, or calls of allocator functions.
    operations: u64,
    /// Processor time of the threads that did them.
    cpu_ns: u64,
    /// Calls that returned a block.
    allocations: u64,
}

impl Reading {
    /// Of one operation.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    pub fn nanoseconds(&self) -> f64 {
        self.cpu_ns as f64 / self.operations as f64
    }
}

/// What memtrace uses itself while it records [`RATE`] allocations a second.
pub struct Paced {
    /// Allocations that the program made.
    pub allocations: u64,
    /// For how long it made them.
    pub seconds: f64,
    /// Share of one processor while recording.
    pub recording: f64,
    /// Share of one processor over that time, with attaching, naming and writing.
    pub whole: f64,
    /// What memtrace says it lost; empty if nothing.
    pub losses: String,
}

impl Paced {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    pub fn per_second(&self) -> f64 {
        self.allocations as f64 / self.seconds
    }
}

/// The compiled programs and memtrace.
pub struct Bench {
    memtrace: PathBuf,
    directory: PathBuf,
    quick: bool,
}

impl Bench {
    /// Compiles the programs into `directory`.
    pub fn prepare(memtrace: PathBuf, directory: &Path, quick: bool) -> Result<Self> {
        for (name, source) in PROGRAMS {
            workload::compile(directory, name, &format!("{HEADER}\n{source}"), "-O2")?;
        }
        Ok(Self { memtrace, directory: directory.to_owned(), quick })
    }

    /// One operation of `program` in one mode.
    pub fn cost(&self, program: &Program, mode: Mode) -> Result<Reading> {
        let seconds = if self.quick { 0.1 } else { 1.0 };
        let mut workload = self.start(program.program, program.arguments)?;
        let pid = workload.pid();
        let tracer = match mode {
            Mode::Untraced => None,
            Mode::Empty => Some(self.trace_empty(pid)?),
            Mode::Traced => Some(self.trace(pid)?),
            Mode::PlainWalks => Some(self.trace_with(pid, &["--plain-walks"])?),
        };
        let reading = ask(&mut workload, seconds)?;
        if let Some(tracer) = tracer {
            tracer.finish()?;
        }
        Ok(reading)
    }

    /// Seconds of attaching to a program that does nothing, and of detaching from it.
    pub fn attach(&self) -> Result<[f64; 2]> {
        let workload = self.start("paced", &[RATE])?;
        let tracer = self.trace(workload.pid())?;
        let attach = tracer.attach;
        let finished = tracer.finish()?;
        Ok([attach, finished.detach].map(|time| time.as_secs_f64()))
    }

    /// memtrace's own share of a processor.
    pub fn paced(&self) -> Result<Paced> {
        let seconds = if self.quick { 1.0 } else { 10.0 };
        let mut workload = self.start("paced", &[RATE])?;
        let tracer = self.trace(workload.pid())?;
        let (started, before) = (Instant::now(), tracer.cpu()?);
        let reading = ask(&mut workload, seconds)?;
        let (elapsed, after) = (started.elapsed().as_secs_f64(), tracer.cpu()?);
        let finished = tracer.finish()?;
        let path = self.result();
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        Ok(Paced {
            allocations: reading.allocations,
            seconds,
            recording: (after - before).as_secs_f64() / elapsed,
            whole: finished.cpu.as_secs_f64() / elapsed,
            losses: losses(&text).with_context(|| path.display().to_string())?,
        })
    }

    pub fn memtrace(&self) -> &Path {
        &self.memtrace
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub fn quick(&self) -> bool {
        self.quick
    }

    pub fn start(&self, program: &str, arguments: &[&str]) -> Result<Workload> {
        Workload::start(&self.directory.join(program), arguments)
    }

    /// Processor time of one operation of a program, nanoseconds.
    pub fn nanoseconds(&self, workload: &mut Workload) -> Result<f64> {
        Ok(ask(workload, if self.quick { 0.2 } else { 2.0 })?.nanoseconds())
    }

    pub fn trace(&self, pid: u32) -> Result<Tracer> {
        self.trace_with(pid, &[])
    }

    fn trace_with(&self, pid: u32, options: &[&str]) -> Result<Tracer> {
        let (pid, result) = (pid.to_string(), self.result().display().to_string());
        let arguments = [&["memstacks", "-p", &pid, "-o", &result], options].concat();
        Tracer::start(&self.memtrace, &arguments, true)
    }

    fn trace_empty(&self, pid: u32) -> Result<Tracer> {
        let arguments = ["bench-empty", "-p", &pid.to_string()];
        Tracer::start(&self.memtrace, &arguments, true)
    }

    fn result(&self) -> PathBuf {
        self.directory.join("trace.json")
    }
}

fn ask(workload: &mut Workload, seconds: f64) -> Result<Reading> {
    let answer = workload.ask(&format!("run {seconds}"))?;
    let reading: Reading = serde_json::from_str(&answer).with_context(|| answer.clone())?;
    if reading.operations == 0 {
        bail!("the program did nothing: {answer}");
    }
    Ok(reading)
}

/// The losses in the coverage of memtrace's JSON, as text; empty if there are none.
fn losses(text: &str) -> Result<String> {
    let json: Value = serde_json::from_str(text)?;
    match json.pointer("/coverage/losses").context("no field \"coverage.losses\"")? {
        Value::Array(list) if list.is_empty() => Ok(String::new()),
        losses => Ok(losses.to_string()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::build;

    #[test]
    fn losses_of_a_result() {
        assert_eq!(losses("{\"coverage\":{\"losses\":[]}}").unwrap(), "");
        assert_eq!(losses("{\"coverage\":{\"losses\":[{\"n\":1}]}}").unwrap(), "[{\"n\":1}]");
        assert!(losses("{}").is_err());
        assert!(losses("").is_err());
    }

    #[test]
    fn time_of_one_operation() {
        let reading: Reading = serde_json::from_str("{\"operations\":4,\"cpu_ns\":10,\"allocations\":4}").unwrap();
        assert_eq!(reading.nanoseconds(), 2.5);
    }

    #[test]
    fn the_programs_run() {
        let directory = build::target_directory().unwrap().join("xtask-tests/bench");
        let bench = Bench::prepare(PathBuf::new(), &directory, true).unwrap();
        for workload in &WORKLOADS {
            let reading = bench.cost(workload, Mode::Untraced).unwrap();
            assert!(reading.allocations > 0 && reading.allocations <= reading.operations, "{}", workload.name);
            assert!(reading.nanoseconds() > 1.0, "{}", workload.name);
        }
        let mut paced = bench.start("paced", &["20000"]).unwrap();
        let reading = ask(&mut paced, 0.5).unwrap();
        // It cannot be ahead of its pace; a busy machine makes it fall behind.
        assert!((1..=10_000).contains(&reading.allocations), "{}", reading.allocations);
    }
}
