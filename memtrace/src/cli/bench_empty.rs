//! `memtrace bench-empty`, for the benchmark: attaches programs that do nothing to the sites that memstacks would probe.

use std::{process::ExitCode, time::Duration};

use anyhow::Context as _;

use super::{
    options::seconds,
    session::{Options, Probes, Session},
    signals::Interrupt,
};
use crate::{
    kernel::budget::{Budget, MIN_MIB},
    target::Process,
};

/// Attaches empty programs to the sites of memstacks
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Process to attach to
    #[arg(short, long, value_name = "PID")]
    pid: u32,
    /// How long [default: until Ctrl-C]
    #[arg(short, long, value_name = "SECS", value_parser = seconds)]
    duration: Option<Duration>,
}

/// Runs the command.
///
/// # Errors
/// The process can't be traced.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("the runtime can't be started")?;
    runtime.block_on(async {
        let process = Process::open(args.pid)?;
        let mut interrupt = Interrupt::install()?;
        let options = Options::plain(Budget::from_mebibytes(MIN_MIB));
        let mut session = Session::attach(vec![process], None, &options, Probes::Empty)?;
        session.start()?;
        eprintln!("tracing {} with empty programs", session.subject());
        session.run(args.duration, interrupt.wait(), std::future::pending(), |_, _| {}).await?;
        Ok(ExitCode::SUCCESS)
    })
}
