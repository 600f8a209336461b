//! `memtrace memstacks`: which call paths allocate, and which allocated blocks are still unfreed.

use std::{process::ExitCode, time::Duration};

use anyhow::bail;

use super::{
    UsageError,
    custom::Custom,
    options::{seconds, unit},
    session::{Ask, Probes, Watch},
    trace::{self, Common, Job},
};
use crate::{
    profile::Subject,
    view::{Unit, Which},
};

/// Shows which call paths allocate memory and do not free it
///
/// Attaches to a running process, or starts a command and traces it from its first allocation. The default view is
/// unfreed allocations: what was allocated during the trace and not freed by its end.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Shows all allocations, without subtracting frees; with --unfreed, both views
    #[arg(long)]
    all: bool,
    /// Shows unfreed allocations; this is the default
    #[arg(long)]
    unfreed: bool,
    /// Leaves out blocks that are younger than this at the end of the trace, which may be about to be freed
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    older: Option<Duration>,
    /// Shows who touched the memory of unfreed blocks: for every call path that allocated, the call paths that made its pages
    /// resident
    #[arg(long, conflicts_with_all = ["all", "unfreed", "older"])]
    touched: bool,
    /// What to count and to rank by: bytes, count or pages
    #[arg(long, value_parser = unit, default_value = "bytes", value_name = "UNIT")]
    unit: Unit,
    #[command(flatten)]
    custom: Custom,
    #[command(flatten)]
    common: Common,
}

/// Runs the command.
///
/// # Errors
/// Whatever prevents a result.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let views = trace::views(args.unfreed, args.all);
    if args.older.is_some() && views == [Which::All] {
        bail!(UsageError(
            "--older leaves young blocks out of the unfreed ones: it has no effect with --all alone".into()
        ));
    }
    if let Some(warning) = args.custom.warning() {
        eprintln!("memtrace: {warning}");
    }
    let subject = if args.touched { Subject::Touched } else { Subject::Heap };
    trace::run(&Job {
        common: args.common,
        custom: args.custom.specs(),
        subject,
        views,
        unit: args.unit,
        probes: Probes::Recording,
        watch: Watch { faults: args.touched, resident: false, space: args.touched },
        ask: Ask { subject, older: args.older.unwrap_or_default(), kind: None },
    })
}
