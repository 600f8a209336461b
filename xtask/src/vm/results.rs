//! What the machine says: lines on its console that begin with [`MARK`] and hold one JSON document each.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::plan::LeftOut;

/// What a line of results begins with. Kernel messages share the console.
pub const MARK: &str = "@memtrace-vm ";
/// Console lines to show after a failure.
const TAIL: usize = 40;

/// What a line tells.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub enum Line {
    /// The checks begin.
    Begin {
        /// As `uname -r` prints it.
        kernel: String,
    },
    /// A check begins.
    Start {
        /// What is checked.
        name: String,
    },
    /// One check is over.
    Check(Check),
    /// All checks are over.
    End {
        /// How many there were.
        checks: usize,
        /// `/proc/sys/kernel/tainted`.
        tainted: u64,
    },
}

/// One check.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
pub struct Check {
    /// What was checked.
    pub name: String,
    pub state: State,
    /// What was seen, what is wrong, or why it was left out.
    pub detail: String,
    /// How long it took.
    pub seconds: f64,
}

/// What became of a check.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Passed,
    Failed,
    /// The machine ended before.
    NotRun,
    /// It is not meant to run in the machine.
    LeftOut,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            Self::Passed => "ok",
            Self::Failed => "FAILED",
            Self::NotRun => "not run",
            Self::LeftOut => "left out",
        }
    }
}

/// How the machine's process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By itself, with this status.
    Exited(String),
    /// It was ended, since its time had passed, in seconds.
    Timeout(u64),
}

/// Everything that the console tells.
#[derive(Debug)]
pub struct Outcome {
    /// Those that were to run, in their order, and those left out.
    checks: Vec<Check>,
    /// How many the machine has told of.
    told: usize,
    end: Option<(usize, u64)>,
    kernel: Option<String>,
    /// The check that had begun last.
    last: Option<String>,
    /// The first line with which the kernel reported a defect.
    trouble: Option<String>,
    broken: Option<String>,
    ended: Ended,
}

/// Bits of `/proc/sys/kernel/tainted` that mean trouble: a bad page, an oops, a warning, a soft lockup
/// (Documentation/admin-guide/tainted-kernels.rst).
const TROUBLE: u64 = 1 << 5 | 1 << 7 | 1 << 9 | 1 << 14;

/// What the kernel's reports of defects begin with, after the time.
const REPORTS: [&str; 18] = [
    "Kernel panic",
    "Oops",
    "BUG:",
    "kernel BUG",
    "WARNING:",
    "general protection fault",
    "Unable to handle",
    "unable to handle",
    "Internal error",
    "watchdog: BUG",
    "rcu: INFO:",
    "INFO: rcu",
    "INFO: task ",
    "INFO: lockdep",
    "INFO: possible",
    "list_add corruption",
    "list_del corruption",
    "UBSAN:",
];

impl Outcome {
    /// Reads a console on which the checks `planned` were to be seen, but not `left_out`.
    pub fn new(console: &str, ended: &Ended, planned: &[String], left_out: &[LeftOut]) -> Self {
        let mut outcome = Self {
            checks: Vec::new(),
            told: 0,
            end: None,
            kernel: None,
            last: None,
            trouble: None,
            broken: None,
            ended: ended.clone(),
        };
        let mut told = Vec::new();
        for line in console.lines().map(|line| line.trim_end_matches('\r')) {
            // The firmware leaves control characters before the first line.
            if let Some(at) = line.find(MARK) {
                match serde_json::from_str(&line[at + MARK.len()..]) {
                    Ok(Line::Begin { kernel }) => outcome.kernel = Some(kernel),
                    Ok(Line::Start { name }) => outcome.last = Some(name),
                    Ok(Line::Check(check)) => told.push(check),
                    Ok(Line::End { checks, tainted }) => outcome.end = Some((checks, tainted)),
                    Err(_) => outcome.broken = Some(line.to_owned()),
                }
            }
            if outcome.kernel.is_some() && outcome.trouble.is_none() && is_report(line) {
                outcome.trouble = Some(line.to_owned());
            }
        }
        outcome.told = told.len();
        outcome.checks = planned.iter().map(|name| outcome.check(name, &mut told)).collect();
        // Nobody asked for these; they count all the same.
        outcome.checks.append(&mut told);
        outcome.checks.extend(left_out.iter().map(|test| Check {
            name: test.name.clone(),
            state: State::LeftOut,
            detail: test.why.to_owned(),
            seconds: 0.0,
        }));
        outcome
    }

    /// What became of a check that was to run. Takes it out of those told.
    fn check(&self, name: &str, told: &mut Vec<Check>) -> Check {
        if let Some(place) = told.iter().position(|check| check.name == name) {
            return told.remove(place);
        }
        let (state, detail) = if self.last.as_deref() == Some(name) {
            (State::Failed, "the machine ended in the middle of it")
        } else {
            (State::NotRun, "the machine ended before")
        };
        Check { name: name.to_owned(), state, detail: detail.to_owned(), seconds: 0.0 }
    }

