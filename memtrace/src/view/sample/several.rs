//! A server with workers, a hostile program that becomes another one, and processes that could not be traced.

use std::{sync::Arc, time::Duration};

use super::{amount, plain, process, stack};
use crate::profile::{
    Amount, AttachedLate, By, Events, Group, GroupKind, NamedProcess, NamedProfile, NamedStack, ProcessState, Thread,
    TraceEnd, numbered,
};

const MEGABYTE: u64 = 1 << 20;

fn processes() -> Vec<NamedProcess> {
    let service = || Some("/system.slice/nginx.service".to_owned());
    let forked = |pid| NamedProcess { parent: Some(100), cgroup: service(), ..process(pid, "nginx") };
    let missed = |pid, reason: &str| NamedProcess {
        state: ProcessState::Missed { reason: reason.into() },
        since: Duration::from_secs(40),
        ..process(pid, "app")
    };
    vec![
        NamedProcess { cgroup: service(), rss: Some((8 * MEGABYTE, 9 * MEGABYTE)), ..process(100, "nginx") },
        NamedProcess {
            rss: Some((6 * MEGABYTE, 30 * MEGABYTE)),
            inherited: Some(5 * MEGABYTE),
            since: Duration::from_micros(1_500_000),
            unseen: Some(Duration::from_micros(3_200)),
            ..forked(101)
        },
        NamedProcess { state: ProcessState::Ended, since: Duration::from_millis(20), ..forked(102) },
        NamedProcess {
            cgroup: Some("/user.slice/\u{202e};x\n<b>&".into()),
            state: ProcessState::Executed,
            rss: Some((MEGABYTE, MEGABYTE)),
            ..process(200, "#a;\u{1b}[31m<b> 7")
        },
        NamedProcess { since: Duration::from_secs(2), unseen: Some(Duration::from_millis(9)), ..process(200, "") },
        missed(300, "it ended before its memory map could be read"),
        missed(301, "not permitted: \u{1b}[2J<&"),
        missed(302, "it ended before its memory map could be read"),
    ]
}

fn late() -> Vec<AttachedLate> {
    [(1, "libother.so", 3_204), (4, "\u{202e}a\n.so", 12)]
        .map(|(process, module, since)| AttachedLate {
            process,
            module: module.into(),
            functions: 1,
            since: Duration::from_millis(since),
        })
        .into()
}

fn threads() -> Vec<Thread> {
    [(0, 100, "nginx"), (1, 101, "nginx"), (1, 105, "# a;\u{7}<b>&"), (2, 102, ""), (3, 200, "x 1"), (4, 200, "sh")]
        .map(|(process, tid, name)| Thread { process, tid, name: name.into() })
        .into()
}

/// Process, thread, call path, all that it allocated, and what of it is unfreed.
type Did = (usize, Option<usize>, &'static [&'static str], Amount, Amount);

/// What each thread did.
fn stacks() -> Vec<Did> {
    const CONFIG: &[&str] = &["_start", "main", "load_config", "malloc"];
    const SERVE: &[&str] =
        &["_start", "main", "serve", "buffer(unsigned long)", "operator new(unsigned long)", "malloc"];
    const THREAD: &[&str] = &["clone3", "start_thread", "cache_put", "calloc"];
    vec![
        (0, Some(0), CONFIG, amount(MEGABYTE, 40), amount(MEGABYTE, 40)),
        (1, Some(1), CONFIG, amount(4096, 2), amount(4096, 2)),
        (1, Some(1), SERVE, amount(90 * MEGABYTE, 9000), amount(12 * MEGABYTE, 1200)),
        (1, Some(2), THREAD, amount(12 * MEGABYTE, 12), amount(8 * MEGABYTE, 8)),
        (1, None, SERVE, amount(500, 5), amount(100, 1)),
        (2, Some(3), SERVE, amount(30 * MEGABYTE, 3000), amount(0, 0)),
        (3, Some(4), CONFIG, amount(70, 7), amount(0, 0)),
        (3, Some(4), &["main", "evil;\u{1b}[0m", "malloc"], amount(700, 7), amount(700, 7)),
        (4, Some(5), CONFIG, amount(4096, 1), amount(4096, 1)),
    ]
}

/// The sample, split by `by`.
pub fn several(by: By) -> NamedProfile {
    let (mut processes, threads) = (processes(), if by == By::Thread { threads() } else { Vec::new() });
    let (mut groups, mut merged): (Vec<Group>, Vec<NamedStack>) = (Vec::new(), Vec::new());
    for (index, thread, frames, allocated, unfreed) in stacks() {
        let thread = thread.filter(|_| by == By::Thread);
        let of = &mut processes[index];
        let mut one = stack(frames, allocated, unfreed);
        of.allocated = of.allocated.plus(one.allocated);
        of.freed = of.freed.plus(one.freed);
        of.unfreed = of.unfreed.plus(one.unfreed);
        let label = numbered(&of.comm, format!("pid {}", of.pid));
        let thread_label = thread.map_or("[unknown thread]".into(), |thread| {
            numbered(&threads[thread].name, format!("tid {}", threads[thread].tid))
        });
        let group = match by {
            By::None => None,
            By::Process => Some((GroupKind::Process(index), label)),
            By::Thread => Some((GroupKind::Thread { process: index, thread }, format!("{label}, {thread_label}"))),
            By::Cgroup => {
                let path = of.cgroup.clone();
                Some((GroupKind::Cgroup(path.clone()), path.unwrap_or_else(|| "[unknown cgroup]".into())))
            }
        };
        one.group = group.map(|(kind, label)| {
            groups.iter().position(|group| group.kind == kind).unwrap_or_else(|| {
                groups.push(Group { kind, label });
                groups.len() - 1
            })
        });
        (one.comm, one.process, one.thread) = (Arc::clone(&of.comm), Some(index), thread);
        let same =
            |other: &&mut NamedStack| (&other.comm, other.group, &other.frames) == (&one.comm, one.group, &one.frames);
        match merged.iter_mut().find(same) {
            Some(sum) => {
                sum.recorded += 1;
                sum.allocated = sum.allocated.plus(one.allocated);
                sum.freed = sum.freed.plus(one.freed);
                sum.unfreed = sum.unfreed.plus(one.unfreed);
                sum.oldest = sum.oldest.max(one.oldest);
                sum.process = sum.process.filter(|process| Some(*process) == one.process);
                sum.thread = sum.thread.filter(|thread| Some(*thread) == one.thread);
            }
            None => merged.push(one),
        }
    }
    NamedProfile {
        processes,
        threads,
        by,
        groups,
        stacks: merged,
        end: TraceEnd::TargetExited,
        everywhere: true,
        attached_late: late(),
        events: Events { allocations: 12_074, frees: 10_815, frees_inherited: 3, ..Events::default() },
        ..plain()
    }
}
