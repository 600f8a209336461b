//! `memtrace doctor`: can this kernel and this user do it, and where would the probes go.

mod unwind;

use std::{
    borrow::Cow,
    fmt::Write as _,
    io::{self, IsTerminal as _, Write as _},
    process::ExitCode,
};

use anyhow::Context as _;
use serde::Serialize;

use super::{FAILURE, colour, options::budget};
use crate::{
    kernel::{
        budget::DEFAULT_MIB,
        feature::{self, Check, State},
    },
    output::escape,
    target::{self, ProbeRow, Process},
};

/// Number of the JSON documents' form: members are renamed or change their meaning only with a new number.
const SCHEMA: u32 = 1;

/// Tells whether this kernel and this user can do what memtrace needs
///
/// Prints one line for each condition: `ok`, `degraded` (what is lost) or `missing` (how to fix it). Exits with 1 if
/// something is missing.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Lists where the probes would go in process PID, and why
    #[arg(long, requires = "pid", group = "look")]
    probes: bool,
    /// Lists by what the frames of each module of process PID are unwound
    #[arg(long, requires = "pid", group = "look")]
    unwind: bool,
    /// The process to look into, with --probes or --unwind
    #[arg(short, long, value_name = "PID", requires = "look")]
    pid: Option<u32>,
    /// Prints JSON
    #[arg(long)]
    json: bool,
    /// Size of the kernel-side tables to check for, MiB
    #[arg(long, value_name = "MIB", value_parser = budget, default_value_t = DEFAULT_MIB, conflicts_with = "look")]
    memory_budget: u32,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match args.pid {
        Some(pid) if args.unwind => unwind::run(pid, args.json),
        Some(pid) => probes(pid, args.json),
        None => checks(args),
    }
}

fn checks(args: &Args) -> anyhow::Result<ExitCode> {
    // The eBPF side's log is read by a task, if it is read.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    let checks = {
        let _inside = runtime.enter();
        feature::checks(args.memory_budget)
    };
    let text = if args.json {
        json(&Report { schema: SCHEMA, checks: &checks })?
    } else {
        table(&checks, colour(io::stdout().is_terminal()))
    };
    print(&text)?;
    let missing = checks.iter().any(|check| check.state == State::Missing);
    Ok(if missing { ExitCode::from(FAILURE) } else { ExitCode::SUCCESS })
}

fn probes(pid: u32, as_json: bool) -> anyhow::Result<ExitCode> {
    let process = Process::open(pid)?;
    let discovery = target::discover(&process)?;
    let rows = discovery.rows();
    let notes: Vec<String> = discovery.notes.iter().map(ToString::to_string).collect();
    let text = if as_json {
        json(&ProbeReport {
            schema: SCHEMA,
            pid,
            comm: process.comm(),
            sites: rows.iter().map(Site::from).collect(),
            notes: &notes,
        })?
    } else {
        probe_table(&rows, &notes)
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The document of `memtrace doctor --json`.
#[derive(Serialize)]
struct Report<'a> {
    schema: u32,
    checks: &'a [Check],
}

/// The document of `memtrace doctor --probes --json`.
#[derive(Serialize)]
struct ProbeReport<'a> {
    schema: u32,
    pid: u32,
    comm: &'a str,
    sites: Vec<Site<'a>>,
    /// What limits a trace of this process, one sentence each.
    notes: &'a [String],
}

#[derive(Serialize)]
struct Site<'a> {
    module: &'a str,
    function: &'a str,
    aliases: &'a [String],
    /// File offset of the function's first instruction.
    function_offset: u64,
    /// Bytes from there to the probed instruction.
    offset: u64,
    instruction: &'a str,
    /// `yes`, `no`, or since which kernel version.
    emulated: &'a str,
    /// Why no better instruction could be taken, or null.
    reason: Option<&'a str>,
}

impl<'a> From<&'a ProbeRow> for Site<'a> {
    fn from(row: &'a ProbeRow) -> Self {
        Self {
            module: &row.module,
            function: &row.function,
            aliases: &row.aliases,
            function_offset: row.function_offset,
            offset: row.offset,
            instruction: &row.instruction,
            emulated: row.emulated,
            reason: row.reason.as_deref(),
        }
    }
}

fn json(document: &impl Serialize) -> anyhow::Result<String> {
    let mut text = serde_json::to_string_pretty(document).context("writing JSON")?;
    text.push('\n');
    Ok(text)
}

fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("standard output")
}