    /// Whether all is well, or the first reason why not.
    pub fn verdict(&self) -> Result<(), String> {
        if let Some(trouble) = &self.trouble {
            return Err(format!("the kernel reported a defect{}: {trouble}", self.during()));
        }
        if let Ended::Timeout(seconds) = self.ended {
            return Err(format!("not done after {seconds} s{}", self.during()));
        }
        let Some((checks, tainted)) = self.end else {
            return Err(format!("the machine ended without its last line{} ({:?})", self.during(), self.ended));
        };
        let failed: Vec<&Check> = self.in_state(State::Failed).collect();
        if let Some(first) = failed.first() {
            return Err(format!("{} failed, the first is {}: {}", failed.len(), first.name, first.detail));
        }
        if let Some(line) = &self.broken {
            return Err(format!("a line of results is broken: {line}"));
        }
        let not_run = self.in_state(State::NotRun).count();
        if checks != self.told || checks == 0 || not_run > 0 {
            return Err(format!("{} of {checks} checks have told their result, {not_run} were not run", self.told));
        }
        if tainted & TROUBLE != 0 {
            return Err(format!("the kernel is tainted: {tainted:#x}"));
        }
        Ok(())
    }

    /// In which check.
    fn during(&self) -> String {
        self.last.as_ref().map_or_else(|| " before the first check".to_owned(), |name| format!(" during {name}"))
    }

    fn in_state(&self, state: State) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(move |check| check.state == state)
    }

    /// One line for each check.
    pub fn table(&self) -> String {
        let width = self.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
        let mut text = String::new();
        for Check { name, state, detail, seconds } in &self.checks {
            text.push_str(&format!("{:<8}  {name:width$}  {seconds:>6.1} s  {detail}\n", state.word()));
        }
        text
    }

    /// The result as JSON on one line.
    pub fn line(&self, version: &str, release: &str) -> Result<String> {
        #[derive(Serialize)]
        struct Document<'a> {
            vm: &'a str,
            kernel: &'a str,
            ok: bool,
            reason: Option<String>,
            passed: usize,
            failed: usize,
            not_run: usize,
            left_out: usize,
            checks: &'a [Check],
        }
        let count = |state| self.in_state(state).count();
        let verdict = self.verdict();
        serde_json::to_string(&Document {
            vm: version,
            kernel: self.kernel.as_deref().unwrap_or(release),
            ok: verdict.is_ok(),
            reason: verdict.err(),
            passed: count(State::Passed),
            failed: count(State::Failed),
            not_run: count(State::NotRun),
            left_out: count(State::LeftOut),
            checks: &self.checks,
        })
        .context("writing JSON")
    }
}

/// Whether the kernel reports a defect: `[   36.934528] Oops: …`, also where its line has come into the middle of
/// another.
fn is_report(line: &str) -> bool {
    // What tests print is told with this before it.
    if line.starts_with('|') {
        return false;
    }
    let begins = |text: &str| REPORTS.iter().any(|report| text.trim_start().starts_with(report));
    begins(line) || line.split("] ").skip(1).any(begins)
}

