//! What the machine says: lines on its console that begin with [`MARK`] and hold one JSON document each.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

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
    /// Whether it is as it should be.
    pub ok: bool,
    /// What was seen, or what is wrong.
    pub detail: String,
    /// How long it took.
    pub seconds: f64,
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
    checks: Vec<Check>,
    end: Option<(usize, u64)>,
    kernel: Option<String>,
    /// The first line with which the kernel reported a defect.
    trouble: Option<String>,
    broken: Option<String>,
    ended: Ended,
}

/// Bits of `/proc/sys/kernel/tainted` that mean trouble: a bad page, an oops, a warning, a soft lockup
/// (Documentation/admin-guide/tainted-kernels.rst).
const TROUBLE: u64 = 1 << 5 | 1 << 7 | 1 << 9 | 1 << 14;

/// What the kernel's reports of defects begin with, after the time.
const REPORTS: [&str; 8] = [
    "Kernel panic",
    "Oops",
    "BUG:",
    "kernel BUG",
    "WARNING:",
    "general protection fault",
    "watchdog: BUG",
    "INFO: task ",
];

impl Outcome {
    /// Reads a console.
    pub fn new(console: &str, ended: &Ended) -> Self {
        let mut outcome =
            Self { checks: Vec::new(), end: None, kernel: None, trouble: None, broken: None, ended: ended.clone() };
        for line in console.lines().map(|line| line.trim_end_matches('\r')) {
            // The firmware leaves control characters before the first line.
            if let Some(at) = line.find(MARK) {
                match serde_json::from_str(&line[at + MARK.len()..]) {
                    Ok(Line::Begin { kernel }) => outcome.kernel = Some(kernel),
                    Ok(Line::Check(check)) => outcome.checks.push(check),
                    Ok(Line::End { checks, tainted }) => outcome.end = Some((checks, tainted)),
                    Err(_) => outcome.broken = Some(line.to_owned()),
                }
            } else if outcome.kernel.is_some() && outcome.trouble.is_none() && is_report(line) {
                outcome.trouble = Some(line.to_owned());
            }
        }
        outcome
    }

    /// Whether all is well, or the first reason why not.
    pub fn verdict(&self) -> Result<(), String> {
        if let Some(trouble) = &self.trouble {
            return Err(format!("the kernel reported a defect: {trouble}"));
        }
        if let Some(check) = self.checks.iter().find(|check| !check.ok) {
            return Err(format!("{}: {}", check.name, check.detail));
        }
        if let Ended::Timeout(seconds) = self.ended {
            let after = self.checks.last().map_or("before the first check", |check| check.name.as_str());
            return Err(format!("not done after {seconds} s; last: {after}"));
        }
        if let Some(line) = &self.broken {
            return Err(format!("a line of results is broken: {line}"));
        }
        match self.end {
            None => Err(format!("the machine ended without its last line ({:?})", self.ended)),
            Some((checks, _)) if checks != self.checks.len() || checks == 0 => {
                Err(format!("{} of {checks} checks have told their result", self.checks.len()))
            }
            Some((_, tainted)) if tainted & TROUBLE != 0 => Err(format!("the kernel is tainted: {tainted:#x}")),
            Some(_) => Ok(()),
        }
    }

    /// One line for each check.
    pub fn table(&self) -> String {
        let width = self.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
        let mut text = String::new();
        for Check { name, ok, detail, seconds } in &self.checks {
            let word = if *ok { "ok" } else { "FAILED" };
            text.push_str(&format!("{word:<6}  {name:width$}  {seconds:>6.1} s  {detail}\n"));
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
            checks: &'a [Check],
        }
        let passed = self.checks.iter().filter(|check| check.ok).count();
        let verdict = self.verdict();
        serde_json::to_string(&Document {
            vm: version,
            kernel: self.kernel.as_deref().unwrap_or(release),
            ok: verdict.is_ok(),
            reason: verdict.err(),
            passed,
            failed: self.checks.len() - passed,
            checks: &self.checks,
        })
        .context("writing JSON")
    }
}

/// Whether the kernel reports a defect: `[   36.934528] Oops: …`.
fn is_report(line: &str) -> bool {
    let message = match line.strip_prefix('[').and_then(|rest| rest.split_once("] ")) {
        Some((_, message)) => message.trim_start(),
        None => line,
    };
    REPORTS.iter().any(|report| message.starts_with(report))
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
    const CHECK: &str =
        "@memtrace-vm {\"check\":{\"name\":\"doctor\",\"ok\":true,\"detail\":\"all\",\"seconds\":1.5}}\r\n";
    const END: &str = "@memtrace-vm {\"end\":{\"checks\":1,\"tainted\":0}}\r\n";

    fn verdict(console: &str) -> Result<(), String> {
        Outcome::new(console, &Ended::Exited("exit status: 0".into())).verdict()
    }

    #[test]
    fn all_is_well() {
        let console = format!("[    0.1] WARNING: early, and nobody's business\n{BEGIN}[ 1.0] mtrr: x\n{CHECK}{END}");
        assert_eq!(verdict(&console), Ok(()));
        let outcome = Outcome::new(&console, &Ended::Exited(String::new()));
        assert_eq!(outcome.table(), "ok      doctor     1.5 s  all\n");
        let line = outcome.line("6.1", "?").unwrap();
        assert!(
            line.starts_with("{\"vm\":\"6.1\",\"kernel\":\"6.1.0\",\"ok\":true,\"reason\":null,\"passed\":1,"),
            "{line}"
        );
    }

    #[test]
    fn everything_else_is_a_failure() {
        for (console, words) in [
            (String::new(), "without its last line"),
            (format!("{BEGIN}{CHECK}"), "without its last line"),
            (format!("{BEGIN}{END}"), "0 of 1"),
            (format!("{BEGIN}{CHECK}[   36.9] Oops: general protection fault\n{END}"), "Oops"),
            (format!("{BEGIN}{CHECK}[   36.9] Kernel panic - not syncing\n"), "panic"),
            (format!("{BEGIN}{CHECK}{}", END.replace(":0}", ":512}")), "tainted: 0x200"),
            (format!("{BEGIN}{}{END}", CHECK.replace("true", "false")), "doctor: all"),
            (format!("{BEGIN}@memtrace-vm {{\"che\n{CHECK}{END}"), "broken"),
        ] {
            let error = verdict(&console).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let console = format!("{BEGIN}{CHECK}");
        let error = Outcome::new(&console, &Ended::Timeout(300)).verdict().unwrap_err();
        assert_eq!(error, "not done after 300 s; last: doctor");
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
