//! Compares the stacks that the kernel side finds in real programs with those that framehop, an unwinder in user space,
//! finds from the same registers and the same memory, frame by frame.
//!
//! Every allocating call of the program is walked, so that most walks start from the thread's last stack; of some the
//! registers and the memory are handed over, and those are compared. Each kind of difference is printed with an
//! example; a kind without an explanation fails the test.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod compare;
mod modules;
mod programs;
mod sample;

use std::{
    path::Path,
    sync::{Mutex, PoisonError},
};

use compare::Comparison;
use programs::Program;

/// Fewest samples of a program.
const FEWEST: usize = 2000;
/// Smallest share of compared stacks that must be equal.
const SHARE: f64 = 0.999;

fn assert_equal(program: &Program) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: takes nothing, changes nothing.
    assert!(unsafe { libc::geteuid() } == 0, "this test must run as root, since it loads eBPF programs");
    let taken = sample::sample(program);
    let comparison = Comparison::of(&taken);
    println!("{}: {comparison}", program.name);
    assert!(taken.samples.len() >= FEWEST, "{}: only {} samples", program.name, taken.samples.len());
    assert!(comparison.unexplained().is_empty(), "{}: differences without an explanation", program.name);
    assert!(comparison.share() >= SHARE, "{}: too few stacks are equal", program.name);
    assert!(comparison.whole > 0, "{}: no stack was compared to its end", program.name);
}

/// Also what fills the directory of programs for a machine without a compiler.
#[test]
fn the_programs_compile() {
    for program in [programs::cpp(), programs::rust()] {
        assert!(Path::new(&program.command[0]).is_file(), "{}", program.name);
    }
}

#[test]
fn python() {
    assert_equal(&programs::python(programs::own_python()));
}

#[test]
fn python_of_the_distribution() {
    if let Some(python) = programs::other_python() {
        assert_equal(&programs::python(python));
    } else {
        println!("there is no second Python on this machine");
    }
}

#[test]
fn sqlite() {
    assert_equal(&programs::sqlite());
}

#[test]
fn cpp_with_exceptions_and_templates() {
    assert_equal(&programs::cpp());
}

#[test]
fn rust_with_threads() {
    assert_equal(&programs::rust());
}

#[test]
fn perl() {
    assert_equal(&programs::perl());
}

#[test]
fn the_cpp_compiler() {
    assert_equal(&programs::compiler());
}
