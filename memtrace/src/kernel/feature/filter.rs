//! Whether a probe in one process leaves others alone that map the same file.

use std::{fs::File, hint::black_box, io, num::NonZeroU32, os::unix::fs::FileExt as _};

use super::{
    Check,
    privilege::Privileges,
    programs::{self, NO_ARGUMENTS},
};
use crate::{
    kernel::{
        KernelError, Settings, Tracer,
        budget::{self, Budget},
        source::uprobe::{Reach, Role},
    },
    target::launch,
};

const NAME: &str = "probes reach one process";

/// Bytes of code that are compared: a breakpoint takes the first, a rewritten nop five.
const CODE: usize = 8;

/// The code at a probe's place in this process and in another one, while the probe is there and before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    before: [u8; CODE],
    own: [u8; CODE],
    other: [u8; CODE],
}

/// Puts a probe into this process, of which another has a copy.
pub fn check(privileges: &Privileges) -> Check {
    match look() {
        Ok(seen) => judge(seen),
        Err(_) if !privileges.lacking().is_empty() => Check::unchecked(NAME),
        Err(error) => Check::missing(NAME, error, "see the checks of programs and probes"),
    }
}

fn judge(seen: Seen) -> Check {
    if seen.own == seen.before {
        return Check::missing(NAME, "a probe in memtrace itself changed no code there", "see the check of probes");
    }
    if seen.other != seen.before {
        return Check::degraded(
            NAME,
            "a probe in one process is in another too that maps the same file: lost: other processes run at full speed",
            "trace only for as long as necessary",
        );
    }
    Check::ok(NAME, "a probe in memtrace itself is not in another process that maps the same file")
}

extern "C" fn probed(value: u64) -> u64 {
    black_box(value) + 1
}

fn look() -> Result<Seen, String> {
    let text = |error: io::Error| error.to_string();
    let address = black_box(probed as extern "C" fn(u64) -> u64) as usize;
    let before = code(std::process::id(), address).map_err(text)?;
    let other = Other::start().map_err(text)?;
    let attached = attach(address).map_err(|error| error.to_string())?;
    let seen = code(std::process::id(), address)
        .and_then(|own| Ok(Seen { before, own, other: code(other.0.unsigned_abs(), address)? }));
    drop(attached);
    seen.map_err(text)
}

fn attach(address: usize) -> Result<Tracer, Box<dyn std::error::Error>> {
    let mut tracer = Tracer::load(&Settings::plain(Budget::from_mebibytes(budget::MIN_MIB)))
        .map_err(|error: KernelError| Box::new(error))?;
    let point = programs::point(Role::Free, address, NO_ARGUMENTS)?;
    tracer.attach_empty(&[point], Reach { pid: NonZeroU32::new(std::process::id()), image: 0 })?;
    Ok(tracer)
}

fn code(pid: u32, address: usize) -> io::Result<[u8; CODE]> {
    let mut code = [0; CODE];
    File::open(format!("/proc/{pid}/mem"))?.read_exact_at(&mut code, address as u64)?;
    Ok(code)
}

/// A process that waits until it is killed; dropping it does that.
struct Other(libc::pid_t);

impl Other {
    fn start() -> io::Result<Self> {
        // SAFETY: the child makes system calls only and never returns.
        match unsafe { libc::fork() } {
            0 => {
                // SAFETY: it is to end with this process. A system call with plain numbers.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                loop {
                    // SAFETY: waits for a signal.
                    unsafe { libc::pause() };
                }
            }
            child if child > 0 => Ok(Self(child)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // SAFETY: a child of this process that has not been waited for.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        let _ = launch::wait(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::State, *};

    #[test]
    fn only_the_truth_is_ok() {
        let (clean, probed) = ([0x55, 1, 2, 3, 4, 5, 6, 7], [0xcc, 1, 2, 3, 4, 5, 6, 7]);
        let state = |own, other| judge(Seen { before: clean, own, other }).state;
        assert_eq!(state(probed, clean), State::Ok);
        assert_eq!(state(probed, probed), State::Degraded);
        assert_eq!(state(clean, clean), State::Missing);
    }

    /// As root: the other process is left alone.
    #[test]
    fn others_are_left_alone_here() {
        let privileges = Privileges::gather();
        let check = check(&privileges);
        let expected = if privileges.lacking().is_empty() { State::Ok } else { State::Missing };
        assert_eq!(check.state, expected, "{check:?}");
    }
}
