#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;

use super::{
    super::{Selection, fake::Fake},
    *,
};

/// A hierarchy of version 2 with systemd's groups.
fn systemd() -> (Fake, PathBuf) {
    let fake = Fake::new();
    let point = fake.mount_point("sys/fs/cgroup");
    fake.mount(&[(&point, "/", "cgroup2", "rw,nsdelegate,memory_recursiveprot")]);
    fs::create_dir_all(point.join("system.slice/nginx.service")).unwrap();
    fs::create_dir_all(point.join("system.slice/idle.service")).unwrap();
    fake.add(30, b"nginx", "0::/system.slice/nginx.service\n");
    fake.add(31, b"nginx", "0::/system.slice/nginx.service/workers/1\n");
    fake.add(32, b"nginx", "0::/system.slice/nginx.service-old\n");
    fake.add(33, b"sh", "0::/user.slice/user-1000.slice/session-1.scope\n");
    (fake, point)
}

fn find(fake: &Fake, path: impl AsRef<Path>) -> Result<Vec<u32>, TargetError> {
    Selection::cgroup_in(fake.procs(), path.as_ref()).find()
}

#[test]
fn a_group_and_those_below_it() {
    let (fake, point) = systemd();
    for path in ["/system.slice/nginx.service", "system.slice/nginx.service", "/system.slice//nginx.service/"] {
        assert_eq!(find(&fake, path).unwrap(), [30, 31], "{path}");
        assert_eq!(find(&fake, point.join(path.trim_start_matches('/'))).unwrap(), [30, 31], "{path}");
    }
    assert_eq!(find(&fake, "/system.slice").unwrap(), [30, 31, 32]);
    assert_eq!(find(&fake, point.join("user.slice")).unwrap(), [33], "shown by a process only");
    assert_eq!(find(&fake, &point).unwrap(), [30, 31, 32, 33]);
    let selection = Selection::cgroup_in(fake.procs(), Path::new("/system.slice/nginx.service"));
    assert!(selection.matches(31) && !selection.matches(32) && !selection.matches(34));
}

#[test]
fn an_empty_group_may_wait_and_one_that_is_not_there_may_not() {
    let (fake, point) = systemd();
    assert_eq!(find(&fake, "/system.slice/idle.service").unwrap(), [] as [u32; 0]);
    assert_eq!(find(&fake, point.join("system.slice/idle.service")).unwrap(), [] as [u32; 0]);
    for path in [PathBuf::from("/system.slice/ngnix.service"), point.join("nginx.servic"), "nginx".into()] {
        let error = find(&fake, &path).unwrap_err();
        let TargetError::Select(SelectError::NoSuchCgroup { similar, .. }) = &error else { panic!("{error}") };
        assert_eq!(similar[0], "/system.slice/nginx.service", "{path:?}");
        assert!(error.to_string().contains("(similar ones: \"/system.slice/nginx.service\", "), "{error}");
    }
    let error = find(&fake, "/zzz").unwrap_err().to_string();
    assert_eq!(error, "there is no cgroup \"/zzz\": the cgroups of a process are in /proc/PID/cgroup");
}

