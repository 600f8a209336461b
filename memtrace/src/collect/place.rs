//! What each stretch of address space is for, as far as all that was traced tells.

use memtrace_common::fault::PAGE;

use super::{
    blocks::LiveBlock,
    ranges::{Flags, Ranges},
};
use crate::target::pages::{Area, Role};

/// What a stretch of address space is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// The allocator: the program's heap; ranges mapped inside an allocating function; anonymous ranges with a traced block.
    Allocator,
    /// A stack: the main thread's; ranges mapped with `MAP_STACK`; anonymous ranges that a thread's stack pointer points into.
    Stack,
    /// Anonymous memory of no known use.
    Outside,
    /// A mapping of a file, or the kernel's own.
    File,
    /// A mapping of tmpfs.
    Shmem,
}

/// What a stretch was for before, and is for after the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// At the first scan.
    pub before: Place,
    /// At the second. Where nothing is mapped any more, as before.
    pub after: Place,
}

/// A stretch of address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Number of the first page.
    pub first: u64,
    /// Number of the page after the last.
    pub end: u64,
    /// What it is for.
    pub placed: Placed,
}

/// Finds what all mappings are for that there were before or are after; ascending. `blocks` have to ascend by address.
pub fn places(
    before: &[Area],
    after: &[Area],
    ranges: Option<&Ranges>,
    blocks: &[LiveBlock],
    stack_pointers: &[u64],
) -> Vec<Stretch> {
    let mut pointers = stack_pointers.to_vec();
    pointers.sort_unstable();
    let now = now(after, ranges, blocks, &pointers);
    // Both lists are cut wherever one of them is.
    let mut borders: Vec<u64> = before.iter().flat_map(|area| [area.start / PAGE, area.end / PAGE]).collect();
    borders.extend(now.iter().flat_map(|(first, end, ..)| [*first, *end]));
    borders.sort_unstable();
    borders.dedup();
    let (mut was, mut is) = (before, &now[..]);
    let mut stretches = Vec::with_capacity(borders.len());
    for border in borders.windows(2) {
        let [first, end] = [border[0], border[1]];
        while let [area, rest @ ..] = was
            && area.end / PAGE <= first
        {
            was = rest;
        }
        while let [piece, rest @ ..] = is
            && piece.1 <= first
        {
            is = rest;
        }
        let role = was.first().filter(|area| area.start / PAGE <= first).map(|area| area.role);
        let here = is.first().filter(|piece| piece.0 <= first).copied();
        let after = here.map(|(.., place)| place);
        // Anonymous memory that is still there is what it is known as now.
        let before = role.map(|role| match (role, here) {
            (Role::Anonymous, Some((.., Role::Anonymous, place))) => place,
            _ => by_role(role),
        });
        if let Some(after) = after.or(before) {
            stretches.push(Stretch { first, end, placed: Placed { before: before.unwrap_or(after), after } });
        }
    }
    stretches
}

/// Pages of the mappings at the end: first, end, role of the mapping, what they are for. Anonymous mappings are cut at the
/// borders of ranges, since the kernel merges neighbours of different use.
fn now(
    areas: &[Area],
    ranges: Option<&Ranges>,
    blocks: &[LiveBlock],
    pointers: &[u64],
) -> Vec<(u64, u64, Role, Place)> {
    let mut pieces = Vec::with_capacity(areas.len());
    for area in areas {
        if area.role != Role::Anonymous {
            pieces.push((area.start / PAGE, area.end / PAGE, area.role, by_role(area.role)));
            continue;
        }
        let mut start = area.start;
        while start < area.end {
            let (owner, until) = ranges.map_or((None, u64::MAX), |ranges| ranges.at(start));
            let end = until.min(area.end);
            let place = match owner.map(|owner| owner.flags) {
                Some(Flags { thread_stack: true, .. }) => Place::Stack,
                Some(Flags { in_allocator: true, .. }) => Place::Allocator,
                // A block first: stacks of coroutines can be blocks, and are the heap's then.
                _ if contains(blocks, start, end, |block| block.address) => Place::Allocator,
                _ if contains(pointers, start, end, |pointer| *pointer) => Place::Stack,
                _ => Place::Outside,
            };
            pieces.push((start / PAGE, end / PAGE, area.role, place));
            start = end;
        }
    }
    pieces
}

fn by_role(role: Role) -> Place {
    match role {
        Role::Heap => Place::Allocator,
        Role::MainStack => Place::Stack,
        Role::Anonymous => Place::Outside,
        // hugetlbfs pages are no RSS; there are none in a scan.
        Role::File | Role::Special | Role::Hugetlb => Place::File,
        Role::Shmem => Place::Shmem,
    }
}

/// Whether one of ascending items has its address in a range.
fn contains<T>(items: &[T], start: u64, end: u64, address: impl Fn(&T) -> u64) -> bool {
    let first = items.partition_point(|item| address(item) < start);
    items.get(first).is_some_and(|item| address(item) < end)
}
