//! Why something was not recorded. Nothing is dropped without one of these being counted.

/// Reason of a loss; the index of its counter.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Loss {
    /// The table of live blocks was full: an allocation is missing from every number.
    BlocksFull = 0,
    /// The stack table was full: the bytes are counted, under an unknown call path.
    StacksFull = 1,
    /// The thread table was full: an allocation is missing from every number.
    ThreadsFull = 2,
    /// An address was allocated that was still live: its free was missed, so the old block was taken for freed.
    Conflict = 3,
    /// A call was left without a return (exception, longjmp, end of its thread): what it allocated, if anything, is
    /// missing.
    Abandoned = 4,
    /// The target's memory could not be read where a function had stored its result.
    ResultUnreadable = 5,
    /// The return address could not be read at entry: the call is counted under an unknown call path.
    StackUnreadable = 6,
    /// Several different stacks had one hash and all probes were used: counted under an unknown call path.
    HashCollision = 7,
    /// A message to the user side found no room in the ring buffer: names of code mapped late may be missing.
    RingFull = 8,
    /// The table of pages was full: the fault counts, but the page it made resident has no call path.
    PagesFull = 9,
    /// A message about a system call found no room: the memory it mapped has no call path, or was given up already.
    CallsLost = 10,
    /// A program did not run, since it was running already on this CPU.
    Missed = 11,
    /// The table of mapped ranges was full: memory mapped has no call path.
    RangesFull = 12,
    /// By frame pointers, a call could not be told from one inside a call that turned out to be left without a return: it
    /// is missing.
    Hidden = 13,
    /// The stack of a system call could not be stored: the memory it mapped is under an unknown call path.
    CallsUnnamed = 14,
    /// The table of processes was full: a forked process is not traced.
    ChildrenFull = 15,
}

impl Loss {
    /// Number of reasons: the length of the counter array.
    pub const COUNT: u32 = 16;

    /// Every reason, in order of its number.
    pub const ALL: [Self; Self::COUNT as usize] = [
        Self::BlocksFull,
        Self::StacksFull,
        Self::ThreadsFull,
        Self::Conflict,
        Self::Abandoned,
        Self::ResultUnreadable,
        Self::StackUnreadable,
        Self::HashCollision,
        Self::RingFull,
        Self::PagesFull,
        Self::CallsLost,
        Self::Missed,
        Self::RangesFull,
        Self::Hidden,
        Self::CallsUnnamed,
        Self::ChildrenFull,
    ];

    /// The reason numbered `raw`.
    pub const fn from_raw(raw: u32) -> Option<Self> {
        if raw < Self::COUNT { Some(Self::ALL[raw as usize]) } else { None }
    }

    /// Short name, for machine-readable output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::BlocksFull => "blocks_full",
            Self::StacksFull => "stacks_full",
            Self::ThreadsFull => "threads_full",
            Self::Conflict => "conflict",
            Self::Abandoned => "abandoned",
            Self::ResultUnreadable => "result_unreadable",
            Self::StackUnreadable => "stack_unreadable",
            Self::HashCollision => "hash_collision",
            Self::RingFull => "ring_full",
            Self::PagesFull => "pages_full",
            Self::CallsLost => "calls_lost",
            Self::Missed => "missed",
            Self::RangesFull => "ranges_full",
            Self::Hidden => "hidden",
            Self::CallsUnnamed => "calls_unnamed",
            Self::ChildrenFull => "children_full",
        }
    }

    /// One sentence for people: what is missing, and what helps.
    pub const fn sentence(self) -> &'static str {
        match self {
            Self::BlocksFull => "allocations not recorded: the table of live blocks was full (raise --memory-budget)",
            Self::StacksFull => {
                "allocations under an unknown call path: the stack table was full (raise --memory-budget)"
            }
            Self::ThreadsFull => "allocations not recorded: the thread table was full (raise --memory-budget)",
            Self::Conflict => "blocks whose free was missed: their address was allocated again",
            Self::Abandoned => "allocating calls left without a return (exception, longjmp, end of a thread)",
            Self::ResultUnreadable => "allocations not recorded: the pointer the function stored could not be read",
            Self::StackUnreadable => "allocations under an unknown call path: the stack could not be read",
            Self::HashCollision => "allocations under an unknown call path: their stack's hash is taken by others",
            Self::PagesFull => "faults on pages that found no room in the table of pages (raise --memory-budget)",
            Self::CallsLost => "system calls not recorded: there was no room for them (raise --memory-budget)",
            Self::CallsUnnamed => "mapped memory under an unknown call path: the stack could not be stored",
            Self::RangesFull => {
                "mapped ranges without a call path: there were too many of them, or their size was not known"
            }
            Self::Missed => "events not seen: the kernel skipped a program that was running already",
            Self::ChildrenFull => "forked processes not followed: there were too many at a time",
            Self::Hidden => {
                "allocations not recorded: taken for calls inside one that never returned (unwind by tables to tell them)"
            }
            Self::RingFull => "messages to memtrace lost: code mapped during the trace may lack names",
        }
    }

    /// Whether it concerns system calls alone, which allocations do not depend on.
    pub const fn is_of_calls(self) -> bool {
        matches!(self, Self::CallsLost | Self::CallsUnnamed | Self::Missed | Self::RangesFull)
    }

    /// Whether bytes or blocks are missing from the totals, so that they are lower bounds.
    pub const fn lowers_totals(self) -> bool {
        matches!(
            self,
            Self::BlocksFull
                | Self::ThreadsFull
                | Self::Abandoned
                | Self::ResultUnreadable
                | Self::PagesFull
                | Self::CallsLost
                | Self::Missed
                | Self::RangesFull
                | Self::Hidden
                | Self::ChildrenFull
        )
    }
}

/// Counter of one reason.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LossCount {
    /// How many times.
    pub count: u64,
    /// Bytes asked for by the calls concerned, where a size is known.
    pub bytes: u64,
}

const _: () = assert!(size_of::<LossCount>() == 16);

#[cfg(feature = "user")]
mod pod {
    // SAFETY: repr(C), only integers, no padding (size asserted above): any bit pattern is a value.
    unsafe impl aya::Pod for super::LossCount {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_match_positions() {
        for (position, loss) in Loss::ALL.iter().enumerate() {
            assert_eq!(*loss as usize, position);
        }
    }
}
