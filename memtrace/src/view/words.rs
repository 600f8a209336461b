//! What the numbers of each kind of trace are called.

use crate::profile::Subject;

use super::Which;

/// Names for one view of one kind of trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Words {
    /// The view's name in options, file names and machine-readable output.
    pub view: &'static str,
    /// Heading of a table.
    pub title: &'static str,
    /// What is said in place of an empty table.
    pub nothing: &'static str,
    /// What is counted, one of it.
    pub noun: &'static str,
}

/// The words for `which` of a trace of `subject`.
pub const fn words(subject: Subject, which: Which) -> Words {
    let (view, title, nothing, noun) = match (subject, which) {
        (Subject::Heap, Which::Unfreed) => ("unfreed", "Unfreed allocations", "no unfreed allocations", "block"),
        (Subject::Heap, Which::All) => ("all", "All allocations", "no allocations", "call"),
        (Subject::Faults, Which::Unfreed) => {
            ("resident", "Pages that became resident and still are", "no pages became resident", "page")
        }
        (Subject::Faults, Which::All) => ("all", "All page faults", "no page faults", "fault"),
        (Subject::Exact, _) => {
            ("exact", "Growth of the resident set by the kernel's own count", "the resident set did not grow", "change")
        }
        (Subject::Touched, _) => (
            "touched",
            "Resident memory of unfreed blocks, by who allocated and who touched it",
            "no unfreed block has memory that became resident",
            "page",
        ),
        (Subject::Mappings, Which::Unfreed) => {
            ("mapped", "Address space mapped and still there", "no address space was mapped", "mapping")
        }
        (Subject::Mappings, Which::All) => ("all", "All calls that map address space", "no calls", "call"),
    };
    Words { view, title, nothing, noun }
}
