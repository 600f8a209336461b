//! `memtrace doctor` and `memtrace selftest` as programs. These tests run as root on a kernel with uprobes.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    thread,
    time::Duration,
};

use serde_json::Value;

const NOBODY: u32 = 65_534;

fn memtrace(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_memtrace"));
    command.args(arguments).stdin(Stdio::null());
    command
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// State of the check `name`.
fn state<'a>(report: &'a Value, name: &str) -> &'a str {
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name}"))["state"].as_str().unwrap()
}

#[test]
fn nothing_is_missing_for_root() {
    let output = memtrace(&["doctor", "--json"]).output().unwrap();
    let report = json(&output);
    assert_eq!(report["schema"], 1);
    for name in ["privileges", "programs", "probes", "messages", "helper bpf_get_attach_cookie"] {
        assert_eq!(state(&report, name), "ok", "{report:#}");
    }
    assert_eq!(output.status.code(), Some(0));
    // The same as lines, with the eBPF side's log on.
    let output = memtrace(&["-vv", "doctor"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), report["checks"].as_array().unwrap().len(), "{text}");
    assert!(text.lines().all(|line| line.starts_with("ok ") || line.starts_with("degraded ")), "{text}");
}

#[test]
fn another_user_is_told_what_is_lacking() {
    // Where that user can execute it.
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let copy: PathBuf = directory.path().join("memtrace");
    fs::copy(env!("CARGO_BIN_EXE_memtrace"), &copy).unwrap();
    let as_nobody = |arguments: &[&str]| {
        Command::new(&copy).args(arguments).stdin(Stdio::null()).uid(NOBODY).gid(NOBODY).output().unwrap()
    };
    let output = as_nobody(&["doctor", "--json"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let report = json(&output);
    for (name, expected) in
        [("architecture", "ok"), ("privileges", "missing"), ("mapped files", "degraded"), ("probes", "missing")]
    {
        assert_eq!(state(&report, name), expected, "{report:#}");
    }
    let privileges = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == "privileges").unwrap();
    assert!(privileges["fix"].as_str().unwrap().contains("setcap"), "{privileges}");
    let output = as_nobody(&["selftest"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("memtrace doctor"), "{output:?}");
}

#[test]
fn usage_errors() {
    for arguments in [
        &["doctor", "--probes"][..],
        &["doctor", "-p", "1"],
        &["doctor", "--memory-budget", "0"],
        &["doctor", "--probes", "-p", "1", "--memory-budget", "5"],
        &["selftest", "--memory-budget", "x"],
    ] {
        let output = memtrace(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
    }
}

/// Ends the process when a test is over.
struct Target(Child);

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn probe_sites_of_a_process() {
    let target = Target(Command::new("sleep").arg("1000").spawn().unwrap());
    let pid = target.0.id();
    let libc_is_mapped = || fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().contains("libc.so.6");
    while !libc_is_mapped() {
        thread::sleep(Duration::from_millis(5));
    }
    let pid = pid.to_string();
    let output = memtrace(&["doctor", "--probes", "--json", "-p", &pid]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = json(&output);
    assert_eq!((report["schema"].clone(), report["comm"].clone()), (1.into(), "sleep".into()));
    let sites = report["sites"].as_array().unwrap();
    for name in ["malloc", "calloc", "realloc", "posix_memalign", "free"] {
        let site = sites.iter().find(|site| site["function"] == name).unwrap_or_else(|| panic!("no {name}"));
        assert_eq!(site["module"], "libc.so.6");
        assert!(!site["instruction"].as_str().unwrap().is_empty());
        // Either it is as good as it gets, or there is a reason.
        assert!(site["emulated"] != "no" || site["reason"].is_string(), "{site}");
    }
    let text = memtrace(&["doctor", "--probes", "-p", &pid]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.starts_with("MODULE "), "{text}");
    assert!(text.lines().count() > sites.len(), "{text}");
    let output = memtrace(&["doctor", "--probes", "-p", "2147483647"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no process"), "{output:?}");
}

/// Rows and bytes of each module are those of its file's table; a module without unwind information says so.
#[test]
fn unwind_tables_of_a_process() {
    let directory = tempfile::tempdir().unwrap();
    let (source, library) = (directory.path().join("bare.s"), directory.path().join("libbare.so"));
    fs::write(&source, ".text\nnop\nret\n.section .note.GNU-stack,\"\"\n").unwrap();
    let built = Command::new("cc").args(["-shared", "-nostdlib", "-o"]).args([&library, &source]).status().unwrap();
    assert!(built.success());
    let target = Target(Command::new("sleep").arg("1000").env("LD_PRELOAD", &library).spawn().unwrap());
    let pid = target.0.id();
    let maps = || fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    while !(maps().contains("libbare.so") && maps().contains("libc.so.6")) {
        thread::sleep(Duration::from_millis(5));
    }
    let pid = pid.to_string();
    let output = memtrace(&["doctor", "--unwind", "--json", "-p", &pid]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = json(&output);
    assert_eq!((report["schema"].clone(), report["comm"].clone()), (1.into(), "sleep".into()));
    let modules = report["modules"].as_array().unwrap();
    let module = |name: &str| modules.iter().find(|module| module["module"] == name).unwrap();
    let (maps, mut files) = (maps(), 0);
    for line in maps.lines().filter(|line| line.contains(" r-xp ") && line.contains(" /")) {
        let path = std::path::Path::new(&line[line.find('/').unwrap()..]);
        let table = memtrace::unwind::Table::read(&fs::File::open(path).unwrap()).unwrap();
        let said = module(path.file_name().unwrap().to_str().unwrap());
        assert_eq!(said["rows"], table.rows().len(), "{said}");
        assert_eq!(said["bytes"], table.bytes(), "{said}");
        let unsupported: u64 = table.summary().unsupported.iter().map(|(_, share)| share.bytes).sum();
        assert_eq!(said["unsupported_code"], unsupported, "{said}");
        let (by, reason) = match table.rows() {
            [] => ("frame pointers", Value::from("it has no unwind information")),
            _ => ("rows", Value::Null),
        };
        assert_eq!((&said["unwound_by"], &said["reason"]), (&by.into(), &reason), "{said}");
        files += 1;
    }
    assert_eq!(module("libbare.so")["rows"], 0);
    assert!(module("[vdso]")["rows"].as_u64().unwrap() > 0);
    assert_eq!(modules.len(), files + 1, "{modules:#?}");
    let text = memtrace(&["doctor", "--unwind", "-p", &pid]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert_eq!(text.lines().count(), modules.len() + 2, "{text}");
    let rows: u64 = modules.iter().map(|module| module["rows"].as_u64().unwrap()).sum();
    let total = text.lines().last().unwrap();
    assert_eq!(total.split_whitespace().take(2).collect::<Vec<_>>(), ["total", &rows.to_string()], "{text}");
}

#[test]
fn selftest_is_exact_here() {
    let output = memtrace(&["selftest", "--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = json(&output);
    assert_eq!((report["schema"].clone(), report["exact"].clone()), (1.into(), true.into()));
    let total = &report["exactness"]["total"];
    assert_eq!(total["seen"], total["truth"]);
    assert!(total["seen"]["allocated_count"].as_u64().unwrap() > 200_000, "{total}");
    let cost = &report["cost"];
    for (less, more) in [("untraced_ns", "empty_ns"), ("empty_ns", "traced_ns")] {
        assert!(cost[less].as_f64().unwrap() > 0.0, "{cost}");
        // Other work on the machine may turn the second two around, but not by far.
        assert!(cost[less].as_f64().unwrap() < 2.0 * cost[more].as_f64().unwrap(), "{cost}");
    }
}

/// The smallest tables are enough for the workload: few of its blocks are alive at a time.
#[test]
fn selftest_is_exact_with_the_smallest_tables() {
    let output = memtrace(&["selftest", "--memory-budget", "1"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.contains("different"), "{text}");
}

#[test]
fn workload_answers_and_ends() {
    use std::io::Write as _;
    let mut command = memtrace(&["__workload"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"exact\npairs 1000\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!((lines.len(), lines[0]), (3, "ready"));
    assert_eq!(serde_json::from_str::<Value>(lines[1]).unwrap()["functions"].as_array().unwrap().len(), 7);
    assert!(lines[2].parse::<u64>().unwrap() > 0);
}
