//! System calls that change an address space, as the kernel side reports them.

/// A system call that maps, unmaps, moves or fills memory.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Call {
    /// `mmap(address, length, protection, flags, descriptor, offset)`
    Mmap = 0,
    /// `munmap(address, length)`
    Munmap = 1,
    /// `brk(address)`
    Brk = 2,
    /// `mremap(address, old length, new length, flags, new address)`
    Mremap = 3,
    /// `madvise(address, length, advice)`
    Madvise = 4,
    /// `shmat(id, address, flags)`
    Shmat = 5,
    /// `shmdt(address)`
    Shmdt = 6,
    /// `mlock(address, length)`
    Mlock = 7,
    /// `mlock2(address, length, flags)`
    Mlock2 = 8,
    /// `mlockall(flags)`
    Mlockall = 9,
}

impl Call {
    /// Every call, in order of its number.
    pub const ALL: [Self; 10] = [
        Self::Mmap,
        Self::Munmap,
        Self::Brk,
        Self::Mremap,
        Self::Madvise,
        Self::Shmat,
        Self::Shmdt,
        Self::Mlock,
        Self::Mlock2,
        Self::Mlockall,
    ];

    /// The call with this system call number on x86-64 (arch/x86/entry/syscalls/syscall_64.tbl).
    #[inline(always)]
    pub const fn from_system_call(number: u64) -> Option<u32> {
        Some(match number {
            9 => Self::Mmap as u32,
            11 => Self::Munmap as u32,
            12 => Self::Brk as u32,
            25 => Self::Mremap as u32,
            28 => Self::Madvise as u32,
            30 => Self::Shmat as u32,
            67 => Self::Shmdt as u32,
            149 => Self::Mlock as u32,
            151 => Self::Mlockall as u32,
            325 => Self::Mlock2 as u32,
            _ => return None,
        })
    }

    /// The call numbered `raw`.
    pub const fn from_raw(raw: u32) -> Option<Self> {
        if (raw as usize) < Self::ALL.len() { Some(Self::ALL[raw as usize]) } else { None }
    }

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mmap => "mmap",
            Self::Munmap => "munmap",
            Self::Brk => "brk",
            Self::Mremap => "mremap",
            Self::Madvise => "madvise",
            Self::Shmat => "shmat",
            Self::Shmdt => "shmdt",
            Self::Mlock => "mlock",
            Self::Mlock2 => "mlock2",
            Self::Mlockall => "mlockall",
        }
    }
}

/// Arguments kept of a call.
pub const ARGUMENTS: usize = 5;

/// One message: a call at its entry or its exit. The two come in this order from one thread; of calls in different
/// threads, one that ends before another begins is reported first.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallEvent {
    /// A [`Call`].
    pub call: u32,
    /// 0 at the entry, 1 at the exit.
    pub exit: u32,
    /// Number of the process's image ([`crate::process`]).
    pub process: u32,
    /// Thread, as the initial pid namespace numbers it.
    pub tid: u32,
    /// At the entry: the first arguments.
    pub arguments: [u64; ARGUMENTS],
    /// At the exit: what the call returned.
    pub result: i64,
    /// At the entry: number of the call path's stack.
    pub stack: u32,
    /// At the entry: [`CallEvent::IN_ALLOCATOR`], or 0.
    pub flags: u32,
    /// Nanoseconds of `CLOCK_MONOTONIC`.
    pub time: u64,
}

impl CallEvent {
    /// The thread is inside a probed allocating function.
    pub const IN_ALLOCATOR: u32 = 1;
}

const _: () = assert!(size_of::<CallEvent>() == 80);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_match_positions_and_the_kernel_s() {
        for (position, call) in Call::ALL.iter().enumerate() {
            assert_eq!(*call as usize, position);
        }
        let numbers: [(i64, Call); 10] = [
            (9, Call::Mmap),
            (11, Call::Munmap),
            (12, Call::Brk),
            (25, Call::Mremap),
            (28, Call::Madvise),
            (30, Call::Shmat),
            (67, Call::Shmdt),
            (149, Call::Mlock),
            (325, Call::Mlock2),
            (151, Call::Mlockall),
        ];
        for (number, call) in numbers {
            assert_eq!(Call::from_system_call(number as u64), Some(call as u32));
        }
        assert_eq!(Call::from_system_call(0), None);
    }
}
