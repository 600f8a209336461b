//! `memtrace bench-names`, for the benchmark: names addresses spread over the code of a file, and says how long it took.

use std::{
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use memtrace_common::stack::StackEnd;
use object::{Object as _, ObjectSegment as _};

use super::progress::Progress;
use crate::{
    profile::{Amount, Events, Function, Leaf, Mapping, NamedStack, Process, Profile, Stack, TraceEnd},
    symbol,
};

/// Addresses of one call stack.
const DEPTH: usize = 100;

/// Names addresses of a file as if they were a trace's
#[derive(Debug, clap::Args)]
pub struct Args {
    /// ELF file with the code
    file: PathBuf,
    /// How many different addresses
    #[arg(default_value_t = 100_000)]
    addresses: usize,
    /// With lines
    #[arg(long)]
    lines: bool,
}

/// Runs the command. Prints `{"addresses", "named", "frames", "seconds", "bytes"}`: how many there were, how many got a
/// name, how many frames they are with inlined functions, how long it took, and what memory memtrace took at most.
///
/// # Errors
/// The file can't be read, or has no code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let addresses = addresses(args)?;
    let count = addresses.len();
    let profile = profile(args, addresses);
    let options = symbol::Options { lines: args.lines, debuginfod: None };
    let mut progress = Progress::naming();
    let start = Instant::now();
    let named = symbol::name(&profile, &options, &mut |done, total| progress.count(done, total));
    let seconds = start.elapsed().as_secs_f64();
    progress.clear();
    // Stacks with the same names are one by now.
    let count_frames = |counted: fn(&str) -> bool| -> u64 {
        let of_stack = |stack: &NamedStack| stack.frames.iter().filter(|frame| counted(frame)).count() as u64;
        named.stacks.iter().map(|stack| stack.recorded * of_stack(stack)).sum()
    };
    let unnamed = count_frames(|frame| frame.starts_with("[unknown]"));
    for problem in &named.problems {
        tracing::warn!("{:?}: {}", problem.module, problem.problem);
    }
    let report = serde_json::json!({
        "addresses": count,
        "named": count as u64 - unnamed,
        "frames": count_frames(|frame| frame != "malloc"),
        "seconds": seconds,
        "bytes": peak()?,
    });
    writeln!(io::stdout(), "{report}")?;
    Ok(ExitCode::SUCCESS)
}

/// File offsets, evenly spread over the code.
fn addresses(args: &Args) -> anyhow::Result<Vec<u64>> {
    let data = std::fs::read(&args.file).with_context(|| args.file.display().to_string())?;
    let file = object::File::parse(&*data).with_context(|| args.file.display().to_string())?;
    let is_code = |segment: &object::Segment<'_, '_>| matches!(segment.flags(), object::SegmentFlags::Elf { p_flags } if p_flags & object::elf::PF_X != 0);
    let ranges: Vec<(u64, u64)> = file.segments().filter(is_code).map(|segment| segment.file_range()).collect();
    let total: u64 = ranges.iter().map(|(_, size)| size).sum();
    let step = total / args.addresses.max(1) as u64;
    anyhow::ensure!(step > 0, "{} has not that much code", args.file.display());
    let of_range = |(start, size): (u64, u64)| (start + 1..start + size).step_by(step as usize);
    Ok(ranges.into_iter().flat_map(of_range).take(args.addresses).collect())
}

/// One mapping of the whole file; addresses are file offsets.
fn profile(args: &Args, addresses: Vec<u64>) -> Profile {
    let one = Amount { bytes: 1, count: 1 };
    let stack = |frames: &[u64]| Stack {
        process: 0,
        thread: None,
        leaf: Leaf::Function(0),
        resident: None,
        touch: None,
        frames: frames.to_vec(),
        end: StackEnd::Complete,
        allocated: one,
        freed: Amount::default(),
        unfreed: one,
        oldest: None,
        growth: Vec::new(),
    };
    let mapping = Mapping {
        start: 0,
        end: u64::MAX,
        offset: 0,
        name: args.file.display().to_string(),
        open: Some(args.file.clone()),
    };
    let process = Process { mappings: vec![mapping], ..Process::new(std::process::id(), "bench-names") };
    Profile {
        subject: Default::default(),
        unwinding: Default::default(),
        memory: None,
        by: Default::default(),
        threads: Vec::new(),
        processes: vec![process],
        duration: Duration::from_secs(1),
        end: TraceEnd::Duration,
        older: Duration::ZERO,
        everywhere: false,
        attached_late: Vec::new(),
        missed_more: 0,
        functions: vec![Function { name: "malloc".into(), module: String::new() }],
        stacks: addresses.chunks(DEPTH).map(stack).collect(),
        events: Events::default(),
        losses: Vec::new(),
    }
}

/// Most anonymous memory that this process had, bytes: its peak resident size less the pages of mapped files, which the
/// kernel can take back at any time.
fn peak() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    let kibibytes = field("VmHWM").zip(field("RssFile")).context("no VmHWM in /proc/self/status")?;
    Ok(kibibytes.0.saturating_sub(kibibytes.1) << 10)
}
