//! The processes' memory as a whole, as text: what its RSS consists of, and how its growth was attributed.

use memtrace_common::fault::PAGE;

use crate::{
    collect::{
        attribution::Source,
        reconcile::{Part, Reconciliation},
    },
    profile::{GrowthSummary, Memory},
    target::pages::Pages,
};

use super::{processes, units};

/// A line of the reconciliation, for people.
pub const fn title(part: Part) -> &'static str {
    match part {
        Part::TracedHeap => "heap, traced and unfreed",
        Part::AllocatorRetained => "allocator-retained",
        Part::UntracedAllocator => "allocator (heap not traced)",
        Part::OutsideMappings => "mapped outside the allocator",
        Part::Stacks => "stacks",
        Part::FileBacked => "file-backed",
        Part::SharedMemory => "shared memory",
    }
}

/// The same, for programs.
pub const fn name(part: Part) -> &'static str {
    match part {
        Part::TracedHeap => "traced_heap",
        Part::AllocatorRetained => "allocator_retained",
        Part::UntracedAllocator => "untraced_allocator",
        Part::OutsideMappings => "outside_mappings",
        Part::Stacks => "stacks",
        Part::FileBacked => "file_backed",
        Part::SharedMemory => "shared_memory",
    }
}

/// How pages found their call path, for people.
pub const fn source(source: Source) -> &'static str {
    match source {
        Source::OwnFault => "by their own fault",
        Source::HugePage => "by a fault on the same huge page",
        Source::Populated => "by the call that populated them",
        Source::Window => "by a fault in the same 64 KiB",
        Source::Nearest => "by the nearest fault in the same 2 MiB",
        Source::Mapping => "by the call that mapped them",
        Source::Unattributed => "unattributed",
    }
}

/// The same, for programs.
pub const fn source_name(source: Source) -> &'static str {
    match source {
        Source::OwnFault => "own_fault",
        Source::HugePage => "huge_page",
        Source::Populated => "populated",
        Source::Window => "window",
        Source::Nearest => "nearest",
        Source::Mapping => "mapping",
        Source::Unattributed => "unattributed",
    }
}

/// Lines with their labels; `rss` is the line on RSS for a process whose memory could not be looked at twice.
pub fn lines(memory: &Memory, rss: Option<String>) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if let Some(growth) = &memory.growth {
        lines.extend(growth_lines(growth, memory.processes));
    }
    if memory.calls_lost > 0 {
        let line = format!(
            "{} of {} are not known: memory can be in another line below than it belongs",
            memory.calls_lost,
            units::counted(memory.calls, "system call")
        );
        lines.push(("calls", line));
    }
    if let Some(audit) = memory.audit
        && (audit.not_mapped > 0 || audit.unowned > 0)
    {
        let line = format!(
            "{} of mappings were gone without a system call seen; {} mapped now belong to no system call seen",
            units::bytes(audit.not_mapped),
            units::bytes(audit.unowned)
        );
        lines.push(("checked", line));
    }
    if let Some(ago) = memory.looked_before_end {
        let ago = units::duration(ago);
        let line = match memory.processes {
            0 | 1 => {
                format!("the process ended by itself: its pages are those of {ago} before the end of the trace")
            }
            _ => format!(
                "processes ended by themselves: their pages are those of up to {ago} before the end of the trace"
            ),
        };
        lines.push(("looked", line));
    }
    match &memory.reconciliation {
        Some(reconciliation) => lines.extend(reconciliation_lines(reconciliation, memory.processes)),
        None => lines.extend(rss.map(|line| ("RSS", line))),
    }
    lines
}

fn growth_lines(growth: &GrowthSummary, all: u32) -> Vec<(&'static str, String)> {
    let pages = |pages: Pages| {
        let kinds = [("anonymous", pages.anon), ("file", pages.file), ("shared", pages.shmem)];
        let parts: Vec<String> =
            kinds.iter().filter(|(_, count)| *count > 0).map(|(kind, count)| format!("{count} {kind}")).collect();
        match parts.len() {
            0 => "none".to_owned(),
            _ => parts.join(", "),
        }
    };
    let mut lines = vec![(
        "pages",
        format!(
            "new: {}; gone, of those from before: {}{}",
            pages(growth.new.pages),
            pages(growth.gone),
            match all {
                0 | 1 => String::new(),
                _ => format!(" (in {} of {all} processes)", growth.processes),
            }
        ),
    )];
    let sources: Vec<String> = Source::ALL
        .into_iter()
        .zip(growth.new.by_source)
        .filter(|(_, count)| *count > 0)
        .map(|(kind, count)| format!("{count} {}", source(kind)))
        .collect();
    if !sources.is_empty() {
        lines.push(("", sources.join(", ")));
    }
    lines
}

fn reconciliation_lines(reconciliation: &Reconciliation, all: u32) -> Vec<(&'static str, String)> {
    let (before, after) = (&reconciliation.before, &reconciliation.after);
    let change = |from: u64, to: u64| units::signed_bytes((i128::from(to) - i128::from(from)) * i128::from(PAGE));
    let (was, is) = (before.scanned, after.scanned);
    let mut lines = vec![(
        "RSS",
        format!(
            "{} → {} ({}): anonymous {}, file {}, shared {}{}",
            units::bytes(before.total),
            units::bytes(after.total),
            units::signed_bytes(reconciliation.change().into()),
            change(was.anon, is.anon),
            change(was.file, is.file),
            change(was.shmem, is.shmem),
            processes::sum_over(reconciliation.processes as usize, all as usize),
        ),
    )];
    let mut add = |title: &str, change: i64, rest: String| {
        let line = format!("  {title:<28} {:>12}  {rest}", units::signed_bytes(change.into()));
        lines.push(("", line.trim_end().to_owned()));
    };
    for line in &reconciliation.lines {
        let rest = match (line.part, reconciliation.heap) {
            (Part::TracedHeap, Some(heap)) => {
                format!("({} requested; {} resident)", units::bytes(heap.requested), units::bytes(heap.resident))
            }
            _ if line.change == 0 && line.resident == 0 => continue,
            _ => format!("({} resident)", units::bytes(line.resident)),
        };
        add(title(line.part), line.change, rest);
    }
    let share = reconciliation.unexplained_share();
    let share = share.map_or_else(String::new, |share| format!("({})", units::percent(share)));
    add("unexplained", reconciliation.unexplained, share);
    lines
}
