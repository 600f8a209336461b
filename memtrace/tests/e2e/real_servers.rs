//! A server with worker processes, and a process that lives in namespaces of its own with another C library.

use std::{collections::BTreeSet, fs, os::unix::net::UnixStream, path::Path, process::Command};

use crate::support::{
    cells::{Allocator, Cell, Language, Way},
    json::Report,
    memtrace::Memtrace,
    process::{Process, children_of, wait_for},
    root::turn,
    target::Target,
    trace::read,
    truth::Amount,
};

/// How many connections to a socket of the file system a process has accepted.
pub fn accepted(pid: u32, socket: &Path) -> usize {
    // An accepted one has the name of the one that listens; its state is 3 (`SS_CONNECTED` in linux/net.h).
    let sockets = fs::read_to_string("/proc/net/unix").expect("the sockets");
    let name = socket.to_str().expect("a path of ASCII");
    let accepted: BTreeSet<String> = sockets
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|fields| fields.len() == 8 && fields[5] == "03" && fields[7] == name)
        .map(|fields| format!("socket:[{}]", fields[6]))
        .collect();
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).expect("the descriptors of a worker");
    let links = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    links.filter(|link| accepted.contains(&*link.to_string_lossy())).count()
}

/// Starts nginx with two workers; its socket is `socket` in the directory.
pub fn nginx(program: &Path, directory: &Path) -> Process {
    let at = directory.display();
    let configuration = format!(
        "daemon off; worker_processes 2; pid {at}/pid; error_log stderr; user root;\n\
         events {{ worker_connections 256; }}\n\
         http {{ access_log off; client_body_temp_path {at}/a; proxy_temp_path {at}/b; fastcgi_temp_path {at}/c;\n\
         uwsgi_temp_path {at}/d; scgi_temp_path {at}/e; server {{ listen unix:{at}/socket; }} }}\n"
    );
    let file = directory.join("nginx.conf");
    fs::write(&file, configuration).expect("the configuration can be written");
    Process::start(Command::new(program).arg("-e").arg("stderr").arg("-c").arg(&file))
}

/// A worker holds one pool for each connection that it has accepted and that has asked for nothing yet, and nothing more
/// once they are gone.
#[test]
fn real_nginx_workers_hold_a_pool_for_each_connection() {
    const CONNECTIONS: usize = 60;
    let _turn = turn();
    let directory = tempfile::tempdir().expect("a temporary directory");
    let nginx = nginx(Path::new("nginx"), directory.path());
    let socket = directory.path().join("socket");
    let workers = wait_for("two workers", || Some(children_of(nginx.pid())).filter(|workers| workers.len() == 2));
    let accepted = || -> Vec<usize> { workers.iter().map(|worker| accepted(*worker, &socket)).collect() };
    let wait_for_connections = |count: usize| {
        wait_for(&format!("{count} connections"), || (accepted().iter().sum::<usize>() == count).then_some(()));
    };

    for keep in [true, false] {
        let output = |worker: &u32| directory.path().join(format!("{worker}.json")).display().to_string();
        let traces: Vec<Memtrace> = workers
            .iter()
            .map(|worker| Memtrace::tracing(&["memstacks", "-p", &worker.to_string(), "-o", &output(worker)]))
            .collect();
        let mut connections: Vec<UnixStream> =
            (0..CONNECTIONS).map(|_| UnixStream::connect(&socket).expect("nginx listens")).collect();
        wait_for_connections(CONNECTIONS);
        if !keep {
            connections.clear();
            wait_for_connections(0);
        }
        for ((trace, worker), accepted) in traces.into_iter().zip(&workers).zip(accepted()) {
            trace.interrupt().success();
            let report = Report::parse(&read(Path::new(&output(worker))));
            assert!(report.losses.is_empty(), "{:?}", report.losses);
            let mut pools = Amount::default();
            for (path, amount) in &report.paths {
                assert!(path.iter().any(|frame| frame == "ngx_create_pool"), "{amount:?} by {}", path.join(";"));
                pools += *amount;
            }
            // The default of `connection_pool_size` on a machine of 64 bits.
            let accepted = u64::try_from(accepted).expect("a number");
            assert_eq!(pools, Amount { bytes: 512 * accepted, count: accepted }, "worker {worker}");
        }
        connections.clear();
        wait_for_connections(0);
    }
    // With its workers.
    nginx.signal(libc::SIGTERM);
    nginx.end();
}

/// Its root directory has nothing but itself and musl, and the process sees itself as the first of all.
#[test]
fn real_process_in_its_own_namespaces_with_musl() {
    let cell = Cell { language: Language::C, allocator: Allocator::Musl, way: Way::Dynamic };
    let program = cell.command();
    let root = tempfile::tempdir().expect("a temporary directory");
    fs::create_dir(root.path().join("lib")).expect("a directory can be made");
    let loader = Path::new("/lib/ld-musl-x86_64.so.1");
    fs::copy(loader, root.path().join("lib/ld-musl-x86_64.so.1")).expect("musl can be copied");
    fs::copy(program.get_program(), root.path().join("program")).expect("the program can be copied");
    let _turn = turn();
    let mut target = Target::child_of(
        Command::new("unshare").args(["--mount", "--pid", "--fork", "--root"]).arg(root.path()).arg("/program"),
    );
    let status = fs::read_to_string(format!("/proc/{}/status", target.pid())).expect("the target's status");
    let ids = status.lines().find(|line| line.starts_with("NSpid:")).expect("its process ids");
    assert!(ids.ends_with("\t1"), "the first process of its namespace: {ids}");
    let traced = crate::allocators::trace(cell, &mut target);
    traced.assert_exact(cell);
    assert!(target.finish().status.success());
}
