//! Processes that are chosen by a name, a control group, a container or a namespace, also those that appear later.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::support::{
    build::Fixture,
    memtrace,
    process::{child_of, wait_for},
    root::turn,
    told::{Report, Told, Tracing, held},
};

/// The fixture under another name, which is that of its processes.
fn copied(fixture: Fixture, directory: &Path, name: &str) -> PathBuf {
    let path = directory.join(name);
    fs::copy(fixture.path(), &path).unwrap();
    path
}

/// A name that no other process of this machine has.
fn unique(start: &str) -> String {
    format!("{start}{}", std::process::id() % 100_000)
}

#[test]
fn processes_of_a_name_also_those_that_get_it_later() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let name = unique("named-");
    let program = copied(Fixture::Targets, directory.path(), &name);
    let mut first = Told::by(&mut Command::new(&program));
    let mut other = Told::start(Fixture::Targets);
    let mut renamed = Told::start(Fixture::TargetsBeta);
    let mut trace = Tracing::start(&["--comm", &name]);
    first.tell("a 100 3");
    other.tell("a 1 1");
    // By executing it.
    let mut second = Told::by(&mut Command::new(&program));
    trace.wait_until_traced(second.pid());
    second.tell("b 10 2");
    // By executing it later.
    let mut third = Told::start(Fixture::TargetsAlpha);
    third.execute(&format!("exec {}", program.display()));
    trace.wait_until_traced(third.pid());
    third.tell("c 20 2");
    // By being called so: nothing tells of it, so that it is looked for.
    renamed.tell(&format!("name {name}"));
    trace.wait_until_traced(renamed.pid());
    renamed.tell("a 7 1");
    // By being forked off one that has it.
    let child = first.ask("fork");
    trace.wait_until_traced(child);
    first.tell("> c 5 1");
    // It is another program's now, with another name.
    let pid = second.pid();
    second.execute(&format!("exec {}", Fixture::TargetsBeta.path().display()));
    second.tell("a 1000 1");
    let report = trace.interrupt();
    report.assert_nothing_else();
    let expected = [
        (name.as_str(), first.pid(), &[("leak_a", 300, 3)][..]),
        (&name, third.pid(), &[("leak_c", 40, 2)]),
        (&name, renamed.pid(), &[("beta_leak_a", 7, 1)]),
        (&name, child, &[("leak_c", 5, 1)]),
    ];
    assert_eq!(report.live, held(&expected));
    let processes = report.processes(pid);
    assert_eq!((processes.len(), &processes[0]["state"]), (1, &"executed".into()));
    assert_eq!(report.processes(other.pid()).len(), 0);
}

/// The kernel keeps 15 bytes of a name; patterns are of whole names.
#[test]
fn long_names_and_patterns() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let name = unique("a-very-long-name-of-a-program-");
    let program = copied(Fixture::Targets, directory.path(), &name);
    let mut told = Told::by(&mut Command::new(&program));
    for pattern in [name.as_str(), "a-very-long-nam", "a-very-l?ng-*"] {
        let trace = Tracing::start(&["--comm", pattern]);
        told.tell("a 100 1");
        let report = trace.interrupt();
        assert_eq!(report.live, held(&[("a-very-long-nam", told.pid(), &[("leak_a", 100, 1)])]), "{pattern}");
    }
}

/// A control group that goes with this.
struct Group {
    path: PathBuf,
}

impl Group {
    fn new(parent: &str, name: &str) -> Self {
        let parent = Path::new(parent);
        assert!(
            parent.join("cgroup.procs").exists(),
            "this test needs the control groups in {}: mount them there",
            parent.display()
        );
        let path = parent.join(name);
        fs::create_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { path }
    }

    fn text(&self) -> &str {
        self.path.to_str().unwrap()
    }

