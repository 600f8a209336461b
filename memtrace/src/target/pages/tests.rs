#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    collections::HashMap,
    fs,
    process::Command,
    time::{Duration, Instant},
};

use super::*;
use crate::target::{
    mappings,
    test_program::{Running, Workshop, is_root},
};

/// Makes a region for each case and writes a line about it: name, first address, length, and how many pages of it are
/// anonymous, of a file, of shared memory.
const REGIONS: &str = include_str!("test_regions.c");

/// What the program says of a region.
#[derive(Debug)]
struct Region {
    start: u64,
    end: u64,
    pages: Pages,
}

/// A program with regions of known content.
struct Fixture {
    _workshop: Workshop,
    _running: Running,
    process: Process,
    regions: HashMap<String, Region>,
}

impl Fixture {
    fn start(arguments: &[&str]) -> Self {
        let workshop = Workshop::new();
        let program = workshop.compile("regions", REGIONS, &["-O1", "-pthread"]);
        let truth = workshop.0.path().join("truth");
        let data = workshop.0.path().join("data");
        let running = Running::start(Command::new(program).arg(&truth).arg(data).args(arguments));
        let process = Process::open(running.pid()).unwrap();
        // Once it waits, it touches no more pages.
        while !fs::read_to_string(format!("/proc/{}/stat", running.pid())).unwrap().contains(") S ") {
            std::thread::yield_now();
        }
        let regions = fs::read_to_string(truth).unwrap().lines().map(parse).collect();
        Self { _workshop: workshop, _running: running, process, regions }
    }

    fn mappings(&self) -> Vec<Mapping> {
        mappings::read(&self.process).unwrap()
    }

    /// By the ioctl if the kernel has it.
    fn scan(&self) -> Scan {
        scan(&self.process, &self.mappings()).unwrap()
    }

    /// By reading pagemap.
    fn read(&self) -> Scan {
        let (file, areas, unknown) = prepare(&self.process, &self.mappings()).unwrap();
        read(&self.process, &file, areas, unknown).unwrap()
    }
}

fn parse(line: &str) -> (String, Region) {
    let mut words = line.split(' ');
    let name = words.next().unwrap().to_owned();
    let numbers: Vec<u64> = words.map(|word| word.parse().unwrap()).collect();
    let [start, length, anon, file, shmem] = numbers[..] else { panic!("{line}") };
    (name, Region { start, end: start + length, pages: Pages { anon, file, shmem } })
}

/// Pages of the scan between two addresses.
fn within(scan: &Scan, region: &Region) -> Pages {
    let mut pages = Pages::default();
    for range in &scan.ranges {
        let (first, end) = (range.first.max(region.start / PAGE), range.end().min(region.end / PAGE));
        pages.add(range.kind, end.saturating_sub(first));
    }
    pages
}

fn role(scan: &Scan, region: &Region) -> Role {
    scan.areas.iter().find(|area| area.start <= region.start && region.start < area.end).unwrap().role
}

fn check(fixture: &Fixture, scan: &Scan) {
    for (name, region) in &fixture.regions {
        assert_eq!(within(scan, region), region.pages, "{name}, {:?}", scan.method);
    }
    let sums = rollup(&fixture.process).unwrap();
    let pages = scan.pages();
    assert_eq!(pages.total() * PAGE, sums.rss, "{:?}: {pages:?}", scan.method);
    assert_eq!(pages.anon * PAGE, sums.anonymous.unwrap(), "{:?}", scan.method);
    assert_eq!(scan.swapped * PAGE, sums.swap.unwrap(), "{:?}", scan.method);
    assert_eq!(scan.hugetlb, sums.hugetlb.unwrap(), "{:?}", scan.method);
    assert!(scan.ranges.is_sorted_by(|one, next| one.end() <= next.first));
    assert_eq!((scan.zero_in_doubt, scan.unknown_file_systems), (0, 0));
}

#[test]
fn regions_of_known_content() {
    let fixture = Fixture::start(&[]);
    let scanned = fixture.scan();
    check(&fixture, &scanned);
    let read = fixture.read();
    assert_eq!(read.method, Method::Pagemap);
    check(&fixture, &read);
    assert_eq!(scanned.ranges, read.ranges);
    assert_eq!(scanned.swapped, read.swapped);

    let roles = |name: &str| role(&scanned, &fixture.regions[name]);
    assert_eq!(roles("written"), Role::Anonymous);
    assert_eq!(roles("private-file"), Role::File);
    assert_eq!(roles("shared-file"), Role::File);
    for name in ["memfd", "memfd-private", "system-v", "shared-anonymous"] {
        assert_eq!(roles(name), Role::Shmem, "{name}");
    }
    let roles: Vec<Role> = scanned.areas.iter().map(|area| area.role).collect();
    assert!(roles.contains(&Role::Heap) && roles.contains(&Role::MainStack) && roles.contains(&Role::Special));
}

