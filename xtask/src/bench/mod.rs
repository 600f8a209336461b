//! `cargo xtask bench`: what tracing costs the traced program, and memtrace itself.

mod faults;
mod load;
mod measure;
mod statistics;
mod symbols;

use std::{fs, path::Path};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::{build, run};
use load::Load;
use measure::{Bench, Mode, Reading, WORKLOADS};
use statistics::Summary;

/// What exact tracing may cost at most, as a multiple of empty programs on the same sites.
const MOST_TIMES_EMPTY: f64 = 1.8;
/// What attaching and detaching may take together, in seconds.
const MOST_ATTACH_SECONDS: f64 = 1.0;
/// What a frame of an unchanged deep stack may cost at most, in nanoseconds.
const MOST_FRAME_NANOSECONDS: f64 = 40.0;
/// What attaching to a process with many libraries may take, in seconds.
const MOST_LOAD_SECONDS: f64 = 2.0;
/// What its unwind tables may take, in MB.
const MOST_TABLES: f64 = 100.0;
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
    /// Page faults, beside other tools that are installed
    Faults,
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

    if options.only == Some(Part::Faults) {
        let table = faults::faults(&bench, options.rounds)?;
        println!("{}\n", machine());
        print!("{table}");
        println!("\nTo repeat: cargo xtask bench --only faults --rounds {}", options.rounds);
        return Ok(());
    }
    let costs = costs(&bench, options.rounds)?;
    let faults = faults::faults(&bench, options.rounds)?;
    let attach = attach(&bench, options.rounds)?;
    let load = load_tables(&bench, options.rounds)?;
    eprintln!("memtrace's own processor time");
    let paced = bench.paced()?;

    println!("{}", machine());
    println!("Processor time of one operation in nanoseconds: median of {} (lowest to highest)\n", options.rounds);
    print!("{}", cost_table(&costs));
    println!();
    print!("{}", walk_table(&costs));
    println!();
    print!("{faults}");
    println!();
    print!("{}", load_table(&load)?);
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
    frames: Option<u32>,
    modes: [Summary; Mode::COUNT],
}

/// Measures every workload in every mode once a round, so that a slow moment of the machine hits all of them alike.
fn costs(bench: &Bench, rounds: u32) -> Result<Vec<Cost>> {
    let mut readings = vec![[const { Vec::new() }; Mode::COUNT]; WORKLOADS.len()];
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
        .map(|(workload, readings)| {
            Ok(Cost { name: workload.name, frames: workload.frames, modes: summaries(&readings)? })
        })
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
        let [untraced, empty, traced, _] = cost.modes;
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
        let [_, empty, traced, _] = shallow.modes;
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

/// What of it is memtrace's own: a pair's traced time minus that with empty probes, and a frame's share of it, by the
/// difference to the shallowest stack.
fn walk_table(costs: &[Cost]) -> String {
    let own = |cost: &Cost, mode: Mode| cost.modes[mode as usize].median - cost.modes[Mode::Empty as usize].median;
    let deep: Vec<(u32, &Cost)> = costs.iter().filter_map(|cost| Some((cost.frames?, cost))).collect();
    let Some(((base, shallow), rest)) = deep.split_first() else { return String::new() };
    let mut text = format!(
        "{:<22}  {:>10}  {:>9}  {:>16}  {:>9}\n",
        "memtrace's own, ns", "a pair", "a frame", "plain: a pair", "a frame"
    );
    let mut frame = 0.0;
    for (frames, cost) in rest {
        let by_frame = |mode| (own(cost, mode) - own(shallow, mode)) / f64::from(frames - base);
        frame = by_frame(Mode::Traced);
        text.push_str(&format!(
            "{:<22}  {:>10.0}  {:>9.1}  {:>16.0}  {:>9.1}\n",
            format!("{frames} frames"),
            own(cost, Mode::Traced),
            frame,
            own(cost, Mode::PlainWalks),
            by_frame(Mode::PlainWalks)
        ));
    }
    text.push_str(&verdict(
        &format!("a frame of an unchanged deep stack costs {frame:.1} ns"),
        frame,
        MOST_FRAME_NANOSECONDS,
        "ns",
    ));
    text.push('\n');
    text
}

fn load_tables(bench: &Bench, rounds: u32) -> Result<Vec<Load>> {
    (1..=rounds)
        .map(|round| {
            let load = load::load(bench)?;
            eprintln!("round {round} of {rounds}: {} rows attached in {:.2} s", load.rows, load.attach);
            Ok(load)
        })
        .collect()
}

fn load_table(loads: &[Load]) -> Result<String> {
    let median = |part: fn(&Load) -> f64| -> Result<f64> {
        Ok(Summary::of(&loads.iter().map(part).collect::<Vec<_>>()).context("nothing measured")?.median)
    };
    let rows = loads.first().map_or(0, |load| load.rows);
    let attach = median(|load| load.attach)?;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let tables = median(|load| load.table_bytes as f64 / 1e6)?;
    let (alone, attaching) = (median(|load| load.pauses[0])?, median(|load| load.pauses[1])?);
    Ok([
        verdict(
            &format!("attaching to a process with 200 libraries and {rows} unwind rows took {attach:.2} s"),
            attach,
            MOST_LOAD_SECONDS,
            "s",
        ),
        verdict(&format!("its unwind tables take {tables:.1} MB"), tables, MOST_TABLES, "MB"),
        format!("meanwhile it did not run for at most {attaching:.1} ms at a time; by itself, {alone:.1} ms\n"),
    ]
    .join("\n"))
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
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn verdicts() {
        assert_eq!(verdict("took 0.5 s", 0.5, 1.0, "s"), "took 0.5 s (limit 1 s: kept)");
        assert_eq!(verdict("took 1.5 s", 1.5, 1.0, "s"), "took 1.5 s (limit 1 s: NOT kept)");
    }

    #[test]
    fn a_frame_costs_the_difference_to_the_shallowest_stack() {
        let summary = |median| Summary { median, lowest: median, highest: median };
        let cost = |frames, traced, plain| Cost {
            name: "x",
            frames: Some(frames),
            modes: [summary(10.0), summary(2000.0), summary(traced), summary(plain)],
        };
        let text = walk_table(&[cost(4, 2100.0, 2200.0), cost(14, 2350.0, 3200.0)]);
        let line = text.lines().find(|line| line.starts_with("14 frames")).unwrap();
        assert_eq!(line.split_whitespace().skip(2).collect::<Vec<_>>(), ["350", "25.0", "1200", "100.0"]);
        assert!(text.contains("costs 25.0 ns (limit 40 ns: kept)"), "{text}");
    }

    #[test]
    fn the_table_has_ratios() {
        let summary = |median| Summary { median, lowest: median - 1.0, highest: median + 1.0 };
        let text = cost_table(&[Cost {
            name: "x",
            frames: None,
            modes: [summary(10.0), summary(2000.0), summary(3000.0), summary(4000.0)],
        }]);
        assert!(text.contains("300.0x"), "{text}");
        assert!(text.contains("1.50x"), "{text}");
        assert!(text.contains("2000.0 (1999 to 2001)"), "{text}");
        assert!(text.contains("limit 1.8 times: kept"), "{text}");
    }
}