/// Hierarchies of version 1, one of them for two controllers, and version 2 beside them without controllers.
#[test]
fn hybrid_hierarchies_are_told_apart() {
    let fake = Fake::new();
    let [memory, cpu, systemd, unified] =
        ["memory", "cpu,cpuacct", "systemd", "unified"].map(|name| fake.mount_point(&format!("cgroup v1/{name}")));
    fake.mount(&[
        (&memory, "/", "cgroup", "rw,memory"),
        (&cpu, "/", "cgroup", "rw,cpu,cpuacct"),
        (&systemd, "/", "cgroup", "rw,xattr,name=systemd"),
        (&unified, "/", "cgroup2", "rw"),
    ]);
    std::os::unix::fs::symlink("cpu,cpuacct", memory.with_file_name("cpu")).unwrap();
    fs::create_dir(cpu.join("a")).unwrap();
    fake.add(30, b"x", "4:memory:/a\n3:cpu,cpuacct:/b\n1:name=systemd:/s\n0::/u\n");
    fake.add(31, b"x", "4:memory:/b\n3:cpu,cpuacct:/a:b/c\n1:name=systemd:/\n0::/\n");
    assert_eq!(find(&fake, memory.join("a")).unwrap(), [30]);
    assert_eq!(find(&fake, memory.join("b")).unwrap(), [31]);
    assert_eq!(find(&fake, cpu.join("b")).unwrap(), [30]);
    assert_eq!(find(&fake, cpu.with_file_name("cpu").join("b")).unwrap_err().to_string().lines().count(), 1);
    fs::create_dir(cpu.join("b")).unwrap();
    assert_eq!(find(&fake, cpu.with_file_name("cpu").join("b")).unwrap(), [30], "by the link");
    assert_eq!(find(&fake, cpu.join("a")).unwrap(), [] as [u32; 0], "/a:b is another one");
    assert_eq!(find(&fake, cpu.join("a:b")).unwrap(), [31]);
    assert_eq!(find(&fake, systemd.join("s")).unwrap(), [30]);
    assert_eq!(find(&fake, unified.join("u")).unwrap(), [30]);
    assert_eq!(find(&fake, "/b").unwrap(), [30, 31], "in whatever hierarchy");
    assert!(find(&fake, unified.join("a")).is_err());
    assert!(find(&fake, unified.join("s")).is_err());
}

/// In a container, the mount shows only the container's own group; of groups outside, paths begin with `/..`.
#[test]
fn a_mount_of_a_group_below_the_root() {
    let fake = Fake::new();
    let point = fake.mount_point("cgroup");
    fake.mount(&[(&point, "/docker/abc", "cgroup", "rw,memory")]);
    fs::create_dir(point.join("child")).unwrap();
    fake.add(30, b"x", "4:memory:/docker/abc/child\n");
    fake.add(31, b"x", "4:memory:/child\n");
    fake.add(32, b"x", "4:memory:/../other\n");
    assert_eq!(find(&fake, point.join("child")).unwrap(), [30]);
    assert_eq!(find(&fake, "/docker/abc").unwrap(), [30]);
    assert_eq!(find(&fake, "/../other").unwrap(), [32]);
    assert!(find(&fake, "/docker").is_ok_and(|found| found == [30]));
}

#[test]
fn the_group_that_names_a_process() {
    let fake = Fake::new();
    for (lines, expected) in [
        ("0::/a.slice\n", Some("/a.slice")),
        ("4:memory:/m\n3:cpu:/c\n0::/a\n", Some("/a")),
        ("4:cpu:/c\n3:memory:/m\n0::/\n", Some("/m")),
        ("4:cpu:/c\n3:hugetlb,memory:/m\n", Some("/m")),
        ("4:cpu:/c\n3:memory:/\n0::/\n", Some("/c")),
        ("3:memory:/\n0::/\n", Some("/")),
        ("", None),
        ("garbage\n:::\n4:memory\n\n0::relative\n", None),
    ] {
        fake.add(30, b"x", lines);
        assert_eq!(cgroup_of(&fake.procs(), 30).as_deref(), expected, "{lines:?}");
    }
    assert_eq!(cgroup_of(&fake.procs(), 31), None);
}

#[test]
fn very_long_paths_are_bounded() {
    let fake = Fake::new();
    let long = format!("/{}", "x/".repeat(2000));
    fake.add(30, b"x", &format!("0::{long}\n"));
    assert_eq!(find(&fake, &long).unwrap(), [30]);
    // More than the kernel writes.
    fake.add(30, b"x", &format!("0::/{}\n", "y".repeat(1 << 20)));
    assert_eq!(cgroup_of(&fake.procs(), 30), None);
    assert!(find(&fake, "/x").is_err());
}

#[test]
fn escapes_of_mountinfo() {
    for (text, expected) in
        [("/a\\040b", "/a b"), ("/a\\134040", "/a\\040"), ("/a\\", "/a\\"), ("/a\\04", "/a\\04"), ("\\999", "\\999")]
    {
        assert_eq!(unescape(text.as_bytes()), Path::new(expected), "{text}");
    }
    for line in ["", "1 2 3", "31 23 0:28 / /x rw", "31 23 0:28 / /x rw - cgroup2", "31 23 0:28 / /x rw - ext4 a b"] {
        assert_eq!(Mount::parse(line.as_bytes()), None, "{line}");
    }
}
