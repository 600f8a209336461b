//! The embedded programs themselves: the verifier accepts them, and probes with them count exactly what happens. The
//! probes go to functions of this very process.

use std::{fs, hint::black_box, io, num::NonZeroU32, os::unix::fs::MetadataExt as _, path::Path};

use memtrace_common::{
    event::{Counter, EventKind},
    site::{Answer, Arg, Site},
};

use super::{Check, Privileges};
use crate::{
    kernel::{
        KernelError, Scope, Settings, Tracer,
        budget::{self, Budget, Uses},
        hazard::{self, TargetTraits},
        release::Release,
        source::uprobe::{AttachPoint, Reach, Role},
    },
    target::{launch, mappings},
};

const PROGRAMS: &str = "programs";
const PROBES: &str = "probes";
const MESSAGES: &str = "messages";

/// Calls of the allocating and of the freeing function.
const ALLOCATIONS: u64 = 1000;
const FREES: u64 = 400;

/// Stands for an allocator: what it returns is no pointer, only a number that no other call returns.
#[inline(never)]
extern "C" fn allocate(size: u64) -> u64 {
    black_box(size)
}

/// Stands for `free`. (Its code must differ from that of [`allocate`]: the compiler makes one of equal functions.)
#[inline(never)]
extern "C" fn free(number: u64) {
    black_box(number ^ 1);
}

/// What the programs have seen of the calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    allocations: u64,
    commits: u64,
    frees: u64,
    frees_unknown: u64,
    blocks: u64,
    bytes: u64,
    losses: u64,
}

impl Seen {
    /// The truth.
    const EXPECTED: Self = Self {
        allocations: ALLOCATIONS,
        commits: ALLOCATIONS,
        frees: FREES,
        frees_unknown: 0,
        blocks: ALLOCATIONS - FREES,
        // The sizes are 1, 2, 3, …, and the first blocks are freed.
        bytes: ALLOCATIONS * (ALLOCATIONS + 1) / 2 - FREES * (FREES + 1) / 2,
        losses: 0,
    };
}

/// How many messages of each kind came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Messages {
    stacks: u64,
    forks: u64,
}

