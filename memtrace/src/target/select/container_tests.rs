#![allow(clippy::unwrap_used, clippy::expect_used)]

use super::{
    super::{Selection, fake::Fake},
    *,
};

const A: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const B: &str = "0123456789abffff0123456789abcdef0123456789abcdef0123456789abcdef";
const C: &str = "c0ffee6789abffff0123456789abcdef0123456789abcdef0123456789abcdef";

fn named(path: &str) -> Vec<String> {
    names(Path::new(path)).map(|name| format!("{name:?}")).collect()
}

#[test]
fn every_runtimes_paths() {
    for path in [
        format!("/docker/{A}"),
        format!("/system.slice/docker-{A}.scope"),
        format!("/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{A}.scope"),
        format!("/docker/buildkit/{A}"),
        format!("/kubepods/besteffort/pod6e1d9c3a-0000-4000-8000-0123456789ab/{A}"),
        format!("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod6e1d.slice/cri-containerd-{A}.scope"),
        format!("/system.slice/containerd.service/kubepods-burstable-pod6e1d.slice:cri-containerd:{A}"),
        format!("/machine.slice/libpod-{A}.scope/container"),
        format!("/libpod_parent/libpod-{A}"),
        format!("/kubepods.slice/kubepods-pod6e1d.slice/crio-{A}.scope"),
        format!("/default/{A}"),
        format!("/system.slice/nerdctl-{A}.scope"),
        format!("/../{A}/init.scope"),
    ] {
        assert_eq!(named(&path), [format!("Id({A:?})")], "{path}");
    }
    assert_eq!(named(&format!("/docker/{A}/docker/{C}")), [format!("Id({A:?})"), format!("Id({C:?})")]);
    for path in ["/lxc/web", "/lxc.payload.web", "/lxc.payload/web/init.scope", "/lxc/web/system.slice"] {
        assert_eq!(named(path), ["Lxc(\"web\")"], "{path}");
    }
    for path in [
        "/".to_owned(),
        "/lxc".to_owned(),
        "/lxc.monitor.web".to_owned(),
        "/docker".to_owned(),
        "/system.slice/docker.service".to_owned(),
        "/system.slice/run-r0123456789abcdef0123456789abcdef.scope".to_owned(),
        "/user.slice/snap.docker.dockerd-6e1d9c3a-0000-4000-8000-0123456789ab.scope".to_owned(),
        format!("/machine.slice/libpod-conmon-{A}.scope"),
        format!("/kubepods.slice/crio-conmon-{A}.scope"),
        format!("/docker/{A}0"),
        format!("/docker/{}", A.to_uppercase()),
    ] {
        assert_eq!(named(&path), [] as [&str; 0], "{path}");
    }
}

fn machine() -> Fake {
    let fake = Fake::new();
    fake.add(30, b"nginx", &format!("0::/system.slice/docker-{A}.scope\n"));
    fake.add(31, b"nginx", &format!("4:memory:/docker/{A}/child\n1:name=systemd:/\n0::/\n"));
    fake.add(32, b"redis", &format!("0::/system.slice/docker-{B}.scope\n"));
    fake.add(33, b"conmon", &format!("0::/machine.slice/libpod-conmon-{C}.scope\n"));
    fake.add(34, b"app", &format!("0::/machine.slice/libpod-{C}.scope/container\n"));
    fake.add(35, b"init", "0::/lxc.payload.web/init.scope\n");
    fake.add(36, b"init", "0::/lxc.payload.web2\n");
    fake.zombie(37, b"dead", &format!("0::/machine.slice/libpod-{C}.scope\n"));
    fake
}

#[test]
fn ids_beginnings_of_ids_and_names() {
    let fake = machine();
    for (asked, expected) in [
        (A, &[30, 31][..]),
        (B, &[32]),
        (&A[..13], &[30, 31]),
        (&C[..12], &[34]),
        (&format!("containerd://{C}"), &[34]),
        ("web", &[35]),
        ("lxc/web", &[35]),
        ("lxc.payload.web2", &[36]),
    ] {
        let selection = Selection::container_in(fake.procs(), asked);
        assert_eq!(selection.find().unwrap(), expected, "{asked}");
        let matching: Vec<_> = (30..40).filter(|pid| selection.matches(*pid)).collect();
        assert_eq!(matching, expected, "{asked}");
        assert!(selection.is_open());
    }
}

#[test]
fn an_ambiguous_beginning_lists_the_ids() {
    let error = Selection::container_in(machine().procs(), &A[..12]).find().unwrap_err();
    let TargetError::Select(SelectError::AmbiguousContainer { candidates, .. }) = &error else { panic!("{error}") };
    assert_eq!(*candidates, [format!("{A:?}"), format!("{B:?}")]);
    assert!(error.to_string().contains(B), "{error}");
}

#[test]
fn what_is_not_there_lists_what_is() {
    let fake = machine();
    for asked in [&C[..11], "we", "", "deadbeefdeadbeef", "lxc/", &format!("{A}0")] {
        let error = Selection::container_in(fake.procs(), asked).find().unwrap_err();
        assert!(matches!(&error, TargetError::Select(SelectError::NoSuchContainer { .. })), "{asked}: {error}");
        let error = error.to_string();
        assert!(error.contains("\"c0ffee6789ab\" (of \"app\", pid 34)"), "{error}");
        assert!(error.contains("\"web\" (of \"init\", pid 35)"), "{error}");
    }
    let error = Selection::container_in(Fake::new().procs(), A).find().unwrap_err().to_string();
    assert!(error.ends_with("/proc/*/cgroup shows no container on this machine; use --cgroup or -p"), "{error}");
}
