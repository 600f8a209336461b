//! Helpers, program types and map types, tried by loading tiny programs and creating tiny maps.

use std::io;

use aya::{
    maps::MapType,
    programs::{ProgramError, ProgramType},
    sys::{self, BpfHelper},
};

use super::{Check, Privileges};

/// A helper and the kinds of programs that call it.
struct Helper {
    name: &'static str,
    helper: BpfHelper,
    uprobes: bool,
    raw_tracepoints: bool,
}

impl Helper {
    const fn new(name: &'static str, helper: BpfHelper, uprobes: bool, raw_tracepoints: bool) -> Self {
        Self { name, helper, uprobes, raw_tracepoints }
    }
}

/// Name of the check of `bpf_loop`.
pub const LOOP: &str = "helper bpf_loop";

/// Every helper that the embedded programs call (a test compares).
const HELPERS: [Helper; 17] = [
    Helper::new("helper bpf_map_lookup_elem", BpfHelper::BPF_FUNC_map_lookup_elem, true, true),
    Helper::new("helper bpf_map_update_elem", BpfHelper::BPF_FUNC_map_update_elem, true, true),
    Helper::new("helper bpf_map_delete_elem", BpfHelper::BPF_FUNC_map_delete_elem, true, true),
    Helper::new("helper bpf_ktime_get_ns", BpfHelper::BPF_FUNC_ktime_get_ns, true, true),
    Helper::new("helper bpf_get_current_pid_tgid", BpfHelper::BPF_FUNC_get_current_pid_tgid, true, true),
    Helper::new("helper bpf_probe_read_user", BpfHelper::BPF_FUNC_probe_read_user, true, true),
    Helper::new("helper bpf_ringbuf_reserve", BpfHelper::BPF_FUNC_ringbuf_reserve, true, true),
    Helper::new("helper bpf_ringbuf_submit", BpfHelper::BPF_FUNC_ringbuf_submit, true, true),
    Helper::new("helper bpf_ringbuf_discard", BpfHelper::BPF_FUNC_ringbuf_discard, true, true),
    Helper::new("helper bpf_probe_read_kernel", BpfHelper::BPF_FUNC_probe_read_kernel, true, true),
    Helper::new("helper bpf_get_current_task", BpfHelper::BPF_FUNC_get_current_task, true, true),
    Helper::new(LOOP, BpfHelper::BPF_FUNC_loop, true, true),
    Helper::new("helper bpf_get_current_task_btf", BpfHelper::BPF_FUNC_get_current_task_btf, false, true),
    Helper::new("helper bpf_task_pt_regs", BpfHelper::BPF_FUNC_task_pt_regs, false, true),
    Helper::new("helper bpf_get_current_comm", BpfHelper::BPF_FUNC_get_current_comm, false, true),
    Helper::new("helper bpf_get_prandom_u32", BpfHelper::BPF_FUNC_get_prandom_u32, true, false),
    Helper::new("helper bpf_get_attach_cookie", BpfHelper::BPF_FUNC_get_attach_cookie, true, false),
];

/// The kernel's name for uprobe programs is that of kprobe programs.
const PROGRAM_TYPES: [(&str, ProgramType); 3] = [
    ("kprobe (for uprobes)", ProgramType::KProbe),
    ("raw tracepoint", ProgramType::RawTracePoint),
    ("tracepoint", ProgramType::TracePoint),
];

const MAP_TYPES: [(&str, MapType); 4] = [
    ("hash", MapType::Hash),
    ("array", MapType::Array),
    ("per-CPU array", MapType::PerCpuArray),
    ("ring buffer", MapType::RingBuf),
];

/// Loads a program of each type and creates a map of each type.
pub fn types(privileges: &Privileges) -> [Check; 2] {
    let programs = PROGRAM_TYPES.map(|(name, kind)| (name, sys::is_program_supported(kind).map_err(program_error)));
    let maps = MAP_TYPES.map(|(name, kind)| (name, sys::is_map_supported(kind).map_err(|error| error.io_error)));
    [all_there("program types", privileges, &programs), all_there("map types", privileges, &maps)]
}

/// Loads a program for each helper that calls it without arguments: the verifier refuses it for its arguments if it
/// knows the helper, and for the helper if not.
pub fn helpers(privileges: &Privileges) -> Vec<Check> {
    let mut checks = Vec::new();
    for helper in HELPERS {
        let mut found = Vec::new();
        for (wanted, name, kind) in [
            (helper.uprobes, "uprobes", ProgramType::KProbe),
            (helper.raw_tracepoints, "raw tracepoints", ProgramType::RawTracePoint),
        ] {
            if wanted {
                found.push((name, sys::is_helper_supported(kind, helper.helper).map_err(program_error)));
            }
        }
        checks.push(all_there(helper.name, privileges, &found));
    }
    checks
}

