//! `pgfaultstacks --exact`: growth from the kernel's own count. It knows how much has come by which path, not which pages: so
//! only cases in which nothing goes again, which are exact then, even where pages have no fault of their own.

use crate::support::{
    build::Fixture,
    growth::{Grown, Growth, Subject},
    root::turn,
    start::Unwind,
};

fn trace(case: &str) -> Grown {
    let options = ["--exact"];
    Growth {
        subject: Subject::Faults,
        fixture: Fixture::PlainPages,
        arguments: &[case],
        options: &options,
        unwind: Unwind::Auto,
    }
    .run()
}

fn exact(case: &str) {
    let _turn = turn();
    let grown = trace(case);
    grown.assert_live_exact();
    grown.assert_no_losses();
}

#[test]
fn writes_by_many_paths() {
    exact("writes");
}

/// Two threads can report their sizes in another order than that in which they were counted. The next change sets that right
/// for all of them together, and nothing does after the last one: so each may be off by one page.
#[test]
fn threads() {
    const THREADS: u64 = 8;
    let _turn = turn();
    let grown = trace("threads");
    grown.assert_no_losses();
    assert_eq!(grown.live.json.keys().collect::<Vec<_>>(), grown.truth.unfreed.keys().collect::<Vec<_>>());
    for (path, amount) in &grown.live.json {
        let off = amount.bytes.abs_diff(grown.truth.unfreed[path].bytes);
        assert!(off <= THREADS * 4096, "{}: off by {off} bytes", path.join(";"));
    }
}

#[test]
fn pages_that_the_kernel_writes_first() {
    exact("kernel");
}

#[test]
fn huge_pages() {
    exact("thp");
}

#[test]
fn moved_pages() {
    exact("moved");
    exact("moved-old");
}

#[test]
fn pages_around_a_fault_on_a_file() {
    exact("file-read");
}

#[test]
fn every_kind_from_its_first_page_on() {
    exact("kinds");
}
