//! `cargo xtask bench`: what tracing costs the traced program, and memtrace itself.

mod measure;
mod statistics;
mod symbols;

use std::{fs, path::Path};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::{build, run};
use measure::{Bench, Mode, Reading, WORKLOADS};
use statistics::Summary;

/// What exact tracing may cost at most, as a multiple of empty programs on the same sites.
const MOST_TIMES_EMPTY: f64 = 1.8;
/// What attaching and detaching may take together, in seconds.
const MOST_ATTACH_SECONDS: f64 = 1.0;
/// What memtrace itself may use while it records, as a share of one processor.
const MOST_OWN_CPU: f64 = 0.02;

#[derive(Args)]
pub struct Options {
    /// Measurements of each kind; the medians are printed
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Short measurements, to see that all of them work: the numbers mean little
    #[arg(long)]
    quick: bool,
    /// Only one part
    #[arg(long, value_name = "PART")]
    only: Option<Part>,
}

/// What can be measured alone.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Giving names to addresses
    Symbols,
}

/// Builds everything, measures in interleaved rounds, and prints medians and ratios.
pub fn bench(options: &Options) -> Result<()> {
    if options.only == Some(Part::Symbols) {
        return symbols::measure(&build::memtrace()?);
    }
    run::need_root("measuring needs")?;
    let memtrace = build::memtrace()?;
    let directory = build::target_directory()?.join("bench");
    let bench = Bench::prepare(memtrace, &directory, options.quick)?;

    let costs = costs(&bench, options.rounds)?;
    let attach = attach(&bench, options.rounds)?;
    eprintln!("memtrace's own processor time");
    let paced = bench.paced()?;

    println!("{}", machine());
    println!("Processor time of one operation in nanoseconds: median of {} (lowest to highest)\n", options.rounds);
    print!("{}", cost_table(&costs));
    println!();
    for line in [
        verdict(
            &format!(
                "attaching {:.0} ms and detaching {:.0} ms from an idle program",
                attach[0].median * 1e3,
                attach[1].median * 1e3
            ),
            attach[0].median + attach[1].median,
            MOST_ATTACH_SECONDS,
            "s together",
        ),
        verdict(
            &format!(
                "memtrace's own processor time while it records {:.0} allocations a second: {:.2} % of one processor",
                paced.per_second(),
                paced.recording * 100.0
            ),
            paced.recording * 100.0,
            MOST_OWN_CPU * 100.0,
            "%",
        ),
        format!("  with attaching, naming and writing, over {:.1} s: {:.2} %", paced.seconds, paced.whole * 100.0),
    ] {
        println!("{line}");
    }
    println!("losses: {}", if paced.losses.is_empty() { "none" } else { &paced.losses });
    let quick = if options.quick { " --quick" } else { "" };
    println!("\nTo repeat: cargo xtask bench --rounds {}{quick}", options.rounds);
    if !paced.losses.is_empty() {
        bail!("losses while recording {:.0} allocations a second", paced.per_second());
    }
    Ok(())
}

/// One workload in every mode.
struct Cost {
    name: &'static str,
    modes: [Summary; 3],
}

/// Measures every workload in every mode once a round, so that a slow moment of the machine hits all of them alike.
fn costs(bench: &Bench, rounds: u32) -> Result<Vec<Cost>> {
    let mut readings = vec![[const { Vec::new() }; 3]; WORKLOADS.len()];
    for round in 1..=rounds {
        for (workload, readings) in WORKLOADS.iter().zip(&mut readings) {
            for (mode, readings) in Mode::ALL.into_iter().zip(readings) {
                let reading: Reading = bench.cost(workload, mode)?;
                eprintln!(
                    "round {round} of {rounds}: {}, {}: {:.1} ns",
                    workload.name,
                    mode.name(),
                    reading.nanoseconds()
                );
                readings.push(reading.nanoseconds());
            }
        }
    }
    WORKLOADS
        .iter()
        .zip(readings)
        .map(|(workload, readings)| Ok(Cost { name: workload.name, modes: summaries(&readings)? }))
        .collect()
}

