//! What runs in the emulated machine: this program, as its first process.

mod checks;
mod suites;
mod target;

use std::{collections::BTreeMap, ffi::CString, fs, io, time::Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Deserialize;

use super::{
    plan::{self, Plan},
    results::{Check, Line, MARK, State},
};

/// Where things are.
pub const INIT: &str = "/init";
pub const MEMTRACE: &str = "/bin/memtrace";
pub const WITH_FRAME_POINTERS: &str = "/bin/fixture-fp";
pub const WITHOUT_FRAME_POINTERS: &str = "/bin/fixture";

/// The subcommand's name.
pub const COMMAND: &str = "__vm-guest";
const REFUSAL: &str = "refusal";

/// What memtrace should do on a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expectation {
    /// Its work.
    Traces,
    /// Say that it can't, since the kernel is too old.
    Refusal,
}

#[derive(Args)]
pub struct Options {
    /// `refusal`: the kernel is too old
    expectation: Option<String>,
}

/// The end of the kernel's command line.
pub fn arguments(expectation: Expectation) -> String {
    let word = match expectation {
        Expectation::Traces => "",
        Expectation::Refusal => REFUSAL,
    };
    // Programs that can be preempted anywhere are the hardest case; Linux 5.12 and newer can choose at the start.
    format!("preempt=full rdinit={INIT} -- {COMMAND} {word}")
}

/// Runs all checks and turns the machine off.
pub fn guest(options: &Options) -> Result<()> {
    // It would turn off the machine that it is run on.
    if std::process::id() != 1 {
        bail!("this is for the first process of an emulated machine");
    }
    let result = checks(options.expectation.as_deref() == Some(REFUSAL));
    if let Err(error) = &result {
        eprintln!("error: {error:#}");
    }
    // SAFETY: both take no pointers. The second ends everything; if it fails, the machine's time runs out.
    unsafe {
        libc::sync();
        libc::reboot(libc::RB_POWER_OFF);
    }
    result
}

fn checks(refusal: bool) -> Result<()> {
    // The file system that the machine starts with is in memory, so that /tmp needs none of its own.
    for (kind, place) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        mount(kind, place).with_context(|| format!("mounting {place}"))?;
    }
    let kernel = read("/proc/sys/kernel/osrelease")?;
    say(&Line::Begin { kernel: kernel.trim().to_owned() })?;
    let mut count = 0;
    let list: &[checks::Named] = if refusal { &checks::REFUSAL } else { &checks::ALL };
    for (name, check) in list {
        run(name, check)?;
        count += 1;
    }
    if !refusal {
        let plan: Plan = serde_json::from_str(&read(plan::FILE)?).context(plan::FILE)?;
        for suite in &plan.suites {
            for test in &suite.tests {
                run(&plan::full_name(&suite.name, test), || suites::run(&plan, suite, test))?;
                count += 1;
            }
        }
    }
    let tainted = read("/proc/sys/kernel/tainted")?.trim().parse().context("/proc/sys/kernel/tainted")?;
    say(&Line::End { checks: count, tainted })
}

/// Says that a check begins, and how it ended.
fn run(name: &str, check: impl FnOnce() -> Result<String>) -> Result<()> {
    say(&Line::Start { name: name.to_owned() })?;
    let started = Instant::now();
    let result = check();
    let seconds = (started.elapsed().as_secs_f64() * 10.0).round() / 10.0;
    let (state, detail) = match result {
        Ok(detail) => (State::Passed, detail),
        Err(error) => (State::Failed, format!("{error:#}")),
    };
    say(&Line::Check(Check { name: name.to_owned(), state, detail, seconds }))
}

/// Names of all checks and tests, in the order in which they run.
pub fn names(expectation: Expectation, plan: &Plan) -> Vec<String> {
    let own = |list: &[checks::Named]| list.iter().map(|(name, _)| (*name).to_owned()).collect::<Vec<_>>();
    match expectation {
        Expectation::Refusal => own(&checks::REFUSAL),
        Expectation::Traces => {
            let tests = plan.suites.iter().flat_map(|suite| {
                let name = |test: &String| plan::full_name(&suite.name, test);
                suite.tests.iter().map(name)
            });
            own(&checks::ALL).into_iter().chain(tests).collect()
        }
    }
}

fn say(line: &Line) -> Result<()> {
    // A line of its own, whatever was printed before.
    println!("\n{MARK}{}", serde_json::to_string(line)?);
    Ok(())
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).with_context(|| path.to_owned())
}

fn mount(kind: &str, place: &str) -> Result<()> {
    let (kind, place) = (CString::new(kind)?, CString::new(place)?);
    // SAFETY: three C strings that outlive the call, and no data.
    if unsafe { libc::mount(kind.as_ptr(), place.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) } != 0 {
        return Err(io::Error::last_os_error().into());
    }
    Ok(())
}

/// Bytes by call path, of all allocations and of those not freed. Paths with none are left out.
#[derive(Debug, PartialEq, Eq)]
pub struct Truth {
    pub all: BTreeMap<String, u64>,
    pub unfreed: BTreeMap<String, u64>,
}

/// Reads what the fixture answers.
pub fn truth(answer: &str) -> Result<Truth> {
    #[derive(Deserialize)]
    struct Row {
        path: String,
        allocated: u64,
        unfreed: u64,
    }
    let rows: Vec<Row> = serde_json::from_str(answer).with_context(|| format!("the fixture's truth: {answer}"))?;
    let of = |value: fn(&Row) -> u64| {
        rows.iter().filter(|row| value(row) > 0).map(|row| (row.path.clone(), value(row))).collect()
    };
    Ok(Truth { all: of(|row| row.allocated), unfreed: of(|row| row.unfreed) })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn truths_without_nothing() {
        let answer = r#"[{"path":"main;f;malloc","allocated":30,"unfreed":0},
                         {"path":"main;g;malloc","allocated":5,"unfreed":4}]"#;
        let truth = truth(answer).unwrap();
        assert_eq!(truth.all.len(), 2);
        assert_eq!(truth.unfreed.into_iter().collect::<Vec<_>>(), [("main;g;malloc".to_owned(), 4)]);
        assert!(super::truth("ready").is_err());
    }

    #[test]
    fn it_does_not_turn_this_machine_off() {
        assert!(guest(&Options { expectation: None }).is_err());
    }

    #[test]
    fn the_command_line_ends_with_what_is_expected() {
        assert!(arguments(Expectation::Refusal).ends_with("-- __vm-guest refusal"));
    }
}
