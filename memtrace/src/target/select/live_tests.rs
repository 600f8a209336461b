//! Selections of processes that really run.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{fs, process::Command};

use super::*;
use crate::target::test_program::{Running, Workshop, is_root};

/// Takes the name it is told, and is told to end by its end of input.
const NAMED: &str = r#"
#include <stdio.h>
#include <sys/prctl.h>
#include <unistd.h>
int main(int argc, char **argv) {
    prctl(PR_SET_NAME, argv[1]);
    puts("ready");
    fflush(stdout);
    for (;;) pause();
}
"#;

fn named(workshop: &Workshop, name: &str) -> Running {
    let program = workshop.compile("named", NAMED, &[]);
    Running::start(Command::new(program).arg(name))
}

#[test]
fn by_name() {
    let workshop = Workshop::new();
    let name = format!("s l)\n{}", std::process::id());
    let running = named(&workshop, &name);
    for pattern in [name.as_str(), &format!("s l)?{}*", std::process::id())] {
        let selection = Selection::comm(pattern);
        assert_eq!(selection.find().unwrap(), [running.pid()], "{pattern:?}");
        assert!(selection.matches(running.pid()));
        assert!(!selection.matches(std::process::id()));
    }
}

#[test]
fn by_number() {
    let workshop = Workshop::new();
    let mut running = named(&workshop, "numbered");
    let pid = running.pid();
    let selection = Selection::pids(&[pid], None);
    assert_eq!(selection.find().unwrap(), [pid]);
    assert!(selection.matches(pid));
    assert!(Selection::all().find().unwrap().contains(&pid));
    running.0.kill().unwrap();
    running.0.wait().unwrap();
    assert!(matches!(selection.find().unwrap_err(), TargetError::NoSuchProcess { .. }));
    assert!(!selection.matches(pid));
    let error = Selection::pids(&[std::process::id()], None).find().unwrap_err();
    assert!(matches!(error, TargetError::Select(SelectError::Own { .. })), "{error}");
    let error = Selection::comm("no such name").find().unwrap();
    assert!(error.is_empty());
}

#[test]
fn all_processes_are_ascending_and_no_kernel_threads() {
    let found = Selection::all().find().unwrap();
    assert!(found.is_sorted());
    assert!(!found.contains(&std::process::id()));
    assert!(!found.contains(&2) || fs::read_link("/proc/2/exe").is_ok());
}

/// Starts it as `unshare`'s child: process 1 of a namespace of its own, with another one as deep below it as asked.
#[test]
fn inside_nested_namespaces() {
    if !is_root() {
        return;
    }
    let workshop = Workshop::new();
    let program = workshop.compile("named", NAMED, &[]);
    let mut unshare = ["--pid", "--fork", "--kill-child", "unshare", "--pid", "--fork", "--kill-child"].to_vec();
    unshare.extend([program.to_str().unwrap(), "nested"]);
    let running = Running::start(Command::new("unshare").args(unshare));
    // unshare (outside), unshare (1 of the outer namespace), the program (1 of the inner, 2 of the outer namespace).
    let outer = only_child(running.pid());
    let program = only_child(outer);
    let at = |number, namespace| Selection::pids(&[number], Some(namespace));
    assert_eq!(at(1, PidNamespace::Process(outer)).find().unwrap(), [outer]);
    assert_eq!(at(2, PidNamespace::Process(outer)).find().unwrap(), [program]);
    assert_eq!(at(1, PidNamespace::Process(program)).find().unwrap(), [program]);
    let file = PidNamespace::File(format!("/proc/{program}/ns/pid").into());
    assert_eq!(at(1, file.clone()).find().unwrap(), [program]);
    assert!(at(1, file.clone()).matches(program));
    assert!(!at(1, file.clone()).matches(outer));
    assert!(at(2, file).find().is_err());
    let own = PidNamespace::File("/proc/self/ns/pid".into());
    assert_eq!(at(program, own).find().unwrap(), [program], "the number in memtrace's own namespace");
    // Once known, the namespace stays known.
    let selection = at(2, PidNamespace::Process(outer));
    assert!(selection.matches(program) && !selection.matches(outer));
}

fn only_child(pid: u32) -> u32 {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.trim().parse().unwrap()
}

/// A group made for the test, where the machine lets it.
struct Group(std::path::PathBuf);

impl Group {
    fn make() -> Option<Self> {
        ["/sys/fs/cgroup/unified", "/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids"]
            .iter()
            .map(|point| Path::new(point).join(format!("memtrace-test-{}", std::process::id())))
            .find(|path| {
                path.parent().is_some_and(|point| point.join("cgroup.procs").exists()) && fs::create_dir(path).is_ok()
            })
            .map(Self)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(self.0.join("child"));
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn by_cgroup() {
    let Some(group) = Group::make() else { return };
    let selection = Selection::cgroup(&group.0);
    assert_eq!(selection.find().unwrap(), [] as [u32; 0], "empty, but there");
    let workshop = Workshop::new();
    let running = named(&workshop, "grouped");
    assert!(!selection.matches(running.pid()));
    let child = group.0.join("child");
    fs::create_dir(&child).unwrap();
    fs::write(child.join("cgroup.procs"), running.pid().to_string()).unwrap();
    assert_eq!(selection.find().unwrap(), [running.pid()], "{:?}", group.0);
    assert!(selection.matches(running.pid()));
    assert_eq!(Selection::cgroup(&child).find().unwrap(), [running.pid()]);
    assert!(cgroup_of(running.pid()).is_some());
    drop(running);
    // The kernel lets go of the group some time after the process.
    while fs::remove_dir(&child).is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY)) {
        std::thread::yield_now();
    }
    let error = Selection::cgroup(&child).find().unwrap_err();
    assert!(matches!(error, TargetError::Select(SelectError::NoSuchCgroup { .. })), "{error}");
}
