//! memtrace never harms the target, nor anybody else.

use std::{process::Command, thread::sleep, time::Duration};

use crate::support::{
    build::Fixture,
    code::{Patch, patches},
    kernel,
    memtrace::Memtrace,
    process::wait_for,
    root::turn,
    target::Target,
};

/// It leaves the CPUs, which it would keep busy, to memtrace when that needs them.
fn start_busy() -> Target {
    Target::of(Command::new("nice").args(["-n", "10"]).arg(Fixture::Busy.path()).arg("2"))
}

/// Waits until `target` has made more rounds.
fn assert_progress(target: &mut Target) {
    let before = target.rounds();
    wait_for("progress of the target", || (target.rounds() > before).then_some(()));
}

/// Waits until the child of `target` has made more rounds.
fn assert_child_progress(target: &mut Target) {
    let before = target.child_rounds();
    wait_for("progress of the forked child", || (target.child_rounds() > before).then_some(()));
}

/// Waits until no code of process `pid` differs from its file: the kernel takes probes out some time after their owner
/// died.
fn wait_until_clean(pid: u32) {
    let mut last: Vec<Patch> = Vec::new();
    wait_for(&format!("process {pid} without a probe in its code"), || {
        last = patches(pid);
        last.is_empty().then_some(())
    });
}

#[test]
fn sigkill_at_any_moment_leaves_the_target_running_and_clean() {
    const KILLS: u32 = 50;
    let _turn = turn();
    let mut target = Target::start(Fixture::Busy, &["4"]);
    let pid = target.pid().to_string();
    let mut random: u32 = 20_240_229;
    let mut while_tracing = 0;
    for kill in 0..KILLS {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let delay = Duration::from_millis(u64::from((random >> 16) % 300));
        let mut memtrace = Memtrace::start(&["memstacks", "-p", &pid]);
        memtrace.hurry();
        // Half of the kills come while it starts up, half while it traces.
        if kill % 2 == 1 {
            memtrace.wait_until_tracing();
        }
        sleep(delay);
        while_tracing += u32::from(memtrace.has_traced());
        memtrace.signal(libc::SIGKILL);
        drop(memtrace);
        assert!(target.is_running(), "the target died of kill {kill}");
        assert_progress(&mut target);
        wait_until_clean(target.pid());
    }
    assert!(while_tracing >= KILLS / 2, "memtrace was killed while it traced only {while_tracing} times");
    // It can still be traced.
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid]);
    assert_progress(&mut target);
    memtrace.interrupt().success();
    wait_until_clean(target.pid());
    assert!(target.finish().status.success());
}

#[test]
fn interrupts_in_the_middle_of_everything_leave_the_target_clean() {
    let _turn = turn();
    let mut target = start_busy();
    let pid = target.pid().to_string();
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid]);
        assert_progress(&mut target);
        memtrace.signal(signal);
        memtrace.end().success();
        // Without waiting: memtrace takes its probes out before it ends.
        assert_eq!(patches(target.pid()), []);
        assert_progress(&mut target);
    }
    // The second Ctrl-C quits at once, whatever the first one began.
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid]);
    memtrace.signal(libc::SIGINT);
    memtrace.signal(libc::SIGINT);
    memtrace.end();
    wait_until_clean(target.pid());
    assert_progress(&mut target);
    assert!(target.finish().status.success());
}

#[test]
fn tracing_a_process_puts_nothing_into_its_neighbours() {
    let _turn = turn();
    let (mut target, mut neighbour) = (start_busy(), start_busy());
    let pid = target.pid().to_string();
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid]);
    let mut late = start_busy();
    assert_ne!(patches(target.pid()), [], "the target has no probes, so that the test shows nothing");
    for other in [&mut neighbour, &mut late] {
        assert_eq!(patches(other.pid()), [], "a probe in a process that is not traced");
        assert_progress(other);
        assert_eq!(patches(other.pid()), [], "a probe in a process that is not traced");
    }
    assert_progress(&mut target);
    memtrace.interrupt().success();
    assert_eq!(patches(target.pid()), []);
    for target in [target, neighbour, late] {
        assert!(target.finish().status.success());
    }
}

#[test]
fn two_traces_of_one_process_do_not_disturb_each_other() {
    let _turn = turn();
    let mut target = start_busy();
    let pid = target.pid().to_string();
    let first = Memtrace::tracing(&["memstacks", "-p", &pid]);
    let second = Memtrace::tracing(&["memstacks", "-p", &pid]);
    assert_progress(&mut target);
    first.interrupt().success();
    assert_ne!(patches(target.pid()), [], "the first trace took the second one's probes with it");
    second.interrupt().success();
    assert_eq!(patches(target.pid()), []);
    assert!(target.finish().status.success());
}

/// Links over many sites are swept out of the child. Single probes leave it where it traps, for good; they stay, and do
/// nothing, where it never comes by.
#[test]
fn a_child_forked_during_a_trace_is_freed_of_probes_while_the_trace_goes_on() {
    /// Of the allocator's functions, those that the child calls: malloc, calloc, realloc, aligned_alloc, free.
    const CALLED: usize = 5;
    let _turn = turn();
    let mut target = start_busy();
    let pid = target.pid().to_string();
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid]);
    let child = target.fork();
    assert_child_progress(&mut target);
    if kernel::has(kernel::MANY_SITES) {
        wait_until_clean(child);
    } else {
        wait_for("a child without probes where it comes by", || {
            (patches(child).len() + CALLED <= patches(target.pid()).len()).then_some(())
        });
    }
    assert_ne!(patches(target.pid()), [], "the trace has ended");
    assert_child_progress(&mut target);
    memtrace.interrupt().success();
    assert_eq!(patches(target.pid()), []);
    wait_until_clean(child);
    assert_child_progress(&mut target);
    assert!(target.finish().status.success());
}

#[test]
fn sigkill_leaves_children_forked_during_a_trace_running_and_clean() {
    let _turn = turn();
    let mut target = start_busy();
    let pid = target.pid().to_string();
    for _ in 0..10 {
        let mut memtrace = Memtrace::start(&["memstacks", "-p", &pid]);
        memtrace.hurry();
        memtrace.wait_until_tracing();
        let child = target.fork();
        memtrace.signal(libc::SIGKILL);
        drop(memtrace);
        wait_until_clean(child);
        wait_until_clean(target.pid());
        assert_child_progress(&mut target);
        assert_progress(&mut target);
    }
    assert!(target.finish().status.success());
}
