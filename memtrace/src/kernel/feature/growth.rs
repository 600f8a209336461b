//! Page faults, system calls and the resident set: memtrace touches pages of its own and looks whether all of them were
//! seen.

use std::{io, num::NonZeroU32, ptr};

use memtrace_common::{call::Call, fault::PAGE, site::special};

use super::{Check, Privileges};
use crate::kernel::{
    self, KernelError, Scope, Settings, Tracer,
    budget::{self, Budget, Uses},
};

const FAULTS: &str = "page faults";
const CALLS: &str = "system calls";
const EXACT: &str = "exact growth";

/// Pages mapped, and how many of them are touched.
const MAPPED: u64 = 64;
const TOUCHED: u64 = 40;

/// What was seen of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    /// Pages with a fault.
    pages: u64,
    /// `mmap` of the length.
    mapped: u64,
    /// `munmap` of the length.
    unmapped: u64,
    losses: u64,
}

impl Seen {
    const EXPECTED: Self = Self { pages: TOUCHED, mapped: 2, unmapped: 1, losses: 0 };
}

/// Traces this process while it maps, touches and unmaps memory.
pub fn checks(privileges: &Privileges) -> Vec<Check> {
    if !privileges.lacking().is_empty() {
        return [FAULTS, CALLS, EXACT].map(Check::unchecked).to_vec();
    }
    if !kernel::in_initial_pid_namespace() {
        let lost = "pgfaultstacks, mmapstacks and the split of RSS: they need the initial pid namespace";
        return [FAULTS, CALLS, EXACT].map(|name| Check::degraded(name, lost, "run memtrace on the host")).to_vec();
    }
    let mut checks = match watch(false) {
        Ok((seen, _)) => judge(seen).to_vec(),
        Err(error) => [FAULTS, CALLS].map(|name| failed(name, &error)).to_vec(),
    };
    checks.push(match watch(true) {
        // The first change tells the size that the next is compared with.
        Ok((_, bytes)) if bytes >= (TOUCHED - 1) * PAGE => {
            Check::ok(EXACT, "the tracepoint kmem:rss_stat reports every change of the resident set")
        }
        Ok((_, bytes)) => Check::degraded(
            EXACT,
            format!(
                "of {} bytes added, {bytes} were reported at once; lost: before Linux 6.2, up to 64 pages of each thread are \
                 reported late with pgfaultstacks --exact",
                TOUCHED * PAGE
            ),
            "use Linux 6.2 or newer, or leave out --exact",
        ),
        Err(error) => Check::degraded(
            EXACT,
            format!("{error}; lost: pgfaultstacks --exact"),
            "use a kernel with the tracepoint kmem:rss_stat, and run as root",
        ),
    });
    checks
}

fn judge(seen: Seen) -> [Check; 2] {
    let bug = "please report this as a bug, with the output of uname -a";
    let faults = if seen.pages == Seen::EXPECTED.pages && seen.losses == 0 {
        Check::ok(FAULTS, format!("{TOUCHED} pages touched in memtrace itself: every one recorded"))
    } else {
        Check::missing(FAULTS, format!("{} of {TOUCHED} pages recorded, {} losses", seen.pages, seen.losses), bug)
    };
    let calls = if (seen.mapped, seen.unmapped) == (Seen::EXPECTED.mapped, Seen::EXPECTED.unmapped) {
        Check::ok(CALLS, "mmap and munmap in memtrace itself were reported")
    } else {
        Check::missing(
            CALLS,
            format!("two mmap and one munmap were made; {} and {} were reported", seen.mapped, seen.unmapped),
            bug,
        )
    };
    [faults, calls]
}

fn failed(name: &'static str, error: &KernelError) -> Check {
    Check::degraded(
        name,
        format!("{error}; lost: pgfaultstacks, mmapstacks and the split of RSS"),
        "use Linux 5.17 or newer, built with CONFIG_FTRACE_SYSCALLS",
    )
}

