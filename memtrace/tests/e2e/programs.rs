//! Every eBPF program, also those that no other test needs, passes the running kernel's verifier.

use std::{collections::BTreeSet, fs};

use memtrace::kernel::{
    Scope, Settings, Tracer,
    budget::{Budget, Uses},
};

use crate::support::root::turn;

/// Numbers of the eBPF programs that this process holds (`bpf_prog_show_fdinfo` in kernel/bpf/syscall.c).
fn held() -> BTreeSet<u32> {
    let entries = fs::read_dir("/proc/self/fdinfo").unwrap();
    // A descriptor can be gone by the time that it is looked at: the one of this very listing.
    let texts = entries.filter_map(|entry| fs::read_to_string(entry.unwrap().path()).ok());
    let number = |text: String| {
        let value = text.lines().find_map(|line| line.strip_prefix("prog_id:"))?;
        Some(value.trim().parse().expect("a number"))
    };
    texts.filter_map(number).collect()
}

#[test]
fn every_program_is_verified() {
    let _turn = turn();
    // With everything that can be asked for: the verifier leaves out what the settings leave out.
    let all = Settings {
        scope: Scope::Several,
        announce: true,
        by_thread: true,
        follow: true,
        ..Settings::plain(Budget::for_uses(1, Uses { blocks: true, pages: true, tracepoints: true }))
    };
    let mut tracer = Tracer::load(&all).expect("the tables");
    let before = held();
    let count = tracer.load_all_programs().expect("every program");
    let ours: BTreeSet<u32> = held().difference(&before).copied().collect();
    let mut programs: Vec<(String, u32)> = aya::programs::loaded_programs()
        .map(|program| program.expect("a program's description"))
        .filter(|program| ours.contains(&program.id()))
        .map(|program| {
            let name = program.name_as_str().expect("a name").to_owned();
            (name, program.verified_instruction_count().expect("a kernel that tells what it has verified"))
        })
        .collect();
    programs.sort();
    for (name, instructions) in &programs {
        println!("{name}: {instructions} instructions verified");
    }
    assert_eq!(programs.len(), count, "not every program is there: {programs:?}");
    assert!(programs.iter().all(|(_, instructions)| *instructions > 0), "{programs:?}");
}
