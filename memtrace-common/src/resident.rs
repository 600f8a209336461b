//! Changes of a process's resident set, as the kernel counts them.

/// What a counter of the resident set counts: the numbers of the kernel's counters (include/linux/mm_types_task.h).
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Member {
    /// Pages of files.
    File = 0,
    /// Anonymous pages.
    Anonymous = 1,
    /// Pages of shared memory.
    Shared = 3,
}

impl Member {
    /// Every counter of resident pages.
    pub const ALL: [Self; 3] = [Self::File, Self::Anonymous, Self::Shared];
    /// Numbers that a counter of the kernel can have.
    pub const COUNT: u32 = 4;

    /// Whether a counter counts resident pages (number 2 counts swap entries).
    #[inline(always)]
    pub const fn is_resident(number: u32) -> bool {
        number < Self::COUNT && number != 2
    }
}

/// Entries of the `RESIDENT` map, a u64 each.
pub mod entry {
    use super::Member;

    /// Plus the number of a [`Member`]: its last known size in bytes, or [`super::UNKNOWN`].
    pub const LAST: u32 = 0;
    /// Plus that: its size before the first change that was seen was applied is not known; the first size seen.
    pub const FIRST: u32 = Member::COUNT;
    /// Plus that: bytes added by others than the target's threads: the kernel's own, other processes.
    pub const OTHERS_ADDED: u32 = 2 * Member::COUNT;
    /// Plus that: bytes taken away by them.
    pub const OTHERS_REMOVED: u32 = 3 * Member::COUNT;
    /// What the tracepoint calls the target's address space; 0 if it is not known yet.
    pub const SPACE: u32 = 4 * Member::COUNT;
    /// Number of entries.
    pub const COUNT: u32 = 4 * Member::COUNT + 1;
}

/// No size yet.
pub const UNKNOWN: u64 = u64::MAX;

/// Where the fields of the tracepoint `kmem:rss_stat` are, in bytes (its `format` file tells).
pub mod field {
    /// u32: a number for the address space.
    pub const SPACE: usize = 8;
    /// u32: whether it is the current thread's.
    pub const CURRENT: usize = 12;
    /// i32: which counter.
    pub const MEMBER: usize = 16;
    /// i64: its new size, bytes.
    pub const SIZE: usize = 24;
}