/// What was seen, and the bytes added to the resident set as the kernel counts them if `exact`.
fn watch(exact: bool) -> Result<(Seen, u64), KernelError> {
    const RING: u32 = 64 * 1024;
    let pid = std::process::id();
    let budget = Budget::for_uses(budget::MIN_MIB, Uses { blocks: false, pages: true, tracepoints: true });
    let scope = NonZeroU32::new(pid).map_or(Scope::Several, Scope::One);
    let settings = Settings { scope, calls: RING, ..Settings::plain(budget) };
    let mut tracer = Tracer::load(&settings)?;
    let number = tracer.add_process(NonZeroU32::new(pid), false)?.unwrap_or_default();
    if exact {
        tracer.attach_resident()?;
    } else {
        tracer.attach_faults()?;
        tracer.attach_calls()?;
    }
    tracer.start()?;
    let own = |source| KernelError::Table { name: "of this process", source };
    let memory = Memory::map().map_err(own)?;
    memory.touch();
    let unmapped = Memory::map().map_err(own)?;
    let gone = unmapped.0;
    drop(unmapped);
    tracer.detach()?;
    let address = memory.0;
    let mut seen = Seen { losses: tracer.losses()?.iter().map(|(_, loss)| loss.count).sum(), ..Seen::default() };
    for (number, chunk) in tracer.page_records(number)? {
        let first = number * chunk.pages.len() as u64;
        let pages = (first..).zip(chunk.pages).filter(|(_, record)| *record != 0);
        seen.pages += pages.filter(|(page, _)| (address / PAGE..address / PAGE + MAPPED).contains(page)).count() as u64;
    }
    if let Some(mut calls) = tracer.take_calls()? {
        while let Some(event) = calls.next_call() {
            if event.exit == 0 && event.arguments[1] == MAPPED * PAGE {
                seen.mapped += u64::from(event.call == Call::Mmap as u32);
                seen.unmapped += u64::from(event.call == Call::Munmap as u32 && event.arguments[0] == gone);
            }
        }
    }
    let totals = tracer.totals(tracer.stack_count()?)?;
    let mut added = 0;
    tracer.for_each_stack(|number, record| {
        if special::member(record.site).is_some() {
            added += totals.get(number as usize).map_or(0, |totals| totals.allocated_bytes);
        }
    })?;
    Ok((seen, added))
}

/// Memory of this process.
struct Memory(u64);

impl Memory {
    const LENGTH: usize = (MAPPED * PAGE) as usize;

    fn map() -> io::Result<Self> {
        // SAFETY: a new private mapping at an address of the kernel's choice.
        let memory = unsafe {
            libc::mmap(
                ptr::null_mut(),
                Self::LENGTH,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if memory == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self(memory as u64)) }
    }

    fn touch(&self) {
        for page in 0..TOUCHED {
            // SAFETY: within the mapping, which nobody else knows.
            unsafe { ((self.0 + page * PAGE) as *mut u8).write_volatile(1) };
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping made above, which nobody uses any more.
        unsafe { libc::munmap(self.0 as *mut libc::c_void, Self::LENGTH) };
    }
}

#[cfg(test)]
mod tests {
    use super::{super::State, *};

    #[test]
    fn only_the_truth_is_ok() {
        assert!(judge(Seen::EXPECTED).iter().all(|check| check.state == State::Ok));
        let states = |seen| judge(seen).map(|check| check.state);
        assert_eq!(states(Seen { pages: 39, ..Seen::EXPECTED }), [State::Missing, State::Ok]);
        assert_eq!(states(Seen { losses: 1, ..Seen::EXPECTED }), [State::Missing, State::Ok]);
        assert_eq!(states(Seen { unmapped: 0, ..Seen::EXPECTED }), [State::Ok, State::Missing]);
    }

    /// As root: everything that this very test does is seen.
    #[test]
    fn all_is_seen_here() {
        let privileges = Privileges::gather();
        let checks = checks(&privileges);
        assert_eq!(checks.len(), 3);
        if privileges.lacking().is_empty() {
            assert!(checks.iter().all(|check| check.state == State::Ok), "{checks:?}");
        }
    }
}
