//! One JSON document, for other programs.
//!
//! Schema 1. Byte counts are integers of 64 bits, times integers of nanoseconds. Objects may get further members within a
//! schema; members are renamed or change their meaning only with a new number.
//!
//! ```text
//! schema           1
//! subject          "heap" | "touched" | "faults" | "exact" | "mappings"
//! view             "unfreed" ("resident" of faults, "mapped" of mappings) | "all": what `bytes`, `count` and `share` of
//!                  the stacks are about
//! unit             "bytes" | "count" | "pages": what the order and `share` are by
//! total            {bytes, count}: sum over `stacks`
//! lower_bound      true if blocks are missing from every total (see coverage.losses)
//! stacks           call paths, the one that holds most first:
//!   frames           names, root first, the allocator function last; pseudo frames: "[truncated: reason]" first,
//!                    "[unknown] (module+0xoffset)", "[unknown call path]" alone
//!   lines            only with source lines: for each of `frames`, null or {file, line} (the path as the compiler
//!                    recorded it; the line of the call, for inlined functions too)
//!   truncated        null, or why frames are missing at the root end
//!   recorded         how many recorded stacks have these names
//!   bytes, count     what the path holds in this view
//!   share            of the total, by `unit`, from 0 to 1
//!   allocated        {bytes, count}: all its calls that returned a block
//!   freed            {bytes, count}: its blocks that were freed
//!   unfreed          {bytes, count}: its blocks still unfreed, and at least `older_ns` old
//!   oldest_ns        age of the oldest of them at the end, or null
//!   growth           its unfreed bytes at equally spaced moments, the last at the end; may be empty
//!   resident         {anonymous, file, shared} in bytes: what of `unfreed` is in resident pages at the end, or null
//!   growth_per_second  bytes per second over the second half of the trace, or null
//! coverage
//!   pid, comm        the traced process
//!   duration_ns      how long events were recorded
//!   end              "duration" | "interrupted" | "target exited" | "target executed another program"
//!   older_ns         unfreed blocks younger than this are left out
//!   younger          {bytes, count}: those blocks
//!   probed           [{module, functions}]
//!   events           {allocations, frees, frees_unknown, nested, failed}
//!   losses           [{name, count, bytes, lowers_totals, sentence}], the non-zero ones
//!   stacks           number of distinct recorded stacks
//!   allocated, unfreed  {bytes, count}: totals of the trace
//!   whole            {stacks, allocated, unfreed}: stacks that reach the outermost function
//!   truncated        [{reason, stacks, allocated, unfreed}]
//!   unwinding        what the unwind tables did not cover:
//!     without_rows     [{module, problem}]: modules that are not unwound by rows
//!     left_out         code mappings beyond those that can be unwound
//!     late_code        {mappings, longest_ns, stacks, allocated}: mappings of code that appeared during the trace, after
//!                      how long at most their rows were in force, and the stacks that fell into that time
//!   problems         [{module, problem}]: modules with names missing
//!   rss              {before, after, difference} in bytes, or null
//!   memory           null, or the process's memory as a whole:
//!     faults           {user, kernel, counted}: page faults seen by who ran, and the kernel's own count (or null); or null
//!     growth           {new, unattributed, gone: {anonymous, file, shared}, by_source: {own_fault, …}} in pages, or null
//!     calls            system calls seen that change the address space
//!     calls_lost       those not recorded or without a call path
//!     audit            {not_mapped, unowned} in bytes: mappings that went, and that came, without a system call seen; or null
//!     looked_before_end_ns  how long before the end the pages were looked at last, or null if that was at the end
//!     reconciliation   {before, after: {rss, anonymous, file, shared}, change, heap: {requested, resident, new}|null,
//!                      lines: [{part, change, resident}], unexplained, unexplained_share|null} in bytes, or null: the
//!                      changes of the lines and `unexplained` add up to `change`
//!   children         null, or [{pid, state: "running" | "ended" | "executed" | "missed", rss: {before, after, difference}|null}]
//!   missed_growth    RSS growth in bytes while no probed function was called, or null
//! ```
//!
//! Names are unchanged, but characters that are harmful on a terminal are written as `\u` escapes.

use std::io::{self, Write};

use serde::Serialize;

use crate::{
    profile::{self, NamedProfile, Subject, TraceEnd},
    view::{self, Coverage, LeakRow},
};

use super::{ViewOptions, escape, json_memory};

