#![allow(clippy::unwrap_used, clippy::expect_used)]

use super::{
    fake::{Fake, OWN},
    *,
};

fn comm(fake: &Fake, name: &str) -> Vec<u32> {
    Selection::comm_in(fake.procs(), name).find().unwrap()
}

#[test]
fn names_are_compared_as_the_kernel_keeps_them() {
    let fake = Fake::new();
    fake.add(30, b"nginx", "0::/\n");
    fake.add(9, b"nginx", "0::/\n");
    fake.add(31, b"nginx2", "0::/\n");
    fake.add(32, b"fifteen-bytes-x", "0::/\n");
    fake.add(33, "fifteen-byte\u{e4}\u{e4}".as_bytes(), "0::/\n");
    fake.write(33, "comm", &["fifteen-byte\u{e4}".as_bytes(), &[0xc3], b"\n"].concat());
    assert_eq!(comm(&fake, "nginx"), [9, 30]);
    assert_eq!(comm(&fake, "ngin"), [] as [u32; 0]);
    assert_eq!(comm(&fake, "ngin*"), [9, 30, 31]);
    assert_eq!(comm(&fake, "nginx?"), [31]);
    assert_eq!(comm(&fake, "*"), [9, 30, 31, 32, 33]);
    assert_eq!(comm(&fake, "fifteen-bytes-x"), [32]);
    assert_eq!(comm(&fake, "fifteen-bytes-xyz"), [32], "cut to 15 bytes");
    assert_eq!(comm(&fake, "fifteen-byte\u{e4}\u{e4}"), [33], "cut inside a character");
}

#[test]
fn hostile_names() {
    let fake = Fake::new();
    for (pid, name) in [(30, &b"a b"[..]), (31, b"a\nb"), (32, b") Z 1 1 1 0 -1 "), (33, b"(x) Z (\n"), (34, b"")] {
        fake.add(pid, name, "0::/\n");
        assert_eq!(comm(&fake, std::str::from_utf8(name).unwrap()), [pid], "{name:?}");
    }
    fake.add(35, b"a\n", "0::/\n");
    assert_eq!(comm(&fake, "a\n"), [35], "only the last newline is not the name's");
    fake.add(36, &[0xff, b'x'], "0::/\n");
    assert_eq!(comm(&fake, "*x"), [36]);
}

#[test]
fn kernel_threads_zombies_and_memtrace_are_left_out() {
    let fake = Fake::new();
    fake.add(30, b"memtrace", "0::/\n");
    fake.zombie(31, b"memtrace", "0::/\n");
    // Ended between the listing of /proc and the reading of its files.
    fake.write(32, "comm", b"memtrace\n");
    for selection in [
        Selection::comm_in(fake.procs(), "memtrace"),
        Selection::cgroup_in(fake.procs(), Path::new("/")),
        Selection { procs: fake.procs(), rule: Rule::All },
    ] {
        assert_eq!(selection.find().unwrap(), [30], "{selection:?}");
        let matching: Vec<_> = [2, 30, 31, 32, 33, OWN].into_iter().filter(|pid| selection.matches(*pid)).collect();
        assert_eq!(matching, [30], "{selection:?}");
        assert!(selection.is_open());
    }
}

#[test]
fn a_process_that_appears_later() {
    let fake = Fake::new();
    let selection = Selection::comm_in(fake.procs(), "late");
    assert_eq!(selection.find().unwrap(), [] as [u32; 0], "an open selection may wait");
    assert!(!selection.matches(30));
    fake.add(30, b"early", "0::/\n");
    assert!(!selection.matches(30));
    fake.add(30, b"late", "0::/\n");
    assert!(selection.matches(30), "renamed");
    assert_eq!(selection.find().unwrap(), [30]);
}

#[test]
fn numbers() {
    let fake = Fake::new();
    let selection = Selection::pids_in(fake.procs(), &[31, 30, 31], None);
    assert_eq!(selection.resolve().unwrap(), [30, 31]);
    assert!(!selection.is_open());
    fake.add(30, b"x", "0::/\n");
    assert!(selection.matches(30));
    assert!(!selection.matches(31), "not there");
    assert!(!selection.matches(32));
    let error = Selection::pids_in(fake.procs(), &[30, OWN], None).find().unwrap_err();
    assert!(matches!(error, TargetError::Select(SelectError::Own { pid: OWN })), "{error}");
}

