//! `memtrace mmapstacks`: which call paths hold address space.

use std::{process::ExitCode, time::Duration};

use anyhow::bail;

use super::{
    UsageError,
    options::{seconds, unit},
    session::{Ask, Probes, Watch},
    trace::{self, Common, Job},
};
use crate::{
    profile::Subject,
    view::{Unit, Which},
};

/// Shows which call paths hold address space, and how much of it is resident
///
/// Attaches to a running process, or starts a command, and records the system calls that map and unmap memory. The default
/// view is what was mapped during the trace and still is at its end.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Shows all that was mapped, without subtracting what was unmapped; with --mapped, both views
    #[arg(long)]
    all: bool,
    /// Shows what was mapped and still is; this is the default
    #[arg(long)]
    mapped: bool,
    /// Leaves out mappings that are younger than this at the end of the trace
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    older: Option<Duration>,
    /// What to count and to rank by: bytes, pages or count
    #[arg(long, value_parser = unit, default_value = "bytes", value_name = "UNIT")]
    unit: Unit,
    #[command(flatten)]
    common: Common,
}

/// Runs the command.
///
/// # Errors
/// Whatever prevents a result.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let views = trace::views(args.mapped, args.all);
    if args.older.is_some() && views == [Which::All] {
        bail!(UsageError(
            "--older leaves young mappings out of those still mapped: it has no effect with --all alone".into()
        ));
    }
    trace::run(&Job {
        common: args.common,
        custom: Vec::new(),
        subject: Subject::Mappings,
        views,
        unit: args.unit,
        probes: Probes::None,
        watch: Watch { faults: false, resident: false, space: true },
        ask: Ask { subject: Subject::Mappings, older: args.older.unwrap_or_default(), kind: None },
    })
}
