//! Can this kernel, as this user, do what memtrace needs: one [`Check`] for each condition.
//!
//! Every check is a pure function of facts (tested with the facts of kernels that are not at hand); next to it stands
//! the code that gathers them. What can be tried is tried: helpers, program types, map types, the programs themselves
//! and a probe that fires.
//!
//! - `privilege`: capabilities and namespaces;
//! - `system`: what the kernel is and what it shows in `/sys` and `/proc`;
//! - `bpf`: helpers, program types and map types, by loading and creating them;
//! - `programs`: the embedded programs, and probes in this very process;
//! - `filter`: whether probes leave other processes alone;
//! - `growth`: page faults, system calls and the resident set;
//! - `hazards`: known kernel defects;
//! - `memory`: whether the tables fit.

mod bpf;
mod filter;
mod growth;
mod hazards;
mod memory;
mod privilege;
mod programs;
mod system;

use std::io;

use serde::Serialize;

use super::release::Release;
use crate::kernel;
use privilege::Privileges;

/// How a condition is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Met.
    Ok,
    /// memtrace works, but something is lost.
    Degraded,
    /// memtrace does not work.
    Missing,
}

impl State {
    /// The word that is printed.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Missing => "missing",
        }
    }
}

/// One condition and how it is met. The texts may hold names from the system: escape before printing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Short name, stable between versions.
    pub name: &'static str,
    /// How it is met.
    pub state: State,
    /// What was found; for [`State::Degraded`] also what is lost.
    pub detail: String,
    /// What helps, if anything does.
    pub fix: Option<String>,
}

impl Check {
    fn ok(name: &'static str, detail: impl Into<String>) -> Self {
        Self { name, state: State::Ok, detail: detail.into(), fix: None }
    }

    fn degraded(name: &'static str, lost: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, state: State::Degraded, detail: lost.into(), fix: Some(fix.into()) }
    }

    fn missing(name: &'static str, detail: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, state: State::Missing, detail: detail.into(), fix: Some(fix.into()) }
    }

    /// A check that could not be made, or whose subject the kernel refused.
    fn refused(name: &'static str, privileges: &Privileges, error: &io::Error) -> Self {
        let denied = matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES));
        if !privileges.lacking().is_empty() && denied {
            Self::unchecked(name)
        } else if denied {
            Self::missing(
                name,
                format!("the kernel refuses it although the privileges are there: {error}"),
                "look for a seccomp filter (containers have one) or a security module that forbids the system calls \
                 bpf and perf_event_open",
            )
        } else {
            Self::missing(name, error.to_string(), "use a kernel that has it")
        }
    }

    /// A check that takes privileges which are not there.
    fn unchecked(name: &'static str) -> Self {
        Self::missing(name, "not checked: needs privileges", "see privileges")
    }
}

/// Makes every check. `mebibytes` is the memory budget that a trace will be started with, MiB.
///
/// Takes some tenths of a second: programs are verified, and probes put into this process and taken out again. Must be
/// called in a tokio runtime if the log level is debug (as [`super::Tracer::load`]).
pub fn checks(mebibytes: u32) -> Vec<Check> {
    let release = Release::running();
    let privileges = Privileges::gather();
    let helpers = bpf::helpers(&privileges);
    let bpf_loop = helpers.iter().any(|check| check.name == bpf::LOOP && check.state == State::Ok);
    let mut checks = vec![
        system::architecture(&system::machine()),
        system::release(release, bpf_loop),
        privilege::check(&privileges, &privilege::own_path()),
        privilege::mapped_files(&privilege::open_mapped_file()),
        privilege::pid_namespace(kernel::in_initial_pid_namespace()),
    ];
    checks.extend(system::gather(release, &privileges));
    checks.extend(bpf::types(&privileges));
    checks.extend(helpers);
    checks.extend(programs::checks(release, &privileges));
    checks.push(filter::check(&privileges));
    checks.extend(growth::checks(&privileges));
    checks.extend(hazards::checks(release));
    checks.push(memory::check(mebibytes, release, &memory::Limits::gather()));
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_told_apart() {
        let denied = io::Error::from_raw_os_error(libc::EPERM);
        let check = Check::refused("x", &Privileges { effective: 0, initial_user_namespace: true }, &denied);
        assert_eq!((check.state, check.detail.as_str()), (State::Missing, "not checked: needs privileges"));
        let all = Privileges { effective: u64::MAX, initial_user_namespace: true };
        let check = Check::refused("x", &all, &denied);
        assert!(check.detail.contains("although"), "{check:?}");
        let check = Check::refused("x", &all, &io::Error::from_raw_os_error(libc::EINVAL));
        assert!(check.detail.contains("Invalid argument"), "{check:?}");
    }
}
