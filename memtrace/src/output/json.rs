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
//! lower_bound      true if blocks or processes are missing from every total (see coverage.losses, processes)
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
//!   comm             command name of its processes: paths of processes with different ones are never one
//!   process          index in `processes`, or null if it is of several
//!   thread           index in `threads`, or null if it is of several, not known or not asked for
//!   group            index in `groups`, or null if results are not split
//! coverage
//!   pid, comm        the first of `processes`
//!   duration_ns      how long events were recorded
//!   end              "duration" | "interrupted" | "target exited" | "target executed another program"
//!   older_ns         unfreed blocks younger than this are left out
//!   younger          {bytes, count}: those blocks
//!   probed           [{module, functions, allocated}]: all files with probed functions, and what was allocated through them
//!   everywhere       whether the probes reached every process that maps the probed files (--all-processes)
//!   attached_late    [{process, pid, module, functions, since_ns}]: allocators that were loaded during the trace, how many of
//!                    their functions were probed and from when; what they did before is in no total, and as nothing is known
//!                    of it, `lower_bound` does not tell of it
//!   missed_more      how many processes that could not be traced are not in `processes`
//!   events           {allocations, frees, frees_unknown, frees_inherited, nested, failed}: of the frees, `frees_unknown` were
//!                    of blocks from before the trace, and `frees_inherited`, by forked processes, of their parents' blocks,
//!                    which stay the parents'
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
//!   rss              {before, after, difference, processes}: bytes, summed over so many processes, or null; pages that processes
//!                    share count for each
//!   memory           null, or the processes' memory as a whole:
//!     processes        over how many this is the sum; in `growth` and `reconciliation` of how many that is known
//!     faults           {user, kernel, counted}: page faults seen by who ran, and the kernel's own count (or null); or null
//!     growth           {processes, new, unattributed, gone: {anonymous, file, shared}, by_source: {own_fault, …}} in pages, or null
//!     calls            system calls seen that change the address space
//!     calls_lost       those not recorded or without a call path
//!     audit            {not_mapped, unowned} in bytes: mappings that went, and that came, without a system call seen; or null
//!     looked_before_end_ns  how long before the end the pages were looked at last, or null if that was at the end
//!     reconciliation   {processes, before, after: {rss, anonymous, file, shared}, change, heap: {requested, resident, new}|null,
//!                      lines: [{part, change, resident}], unexplained, unexplained_share|null} in bytes, or null: the
//!                      changes of the lines and `unexplained` add up to `change`
//!   children         null, or those of `processes` that were forked during the trace: [{pid, state, rss}], where rss.before is what
//!                    they inherited
//!   missed_growth    RSS growth in bytes while no probed function was called, or null
//! by               "none" | "thread" | "process" | "cgroup": what the results are split by
//! groups           the parts, the one that holds most first, empty if results are not split:
//!   label            name for people
//!   process          index in `processes`, with "process" and "thread"
//!   thread           index in `threads`, with "thread"; null for threads of the process that are not known
//!   cgroup           its path, with "cgroup"; null for processes of which it is not known
//!   bytes, count     what the group holds in this view: the sum over its stacks
//!   share            of the total, by `unit`, from 0 to 1
//! processes        the traced processes, and those that could not be traced; one that executed another program has an entry for
//!                  each program:
//!   pid, comm        process id, command name
//!   cgroup           path of its control group, or null
//!   parent           pid of the process that forked it during the trace, or null
//!   state            "running" (at the end) | "ended" | "executed" (another program) | "missed"
//!   reason           why it could not be traced ("missed"), or null
//!   since_ns         from the start of the trace to the moment from which on it was traced
//!   unseen_ns        how long it ran before its calls were seen, if it appeared during the trace, or null
//!   rss              {before, after, difference} in bytes, or null
//!   inherited        bytes of resident memory that it had from its parent at the fork, or null
//!   allocated, freed, unfreed  {bytes, count}: the sums over its stacks
//! threads          with "thread", those that allocated: [{process (an index), tid, name}]; the name of one that ended early is empty
//! ```
//!
//! Names are unchanged, but characters that are harmful on a terminal are written as `\u` escapes.

use std::io::{self, Write};

use serde::Serialize;

use crate::{
    profile::{self, NamedProfile, Subject},
    view::{self, LeakRow},
};

use super::{
    ViewOptions, escape,
    json_coverage::CoverageObject,
    json_processes::{Group, Groups, Process, Thread},
};

/// Writes the document and a line feed.
pub fn write(profile: &NamedProfile, options: &ViewOptions, out: &mut dyn Write) -> io::Result<()> {
    let table = view::leaks(profile, options.unit, options.which);
    let coverage = view::coverage(profile);
    let groups = Groups::new(view::groups(profile, options.unit, options.which));
    let document = Document {
        schema: 1,
        subject: subject(profile.subject),
        view: view::words(profile.subject, options.which).view,
        unit: options.unit.name(),
        total: table.total.into(),
        lower_bound: coverage.lower_bound,
        stacks: table.rows.iter().map(|row| Stack::new(row, &groups)).collect(),
        coverage: (&coverage).into(),
        by: profile.by.name(),
        groups: groups.objects(),
        processes: profile.processes.iter().map(Process::from).collect(),
        threads: profile.threads.iter().map(Thread::from).collect(),
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
    by: &'static str,
    groups: Vec<Group<'a>>,
    processes: Vec<Process<'a>>,
    threads: Vec<Thread<'a>>,
}

#[derive(Serialize)]
pub(super) struct Amount {
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
    comm: &'a str,
    process: Option<usize>,
    thread: Option<usize>,
    group: Option<usize>,
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

impl<'a> Stack<'a> {
    fn new(row: &LeakRow<'a>, groups: &Groups<'_>) -> Self {
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
            comm: &stack.comm,
            process: stack.process,
            thread: stack.thread,
            group: stack.group.and_then(|group| groups.position(group)),
        }
    }
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

pub(super) fn nanoseconds(duration: std::time::Duration) -> u64 {
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
