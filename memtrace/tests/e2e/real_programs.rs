//! Programs of every day whose own code, or an extension of theirs, leaks.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::support::{
    build::{artifact, run, sources_directory},
    cargo,
    json::Report,
    memtrace::Memtrace,
    process::Process,
    root::turn,
    trace::read,
    truth::Amount,
};

/// Traces a program from its `ready` to its next line, and gives that and what is unfreed then.
fn trace(program: &mut Process) -> (String, Report) {
    assert_eq!(program.line(), "ready");
    let directory = tempfile::tempdir().expect("a temporary directory");
    let output = directory.path().join("program.json").display().to_string();
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &program.pid().to_string(), "-o", &output]);
    program.send("go");
    let line = program.line();
    memtrace.interrupt().success();
    (line, Report::parse(&read(Path::new(&output))))
}

/// What paths through a function hold.
fn through(report: &Report, function: &str) -> Amount {
    let mut sum = Amount::default();
    for (path, amount) in &report.paths {
        if path.iter().any(|frame| frame == function) {
            sum += *amount;
        }
    }
    sum
}

/// Its threads share a cache; jemalloc is linked into it, with a prefix, and glibc's allocator is beside it.
#[test]
fn real_rust_service_with_a_jemalloc_of_its_own() {
    let mut command = Command::new(cargo::program("service"));
    let _turn = turn();
    let mut service = Process::start(&mut command);
    let (bytes, report) = trace(&mut service);
    let held = Amount {
        bytes: bytes.parse().expect("a number of bytes"),
        count: service.line().parse().expect("a number of blocks"),
    };
    assert!(report.losses.is_empty(), "{:?}", report.losses);
    let mut jemalloc = Amount::default();
    for (path, amount) in &report.paths {
        if path.last().is_some_and(|function| function.starts_with("_rjem_")) {
            jemalloc += *amount;
        }
    }
    assert_eq!(jemalloc, held, "what the service counts itself: {:#?}", report.paths);
    // A name and an answer for each that stays: four threads, a thousand each.
    let remembered = through(&report, "service::remember");
    assert!(remembered.count >= 8000, "{remembered:?}");
}

fn python_module() -> PathBuf {
    artifact("leaky.so", |path| {
        let flags = Command::new("/usr/bin/python3-config").arg("--includes").output();
        let flags = flags.expect("python3-config starts: `cargo xtask setup` installs it").stdout;
        let mut command = Command::new("cc");
        command.current_dir(sources_directory()).args(["-O2", "-g", "-fPIC", "-shared", "alloc_python.c", "-o"]);
        command.arg(path).args(String::from_utf8_lossy(&flags).split_whitespace());
        run(command, "cc");
    })
}

#[test]
fn real_python_with_an_extension_that_leaks() {
    const SCRIPT: &str = "\
import importlib.util, sys
spec = importlib.util.spec_from_file_location('leaky', sys.argv[1])
leaky = importlib.util.module_from_spec(spec)
spec.loader.exec_module(leaky)
print('ready', flush=True)
sys.stdin.readline()
words = {}
for i in range(300):
    leaky.leak(3, 700 + i)
    words[i] = 'kept' * i
print('done', flush=True)
sys.stdin.readline()
";
    let module = python_module();
    let _turn = turn();
    let mut python = Process::start(Command::new("/usr/bin/python3").args(["-c", SCRIPT]).arg(&module));
    let (line, report) = trace(&mut python);
    assert_eq!(line, "done");
    assert_leak(&report, "leak_in_extension");
}

#[test]
fn real_node_with_an_addon_that_leaks() {
    const SCRIPT: &str = "\
const addon = { exports: {} };
process.dlopen(addon, process.argv[1]);
const lines = require('readline').createInterface({ input: process.stdin });
const kept = [];
lines.on('line', line => {
  if (line != 'go') process.exit(0);
  for (let i = 0; i < 300; i++) {
    addon.exports.leak(3, 700 + i);
    kept.push('kept'.repeat(i));
  }
  console.log('done');
});
console.log('ready');
";
    let addon = artifact("leaky.node", |path| {
        let mut command = Command::new("cc");
        command.current_dir(sources_directory()).args(["-O2", "-g", "-fPIC", "-shared", "alloc_node.c", "-o"]);
        command.arg(path);
        run(command, "cc");
    });
    let _turn = turn();
    let mut node = Process::start(Command::new("node").args(["-e", SCRIPT]).arg(&addon));
    let (line, report) = trace(&mut node);
    assert_eq!(line, "done");
    assert_leak(&report, "leak_in_addon");
}

/// Panics unless all of what the scripts let the extensions leak is on paths through one function, and on no other.
fn assert_leak(report: &Report, function: &str) {
    let leaked = Amount { bytes: (0..300).map(|i| 3 * (700 + i)).sum(), count: 900 };
    assert_eq!(through(report, function), leaked, "{:?}", report.losses);
    let leaf = |path: &&Vec<String>| path.iter().any(|frame| frame == function);
    for path in report.paths.keys().filter(leaf) {
        assert_eq!(&path[path.len() - 2..], [function, "malloc"], "{}", path.join(";"));
    }
}