    fn take(&self, pid: u32) {
        fs::write(self.path.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its processes have ended, or are about to.
        for _ in 0..500 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

/// Where this machine has hierarchies of both versions, or only the one of the second.
fn hierarchies() -> Vec<&'static str> {
    let places = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/memory"];
    let found: Vec<_> = places.into_iter().filter(|place| Path::new(place).join("cgroup.procs").exists()).collect();
    assert!(!found.is_empty(), "no control groups are mounted in /sys/fs/cgroup, which this test needs");
    found
}

/// One that is in it, one that is moved there, one that is forked in it, and one that is in a group below.
#[test]
fn processes_of_a_control_group_also_those_that_are_moved_there() {
    let _turn = turn();
    for hierarchy in hierarchies() {
        let group = Group::new(hierarchy, &unique("memtrace-test-"));
        let below = Group::new(group.text(), "below");
        let [mut first, mut moved, mut inner, mut other] = [(); 4].map(|()| Told::start(Fixture::Targets));
        group.take(first.pid());
        below.take(inner.pid());
        let mut trace = Tracing::start(&["--cgroup", group.text()]);
        moved.tell("a 1000 1");
        group.take(moved.pid());
        trace.wait_until_traced(moved.pid());
        first.tell("a 100 3");
        moved.tell("b 10 2");
        inner.tell("c 1 1");
        other.tell("c 1 1");
        let child = inner.ask("fork");
        trace.wait_until_traced(child);
        inner.tell("> a 2 2");
        let report = trace.interrupt();
        report.assert_nothing_else();
        let expected = [
            ("targets", first.pid(), &[("leak_a", 300, 3)][..]),
            ("targets", moved.pid(), &[("leak_b", 20, 2)]),
            ("targets", inner.pid(), &[("leak_c", 1, 1)]),
            ("targets", child, &[("leak_a", 4, 2)]),
        ];
        assert_eq!(report.live, held(&expected), "{hierarchy}");

        // Split by group, the processes of one are one.
        let trace = Tracing::of("memstacks", &["--by", "cgroup", "--cgroup", group.text()]);
        first.tell("a 100 3");
        moved.tell("a 100 2");
        inner.tell("a 1 1");
        let report = trace.interrupt();
        let groups = report.json["groups"].as_array().unwrap();
        let bytes: Vec<_> = groups
            .iter()
            .map(|group| (group["cgroup"].as_str().unwrap().to_owned(), group["bytes"].as_u64().unwrap()))
            .collect();
        let name = group.path.strip_prefix(hierarchy).unwrap().display().to_string();
        assert_eq!(bytes, [(format!("/{name}"), 500), (format!("/{name}/below"), 1)]);
        let roots: u64 =
            report.folded.lines().map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum();
        assert_eq!(roots, 501, "{}", report.folded);
        assert!(report.folded.lines().all(|line| line.starts_with("[cgroup] /")), "{}", report.folded);
    }
}

/// As the runtimes name their groups.
#[test]
fn processes_of_a_container() {
    let _turn = turn();
    let hierarchy = hierarchies()[0];
    let digits = format!("{:016x}", std::process::id());
    let (id, twin) = (format!("{digits}{}", "ab".repeat(24)), format!("{digits}{}", "cd".repeat(24)));
    let group = Group::new(hierarchy, &format!("docker-{id}.scope"));
    let mut told = Told::start(Fixture::Targets);
    group.take(told.pid());
    for asked in [&id[..], &id[..12], &format!("docker://{id}")] {
        let mut trace = Tracing::start(&["--container", asked]);
        told.tell("a 100 3");
        let mut later = Told::start(Fixture::Targets);
        group.take(later.pid());
        trace.wait_until_traced(later.pid());
        later.tell("a 1 1");
        let pid = later.pid();
        later.end();
        let report = trace.interrupt();
        report.assert_nothing_else();
        assert_eq!(report.live, held(&[("targets", told.pid(), &[("leak_a", 300, 3)])]), "{asked}");
        assert_eq!(report.all.len(), 2);
        assert_eq!(report.processes(pid)[0]["state"], "ended");
    }
    // Two begin alike.
    let group = Group::new(hierarchy, &format!("docker-{twin}.scope"));
    let other = Told::start(Fixture::Targets);
    group.take(other.pid());
    let ended = memtrace::run(&["memstacks", "--container", &id[..12]]);
    assert_eq!(ended.code(), 1, "{}", ended.stderr);
    assert!(ended.stderr.contains(&id) && ended.stderr.contains(&twin), "{}", ended.stderr);
}

fn alone(report: &Report, pid: u32) {
    report.assert_nothing_else();
    assert_eq!(report.live, held(&[("targets", pid, &[("leak_a", 300, 3), ("leak_b", 10, 1)])]));
}

fn allocate(told: &mut Told) {
    told.tell("a 100 4");
    told.tell("free 1");
    told.tell("b 10 1");
}

/// Its number is another inside. The number of another process is the same outside.
#[test]
fn a_process_by_its_number_inside_a_namespace() {
    let _turn = turn();
    let mut told = Told::by(
        Command::new("unshare").args(["--pid", "--fork", "--mount-proc", "--kill-child"]).arg(Fixture::Targets.path()),
    );
    let pid = child_of(told.pid());
    let unshare = told.pid().to_string();
    let namespaces = [pid.to_string(), format!("/proc/{pid}/ns/pid"), format!("/proc/{unshare}/ns/pid_for_children")];
    for namespace in &namespaces {
        let trace = Tracing::start(&["-p", "1", "--pid-ns", namespace]);
        allocate(&mut told);
        alone(&trace.interrupt(), pid);
    }
    // By the number outside.
    let trace = Tracing::start(&["-p", &pid.to_string()]);
    allocate(&mut told);
    alone(&trace.interrupt(), pid);
    // Its children are traced by their numbers outside.
    let mut trace = Tracing::start(&["--children", "-p", "1", "--pid-ns", &namespaces[0]]);
    let inside = told.ask("fork");
    assert!(inside < 10, "{inside}");
    let child = child_of(pid);
    trace.wait_until_traced(child);
    told.tell("> a 1 1");
    let report = trace.interrupt();
    report.assert_nothing_else();
    assert_eq!(report.live, held(&[("targets", child, &[("leak_a", 1, 1)])]));
    let ended = memtrace::run(&["memstacks", "-p", "77", "--pid-ns", &namespaces[0]]);
    assert_eq!(ended.code(), 1, "{}", ended.stderr);
    assert!(ended.stderr.contains("77"), "{}", ended.stderr);
}

/// Its files cannot be reached by the paths that it knows.
#[test]
fn a_process_in_another_root_and_one_whose_program_is_gone() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    copied(Fixture::TargetsStatic, directory.path(), "targets");
    let mut told = Told::by(Command::new("unshare").args(["--mount", "--root"]).arg(directory.path()).arg("/targets"));
    let pid = told.pid();
    let trace = Tracing::start(&["-p", &pid.to_string()]);
    allocate(&mut told);
    alone(&trace.interrupt(), pid);

    let directory = tempfile::tempdir().unwrap();
    let path = copied(Fixture::Targets, directory.path(), "targets");
    let mut told = Told::by(&mut Command::new(&path));
    fs::remove_file(&path).unwrap();
    let mut trace = Tracing::start(&["--children", "-p", &told.pid().to_string()]);
    allocate(&mut told);
    let child = told.ask("fork");
    trace.wait_until_traced(child);
    told.tell("> a 1 1");
    let report = trace.interrupt();
    report.assert_nothing_else();
    let expected = [
        ("targets", told.pid(), &[("leak_a", 300, 3), ("leak_b", 10, 1)][..]),
        ("targets", child, &[("leak_a", 1, 1)]),
    ];
    assert_eq!(report.live, held(&expected));
}

/// Another program takes its path, as updates do: the old one is what runs, and the new one is what is executed.
#[test]
fn a_program_that_is_replaced_during_the_trace() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = copied(Fixture::Targets, directory.path(), "targets");
    let mut told = Told::by(&mut Command::new(&path));
    let pid = told.pid();
    let mut trace = Tracing::start(&["--children", "-p", &pid.to_string()]);
    told.tell("a 100 3");
    let new = copied(Fixture::TargetsBeta, directory.path(), "new");
    fs::rename(&new, &path).unwrap();
    told.tell("b 10 1");
    let spawned = told.ask(&format!("spawn {}", path.display()));
    trace.wait_until_traced(spawned);
    told.tell("> a 7 1");
    let report = trace.interrupt();
    report.assert_nothing_else();
    let expected = [
        ("targets", pid, &[("leak_a", 300, 3), ("leak_b", 10, 1)][..]),
        ("targets", spawned, &[("beta_leak_a", 7, 1)]),
    ];
    assert_eq!(report.live, held(&expected));
}

