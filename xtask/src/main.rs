//! `cargo xtask …`: sets up, builds, tests and measures memtrace.
//!
//! One file per command; [`run`] starts child processes and names the one that failed; [`tracer`] and [`workload`]
//! are what `demo`, `bench` and `vm` share.

mod bench;
mod build;
mod demo;
#[path = "../../memtrace/build/ebpf.rs"]
mod ebpf;
mod folded;
mod lint;
mod run;
mod setup;
mod test;
mod tracer;
mod vm;
mod workload;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(bin_name = "cargo xtask", about = "Sets up, builds, tests and measures memtrace")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what building and testing take; does nothing if all of it is there
    Setup,
    /// Set up, then build target/release/memtrace
    Build,
    /// Set up, then run every test (needs root)
    Test(test::Options),
    /// Check formatting and lints, warnings denied
    Lint,
    /// Trace a program that leaks in a known way and compare (needs root)
    Demo,
    /// Measure what tracing costs on this machine (needs root)
    Bench(bench::Options),
    /// Boot other kernels in emulated machines and run the privileged tests there
    Vm(vm::Options),
    /// The emulated machine's first process
    #[command(name = vm::guest::COMMAND, hide = true)]
    VmGuest(vm::guest::Options),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Setup => setup::setup(),
        Command::Build => build::build(),
        Command::Test(options) => test::test(&options),
        Command::Lint => lint::lint(),
        Command::Demo => demo::demo(),
        Command::Bench(options) => bench::bench(&options),
        Command::Vm(options) => vm::vm(&options),
        Command::VmGuest(options) => vm::guest::guest(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
