//! What all tracing commands do: attach or start, record, name the addresses, write the outputs.

use std::{
    future,
    io::{self, IsTerminal as _},
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use memtrace_common::settings::Unwind;

use super::{
    FAILURE, UsageError, colour,
    launch::{self, Command, Stop},
    options::{budget, by, format, seconds, unwind},
    progress::Progress,
    session::{Ask, Finished, OnExec, Options, Probes, Session, Watch},
    signals::Interrupt,
    targets::Targets,
};
use crate::{
    kernel::{
        self,
        budget::{Budget, DEFAULT_MIB, Uses},
    },
    output::{self, Format, Outputs, ViewOptions, Written},
    profile::{By, NamedProfile, Subject, TraceEnd},
    symbol::{self, debuginfod::Settings},
    target::{Process, Selection, custom::Spec},
    view::{self, Unit, Which},
};

/// Options of all tracing commands.
#[derive(Debug, clap::Args)]
pub struct Common {
    #[command(flatten)]
    targets: Targets,
    /// How long to trace [default: until Ctrl-C or the end of the process]
    #[arg(short, long, value_name = "SECS", value_parser = seconds)]
    duration: Option<Duration>,
    /// Writes to FILE, in the format of its extension (.folded, .svg, .json, .txt), or to standard output with "-"; may be
    /// given many times. With two views, FILE becomes two files, with the view's name before the extension
    #[arg(short, long, value_name = "FILE")]
    output: Vec<PathBuf>,
    /// Format of standard output and of files without a known extension: text, folded, svg or json
    #[arg(long, value_parser = format, value_name = "FORMAT")]
    format: Option<Format>,
    /// Most call paths in the table
    #[arg(long, value_name = "N", default_value_t = 20)]
    top: usize,
    /// Tells call paths apart by source line too, and shows file and line of every frame, inlined ones included: in the table
    /// and in folded stacks as "function (file.c:12)", in JSON with the whole path
    #[arg(long)]
    lines: bool,
    /// Shows C++ and Rust names with all their template arguments and parameters in the table. The other formats always do
    #[arg(long)]
    full_names: bool,
    /// Fetches debug files that are not on this machine from the debuginfod servers in DEBUGINFOD_URLS. Without this option,
    /// or MEMTRACE_DEBUGINFOD=1, memtrace never uses the network
    #[arg(long, env = "MEMTRACE_DEBUGINFOD", hide_env = true, value_parser = clap::builder::FalseyValueParser::new())]
    debuginfod: bool,
    /// How stacks are walked: auto (by unwind tables, and by frame pointers in code that has none), dwarf (by unwind
    /// tables only) or fp (by frame pointers only)
    #[arg(long, value_parser = unwind, default_value = "auto", value_name = "HOW")]
    unwind: Unwind,
    /// Memory for the kernel side's tables, MiB
    #[arg(long, value_name = "MIB", value_parser = budget, default_value_t = DEFAULT_MIB)]
    memory_budget: u32,
    /// Traces the processes too that the traced ones fork, and the programs that those execute. (With --comm, --cgroup,
    /// --container and --all-processes that is always so, for those that belong to it.)
    #[arg(long)]
    children: bool,
    /// Splits the results: thread, process or cgroup
    #[arg(long, value_name = "WHAT", value_parser = by)]
    by: Option<By>,
    /// Does not look at the process's memory as a whole: no split of its RSS at the end
    #[arg(long)]
    no_reconcile: bool,
    /// Bits of the stack hash to ignore, so that tests can make stacks collide
    #[arg(long, hide = true, default_value_t = 0)]
    hash_ignore: u64,
    /// Walks every stack from its innermost frame, so that the benchmark can compare
    #[arg(long, hide = true)]
    plain_walks: bool,
}

/// One command's trace.
pub struct Job {
    /// The options that it shares with the others.
    pub common: Common,
    /// Allocator functions that the user describes.
    pub custom: Vec<Spec>,
    /// What the trace is about.
    pub subject: Subject,
    /// The views asked for; empty for the default one.
    pub views: Vec<Which>,
    /// What is counted.
    pub unit: Unit,
    /// Programs on the allocator.
    pub probes: Probes,
    /// What is recorded of the process's memory as a whole, whether or not it is reconciled.
    pub watch: Watch,
    /// What the profile is asked to hold.
    pub ask: Ask,
}

/// The views that two options ask for.
pub fn views(unfreed: bool, all: bool) -> Vec<Which> {
    let asked = [(unfreed, Which::Unfreed), (all, Which::All)];
    asked.into_iter().filter_map(|(asked, which)| asked.then_some(which)).collect()
}

/// Runs the command.
///
/// # Errors
/// Whatever prevents a result.
pub fn run(job: &Job) -> anyhow::Result<ExitCode> {
    let common = &job.common;
    if common.debuginfod && Settings::from_environment().is_none() {
        bail!(UsageError(
            "--debuginfod needs at least one http:// or https:// URL of a server in DEBUGINFOD_URLS, and a place for the \
             cache: DEBUGINFOD_CACHE_PATH, XDG_CACHE_HOME or HOME"
                .into()
        ));
    }
    let planned = output::plan(&common.output, common.format, &job.views, job.subject)
        .map_err(|error| UsageError(error.to_string()))?;
    let outputs = Outputs::prepare(&planned)?;
    // Signals, timers and draining take one thread; a command must be held by the thread that started it.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("the runtime can't be started")?;
    match common.targets.selection()? {
        Some(selection) => runtime.block_on(trace_processes(job, &selection, outputs)),
        None => runtime.block_on(trace_command(job, outputs)),
    }
}

fn options(job: &Job, selection: Option<&Selection>) -> Options {
    let common = &job.common;
    let open = selection.is_some_and(Selection::is_open);
    let watch = Watch { space: job.watch.space || reconciles(common), ..job.watch };
    let uses =
        Uses { blocks: job.probes != Probes::None, pages: job.watch.faults, tracepoints: watch != Watch::default() };
    Options {
        custom: job.custom.clone(),
        starting: selection.is_none(),
        budget: Budget::for_uses(common.memory_budget, uses),
        unwind: common.unwind,
        hash_ignore: common.hash_ignore,
        plain_walks: common.plain_walks,
        follow: common.children || open,
        // A command is held where it executes another program, and then begun anew with.
        on_exec: if selection.is_some() || common.children { OnExec::Follow } else { OnExec::End },
        unfiltered: selection.is_some_and(Selection::is_all),
        by: common.by.unwrap_or_default(),
        watch,
    }
}

/// Whether the process's memory is looked at as a whole beside what was asked for. What that takes is not there in other pid
/// namespaces.
fn reconciles(common: &Common) -> bool {
    !common.no_reconcile && kernel::in_initial_pid_namespace()
}

async fn trace_processes(job: &Job, selection: &Selection, outputs: Outputs) -> anyhow::Result<ExitCode> {
    let open = selection.is_open();
    let mut processes = Vec::new();
    for pid in selection.find()? {
        match Process::open(pid) {
            Ok(process) => processes.push(process),
            Err(error) if open => tracing::info!("process {pid} is not traced: {error}"),
            Err(error) => return Err(error.into()),
        }
    }
    let mut interrupt = Interrupt::install()?;
    let later = open.then(|| selection.clone());
    let mut session = Session::attach(processes, later, &options(job, Some(selection)), job.probes)?;
    session.start()?;
    let whom = if open { format!("{}: {}", selection.describe(), session.subject()) } else { session.subject() };
    let end = record(job, &mut session, &mut interrupt, job.common.duration, future::pending(), &whom).await?;
    let complete = report(job, session.finish(end, &job.ask)?, outputs)?.1;
    Ok(if complete { ExitCode::SUCCESS } else { ExitCode::from(FAILURE) })
}

async fn trace_command(job: &Job, outputs: Outputs) -> anyhow::Result<ExitCode> {
    let mut interrupt = Interrupt::install()?;
    let options = options(job, None);
    let (mut session, mut command) = launch::start(job.common.targets.command(), &options, job.probes)?;
    let until = job.common.duration.and_then(|duration| Instant::now().checked_add(duration));
    let left = || until.map(|until| until.saturating_duration_since(Instant::now()));
    let mut end = loop {
        let whom = session.subject();
        let end = record(job, &mut session, &mut interrupt, left(), command.stops(), &whom).await?;
        if end != TraceEnd::TargetExecuted {
            break end;
        }
        // The end of the old program may have been seen before the command is held at the beginning of the new one.
        if command.stops().await? != Stop::Exec {
            break TraceEnd::TargetExited;
        }
        if job.common.children {
            command.go_on_in(&mut session)?;
            continue;
        }
        eprintln!("memtrace: the command executes another program: what it did before is left out");
        drop(session);
        match command.attach_again(&options, job.probes) {
            Ok(Some(again)) => session = again,
            Ok(None) => bail!("the command ended while it executed another program"),
            Err(error) => {
                command.go_on();
                return Err(error);
            }
        }
    };
    let command_ended = end == TraceEnd::TargetExited;
    if command_ended && job.common.children {
        // What it forked can go on without it.
        session.end_first()?;
        command.go_on();
        if session.goes_on() {
            let whom = session.subject();
            end = record(job, &mut session, &mut interrupt, left(), future::pending(), &whom).await?;
        }
    }
    let finished = session.finish(end, &job.ask);
    if end == TraceEnd::TargetExited {
        command.go_on();
    }
    let (named, complete) = report(job, finished?, outputs)?;
    eprintln!("{}", summary(&named));
    if end != TraceEnd::TargetExited && !command_ended {
        eprintln!("memtrace: the command goes on; waiting for its end");
    }
    let status = Command::wait(command, &mut interrupt).await?;
    Ok(if complete { status } else { ExitCode::from(FAILURE) })
}

async fn record(
    job: &Job,
    session: &mut Session,
    interrupt: &mut Interrupt,
    duration: Option<Duration>,
    stops: impl Future<Output = anyhow::Result<Stop>>,
    whom: &str,
) -> anyhow::Result<TraceEnd> {
    let mut progress = Progress::tracing();
    let until = if duration.is_some() { "" } else { "; Ctrl-C ends the trace" };
    // Tests and scripts wait for this line: recording has begun.
    eprintln!("tracing {whom}: {}{until}", session.probed());
    let noun = match job.subject {
        Subject::Heap | Subject::Touched => "allocations",
        Subject::Faults => "page faults",
        Subject::Exact => "system calls",
        Subject::Mappings => "system calls",
    };
    let tick = |passed, events| progress.tick(passed, duration, events, noun);
    let end = session.run(duration, interrupt.wait(), stops, tick).await?;
    progress.clear();
    Ok(end)
}

/// Names the addresses and writes every output. The second value tells whether everything is there and true.
fn report(job: &Job, finished: Finished, outputs: Outputs) -> anyhow::Result<(NamedProfile, bool)> {
    let mut progress = Progress::naming();
    let names = symbol::Options {
        lines: job.common.lines,
        debuginfod: Settings::from_environment().filter(|_| job.common.debuginfod),
    };
    let named = symbol::name(&finished.profile, &names, &mut |done, total| progress.count(done, total));
    progress.clear();
    let options = ViewOptions {
        unit: job.unit,
        top: job.common.top,
        colour: colour(io::stdout().is_terminal()),
        full_names: job.common.full_names,
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
    if coverage.losses.iter().any(|loss| loss.lowers_totals) {
        eprintln!("memtrace: therefore every total is a lower bound");
    }
    let missed = coverage.missed_count();
    if missed > 0 {
        eprintln!("memtrace: {missed} of the processes could not be traced: every total is a lower bound");
    }
    if profile.end == TraceEnd::TargetExecuted {
        eprintln!("memtrace: the process executed another program; the trace ends there");
    }
}

/// The summary of a command's trace in one line.
fn summary(profile: &NamedProfile) -> String {
    let (mut bytes, mut count, mut paths) = (0u64, 0u64, 0u64);
    for stack in profile.stacks.iter().filter(|stack| stack.unfreed.count > 0) {
        bytes = bytes.saturating_add(stack.unfreed.bytes);
        count = count.saturating_add(stack.unfreed.count);
        paths += 1;
    }
    let at_least = if view::is_lower_bound(profile) { "at least " } else { "" };
    let view::Words { view, noun, .. } = view::words(profile.subject, Which::Unfreed);
    format!("memtrace: {view}: {at_least}{bytes} bytes in {count} {noun}s by {paths} call paths")
}