/// The console's last lines.
pub fn tail(console: &str) -> String {
    let lines: Vec<&str> = console.lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const BEGIN: &str = "\u{1b}c@memtrace-vm {\"begin\":{\"kernel\":\"6.1.0\"}}\r\n";
    const START: &str = "@memtrace-vm {\"start\":{\"name\":\"doctor\"}}\r\n";
    const CHECK: &str =
        "@memtrace-vm {\"check\":{\"name\":\"doctor\",\"state\":\"passed\",\"detail\":\"all\",\"seconds\":1.5}}\r\n";
    const END: &str = "@memtrace-vm {\"end\":{\"checks\":1,\"tainted\":0}}\r\n";

    fn outcome(console: &str, ended: &Ended) -> Outcome {
        let left_out = [LeftOut { name: "e2e a".into(), why: "slow" }];
        Outcome::new(console, ended, &["doctor".to_owned()], &left_out)
    }

    fn verdict(console: &str) -> Result<(), String> {
        outcome(console, &Ended::Exited("exit status: 0".into())).verdict()
    }

    #[test]
    fn all_is_well() {
        let console =
            format!("[    0.1] WARNING: early, and nobody's business\n{BEGIN}{START}[ 1.0] mtrr: x\n{CHECK}{END}");
        assert_eq!(verdict(&console), Ok(()));
        let outcome = outcome(&console, &Ended::Exited(String::new()));
        assert_eq!(outcome.table(), "ok        doctor     1.5 s  all\nleft out  e2e a      0.0 s  slow\n");
        let line = outcome.line("6.1", "?").unwrap();
        assert!(
            line.starts_with(
                "{\"vm\":\"6.1\",\"kernel\":\"6.1.0\",\"ok\":true,\"reason\":null,\"passed\":1,\"failed\":0,\"not_run\":0,\"left_out\":1,"
            ),
            "{line}"
        );
    }

    #[test]
    fn everything_else_is_a_failure() {
        for (console, words) in [
            (String::new(), "without its last line before the first check"),
            (format!("{BEGIN}{START}"), "without its last line during doctor"),
            (format!("{BEGIN}{CHECK}"), "without its last line"),
            (format!("{BEGIN}{END}"), "0 of 1 checks have told their result, 1 were not run"),
            (format!("{BEGIN}{}{END}", CHECK.replace("doctor", "unheard-of")), "1 were not run"),
            (format!("{BEGIN}{CHECK}{}", END.replace(":0}", ":512}")), "tainted: 0x200"),
            (format!("{BEGIN}{}{END}", CHECK.replace("passed", "failed")), "1 failed, the first is doctor: all"),
            (format!("{BEGIN}@memtrace-vm {{\"che\n{CHECK}{END}"), "broken"),
        ] {
            let error = verdict(&console).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let console = format!("{BEGIN}{START}");
        let error = outcome(&console, &Ended::Timeout(300)).verdict().unwrap_err();
        assert_eq!(error, "not done after 300 s during doctor");
    }

    /// Lines of real kernels.
    #[test]
    fn reports_of_the_kernel_are_failures() {
        for report in [
            "[   36.934528] Oops: general protection fault, probably for non-canonical address 0xdead: 0000 [#1] SMP",
            "[   36.934528] general protection fault, probably for non-canonical address 0xdead: 0000 [#1] SMP",
            "[   12.345678] Kernel panic - not syncing: sysrq triggered crash",
            "[   12.345678] BUG: unable to handle page fault for address: ffffc90000000000",
            "[   12.345678] BUG: kernel NULL pointer dereference, address: 0000000000000000",
            "[   12.345678] BUG: scheduling while atomic: memtrace/123/0x00000002",
            "[   12.345678] BUG: sleeping function called from invalid context at kernel/locking/mutex.c:283",
            "[   12.345678] kernel BUG at mm/slub.c:431!",
            "[   12.345678] WARNING: CPU: 1 PID: 77 at kernel/bpf/core.c:1 foo+0x1/0x2",
            "[   12.345678] WARNING: possible circular locking dependency detected",
            "[   12.345678] WARNING: suspicious RCU usage",
            "[   12.345678] watchdog: BUG: soft lockup - CPU#0 stuck for 23s! [memtrace:77]",
            "[   12.345678] rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
            "[   12.345678] INFO: task memtrace:77 blocked for more than 120 seconds.",
            "[   12.345678][   T77] WARNING: CPU: 1 PID: 77 at kernel/bpf/core.c:1 foo+0x1/0x2",
            "some test's words[   12.345678] BUG: unable to handle page fault for address: 0",
        ] {
            let error = verdict(&format!("{BEGIN}{START}{report}\r\n{CHECK}{END}")).unwrap_err();
            assert_eq!(error, format!("the kernel reported a defect during doctor: {report}"));
        }
        // In the middle of a line of results.
        let cut = CHECK.replace("all", "a[   12.345678] WARNING: CPU: 1 PID: 77 at a.c:1");
        assert!(verdict(&format!("{BEGIN}{START}{cut}{END}")).unwrap_err().contains("defect"));
        for harmless in [
            "| [   12.345678] WARNING: only what a test printed",
            "[   12.345678] process 'target' launched '/tmp/x' with NULL argv: empty string added",
            "[   12.345678] traps: tiny32[77] trap int3 ip:8049000 sp:0 error:0",
        ] {
            assert_eq!(verdict(&format!("{BEGIN}{START}{harmless}\n{CHECK}{END}")), Ok(()));
        }
    }

    #[test]
    fn what_the_machine_did_not_come_to() {
        let planned = ["doctor", "e2e a", "e2e b"].map(str::to_owned);
        let console = format!("{BEGIN}{START}{CHECK}{}", START.replace("doctor", "e2e a"));
        let outcome = Outcome::new(&console, &Ended::Timeout(9), &planned, &[]);
        let states: Vec<State> = outcome.checks.iter().map(|check| check.state).collect();
        assert_eq!(states, [State::Passed, State::Failed, State::NotRun]);
        assert_eq!(outcome.verdict().unwrap_err(), "not done after 9 s during e2e a");
    }

    #[test]
    fn lines_round_trip() {
        let line = Line::End { checks: 3, tainted: 1 };
        let text = serde_json::to_string(&line).unwrap();
        assert_eq!(text, "{\"end\":{\"checks\":3,\"tainted\":1}}");
        assert_eq!(serde_json::from_str::<Line>(&text).unwrap(), line);
    }

    #[test]
    fn the_last_lines() {
        let console: String = (0..100).map(|number| format!("{number}\n")).collect();
        assert!(tail(&console).starts_with("60\n") && tail(&console).ends_with("\n99"));
        assert_eq!(tail(""), "");
    }
}
