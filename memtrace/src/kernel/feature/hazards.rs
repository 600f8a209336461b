//! Kernel defects that could harm a target ([`crate::kernel::hazard`]): what memtrace does about each on this kernel.

use super::Check;
use crate::kernel::{
    hazard::{self, Hazard, SHADOW_STACKS, TargetTraits},
    release::Release,
};

const UNKNOWN: &str = "the kernel's version is not known: /proc/sys/kernel/osrelease can't be read";

/// The first release that turns a probed 5-byte nop into a call, which writes below the stack pointer (the "optimized
/// uprobes" of arch/x86/kernel/uprobes.c).
const REWRITTEN_NOPS: Release = Release::new(6, 18);

/// One check for each defect.
pub fn checks(release: Option<Release>) -> [Check; 3] {
    [seccomp(release), shadow_stack(release), nop(release)]
}

fn seccomp(release: Option<Release>) -> Check {
    const NAME: &str = "seccomp and return probes";
    let Some(release) = release else { return unknown(NAME) };
    match hazard::of_return_probes(release, TargetTraits { seccomp: true, shadow_stack: false }) {
        Some(hazard) => refused(NAME, "processes under a seccomp filter", hazard),
        None => Check::ok(NAME, format!("{release} lets return probes pass seccomp filters")),
    }
}

fn shadow_stack(release: Option<Release>) -> Check {
    const NAME: &str = "shadow stacks and return probes";
    let Some(release) = release else { return unknown(NAME) };
    if release < SHADOW_STACKS {
        return Check::ok(NAME, format!("{release} has no shadow stacks for programs"));
    }
    match hazard::of_return_probes(release, TargetTraits { seccomp: false, shadow_stack: true }) {
        Some(hazard) => refused(NAME, "processes with a shadow stack", hazard),
        None => Check::ok(NAME, format!("{release} keeps shadow stacks right under return probes")),
    }
}

fn nop(release: Option<Release>) -> Check {
    const NAME: &str = "rewritten nops";
    let Some(release) = release else { return unknown(NAME) };
    if release < REWRITTEN_NOPS {
        return Check::ok(NAME, format!("{release} does not rewrite probed instructions"));
    }
    Check::ok(
        NAME,
        "avoided: this kernel makes a probed 5-byte nop a call that writes below the stack pointer, so no probe is put \
         on one inside a function",
    )
}

fn refused(name: &'static str, targets: &str, hazard: Hazard) -> Check {
    Check::degraded(name, format!("avoided: {targets} are refused"), hazard.sentence())
}

fn unknown(name: &'static str) -> Check {
    Check::degraded(name, UNKNOWN, "mount /proc: mount -t proc proc /proc")
}

#[cfg(test)]
mod tests {
    use super::super::State::{Degraded, Ok};
    use super::*;

    #[test]
    fn each_release_range() {
        let states = |major, minor| checks(Some(Release::new(major, minor))).map(|check| check.state);
        assert_eq!(states(5, 15), [Ok, Ok, Ok]);
        assert_eq!(states(6, 6), [Ok, Degraded, Ok]);
        assert_eq!(states(6, 10), [Ok, Degraded, Ok]);
        assert_eq!(states(6, 11), [Degraded, Ok, Ok]);
        assert_eq!(states(6, 13), [Degraded, Ok, Ok]);
        assert_eq!(states(6, 14), [Ok, Ok, Ok]);
        assert_eq!(states(6, 18), [Ok, Ok, Ok]);
        assert!(nop(Some(Release::new(6, 18))).detail.starts_with("avoided"));
        assert_eq!(checks(None).map(|check| check.state), [Degraded; 3]);
    }
}
