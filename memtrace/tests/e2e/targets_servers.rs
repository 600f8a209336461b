//! Allocators that are opened during the trace, and a server whose workers are traced by its name.

use std::{collections::BTreeSet, fs, os::unix::net::UnixStream};

use crate::{
    allocators::of_functions,
    real_servers::{accepted, nginx},
    support::{
        cells::{Allocator, Cell, Language, Way},
        json,
        memtrace::Memtrace,
        process::{children_of, wait_for},
        root::turn,
        target::Target,
        told::{Report, Tracing},
        trace::read,
        truth::{Amount, Paths, amount},
    },
};

/// A library brings an allocator along: from the moment on at which memtrace says so, everything is seen.
fn opened_late(allocator: Allocator, way: Way) {
    let cell = Cell { language: Language::C, allocator, way };
    let mut command = cell.late_command();
    let _turn = turn();
    let mut target = Target::of(&mut command);
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("late.json").display().to_string();
    let pid = target.pid().to_string();
    let mut memtrace = Memtrace::tracing(&["memstacks", "-p", &pid, "--all", "--unfreed", "-o", &output]);
    target.go();
    target.wait_ready();
    let line = memtrace.wait_for_line(&format!("(pid {pid}) has loaded \""));
    let since = line.rsplit_once(" probed from ").and_then(|(_, rest)| rest.strip_suffix(" s on")).unwrap();
    target.go();
    let truth = target.truth();
    memtrace.interrupt().success();
    let functions: BTreeSet<&str> =
        truth.all.keys().flat_map(|path| &path[..path.len() - 1]).map(String::as_str).collect();
    for (view, known) in [("unfreed", &truth.unfreed), ("all", &truth.all)] {
        let text = read(&directory.path().join(format!("late.{view}.json")));
        let report = json::Report::parse(&text);
        assert!(report.losses.is_empty(), "{cell:?}: {:?}", report.losses);
        let mut own = Paths::new();
        for (path, amount) in &report.paths {
            let frames: Vec<String> = path.iter().filter(|frame| functions.contains(frame.as_str())).cloned().collect();
            // The loader's, and what the libraries do when they are loaded.
            let foreign =
                frames.is_empty() && path.iter().any(|frame| frame.contains("dlopen") || frame.contains("dlsym"));
            if !foreign {
                *own.entry(frames).or_default() += *amount;
            }
        }
        assert_eq!(own, of_functions(known), "{cell:?}, {view}");
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let late = json["coverage"]["attached_late"].as_array().unwrap();
        let of_allocator = late
            .iter()
            .find(|late| cell.modules().iter().any(|module| late["module"].as_str().unwrap().starts_with(module)));
        let late = of_allocator.unwrap_or_else(|| panic!("{cell:?}: {late:?}"));
        assert_eq!(late["pid"].to_string(), pid);
        assert!(late["functions"].as_u64().unwrap() >= 3, "{late}");
        let seconds = late["since_ns"].as_u64().unwrap() as f64 / 1e9;
        assert!((seconds - since.parse::<f64>().unwrap()).abs() < 1.0 && seconds > 0.0, "{line}: {late}");
    }
    assert!(target.finish().status.success());
}

#[test]
fn late_jemalloc() {
    opened_late(Allocator::Jemalloc, Way::Dlopened);
}

#[test]
fn late_prefixed_jemalloc_in_a_library() {
    opened_late(Allocator::PrefixedJemalloc, Way::DlopenedStatic);
}

#[test]
fn late_tcmalloc() {
    opened_late(Allocator::Tcmalloc, Way::Dlopened);
}

#[test]
fn late_mimalloc() {
    opened_late(Allocator::Mimalloc, Way::Dlopened);
}

#[test]
fn late_scudo() {
    opened_late(Allocator::Scudo, Way::Dlopened);
}

/// One trace of all processes of that name, also of the workers that come when it is told to take up its configuration again. Each
/// holds a pool for each connection that it has accepted and that has asked for nothing.
#[test]
fn nginx_workers_by_their_name() {
    const CONNECTIONS: usize = 60;
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    // A name that no other process has.
    let name = format!("nginx-{}", std::process::id() % 100_000);
    let program = directory.path().join(&name);
    fs::copy("/usr/sbin/nginx", &program).expect("nginx is installed");
    let nginx = nginx(&program, directory.path());
    let socket = directory.path().join("socket");
    let two = |before: &[u32]| {
        wait_for("two workers", || {
            let mut workers = children_of(nginx.pid());
            workers.retain(|worker| !before.contains(worker));
            (workers.len() == 2).then_some(workers)
        })
    };
    let workers = two(&[]);
    let accepted =
        |workers: &[u32]| -> Vec<usize> { workers.iter().map(|worker| accepted(*worker, &socket)).collect() };
    let connect = |workers: &[u32]| -> Vec<UnixStream> {
        let connections = (0..CONNECTIONS).map(|_| UnixStream::connect(&socket).expect("nginx listens")).collect();
        wait_for("connections", || (accepted(workers).iter().sum::<usize>() == CONNECTIONS).then_some(()));
        connections
    };
    let pools = |report: &Report, workers: &[u32]| {
        for (worker, accepted) in workers.iter().zip(accepted(workers)) {
            let accepted = u64::try_from(accepted).unwrap();
            let mut held = Amount::default();
            for stack in report.json["stacks"].as_array().unwrap() {
                let process = &report.json["processes"][stack["process"].as_u64().unwrap() as usize];
                let has = |name: &str| stack["frames"].as_array().unwrap().iter().any(|frame| frame == name);
                if process["pid"] == *worker && has("ngx_event_accept") {
                    assert!(has("ngx_create_pool"), "{stack}");
                    held += amount(stack);
                }
            }
            assert_eq!(held, Amount { bytes: 512 * accepted, count: accepted }, "worker {worker}");
        }
    };
    let trace = Tracing::start(&["--comm", &name]);
    let connections = connect(&workers);
    let report = trace.interrupt();
    report.assert_no_losses();
    pools(&report, &workers);
    // Nobody else has allocated anything that it holds.
    assert_eq!(amount(&report.json["total"]), Amount { bytes: 512 * CONNECTIONS as u64, count: CONNECTIONS as u64 });
    assert_eq!(report.json["processes"].as_array().unwrap().len(), 3);
    drop(connections);

    let mut trace = Tracing::start(&["--comm", &name]);
    nginx.signal(libc::SIGHUP);
    let new = two(&workers);
    for worker in &new {
        trace.wait_until_traced(*worker);
    }
    wait_for("the old workers' end", || {
        children_of(nginx.pid()).iter().all(|worker| new.contains(worker)).then_some(())
    });
    let _connections = connect(&new);
    let report = trace.interrupt();
    pools(&report, &new);
    for worker in workers {
        assert_eq!(report.processes(worker)[0]["state"], "ended");
    }
    // With its workers.
    nginx.signal(libc::SIGTERM);
    nginx.end();
}
