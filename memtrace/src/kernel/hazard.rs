//! Known kernel defects that would harm a target: checked before anything is attached.

use super::release::Release;

/// What of a target matters for the hazards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TargetTraits {
    /// A thread of it runs under a seccomp filter or in strict mode.
    pub seccomp: bool,
    /// A thread of it uses a shadow stack.
    pub shadow_stack: bool,
}

/// A reason not to attach return probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hazard {
    /// Return probes leave the trampoline through a system call that the target's seccomp filter does not know, and
    /// the target is killed. From Linux 6.11 (which added the call) until 6.14 (kernel/seccomp.c lets it pass).
    SeccompKillsReturnProbe,
    /// Return addresses are replaced on the stack but not on the shadow stack, and the target is killed. Until Linux
    /// 6.11 (arch/x86/kernel/uprobes.c: "handle shadow stack").
    ShadowStackReturnProbe,
}

impl Hazard {
    /// What would happen, and what to do.
    pub const fn sentence(self) -> &'static str {
        match self {
            Self::SeccompKillsReturnProbe => {
                "this kernel (6.11 to 6.13) kills a process under a seccomp filter at its first return probe: use a \
                 kernel from 6.14 on, or start the target without its seccomp filter"
            }
            Self::ShadowStackReturnProbe => {
                "this kernel (before 6.11) kills a process with a shadow stack at its first return probe: use a \
                 kernel from 6.11 on, or start the target with GLIBC_TUNABLES=glibc.cpu.x86_shstk=off"
            }
        }
    }
}

/// The first release that lets user programs have shadow stacks on x86-64 ("x86/shstk").
pub const SHADOW_STACKS: Release = Release::new(6, 6);

/// The hazard that return probes would be for such a target on this kernel.
pub fn of_return_probes(release: Release, target: TargetTraits) -> Option<Hazard> {
    if target.seccomp && release >= Release::new(6, 11) && release < Release::new(6, 14) {
        return Some(Hazard::SeccompKillsReturnProbe);
    }
    if target.shadow_stack && release < Release::new(6, 11) {
        return Some(Hazard::ShadowStackReturnProbe);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seccomp_hazard_is_bounded() {
        let target = TargetTraits { seccomp: true, shadow_stack: false };
        let hazard = |major, minor| of_return_probes(Release::new(major, minor), target);
        assert_eq!(hazard(6, 10), None);
        assert_eq!(hazard(6, 11), Some(Hazard::SeccompKillsReturnProbe));
        assert_eq!(hazard(6, 13), Some(Hazard::SeccompKillsReturnProbe));
        assert_eq!(hazard(6, 14), None);
        assert_eq!(of_return_probes(Release::new(6, 12), TargetTraits::default()), None);
    }

    #[test]
    fn shadow_stack_hazard_ends_with_6_11() {
        let target = TargetTraits { seccomp: false, shadow_stack: true };
        assert_eq!(of_return_probes(Release::new(6, 6), target), Some(Hazard::ShadowStackReturnProbe));
        assert_eq!(of_return_probes(Release::new(6, 11), target), None);
    }
}
