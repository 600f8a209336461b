//! The commands, one file each. Only here (and in a later daemon) are stages joined.

mod bench_empty;
mod bench_names;
mod custom;
mod doctor;
mod late;
mod launch;
mod limits;
mod memstacks;
mod mmapstacks;
mod options;
mod pgfaultstacks;
mod progress;
mod selftest;
pub mod session;
mod signals;
mod sweeper;
mod targets;
mod trace;
mod unwinding;
mod workload;

use std::{io, io::IsTerminal as _, process::ExitCode};

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Exit code of a failure while the command ran.
const FAILURE: u8 = 1;
/// Exit code of wrong usage.
const USAGE: u8 = 2;

/// Tells which code makes a running process's memory grow.
#[derive(Debug, Parser)]
#[command(name = "memtrace", version, max_term_width = 110, disable_help_subcommand = true)]
struct Cli {
    /// Says more on standard error: -v for what is done, -vv for the eBPF side's messages too
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    verbose: u8,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Memstacks(memstacks::Args),
    Pgfaultstacks(pgfaultstacks::Args),
    Mmapstacks(mmapstacks::Args),
    Doctor(doctor::Args),
    Selftest(selftest::Args),
    #[command(hide = true)]
    BenchEmpty(bench_empty::Args),
    #[command(hide = true)]
    BenchNames(bench_names::Args),
    /// The program that selftest traces
    #[command(name = "__workload", hide = true)]
    Workload,
}

/// An error in the way the command was called.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// Runs the command that the arguments name.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are results and go to standard output, usage errors to standard error.
            let code = if error.use_stderr() { USAGE } else { 0 };
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    init_log(cli.verbose);
    match run(cli.command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("memtrace: {error:#}");
            ExitCode::from(if error.is::<UsageError>() { USAGE } else { FAILURE })
        }
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Memstacks(args) => memstacks::run(args),
        Command::Pgfaultstacks(args) => pgfaultstacks::run(args),
        Command::Mmapstacks(args) => mmapstacks::run(args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Selftest(args) => selftest::run(&args),
        Command::BenchEmpty(args) => bench_empty::run(&args),
        Command::BenchNames(args) => bench_names::run(&args),
        Command::Workload => workload::run(),
    }
}

/// Sends the log to standard error. `MEMTRACE_LOG` (the syntax of `RUST_LOG`) overrides the level.
fn init_log(verbose: u8) {
    let level = match verbose {
        0 => "warn",
        1 => "info",
        _ => "debug",
    };
    let filter =
        EnvFilter::try_from_env("MEMTRACE_LOG").unwrap_or_else(|_| EnvFilter::new(format!("memtrace={level}")));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(colour(io::stderr().is_terminal()))
        .without_time()
        .init();
}

/// Whether to use colours on a stream: only on a terminal, and not when NO_COLOR is set and not empty
/// (<https://no-color.org>).
fn colour(terminal: bool) -> bool {
    terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}
