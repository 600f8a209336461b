//! `memtrace pgfaultstacks`: which call paths made physical memory grow.

use std::{process::ExitCode, time::Duration};

use anyhow::bail;

use super::{
    UsageError,
    options::{kind, unit},
    session::{Ask, Probes, Watch},
    trace::{self, Common, Job},
};
use crate::{
    profile::Subject,
    target::pages::PageKind,
    view::{Unit, Which},
};

/// Shows which call paths made physical memory grow
///
/// Attaches to a running process, or starts a command, and records its page faults. The default view is the pages that
/// became resident during the trace and still are at its end. Needs nothing of the allocator or the language.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Shows all page faults, whatever became of the pages; with --resident, both views
    #[arg(long)]
    all: bool,
    /// Shows the pages that became resident and still are; this is the default
    #[arg(long)]
    resident: bool,
    /// Takes every change of the resident set from the kernel's own count, instead of page faults and a look at the pages: by
    /// call path what was added to RSS minus what was taken away
    #[arg(long, conflicts_with_all = ["all", "resident"])]
    exact: bool,
    /// Only pages of this kind: anon, file or shmem
    #[arg(long, value_parser = kind, value_name = "KIND")]
    kind: Option<PageKind>,
    /// What to count and to rank by: pages, bytes or count
    #[arg(long, value_parser = unit, default_value = "pages", value_name = "UNIT")]
    unit: Unit,
    #[command(flatten)]
    common: Common,
}

/// Runs the command.
///
/// # Errors
/// Whatever prevents a result.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let views = trace::views(args.resident, args.all);
    if args.kind.is_some() && views.contains(&Which::All) {
        bail!(UsageError(
            "--kind tells resident pages apart; what kind of page a fault was for is not known: leave out --all".into()
        ));
    }
    let subject = if args.exact { Subject::Exact } else { Subject::Faults };
    trace::run(&Job {
        common: args.common,
        custom: Vec::new(),
        subject,
        views,
        unit: args.unit,
        probes: Probes::None,
        watch: Watch { faults: !args.exact, resident: args.exact, space: true },
        ask: Ask { subject, older: Duration::ZERO, kind: args.kind },
    })
}