/// Makes one check of several things, each there, not there, or not to be found out.
fn all_there(name: &'static str, privileges: &Privileges, found: &[(&str, io::Result<bool>)]) -> Check {
    if let Some(error) = found.iter().find_map(|(_, there)| there.as_ref().err()) {
        return Check::refused(name, privileges, error);
    }
    let names = |wanted: bool| {
        let names: Vec<&str> =
            found.iter().filter(|(_, there)| matches!(there, Ok(there) if *there == wanted)).map(|(n, _)| *n).collect();
        names.join(", ")
    };
    match names(false) {
        none if none.is_empty() => Check::ok(name, names(true)),
        absent => Check::missing(
            name,
            format!("not there: {absent}"),
            "use Linux 5.17 or newer, built with CONFIG_BPF_SYSCALL, CONFIG_BPF_EVENTS and CONFIG_UPROBE_EVENTS",
        ),
    }
}

fn program_error(error: ProgramError) -> io::Error {
    match error {
        ProgramError::SyscallError(error) => error.io_error,
        other => io::Error::other(other),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::{BTreeSet, HashSet};

    use aya_obj::{Object, ProgramSection};
    use memtrace_common::settings::calls;

    use super::super::State;
    use super::*;
    use crate::kernel::object::OBJECT;

    const ROOT: Privileges = Privileges { effective: u64::MAX, initial_user_namespace: true };

    /// The helpers that the object file's programs of one kind call.
    fn called(kind: impl Fn(&ProgramSection) -> bool) -> BTreeSet<i32> {
        const CALL: u8 = 0x85;
        let mut object = Object::parse(OBJECT).unwrap();
        let text: HashSet<usize> = object.functions.keys().map(|(section, _)| *section).collect();
        object.relocate_calls(&text).unwrap();
        let programs = object.programs.values().filter(|program| kind(&program.section));
        programs
            .flat_map(|program| &object.functions[&program.function_key()].instructions)
            // A call of another function has source register 1 (BPF_PSEUDO_CALL).
            .filter(|instruction| instruction.code == CALL && instruction.src_reg() == 0)
            .map(|instruction| instruction.imm)
            // They stand for functions that are no helpers.
            .filter(|number| ![calls::PREEMPT_DISABLE, calls::PREEMPT_ENABLE].contains(number))
            .collect()
    }

    #[test]
    fn every_helper_that_the_programs_call_is_checked() {
        let listed = |wanted: fn(&Helper) -> bool| -> BTreeSet<i32> {
            HELPERS.iter().filter(|helper| wanted(helper)).map(|helper| helper.helper as i32).collect()
        };
        let uprobe = |section: &ProgramSection| {
            matches!(section, ProgramSection::UProbe { .. } | ProgramSection::URetProbe { .. })
        };
        assert_eq!(called(uprobe), listed(|helper| helper.uprobes));
        let raw = |section: &ProgramSection| matches!(section, ProgramSection::RawTracePoint);
        assert_eq!(called(raw), listed(|helper| helper.raw_tracepoints));
        let tracepoint = |section: &ProgramSection| matches!(section, ProgramSection::TracePoint);
        // Programs of both kinds may call the same helpers (bpf_tracing_func_proto in kernel/trace/bpf_trace.c).
        assert!(called(tracepoint).is_subset(&called(raw)));
        let other = |section: &ProgramSection| !uprobe(section) && !raw(section) && !tracepoint(section);
        assert_eq!(called(other), BTreeSet::new());
    }

    #[test]
    fn names_follow_the_helpers() {
        for helper in HELPERS {
            let name = format!("{:?}", helper.helper).replace("BPF_FUNC_", "helper bpf_");
            assert_eq!(helper.name, name);
        }
    }

    #[test]
    fn one_check_for_several_things() {
        let check = all_there("x", &ROOT, &[("a", Ok(true)), ("b", Ok(true))]);
        assert_eq!((check.state, check.detail.as_str()), (State::Ok, "a, b"));
        let check = all_there("x", &ROOT, &[("a", Ok(true)), ("b", Ok(false))]);
        assert_eq!((check.state, check.detail.as_str()), (State::Missing, "not there: b"));
        let denied = || Err(io::Error::from_raw_os_error(libc::EPERM));
        assert_eq!(all_there("x", &ROOT, &[("a", Ok(true)), ("b", denied())]).state, State::Missing);
        let nobody = Privileges { effective: 0, ..ROOT };
        let check = all_there("x", &nobody, &[("a", denied())]);
        assert_eq!(check.detail, "not checked: needs privileges");
    }
}