/// Writes the document and a line feed.
pub fn write(profile: &NamedProfile, options: &ViewOptions, out: &mut dyn Write) -> io::Result<()> {
    let table = view::leaks(profile, options.unit, options.which);
    let coverage = view::coverage(profile);
    let document = Document {
        schema: 1,
        subject: subject(profile.subject),
        view: view::words(profile.subject, options.which).view,
        unit: options.unit.name(),
        total: table.total.into(),
        lower_bound: coverage.lower_bound,
        stacks: table.rows.iter().map(Stack::from).collect(),
        coverage: (&coverage).into(),
    };
    let mut writer = serde_json::Serializer::with_formatter(&mut *out, Lines::default());
    document.serialize(&mut writer)?;
    writeln!(out)
}

#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    subject: &'static str,
    view: &'static str,
    unit: &'static str,
    total: Amount,
    lower_bound: bool,
    stacks: Vec<Stack<'a>>,
    coverage: CoverageObject<'a>,
}

#[derive(Serialize)]
struct Amount {
    bytes: u64,
    count: u64,
}

impl From<profile::Amount> for Amount {
    fn from(amount: profile::Amount) -> Self {
        Self { bytes: amount.bytes, count: amount.count }
    }
}

#[derive(Serialize)]
struct Line<'a> {
    file: &'a str,
    line: u32,
}

#[derive(Serialize)]
struct Stack<'a> {
    frames: Vec<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lines: Vec<Option<Line<'a>>>,
    truncated: Option<&'static str>,
    recorded: u64,
    bytes: u64,
    count: u64,
    share: f64,
    allocated: Amount,
    freed: Amount,
    unfreed: Amount,
    oldest_ns: Option<u64>,
    growth: &'a [u64],
    growth_per_second: Option<f64>,
    resident: Option<Resident>,
}

#[derive(Serialize)]
struct Resident {
    anonymous: u64,
    file: u64,
    shared: u64,
}

impl From<profile::Resident> for Resident {
    fn from(resident: profile::Resident) -> Self {
        Self { anonymous: resident.anonymous, file: resident.file, shared: resident.shared }
    }
}

impl<'a> From<&LeakRow<'a>> for Stack<'a> {
    fn from(row: &LeakRow<'a>) -> Self {
        let stack = row.stack;
        Self {
            frames: row.frames.iter().map(AsRef::as_ref).collect(),
            lines: stack
                .lines
                .iter()
                .map(|line| line.as_ref().map(|line| Line { file: &line.file, line: line.line }))
                .collect(),
            truncated: stack.truncated.map(|end| end.reason()),
            recorded: stack.recorded,
            bytes: row.amount.bytes,
            count: row.amount.count,
            share: row.share,
            allocated: stack.allocated.into(),
            freed: stack.freed.into(),
            unfreed: stack.unfreed.into(),
            oldest_ns: row.oldest.map(nanoseconds),
            growth: row.growth.series,
            growth_per_second: row.growth.per_second,
            resident: stack.resident.map(Into::into),
        }
    }
}

#[derive(Serialize)]
struct CoverageObject<'a> {
    pid: u32,
    comm: &'a str,
    duration_ns: u64,
    end: &'static str,
    older_ns: u64,
    younger: Amount,
    probed: Vec<Probed<'a>>,
    events: Events,
    losses: Vec<Loss>,
    stacks: u64,
    allocated: Amount,
    unfreed: Amount,
    whole: Whole,
    truncated: Vec<Truncated>,
    unwinding: Unwinding<'a>,
    problems: Vec<Problem<'a>>,
    rss: Option<Rss>,
    memory: Option<json_memory::Memory>,
    children: Option<Vec<ChildObject>>,
    missed_growth: Option<u64>,
}

#[derive(Serialize)]
struct Probed<'a> {
    module: &'a str,
    functions: &'a [String],
}

#[derive(Serialize)]
struct Events {
    allocations: u64,
    frees: u64,
    frees_unknown: u64,
    nested: u64,
    failed: u64,
}

#[derive(Serialize)]
struct Loss {
    name: &'static str,
    count: u64,
    bytes: u64,
    lowers_totals: bool,
    sentence: &'static str,
}

#[derive(Serialize)]
struct Whole {
    stacks: u64,
    allocated: Amount,
    unfreed: Amount,
}

#[derive(Serialize)]
struct Unwinding<'a> {
    without_rows: Vec<Problem<'a>>,
    left_out: u64,
    late_code: LateCode,
}

#[derive(Serialize)]
struct LateCode {
    mappings: u64,
    longest_ns: u64,
    stacks: u64,
    allocated: Amount,
}