#[test]
fn numbers_inside_a_namespace() {
    let fake = Fake::new();
    fake.in_namespace(OWN, 100, "77");
    for (pid, namespace, numbers) in
        [(30, 200, "30 1"), (31, 200, "31\t7"), (32, 300, "32 7"), (33, 100, "33"), (7, 100, "7"), (34, 400, "34 9 7")]
    {
        fake.add(pid, b"x", "0::/\n");
        fake.in_namespace(pid, namespace, numbers);
    }
    let of = |numbers: &[u32], process| {
        Selection::pids_in(fake.procs(), numbers, Some(PidNamespace::Process(process))).resolve()
    };
    assert_eq!(of(&[7, 1], 30).unwrap(), [30, 31]);
    assert_eq!(of(&[7], 32).unwrap(), [32]);
    assert_eq!(of(&[7, 33], 33).unwrap(), [7, 33], "the outermost, too");
    assert_eq!(of(&[7], 34).unwrap(), [34]);
    let error = of(&[31], 30).unwrap_err();
    assert!(matches!(error, TargetError::Select(SelectError::NotInNamespace { pid: 31, .. })), "{error}");
    let error = of(&[1], 99).unwrap_err();
    assert!(matches!(error, TargetError::NoSuchProcess { pid: 99 }), "{error}");
    let error = of(&[77], 77).unwrap_err();
    assert!(matches!(error, TargetError::Select(SelectError::Own { .. })), "{error}");
    let selection = Selection::pids_in(fake.procs(), &[7], Some(PidNamespace::Process(30)));
    let matching: Vec<_> = [7, 30, 31, 32, 33, 34].into_iter().filter(|pid| selection.matches(*pid)).collect();
    assert_eq!(matching, [31]);
}

#[test]
fn damaged_status_is_no_process_of_any_namespace() {
    let fake = Fake::new();
    for (pid, status) in [(30, "NSpid:\n"), (31, "NSpid:\t31 x\n"), (32, "Name:\tx\n"), (33, "NSpid:\t99999999999 7\n")]
    {
        fake.add(pid, b"x", "0::/\n");
        fake.in_namespace(pid, 200, "1");
        fake.write(pid, "status", status.as_bytes());
    }
    let selection = Selection::pids_in(fake.procs(), &[7], Some(PidNamespace::Process(30)));
    let error = selection.resolve().unwrap_err();
    assert!(matches!(error, TargetError::Select(SelectError::NotInNamespace { .. })), "{error}");
    assert!(![30, 31, 32, 33].into_iter().any(|pid| selection.matches(pid)));
}

#[test]
fn what_names_no_namespace() {
    let fake = Fake::new();
    for path in ["/proc/self/ns/mnt", "/etc/passwd", "/dev/null", "/"] {
        let error = Selection::pids(&[1], Some(PidNamespace::File(path.into()))).find().unwrap_err();
        assert!(matches!(error, TargetError::Select(SelectError::NotPidNamespace { .. })), "{path}: {error}");
    }
    let missing = PidNamespace::File("/no/such/file".into());
    let error = Selection::pids_in(fake.procs(), &[1], Some(missing)).find().unwrap_err();
    assert!(matches!(error, TargetError::Select(SelectError::Namespace { .. })), "{error}");
}

#[test]
fn without_a_proc() {
    let procs = Procs::new(Path::new("/no/such/directory"));
    let error = Selection { procs, rule: Rule::All }.find().unwrap_err();
    assert!(matches!(error, TargetError::Io { .. }), "{error}");
}

#[test]
fn descriptions_escape_names() {
    assert_eq!(Selection::comm("a\n\"b").describe(), "processes named \"a\\n\\\"b\"");
    assert_eq!(Selection::comm("a\n*").describe(), "processes named like \"a\\n*\"");
    assert_eq!(Selection::cgroup(Path::new("/a\nb")).describe(), "processes in the cgroup \"/a\\nb\"");
    assert_eq!(Selection::container("a\n").describe(), "processes in the container \"a\\n\"");
}
