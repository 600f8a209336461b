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

#[test]
fn threads() {
    exact("threads");
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
