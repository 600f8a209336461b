//! Real programs: all growth that is attributed to call paths, less what has gone, is within 1 % of the change of RSS that the
//! kernel gives.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use serde_json::Value;

use super::reconcile::Reconciled;
use crate::support::{
    growth::{UNATTRIBUTED, held, parse},
    memtrace::{self, Memtrace},
    process::Process,
    root::turn,
    smaps,
    trace::read,
};

const PAGE: i64 = 4096;

/// Bytes attributed less bytes gone, and how much of it has no call path.
fn attributed(report: &Value) -> (i64, i64) {
    let gone = &report["coverage"]["memory"]["growth"]["gone"];
    let gone: i64 = ["anonymous", "file", "shared"].iter().map(|kind| gone[*kind].as_i64().expect("pages")).sum();
    let held = held(report);
    let total: u64 = held.values().map(|amount| amount.bytes).sum();
    let nobody = held.get(&vec![UNATTRIBUTED.to_owned()]).map_or(0, |amount| amount.bytes);
    (i64::try_from(total).unwrap() - gone * PAGE, i64::try_from(nobody).unwrap())
}

fn assert_within_one_percent(what: &str, seen: i64, kernel: i64) {
    println!("{what}: {seen} bytes attributed, {kernel} by smaps_rollup");
    assert!(
        (seen - kernel).abs() * 100 <= kernel.abs(),
        "{what}: {seen} bytes attributed, RSS has changed by {kernel}"
    );
}

/// A program that answers each line of work with a line.
struct Program {
    process: Process,
}

impl Program {
    fn start(command: &mut Command, first: &str) -> Self {
        let mut process = Process::start(command);
        process.send(first);
        assert_eq!(process.line(), "ready");
        Self { process }
    }

    fn rss(&self) -> i64 {
        i64::try_from(smaps::rss(self.process.pid()).expect("the program runs")).expect("a size")
    }

    /// Traces a line of work, and compares.
    fn trace(&mut self, what: &str, work: &str) -> Value {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("growth.json").display().to_string();
        let memtrace = Memtrace::tracing(&["pgfaultstacks", "-p", &self.process.pid().to_string(), "-o", &file]);
        let before = self.rss();
        self.process.send(work);
        assert_eq!(self.process.line(), "done", "{what}");
        let after = self.rss();
        memtrace.interrupt().success();
        let report = parse(&read(Path::new(&file)));
        assert_eq!(report["lower_bound"], false, "{what}: {:#}", report["coverage"]["losses"]);
        let (seen, nobody) = attributed(&report);
        let kernel = after - before;
        assert!(kernel > 4 << 20, "{what}: RSS has hardly changed: {kernel}");
        assert_within_one_percent(what, seen, kernel);
        assert!(nobody * 100 <= kernel, "{what}: {nobody} bytes without a call path");
        let reconciled = Reconciled::of(&report);
        assert!(reconciled.unexplained.abs() * 100 <= kernel, "{what}: {:#}", reconciled.value);
        report
    }
}

fn by(report: &Value, function: &str) -> u64 {
    let has = |path: &&Vec<String>| path.iter().any(|frame| frame == function);
    let held = held(report);
    held.iter().filter(|(path, _)| has(path)).map(|(_, amount)| amount.bytes).sum()
}

#[test]
fn sqlite_builds_a_database_in_memory() {
    let _turn = turn();
    let mut sqlite = Program::start(Command::new("sqlite3").arg(":memory:"), "select 'ready';");
    let work = "create table t(a integer primary key, b text); \
                with recursive c(n) as (select 1 union all select n + 1 from c where n < 300000) \
                insert into t select n, hex(zeroblob(20)) || n from c; \
                create index i on t(b); select 'done';";
    sqlite.trace("sqlite3", work);
}

#[test]
fn python_builds_lists_and_gives_some_back() {
    let _turn = turn();
    let program = "
import sys
kept = {}
for line in sys.stdin:
    exec(line, kept)
";
    let mut python = Program::start(Command::new("python3").args(["-u", "-c", program]), "print('ready')");
    let grow = "a = [str(i) * 3 for i in range(400000)]; b = bytearray(20 << 20); print('done')";
    python.trace("python3, growing", grow);
    // A third of it goes, something else comes.
    let change = "del a; c = {i: (i,) for i in range(700000)}; b += bytes(8 << 20); print('done')";
    python.trace("python3, changing", change);
}

#[test]
fn node_builds_objects() {
    let _turn = turn();
    if Command::new("node").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("NOT TESTED: there is no node on this machine");
        return;
    }
    let program = "
const kept = [];
require('readline').createInterface({ input: process.stdin }).on('line', (line) => eval(line));
";
    let mut node = Program::start(Command::new("node").args(["-e", program]), "console.log('ready')");
    let work = "for (let i = 0; i < 400000; i++) kept.push({ i, s: 'x' + i, f: [i] }); \
                kept.push(Buffer.alloc(16 << 20, 1)); console.log('done')";
    node.trace("node", work);
}

/// The compiler proper, from its first fault to its end.
#[test]
fn a_compiler_run() {
    let _turn = turn();
    let ask = |question: &str| {
        let answer = Command::new("g++").arg(question).output().expect("g++ starts");
        String::from_utf8(answer.stdout).unwrap().trim().to_owned()
    };
    let (compiler, system) = (ask("-print-prog-name=cc1plus"), ask("-print-multiarch"));
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source.cpp").display().to_string();
    let text = "#include <map>\n#include <string>\n#include <regex>\n#include <iostream>\n\
                int main() { std::map<std::string, std::regex> m; m[\"a\"] = std::regex(\"b+\"); std::cout << m.size(); }\n";
    fs::write(&source, text).unwrap();
    let file = directory.path().join("growth.json").display().to_string();
    let assembly = directory.path().join("source.s").display().to_string();
    let mut arguments = vec!["pgfaultstacks", "-o", &file, "--", &compiler, "-quiet", "-O1", "-D_GNU_SOURCE", &source];
    arguments.extend(["-imultiarch", &system, "-o", &assembly]);
    let ended = memtrace::run(&arguments).success();
    assert!(fs::metadata(&assembly).unwrap().len() > 10_000, "nothing was compiled");
    let report = parse(&read(Path::new(&file)));
    assert_eq!(report["lower_bound"], false, "{}", ended.stderr);
    let (seen, nobody) = attributed(&report);
    let reconciled = Reconciled::of(&report);
    assert!(reconciled.change > 50 << 20, "{:#}", reconciled.value);
    assert_within_one_percent("cc1plus", seen, reconciled.change);
    assert!(nobody * 100 <= reconciled.change, "{nobody} bytes without a call path");
    assert!(reconciled.unexplained.abs() * 100 <= reconciled.change, "{:#}", reconciled.value);
    // The compiler's own main function leads to nearly all of it, though it is stripped: by the unwind tables.
    assert!(by(&report, "_start") > 30 << 20 || by(&report, "main") > 30 << 20, "{:#}", report["stacks"][0]);
}
