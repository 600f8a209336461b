//! `memtrace memstacks`: which call paths allocate, and which allocated blocks are still unfreed.

use std::{
    ffi::OsString,
    io::{self, IsTerminal as _},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, bail};
use memtrace_common::settings::Unwind;

use super::{
    FAILURE, UsageError, colour, launch,
    options::{budget, format, seconds, unit, unwind},
    progress::Progress,
    session::{Finished, Options, Probes, Session},
    signals::Interrupt,
};
use crate::{
    kernel::budget::{Budget, DEFAULT_MIB},
    output::{self, Format, Outputs, ViewOptions, Written},
    profile::{NamedProfile, TraceEnd},
    symbol,
    target::Process,
    view::{self, Unit, Which},
};

/// Shows which call paths allocate memory and do not free it
///
/// Attaches to a running process, or starts a command and traces it from its first allocation. The default view is
/// unfreed allocations: what was allocated during the trace and not freed by its end.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("target").required(true).args(["pid", "command"]))]
pub struct Args {
    /// Process to trace
    #[arg(short, long, value_name = "PID")]
    pid: Option<u32>,
    /// How long to trace [default: until Ctrl-C or the end of the process]
    #[arg(short, long, value_name = "SECS", value_parser = seconds)]
    duration: Option<Duration>,
    /// Shows all allocations, without subtracting frees; with --unfreed, both views
    #[arg(long)]
    all: bool,
    /// Shows unfreed allocations; this is the default
    #[arg(long)]
    unfreed: bool,
    /// Leaves out blocks that are younger than this at the end of the trace, which may be about to be freed
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    older: Option<Duration>,
    /// What to count and to rank by: bytes or count
    #[arg(long, value_parser = unit, default_value = "bytes", value_name = "UNIT")]
    unit: Unit,
    /// Writes to FILE, in the format of its extension (.folded, .svg, .json, .txt), or to standard output with "-"; may be
    /// given many times. With two views, FILE becomes two files: leak.svg gives leak.unfreed.svg and leak.all.svg
    #[arg(short, long, value_name = "FILE")]
    output: Vec<PathBuf>,
    /// Format of standard output and of files without a known extension: text, folded, svg or json
    #[arg(long, value_parser = format, value_name = "FORMAT")]
    format: Option<Format>,
    /// Most call paths in the table
    #[arg(long, value_name = "N", default_value_t = 20)]
    top: usize,
    /// How stacks are walked: auto (by unwind tables, and by frame pointers in code that has none), dwarf (by unwind
    /// tables only) or fp (by frame pointers only)
    #[arg(long, value_parser = unwind, default_value = "auto", value_name = "HOW")]
    unwind: Unwind,
    /// Memory for the kernel side's tables, MiB
    #[arg(long, value_name = "MIB", value_parser = budget, default_value_t = DEFAULT_MIB)]
    memory_budget: u32,
    /// Bits of the stack hash to ignore, so that tests can make stacks collide
    #[arg(long, hide = true, default_value_t = 0)]
    hash_ignore: u64,
    /// Walks every stack from its innermost frame, so that the benchmark can compare
    #[arg(long, hide = true)]
    plain_walks: bool,
    /// Command to start and trace; its exit status becomes memtrace's
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Runs the command.
///
/// # Errors
/// Whatever prevents a result.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let outputs = prepare(&args)?;
    // Signals, timers and draining take one thread; a command must be held by the thread that started it.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("the runtime can't be started")?;
    if args.command.is_empty() {
        runtime.block_on(trace_process(&args, outputs))
    } else {
        runtime.block_on(trace_command(&args, outputs))
    }
}

fn options(args: &Args) -> Options {
    Options {
        budget: Budget::from_mebibytes(args.memory_budget),
        unwind: args.unwind,
        hash_ignore: args.hash_ignore,
        plain_walks: args.plain_walks,
    }
}

/// Checks what the command line can tell by itself, and opens the outputs, before anything is attached.
fn prepare(args: &Args) -> anyhow::Result<Outputs> {
    let mut views = Vec::new();
    if args.unfreed {
        views.push(Which::Unfreed);
    }
    if args.all {
        views.push(Which::All);
    }
    if args.older.is_some() && views == [Which::All] {
        bail!(UsageError(
            "--older leaves young blocks out of the unfreed ones: it has no effect with --all alone".into()
        ));
    }
    let planned = output::plan(&args.output, args.format, &views).map_err(|error| UsageError(error.to_string()))?;
    Ok(Outputs::prepare(&planned)?)
}

