//! What tracing page faults costs a program that does little else, beside other tools.

use std::{
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use super::{measure::Bench, statistics::Summary, verdict};
use crate::{run, tracer::Tracer, workload::Workload};

/// What of its untraced rate the program must keep.
const LEAST_KEPT: f64 = 0.8;
/// How long another tool gets to attach.
const SETTLING: Duration = Duration::from_secs(2);

/// Who watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Watcher {
    Nobody,
    Memtrace,
    Perf,
    Bpftrace,
}

impl Watcher {
    const ALL: [Self; 4] = [Self::Nobody, Self::Memtrace, Self::Perf, Self::Bpftrace];

    const fn name(self) -> &'static str {
        match self {
            Self::Nobody => "untraced",
            Self::Memtrace => "memtrace pgfaultstacks",
            Self::Perf => "perf record -e page-faults -c 1 -g",
            Self::Bpftrace => "bpftrace, one line",
        }
    }

    /// The program that has to be installed.
    const fn program(self) -> Option<&'static str> {
        match self {
            Self::Nobody | Self::Memtrace => None,
            Self::Perf => Some("perf"),
            Self::Bpftrace => Some("bpftrace"),
        }
    }
}

/// Measures each watcher once a round, and prints the table.
pub fn faults(bench: &Bench, rounds: u32) -> Result<String> {
    let there: Vec<Watcher> = Watcher::ALL
        .into_iter()
        .filter(|watcher| {
            watcher.program().is_none_or(|program| run::output(Command::new(program).arg("--version")).is_ok())
        })
        .collect();
    let mut readings = vec![Vec::new(); there.len()];
    for round in 1..=rounds {
        for (watcher, readings) in there.iter().zip(&mut readings) {
            let nanoseconds = measure(bench, *watcher)?;
            eprintln!("round {round} of {rounds}: page faults, {}: {nanoseconds:.0} ns", watcher.name());
            readings.push(nanoseconds);
        }
    }
    let summaries: Vec<Summary> = readings.iter().filter_map(|values| Summary::of(values)).collect();
    let untraced = summaries.first().context("nothing measured")?.median;
    let mut text = format!("{:<36}  {:>22}  {:>8}  {:>6}\n", "page faults", "ns a fault", "added", "rate");
    for (watcher, summary) in there.iter().zip(&summaries) {
        let cell = format!("{:.0} ({:.0} to {:.0})", summary.median, summary.lowest, summary.highest);
        text.push_str(&format!(
            "{:<36}  {cell:>22}  {:>8.0}  {:>4.0} %\n",
            watcher.name(),
            summary.median - untraced,
            untraced / summary.median * 100.0
        ));
    }
    for watcher in Watcher::ALL {
        if let (false, Some(program)) = (there.contains(&watcher), watcher.program()) {
            text.push_str(&format!("{:<36}  not measured: {program} is not installed\n", watcher.name()));
        }
    }
    if let Some(position) = there.iter().position(|watcher| *watcher == Watcher::Memtrace) {
        let kept = untraced / summaries[position].median;
        text.push_str(&verdict(
            &format!("traced by memtrace, a faulting program takes {:.2} times as long", 1.0 / kept),
            1.0 / kept,
            1.0 / LEAST_KEPT,
            "times",
        ));
        text.push('\n');
    }
    Ok(text)
}

/// Processor time of one fault, nanoseconds.
fn measure(bench: &Bench, watcher: Watcher) -> Result<f64> {
    let mut workload = bench.start("faults", &[])?;
    let pid = workload.pid();
    let nanoseconds = match watcher {
        Watcher::Nobody => bench.nanoseconds(&mut workload)?,
        Watcher::Memtrace => {
            let (pid, result) = (pid.to_string(), bench.directory().join("faults.json").display().to_string());
            let tracer = Tracer::start(bench.memtrace(), &["pgfaultstacks", "-p", &pid, "--all", "-o", &result], true)?;
            let nanoseconds = bench.nanoseconds(&mut workload)?;
            tracer.finish()?;
            no_losses(&result)?;
            nanoseconds
        }
        Watcher::Perf => {
            let data = bench.directory().join("perf.data");
            let arguments = ["record", "-q", "-e", "page-faults", "-c", "1", "-g", "-o"];
            let mut command = Command::new("perf");
            command.args(arguments).arg(data).args(["-p", &pid.to_string()]);
            watched_by(&mut command, bench, &mut workload)?
        }
        Watcher::Bpftrace => {
            let script = format!("tracepoint:exceptions:page_fault_user /pid == {pid}/ {{ @[ustack] = count(); }}");
            let mut command = Command::new("bpftrace");
            command.args(["-e", &script]);
            watched_by(&mut command, bench, &mut workload)?
        }
    };
    workload.finish()?;
    Ok(nanoseconds)
}

/// Measures while another tool runs.
fn watched_by(command: &mut Command, bench: &Bench, workload: &mut Workload) -> Result<f64> {
    let mut child = Watching(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().context("another tool")?);
    thread::sleep(SETTLING);
    if let Some(status) = child.0.try_wait()? {
        bail!("{command:?} ended before anything was measured ({status})");
    }
    bench.nanoseconds(workload)
}

/// Interrupted when it goes out of scope.
struct Watching(Child);

impl Drop for Watching {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-INT", &self.0.id().to_string()]).status();
        let _ = self.0.wait();
    }
}

fn no_losses(path: &str) -> Result<()> {
    let text = std::fs::read_to_string(path).with_context(|| path.to_owned())?;
    let report: serde_json::Value = serde_json::from_str(&text).context("memtrace's report")?;
    match report["coverage"]["losses"].as_array() {
        Some(losses) if losses.is_empty() => Ok(()),
        losses => bail!("page faults were lost: {losses:?}"),
    }
}