impl<'a> From<&'a profile::Unwinding> for Unwinding<'a> {
    fn from(unwinding: &'a profile::Unwinding) -> Self {
        let late = unwinding.late;
        Self {
            without_rows: unwinding
                .problems
                .iter()
                .map(|problem| Problem { module: &problem.module, problem: &problem.problem })
                .collect(),
            left_out: unwinding.left_out,
            late_code: LateCode {
                mappings: late.mappings,
                longest_ns: nanoseconds(late.longest),
                stacks: late.stacks,
                allocated: late.allocated.into(),
            },
        }
    }
}

#[derive(Serialize)]
struct Truncated {
    reason: &'static str,
    stacks: u64,
    allocated: Amount,
    unfreed: Amount,
}

#[derive(Serialize)]
struct Problem<'a> {
    module: &'a str,
    problem: &'a str,
}

#[derive(Serialize)]
struct Rss {
    before: u64,
    after: u64,
    difference: i128,
}

impl<'a> From<&'a Coverage> for CoverageObject<'a> {
    fn from(coverage: &'a Coverage) -> Self {
        let events = &coverage.events;
        Self {
            pid: coverage.processes[0].pid,
            comm: &coverage.processes[0].comm,
            duration_ns: nanoseconds(coverage.duration),
            end: end(coverage.end),
            older_ns: nanoseconds(coverage.older),
            younger: coverage.younger.into(),
            probed: coverage
                .probed
                .iter()
                .map(|probed| Probed { module: &probed.module, functions: &probed.functions })
                .collect(),
            events: Events {
                allocations: events.allocations,
                frees: events.frees,
                frees_unknown: events.frees_unknown,
                nested: events.nested,
                failed: events.failed,
            },
            losses: coverage
                .losses
                .iter()
                .map(|loss| Loss {
                    name: loss.name,
                    count: loss.count,
                    bytes: loss.bytes,
                    lowers_totals: loss.lowers_totals,
                    sentence: loss.sentence,
                })
                .collect(),
            stacks: coverage.stacks,
            allocated: coverage.allocated.into(),
            unfreed: coverage.unfreed.into(),
            whole: Whole {
                stacks: coverage.whole.stacks,
                allocated: coverage.whole.allocated.into(),
                unfreed: coverage.whole.unfreed.into(),
            },
            truncated: coverage
                .truncated
                .iter()
                .map(|cut| Truncated {
                    reason: cut.reason.reason(),
                    stacks: cut.share.stacks,
                    allocated: cut.share.allocated.into(),
                    unfreed: cut.share.unfreed.into(),
                })
                .collect(),
            unwinding: (&coverage.unwinding).into(),
            problems: coverage
                .problems
                .iter()
                .map(|problem| Problem { module: &problem.module, problem: &problem.problem })
                .collect(),
            rss: coverage.rss.map(|rss| Rss { before: rss.before, after: rss.after, difference: rss.difference() }),
            memory: coverage.memory.as_ref().map(Into::into),
            children: None,
            missed_growth: coverage.missed_growth(),
        }
    }
}

#[derive(Serialize)]
struct ChildObject {
    pid: u32,
    state: &'static str,
    rss: Option<Rss>,
}

fn subject(subject: Subject) -> &'static str {
    match subject {
        Subject::Heap => "heap",
        Subject::Touched => "touched",
        Subject::Exact => "exact",
        Subject::Faults => "faults",
        Subject::Mappings => "mappings",
    }
}

fn end(end: TraceEnd) -> &'static str {
    match end {
        TraceEnd::Duration => "duration",
        TraceEnd::Interrupted => "interrupted",
        TraceEnd::TargetExited => "target exited",
        TraceEnd::TargetExecuted => "target executed another program",
    }
}

fn nanoseconds(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Compact, but for one line for every element of an outermost array, so that the stacks can be told apart by eye and by
/// line; and with more characters escaped than JSON asks for.
#[derive(Default)]
struct Lines {
    depth: u32,
}

impl serde_json::ser::Formatter for Lines {
    fn begin_array<W: Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        self.depth += 1;
        writer.write_all(b"[")
    }

    fn end_array<W: Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        self.depth -= 1;
        writer.write_all(b"]")
    }

    fn begin_array_value<W: Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(b",")?;
        }
        if self.depth == 1 {
            writer.write_all(b"\n")?;
        }
        Ok(())
    }

    fn write_string_fragment<W: Write + ?Sized>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        let mut start = 0;
        for (position, character) in fragment.char_indices() {
            if escape::needs_json_escape(character) {
                writer.write_all(&fragment.as_bytes()[start..position])?;
                let mut units = [0; 2];
                for unit in character.encode_utf16(&mut units) {
                    write!(writer, "\\u{unit:04x}")?;
                }
                start = position + character.len_utf8();
            }
        }
        writer.write_all(&fragment.as_bytes()[start..])
    }
}