/// Why there is nothing to compare.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error("this process's own code can't be found: {0}")]
    Own(#[from] io::Error),
    #[error("no child process could be made: {0}")]
    Fork(#[source] io::Error),
}

/// Loads the programs and puts probes into this process.
pub fn checks(release: Option<Release>, privileges: &Privileges) -> Vec<Check> {
    // With everything that can be asked for: the verifier leaves out what the settings leave out.
    let all = Settings {
        scope: Scope::Several,
        follow: true,
        announce: true,
        by_thread: true,
        ..Settings::plain(Budget::for_uses(budget::MIN_MIB, Uses { blocks: true, pages: true, tracepoints: true }))
    };
    let loaded = Tracer::load(&all).and_then(|mut tracer| tracer.load_all_programs()).and_then(|count| {
        let mut tracer = Tracer::load(&Settings::plain(Budget::from_mebibytes(budget::MIN_MIB)))?;
        tracer.load_all_programs()?;
        Ok((tracer, count))
    });
    let (tracer, count) = match loaded {
        Ok(loaded) => loaded,
        Err(error) => {
            let rest = [PROBES, MESSAGES].map(|name| match privileges.lacking().is_empty() {
                true => Check::missing(name, "not checked: the programs can't be loaded", "see programs"),
                false => Check::unchecked(name),
            });
            return [failed(PROGRAMS, privileges, &error.into())].into_iter().chain(rest).collect();
        }
    };
    let mut checks = vec![Check::ok(PROGRAMS, format!("the verifier accepts all {count}"))];
    if let Some(hazard) = release.and_then(|release| hazard::of_return_probes(release, own_traits())) {
        let harmful = "not checked: a return probe would end this process, because of the sandbox that it runs in";
        checks.extend([PROBES, MESSAGES].map(|name| Check::missing(name, harmful, hazard.sentence())));
        return checks;
    }
    match fire(tracer) {
        Ok((seen, messages)) => checks.extend([judge(seen), judge_messages(messages)]),
        Err(error) => checks.extend([PROBES, MESSAGES].map(|name| failed(name, privileges, &error))),
    }
    checks
}

fn failed(name: &'static str, privileges: &Privileges, error: &Failure) -> Check {
    if privileges.lacking().is_empty() {
        Check::missing(name, error.to_string(), "use Linux 5.17 or newer; if it is, please report this as a bug")
    } else {
        Check::unchecked(name)
    }
}

fn judge(seen: Seen) -> Check {
    if seen == Seen::EXPECTED {
        return Check::ok(
            PROBES,
            format!("{ALLOCATIONS} calls in memtrace itself and {FREES} frees: every one counted, every byte right"),
        );
    }
    Check::missing(
        PROBES,
        format!("they do not count what happens: {seen:?} instead of {:?}", Seen::EXPECTED),
        "please report this as a bug, with the output of uname -a",
    )
}

fn judge_messages(messages: Messages) -> Check {
    let missing = match messages {
        Messages { stacks: 0, .. } => "a new call path",
        Messages { forks: 0, .. } => "a fork (raw tracepoint task_newtask)",
        _ => return Check::ok(MESSAGES, "the ring buffer and the raw tracepoints report new call paths and forks"),
    };
    Check::missing(
        MESSAGES,
        format!("the message about {missing} did not come"),
        "please report this as a bug, with the output of uname -a",
    )
}

/// What of this process matters for the hazards.
fn own_traits() -> TargetTraits {
    traits(&fs::read_to_string("/proc/self/status").unwrap_or_default())
}

/// The same, by the text of a `status` file (proc_pid_status(5)).
fn traits(status: &str) -> TargetTraits {
    let field = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).map(str::trim);
    TargetTraits {
        seccomp: field("Seccomp").is_some_and(|mode| mode != "0"),
        shadow_stack: field("x86_Thread_features").is_some_and(|list| list.split(' ').any(|name| name == "shstk")),
    }
}

/// Puts probes on [`allocate`] and [`free`], calls them and reads the tables.
fn fire(mut tracer: Tracer) -> Result<(Seen, Messages), Failure> {
    // Called through pointers that the compiler knows nothing about, so that the calls are made.
    let allocate = black_box(allocate as extern "C" fn(u64) -> u64);
    let free = black_box(free as extern "C" fn(u64));
    let points = [
        point(Role::Allocate, allocate as usize, Site { size: Arg::A0, ..NO_ARGUMENTS })?,
        point(Role::Free, free as usize, Site { pointer: Arg::A0, ..NO_ARGUMENTS })?,
    ];
    let pid = NonZeroU32::new(std::process::id()).ok_or(io::ErrorKind::NotFound).map_err(io::Error::from)?;
    tracer.attach_process_events()?;
    let image = tracer.add_process(None, true)?.unwrap_or_default();
    tracer.attach_allocator(&points, Reach { pid: Some(pid), image })?;
    tracer.start()?;
    for size in 1..=ALLOCATIONS {
        black_box(allocate(size));
    }
    for number in 1..=FREES {
        free(number);
    }
    // Without a target's number the tracepoint programs go by threads that have allocated: this one has now.
    fork().map_err(Failure::Fork)?;
    tracer.detach()?;
    let messages = receive(&mut tracer)?;
    Ok((look(&tracer)?, messages))
}

/// A site whose arguments nobody needs.
pub(super) const NO_ARGUMENTS: Site = Site {
    constant: 0,
    index: 0,
    size: Arg::None,
    count: Arg::None,
    pointer: Arg::None,
    out: Arg::None,
    answer: Answer::Pointer,
    repeats: false,
    return_offset: 0,
    tag: 0,
};

