//! redis's server, which uses jemalloc and counts its memory by itself.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::{net::UnixStream, process::CommandExt as _},
    path::Path,
    process::Command,
};

use crate::support::{
    json::Report,
    memtrace::Memtrace,
    process::{Process, wait_for},
    root::turn,
    trace::read,
    truth::Amount,
};

/// A running server, and a connection to it.
struct Server {
    process: Process,
    connection: BufReader<UnixStream>,
}

impl Server {
    /// Starts one that keeps everything in memory and is reached by a socket in `directory` only.
    fn start(directory: &Path) -> Self {
        let socket = directory.join("redis.sock");
        let process = Process::start(
            // The program is the same; it looks at the name that it is called by.
            Command::new("redis-check-rdb")
                .arg0("redis-server")
                .args(["--port", "0", "--save", "", "--appendonly", "no", "--daemonize", "no"])
                .arg("--unixsocket")
                .arg(&socket)
                .arg("--dir")
                .arg(directory),
        );
        let connection = wait_for("redis's socket", || UnixStream::connect(&socket).ok());
        Self { process, connection: BufReader::new(connection) }
    }

    /// Sends a command and returns the answer: a number, or a text.
    fn ask(&mut self, command: &str) -> String {
        writeln!(self.connection.get_mut(), "{command}\r").expect("redis reads");
        let mut line = String::new();
        self.connection.read_line(&mut line).expect("redis answers");
        let line = line.trim_end();
        let Some(length) = line.strip_prefix('$') else {
            return line.trim_start_matches(['+', ':']).to_owned();
        };
        let length: usize = length.parse().expect("a length");
        // The text, and the end of its line.
        let mut text = vec![0; length + 2];
        self.connection.read_exact(&mut text).expect("redis's text");
        String::from_utf8(text).expect("redis writes UTF-8")
    }

    /// A number of what `INFO` tells.
    fn info(&mut self, name: &str) -> u64 {
        let text = self.ask("INFO");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().expect("a number")
    }
}

/// What jemalloc uses for `size` bytes: its size classes have four steps in each doubling, and steps of 16 bytes up to
/// 128 (the table in jemalloc(3)).
fn size_class(size: u64) -> u64 {
    match size {
        0..=8 => 8,
        9..=128 => size.next_multiple_of(16),
        _ => size.next_multiple_of((1 << (size - 1).ilog2()) / 4),
    }
}

/// What `used_memory` counts is what jemalloc uses for each block, and memtrace what was asked for. Large values leave
/// little between the two; for small ones the size classes explain what is.
#[test]
fn real_redis_holds_what_it_says() {
    for (value, requests, agrees) in [(2041, 10_000, true), (37, 100_000, false)] {
        let _turn = turn();
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut server = Server::start(directory.path());
        // The buffers of this connection are there before the trace.
        server.info("used_memory");
        let output = directory.path().join("redis.json").display().to_string();
        let pid = server.process.pid().to_string();
        let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid, "-o", &output]);
        let before = server.info("used_memory");
        load(directory.path(), value, requests);
        wait_for("the end of redis's other clients", || (server.info("connected_clients") == 1).then_some(()));
        let keys: u64 = server.ask("DBSIZE").parse().expect("a number of keys");
        let grown = server.info("used_memory") - before;
        memtrace.interrupt().success();

        assert!(keys > 3000, "{keys} keys are kept");
        let report = Report::parse(&read(Path::new(&output)));
        assert!(report.losses.is_empty(), "{:?}", report.losses);
        let held = report.paths.values().fold(Amount::default(), |mut sum, amount| {
            sum += *amount;
            sum
        });
        let used: u64 =
            report.paths.values().map(|amount| size_class(amount.bytes.div_ceil(amount.count)) * amount.count).sum();
        println!("{keys} keys of {value} bytes: {held:?}, {used} bytes used for them; redis: {grown} more");
        // redis makes the buffers of a connection smaller while it is idle: some 30 KiB that are older than the trace.
        assert!(within(used, grown, 1.0), "jemalloc uses {used} bytes for the unfreed blocks, redis says {grown}");
        if agrees {
            assert!(within(held.bytes, grown, 2.0), "{} bytes are unfreed, redis says {grown}", held.bytes);
        }
        // For each key, its name, its value, and an entry that holds both.
        let of_keys = report.paths.values().filter(|amount| amount.count == keys).count();
        assert!(of_keys >= 3, "{of_keys} paths hold a block for each of {keys} keys: {:#?}", report.paths);
    }
}

/// Sets random keys to values of `size` bytes, half as many keys as requests at most.
fn load(directory: &Path, size: u32, requests: u32) {
    let output = Command::new("redis-benchmark")
        .arg("-s")
        .arg(directory.join("redis.sock"))
        .args(["-t", "set", "-c", "4", "-P", "8", "-q", "-n", &requests.to_string()])
        .args(["-r", &(requests / 2).to_string(), "-d", &size.to_string()])
        .output()
        .expect("redis-benchmark starts: `cargo xtask setup` installs it");
    assert!(output.status.success(), "redis-benchmark: {}", String::from_utf8_lossy(&output.stderr));
}

/// Whether two numbers differ by at most so many percent of the second.
fn within(a: u64, b: u64, percent: f64) -> bool {
    a.abs_diff(b) as f64 <= b as f64 * percent / 100.0
}

#[test]
fn real_redis_size_classes_are_jemallocs() {
    let classes = [(1, 8), (9, 16), (17, 32), (128, 128), (129, 160), (2048, 2048), (2049, 2560), (40000, 40960)];
    for (size, class) in classes {
        assert_eq!(size_class(size), class, "{size}");
    }
}