#[test]
fn huge_pages_are_told_from_small_ones() {
    let fixture = Fixture::start(&[]);
    let Some(region) = fixture.regions.get("huge") else { panic!("no region huge") };
    let kernel = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let expected = if kernel.is_empty() || kernel.contains("[never]") { 0 } else { (region.end - region.start) / PAGE };
    for scan in [fixture.scan(), fixture.read()] {
        let inside = |range: &&PageRange| range.first >= region.start / PAGE && range.end() <= region.end / PAGE;
        let huge = scan.ranges.iter().filter(inside).filter(|range| range.huge);
        assert_eq!(huge.map(|range| u64::from(range.count)).sum::<u64>(), expected, "{:?}", scan.method);
    }
}

#[test]
fn hidden_frames_leave_no_silent_guess() {
    let fixture = Fixture::start(&[]);
    let (file, areas, _) = prepare(&fixture.process, &fixture.mappings()).unwrap();
    let mut builder = Builder::new(&areas);
    let doubt = pagemap::scan(&fixture.process, &file, pagemap::ZeroFrames::default(), &mut builder).unwrap();
    let scan = builder.finish(Method::Pagemap, doubt, 0);
    let sums = rollup(&fixture.process).unwrap();
    assert_eq!((scan.pages().total() - doubt) * PAGE, sums.rss);
    // Where nothing but the zero page is mapped there is no doubt: the kernel says that nothing is resident.
    let region = &fixture.regions["read-then-written"];
    assert_eq!(doubt, (region.end - region.start) / PAGE - region.pages.anon);
}

#[test]
fn hugetlb_is_kept_apart() {
    const LIMIT: &str = "/proc/sys/vm/nr_overcommit_hugepages";
    assert!(is_root(), "the limit of huge pages has to be raised");
    let Ok(before) = fs::read_to_string(LIMIT) else { return };
    fs::write(LIMIT, (before.trim().parse::<u64>().unwrap() + 8).to_string()).unwrap();
    let fixture = Fixture::start(&["hugetlb"]);
    fs::write(LIMIT, before.trim()).unwrap();
    for scan in [fixture.scan(), fixture.read()] {
        assert_eq!(scan.hugetlb, 3 * (2 << 20), "{:?}", scan.method);
        assert_eq!(role(&scan, &fixture.regions["hugetlb"]), Role::Hugetlb);
        check(&fixture, &scan);
    }
}

#[test]
fn a_gibibyte_and_twenty_sparse_ones() {
    let fixture = Fixture::start(&["large"]);
    for (name, scan) in [("scan", &Fixture::scan as &dyn Fn(&Fixture) -> Scan), ("read", &Fixture::read)] {
        let start = Instant::now();
        let scan = scan(&fixture);
        let took = start.elapsed();
        check(&fixture, &scan);
        println!("{name}: {} pages, {} ranges, {took:?}", scan.pages().total(), scan.ranges.len());
        assert!(took < Duration::from_secs(60), "{took:?}");
    }
}

#[test]
fn the_end_of_a_process() {
    let Fixture { _running: mut running, process, _workshop, .. } = Fixture::start(&[]);
    let map = mappings::read(&process).unwrap();
    running.0.kill().unwrap();
    while process.is_alive() {
        std::thread::sleep(Duration::from_millis(1));
    }
    for _ in 0..2 {
        assert!(matches!(scan(&process, &map), Err(TargetError::Exited { .. })));
        assert!(matches!(rollup(&process), Err(TargetError::Exited { .. })));
        running.0.wait().unwrap();
    }
}

#[test]
fn a_main_thread_that_has_ended() {
    let fixture = Fixture::start(&["end-main"]);
    let map = fixture.mappings();
    // SAFETY: a signal to a child of this process that has not been waited for.
    assert_eq!(unsafe { libc::kill(fixture.process.pid() as i32, libc::SIGUSR1) }, 0);
    while mappings::read(&fixture.process).is_ok() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let error = scan(&fixture.process, &map).unwrap_err();
    assert!(matches!(error, TargetError::MainThreadEnded { .. }), "{error:?}");
    let error = rollup(&fixture.process).unwrap_err();
    assert!(matches!(error, TargetError::MainThreadEnded { .. }), "{error:?}");
    fault_counts(&fixture.process).unwrap();
}