/// One line for each check.
fn table(checks: &[Check], colour: bool) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for check in checks {
        let word = check.state.word();
        let (on, off) = match (colour, check.state) {
            (false, _) => ("", ""),
            (true, State::Ok) => ("\x1b[32m", "\x1b[0m"),
            (true, State::Degraded) => ("\x1b[33m", "\x1b[0m"),
            (true, State::Missing) => ("\x1b[31m", "\x1b[0m"),
        };
        let fix = check.fix.as_ref().map_or_else(String::new, |fix| format!("; fix: {fix}"));
        let line = format!("{:width$}  {}{fix}", check.name, check.detail);
        let _ = writeln!(text, "{on}{word:8}{off}  {}", printable(&line));
    }
    text
}

/// One line for each site, then the notes.
fn probe_table(rows: &[ProbeRow], notes: &[String]) -> String {
    let mut lines =
        vec![["MODULE", "FUNCTION", "OFFSET", "INSTRUCTION", "EMULATED", "WHY NO BETTER ONE"].map(String::from)];
    for row in rows {
        let aliases = if row.aliases.is_empty() { String::new() } else { format!(" ({})", row.aliases.join(", ")) };
        lines.push([
            printable(&row.module).into_owned(),
            printable(&format!("{}{aliases}", row.function)).into_owned(),
            format!("+{:#x}", row.offset),
            printable(&row.instruction).into_owned(),
            row.emulated.into(),
            printable(row.reason.as_deref().unwrap_or("-")).into_owned(),
        ]);
    }
    let mut text = align(&lines);
    for note in notes {
        let _ = writeln!(text, "note: {}", printable(note));
    }
    text
}

/// Columns as wide as their widest cell.
fn align<const N: usize>(lines: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for line in lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for line in lines {
        let cells: Vec<String> = line.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        let _ = writeln!(text, "{}", cells.join("  ").trim_end());
    }
    text
}

/// Names from the target must not move a terminal's cursor or begin a line of their own.
fn printable(text: &str) -> Cow<'_, str> {
    escape::text(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &'static str, state: State, detail: &str, fix: Option<&str>) -> Check {
        Check { name, state, detail: detail.into(), fix: fix.map(String::from) }
    }

    #[test]
    fn lines_are_aligned() {
        let checks = [
            check("architecture", State::Ok, "x86-64", None),
            check("tracefs", State::Degraded, "not mounted", Some("mount it")),
            check("privileges", State::Missing, "lacks CAP_BPF", Some("sudo")),
        ];
        assert_eq!(
            table(&checks, false),
            "ok        architecture  x86-64\n\
             degraded  tracefs       not mounted; fix: mount it\n\
             missing   privileges    lacks CAP_BPF; fix: sudo\n"
        );
        let coloured = table(&checks, true);
        assert!(coloured.starts_with("\x1b[32mok      \x1b[0m  architecture"), "{coloured:?}");
    }

    #[test]
    fn hostile_texts_are_harmless() {
        let text = table(&[check("x", State::Ok, "a\nb\x1b[2J", None)], false);
        assert_eq!(text.matches('\n').count(), 1);
        assert!(!text.contains('\x1b'));
    }

    fn row() -> ProbeRow {
        ProbeRow {
            module: "libc\n.so.6".into(),
            function: "free".into(),
            aliases: vec!["cfree".into(), "__libc_free".into()],
            function_offset: 0x1000,
            offset: 9,
            instruction: "push %rbp".into(),
            emulated: "yes",
            reason: None,
        }
    }

    #[test]
    fn probes_as_a_table() {
        let text = probe_table(&[row()], &["a\nb".into()]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[1].contains("free (cfree, __libc_free)  +0x9    push %rbp    yes       -"), "{text}");
        assert!(!lines[2].contains('\n'));
    }

    #[test]
    #[allow(clippy::unwrap_used)]
    fn documents_have_a_schema() {
        let checks = [check("x", State::Degraded, "d", None)];
        let text = json(&Report { schema: SCHEMA, checks: &checks }).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            value,
            serde_json::json!({"schema": 1, "checks": [{"name": "x", "state": "degraded", "detail": "d", "fix": null}]})
        );
        let row = row();
        let text = serde_json::to_value(Site::from(&row)).unwrap();
        assert_eq!(text["aliases"], serde_json::json!(["cfree", "__libc_free"]));
        assert_eq!(text["reason"], serde_json::Value::Null);
    }
}