/// Seconds of attaching and of detaching.
fn attach(bench: &Bench, rounds: u32) -> Result<[Summary; 2]> {
    let mut readings = [const { Vec::new() }; 2];
    for round in 1..=rounds {
        let [attach, detach] = bench.attach()?;
        eprintln!("round {round} of {rounds}: attach {:.0} ms, detach {:.0} ms", attach * 1e3, detach * 1e3);
        readings[0].push(attach);
        readings[1].push(detach);
    }
    summaries(&readings)
}

fn summaries<const N: usize>(readings: &[Vec<f64>; N]) -> Result<[Summary; N]> {
    let summaries: Vec<_> = readings.iter().filter_map(|values| Summary::of(values)).collect();
    summaries.try_into().ok().context("nothing measured")
}

fn cost_table(costs: &[Cost]) -> String {
    let width = WORKLOADS.iter().map(|workload| workload.name.len()).max();
    let width = width.unwrap_or_default();
    let mut text = format!(
        "{:width$}  {:>22}  {:>22}  {:>22}  {:>9}  {:>8}\n",
        "", "untraced", "empty probes", "traced", "/untraced", "/empty"
    );
    for cost in costs {
        let [untraced, empty, traced] = cost.modes;
        let cell =
            |summary: Summary| format!("{:.1} ({:.0} to {:.0})", summary.median, summary.lowest, summary.highest);
        text.push_str(&format!(
            "{:width$}  {:>22}  {:>22}  {:>22}  {:>8.1}x  {:>7.2}x\n",
            cost.name,
            cell(untraced),
            cell(empty),
            cell(traced),
            traced.median / untraced.median,
            traced.median / empty.median
        ));
    }
    if let Some(shallow) = costs.first() {
        let [_, empty, traced] = shallow.modes;
        text.push('\n');
        text.push_str(&verdict(
            &format!("tracing the first costs {:.2} times what empty probes cost", traced.median / empty.median),
            traced.median / empty.median,
            MOST_TIMES_EMPTY,
            "times",
        ));
        text.push('\n');
    }
    text
}

/// A measured fact and whether it keeps to its limit.
fn verdict(fact: &str, value: f64, limit: f64, unit: &str) -> String {
    let word = if value <= limit { "kept" } else { "NOT kept" };
    format!("{fact} (limit {limit} {unit}: {word})")
}

/// What the numbers were measured on.
fn machine() -> String {
    let read = |path: &str| fs::read_to_string(Path::new(path)).unwrap_or_default();
    let cpu = read("/proc/cpuinfo");
    let model = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or("unknown processor", |model| model.trim_start_matches([' ', '\t', ':']));
    let processors = cpu.lines().filter(|line| line.starts_with("processor")).count();
    format!("Linux {}, {processors} processors: {model}", read("/proc/sys/kernel/osrelease").trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts() {
        assert_eq!(verdict("took 0.5 s", 0.5, 1.0, "s"), "took 0.5 s (limit 1 s: kept)");
        assert_eq!(verdict("took 1.5 s", 1.5, 1.0, "s"), "took 1.5 s (limit 1 s: NOT kept)");
    }

    #[test]
    fn the_table_has_ratios() {
        let summary = |median| Summary { median, lowest: median - 1.0, highest: median + 1.0 };
        let text = cost_table(&[Cost { name: "x", modes: [summary(10.0), summary(2000.0), summary(3000.0)] }]);
        assert!(text.contains("300.0x"), "{text}");
        assert!(text.contains("1.50x"), "{text}");
        assert!(text.contains("2000.0 (1999 to 2001)"), "{text}");
        assert!(text.contains("limit 1.8 times: kept"), "{text}");
    }
}