/// Every other system call than those of its own kills it: probes must make none on its behalf.
#[test]
fn a_process_that_a_filter_confines() {
    let _turn = turn();
    let mut told = Told::start(Fixture::Targets);
    told.tell("confine");
    let pid = told.pid();
    for _ in 0..2 {
        let trace = Tracing::start(&["-p", &pid.to_string()]);
        allocate(&mut told);
        alone(&trace.interrupt(), pid);
    }
    told.end();
}

/// Whatever else runs on the machine.
#[test]
fn all_processes() {
    let _turn = turn();
    let mut first = Told::start(Fixture::TargetsAlpha);
    let begun = std::time::Instant::now();
    let mut trace = Tracing::start(&["--memory-budget", "1024", "--all-processes"]);
    let attached = begun.elapsed();
    first.tell("a 100 3");
    let mut later = Told::start(Fixture::TargetsBeta);
    trace.wait_until_traced(later.pid());
    later.tell("a 7 2");
    let child = later.ask("fork");
    trace.wait_until_traced(child);
    later.tell("> b 3 1");
    let stat = fs::read_to_string(format!("/proc/{}/stat", trace.pid())).unwrap();
    let times: Vec<u64> =
        stat.rsplit_once(')').unwrap().1.split_whitespace().skip(11).take(2).map(|n| n.parse().unwrap()).collect();
    let own = trace.pid();
    println!("attached after {attached:?}; {times:?} ticks of CPU in {:?}", begun.elapsed());
    let report = trace.interrupt();
    for (comm, pid, function, bytes, count) in [
        ("targets-alpha", first.pid(), "alpha_leak_a", 300, 3),
        ("targets-beta", later.pid(), "beta_leak_a", 14, 2),
        ("targets-beta", child, "beta_leak_b", 3, 1),
    ] {
        let own: Vec<_> = report.live.iter().filter(|((_, holder, _), _)| *holder == pid).collect();
        let expected = held(&[(comm, pid, &[(function, bytes, count)])]);
        let losses = &report.json["coverage"]["losses"];
        assert_eq!(own, expected.iter().collect::<Vec<_>>(), "{losses:#}");
    }
    // memtrace itself is no target.
    assert!(report.processes(own).is_empty());
    wait_for("both to be as they were", || {
        [first.pid(), later.pid()].iter().all(|pid| crate::support::code::patches(*pid).is_empty()).then_some(())
    });
    first.end();
    later.end();
}
