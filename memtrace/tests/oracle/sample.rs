//! Runs a program and takes samples of the kernel side's walks.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use memtrace::{
    cli::session::{Options, Probes, Session},
    kernel::{
        budget::Budget,
        source::oracle::{Counts, Sample},
    },
    profile::Mapping,
    target::{
        Process,
        launch::{Launched, Reached, wait},
        mappings,
    },
};
use memtrace_common::settings::Unwind;

use super::{modules::Modules, programs::Program};

/// Size of the ring buffer.
const RING: u32 = 64 << 20;
/// Most samples kept of a program: 17 KiB each.
const MOST: usize = 20_000;

/// What was taken from one run of a program.
pub struct Taken {
    pub samples: Vec<Sample>,
    /// Samples that came when there were enough.
    pub surplus: u64,
    pub counts: Counts,
    pub modules: Modules,
}

/// Runs the program to its end, all its allocating calls walked. Panics with what went wrong.
pub fn sample(program: &Program) -> Taken {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(run(program))
}

async fn run(program: &Program) -> Taken {
    let mut launched = Launched::spawn(&program.command).expect("the program starts");
    let process = Process::open(launched.pid()).expect("the program runs");
    let maps_libc = || mappings::read(&process).is_ok_and(|mappings| mappings::maps_libc(&mappings));
    let reached = launched.run_until(maps_libc).expect("the program can be held");
    assert!(!matches!(reached, Reached::Ended(_)), "{} has no C library", program.name);
    let options = Options { unwind: Unwind::Auto, ..Options::plain(Budget::from_mebibytes(64)) };
    let probes = Probes::Oracle { bytes: RING, every: program.every };
    let mut session = Session::attach(vec![process], None, &options, probes).expect("the program can be traced");
    let mut stream = session.tracer().take_oracle().expect("a ring buffer").expect("it is there once");
    session.start().expect("the trace starts");
    let reached = launched.run_to_entry().expect("the program can be held");
    assert!(!matches!(reached, Reached::Ended(_)), "{} ended before it began", program.name);
    session.refresh_modules();
    let early = session.mappings().len();

    let ended = Arc::new(AtomicBool::new(false));
    let drain = thread::spawn({
        let ended = Arc::clone(&ended);
        move || {
            let (mut samples, mut surplus) = (Vec::new(), 0);
            loop {
                let last = ended.load(Ordering::Acquire);
                while let Some(sample) = stream.next_sample() {
                    if samples.len() < MOST {
                        samples.push(sample);
                    } else {
                        surplus += 1;
                    }
                }
                if last {
                    return (samples, surplus);
                }
                thread::sleep(Duration::from_millis(1));
            }
        }
    });
    let pid = libc::pid_t::try_from(launched.pid()).expect("a pid");
    launched.release().expect("the program goes on");
    let waited = thread::spawn(move || wait(pid).expect("the program can be waited for"));
    session.run(None, std::future::pending(), std::future::pending(), |_, _| ()).await.expect("the trace runs");
    let status = waited.join().expect("the waiting thread");
    assert_eq!(status, 0, "{} failed with wait status {status:#x}", program.name);
    ended.store(true, Ordering::Release);
    let (samples, surplus) = drain.join().expect("the draining thread");
    let counts = session.tracer().oracle_counts().expect("the counters");
    let mappings: Vec<Mapping> = session.mappings().to_vec();
    Taken { samples, surplus, counts, modules: Modules::read(&mappings, early) }
}