async fn trace_process(args: &Args, outputs: Outputs) -> anyhow::Result<ExitCode> {
    let pid = args.pid.context("no process was named")?;
    let process = Process::open(pid)?;
    let mut interrupt = Interrupt::install()?;
    let mut session = Session::attach(process, None, &options(args), Probes::Recording)?;
    session.start()?;
    let end = record(args, &mut session, &mut interrupt).await?;
    let complete = report(args, session.finish(end, args.older.unwrap_or_default())?, outputs)?.1;
    Ok(if complete { ExitCode::SUCCESS } else { ExitCode::from(FAILURE) })
}

async fn trace_command(args: &Args, outputs: Outputs) -> anyhow::Result<ExitCode> {
    let mut interrupt = Interrupt::install()?;
    let (mut session, command) = launch::start(&args.command, &options(args))?;
    let end = record(args, &mut session, &mut interrupt).await?;
    let (named, complete) = report(args, session.finish(end, args.older.unwrap_or_default())?, outputs)?;
    eprintln!("{}", summary(&named));
    if end != TraceEnd::TargetExited {
        eprintln!("memtrace: the command goes on; waiting for its end");
    }
    let status = command.wait(&mut interrupt).await?;
    Ok(if complete { status } else { ExitCode::from(FAILURE) })
}

async fn record(args: &Args, session: &mut Session, interrupt: &mut Interrupt) -> anyhow::Result<TraceEnd> {
    let mut progress = Progress::tracing();
    let pid = session.process().pid();
    let until = if args.duration.is_some() { "" } else { "; Ctrl-C ends the trace" };
    // Tests and scripts wait for this line: recording has begun.
    eprintln!("tracing {:?} (pid {pid}): {}{until}", session.process().comm(), session.probed());
    let end = session
        .run(args.duration, interrupt.wait(), |passed, allocations| progress.tick(passed, args.duration, allocations))
        .await?;
    progress.clear();
    Ok(end)
}

/// Names the addresses and writes every output. The second value tells whether everything is there and true.
fn report(args: &Args, finished: Finished, outputs: Outputs) -> anyhow::Result<(NamedProfile, bool)> {
    let mut progress = Progress::naming();
    let named = symbol::name(&finished.profile, &mut |done, total| progress.count(done, total));
    progress.clear();
    let options = ViewOptions {
        unit: args.unit,
        top: args.top,
        colour: colour(io::stdout().is_terminal()),
        ..ViewOptions::default()
    };
    if !outputs.shows_coverage() {
        warn(&named);
    }
    let mut complete = true;
    for Written { path, result, .. } in outputs.write(&named, &options) {
        match result {
            Ok(()) if path.as_os_str() != "-" => tracing::info!("wrote {path:?}"),
            Ok(()) => {}
            Err(error) => {
                eprintln!("memtrace: {error}");
                complete = false;
            }
        }
    }
    for imbalance in &finished.imbalances {
        eprintln!("memtrace: {imbalance}");
        complete = false;
    }
    Ok((named, complete))
}

/// Says on standard error what the text table would say: what was lost, and an end that was not asked for.
fn warn(profile: &NamedProfile) {
    let coverage = view::coverage(profile);
    for loss in &coverage.losses {
        eprintln!("memtrace: lost: {} {}", loss.count, loss.sentence);
    }
    if coverage.lower_bound {
        eprintln!("memtrace: therefore every total is a lower bound");
    }
    if profile.end == TraceEnd::TargetExecuted {
        eprintln!("memtrace: the process executed another program; the trace ends there");
    }
}

/// The one-line leak summary.
fn summary(profile: &NamedProfile) -> String {
    let (mut bytes, mut count, mut paths) = (0u64, 0u64, 0u64);
    for stack in profile.stacks.iter().filter(|stack| stack.unfreed.count > 0) {
        bytes = bytes.saturating_add(stack.unfreed.bytes);
        count = count.saturating_add(stack.unfreed.count);
        paths += 1;
    }
    let at_least = if profile.losses.iter().any(|(loss, _)| loss.lowers_totals()) { "at least " } else { "" };
    format!("memtrace: unfreed: {at_least}{bytes} bytes in {count} blocks by {paths} call paths")
}