/// A probe at the entry of a function of this program.
pub(super) fn point(role: Role, address: usize, site: Site) -> io::Result<AttachPoint> {
    let path = Path::new("/proc/self/exe");
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "/proc/self/maps");
    let mappings = mappings::parse(&fs::read("/proc/self/maps")?).map_err(|_| invalid())?;
    let (mapping, offset) = mappings
        .iter()
        .find_map(|mapping| Some((mapping, mapping.file_offset(address as u64)?)))
        .ok_or_else(invalid)?;
    // Started by way of the dynamic loader (`ld-linux-x86-64.so.2 memtrace`), the loader is what that link leads to.
    if mapping.file.inode != fs::metadata(path)?.ino() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not in /proc/self/exe"));
    }
    Ok(AttachPoint { role, path: path.into(), offset, cookie: site.cookie(), name: "a function of memtrace".into() })
}

/// Makes a child process that ends at once.
fn fork() -> io::Result<()> {
    // SAFETY: the child makes one system call and never returns.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: ends the child without running anything of this process.
            unsafe { libc::_exit(0) }
        }
        child if child > 0 => launch::wait(child).map(drop),
        _ => Err(io::Error::last_os_error()),
    }
}

fn receive(tracer: &mut Tracer) -> Result<Messages, KernelError> {
    let mut messages = Messages::default();
    if let Some(mut events) = tracer.take_events()? {
        while let Some(event) = events.next_event() {
            match EventKind::from_raw(event.kind) {
                Some(EventKind::NewStack) => messages.stacks += 1,
                Some(EventKind::Fork) => messages.forks += 1,
                _ => {}
            }
        }
    }
    Ok(messages)
}

fn look(tracer: &Tracer) -> Result<Seen, KernelError> {
    let (mut blocks, mut bytes) = (0, 0);
    tracer.for_each_block(|_, block| {
        blocks += 1;
        bytes += block.size;
    })?;
    Ok(Seen {
        allocations: tracer.counter(Counter::Allocations)?,
        commits: tracer.counter(Counter::Commits)?,
        frees: tracer.counter(Counter::Frees)?,
        frees_unknown: tracer.counter(Counter::FreesUnknown)?,
        blocks,
        bytes,
        losses: tracer.losses()?.iter().map(|(_, loss)| loss.count).sum(),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn only_the_truth_is_ok() {
        assert_eq!(judge(Seen::EXPECTED).state, State::Ok);
        let check = judge(Seen { commits: 999, ..Seen::EXPECTED });
        assert_eq!(check.state, State::Missing);
        assert!(check.detail.contains("commits: 999"), "{check:?}");
        assert_eq!(judge(Seen { losses: 1, ..Seen::EXPECTED }).state, State::Missing);
        assert_eq!(judge_messages(Messages { stacks: 1, forks: 1 }).state, State::Ok);
        assert!(judge_messages(Messages { stacks: 0, forks: 1 }).detail.contains("call path"));
        assert!(judge_messages(Messages { stacks: 2, forks: 0 }).detail.contains("fork"));
    }

    #[test]
    fn traits_of_a_sandbox() {
        let status = "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\nx86_Thread_features:\tshstk wrss \n";
        assert_eq!(traits(status), TargetTraits { seccomp: true, shadow_stack: true });
        assert_eq!(traits("Seccomp:\t0\nx86_Thread_features:\t\n"), TargetTraits::default());
        assert_eq!(traits(""), TargetTraits::default());
    }

    #[test]
    fn own_functions_are_found() {
        let point = point(Role::Free, free as extern "C" fn(u64) as usize, NO_ARGUMENTS).unwrap();
        assert!(point.offset > 0);
    }

    /// As root: probes in this very test count what happens. As another user: the reason is given.
    #[test]
    fn probes_fire_here() {
        let privileges = Privileges::gather();
        let checks = checks(Release::running(), &privileges);
        assert_eq!(checks.len(), 3);
        for check in checks {
            if privileges.lacking().is_empty() {
                assert_eq!(check.state, State::Ok, "{check:?}");
            } else {
                assert_eq!(check.detail, "not checked: needs privileges");
            }
        }
    }
}
