//! `memtrace doctor --unwind -p PID`: how the frames of each module are unwound.

use std::process::ExitCode;

use serde::Serialize;

use super::{SCHEMA, align, json, print, printable};
use crate::{
    cli::unwinding::{ModuleState, State, Unwinding},
    collect::modules::Modules,
    target::Process,
};

/// Prints the table.
///
/// # Errors
/// The process can't be looked into.
pub fn run(pid: u32, as_json: bool) -> anyhow::Result<ExitCode> {
    let process = Process::open(pid)?;
    let mut modules = Modules::default();
    modules.refresh(&process)?;
    let mut unwinding = Unwinding::default();
    unwinding.prepare(&process, &modules);
    let states = unwinding.modules();
    let text = if as_json {
        let modules = states.iter().map(Row::from).collect();
        json(&Report { schema: SCHEMA, pid, comm: process.comm(), modules })?
    } else {
        table(&states)
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The document of `memtrace doctor --unwind --json`.
#[derive(Serialize)]
struct Report<'a> {
    schema: u32,
    pid: u32,
    comm: &'a str,
    modules: Vec<Row<'a>>,
}

#[derive(Serialize)]
struct Row<'a> {
    module: &'a str,
    rows: u64,
    /// Bytes of the table.
    bytes: u64,
    /// Bytes of code whose unwind rules the table can't express: stacks through it are cut.
    unsupported_code: u64,
    /// `rows`, `frame pointers`, or `nothing`: stacks are cut there.
    unwound_by: &'static str,
    /// Why not by rows, or null.
    reason: Option<String>,
}

impl<'a> From<&'a ModuleState> for Row<'a> {
    fn from(state: &'a ModuleState) -> Self {
        let reason = state.state.reason().map(str::to_owned);
        Self {
            module: &state.name,
            rows: state.rows,
            bytes: state.bytes,
            unsupported_code: state.unsupported_code,
            unwound_by: means(&state.state),
            reason,
        }
    }
}

fn means(state: &State) -> &'static str {
    match state {
        State::Rows => "rows",
        State::NoInformation | State::NoModule(_) => "frame pointers",
        State::Unusable(_) | State::NoRoom => "nothing",
    }
}

fn table(states: &[ModuleState]) -> String {
    let mut lines = vec![["MODULE", "ROWS", "BYTES", "CUT CODE", "UNWOUND BY"].map(String::from)];
    for state in states {
        let by = means(&state.state);
        let reason = state.state.reason().map_or_else(String::new, |reason| format!(": {reason}"));
        lines.push([
            printable(&state.name).into_owned(),
            state.rows.to_string(),
            state.bytes.to_string(),
            state.unsupported_code.to_string(),
            printable(&format!("{by}{reason}")).into_owned(),
        ]);
    }
    let rows: u64 = states.iter().map(|state| state.rows).sum();
    let bytes: u64 = states.iter().map(|state| state.bytes).sum();
    let cut: u64 = states.iter().map(|state| state.unsupported_code).sum();
    lines.push(["total".into(), rows.to_string(), bytes.to_string(), cut.to_string(), String::new()]);
    align(&lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_says_by_what_it_is_unwound() {
        let state = |name: &str, rows, state| ModuleState {
            name: name.into(),
            rows,
            bytes: rows * 8,
            unsupported_code: 3,
            state,
        };
        let text = table(&[
            state("libc.so.6", 100, State::Rows),
            state("jit\n", 0, State::NoInformation),
            state("bad", 0, State::Unusable("it is damaged".into())),
        ]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5, "{text}");
        assert!(lines[1].ends_with("800    3         rows"), "{text}");
        assert!(lines[2].ends_with("frame pointers: it has no unwind information"), "{text}");
        assert!(lines[3].ends_with("nothing: it is damaged"), "{text}");
        assert!(lines[4].starts_with("total"), "{text}");
        assert!(lines[4].ends_with("9"), "{text}");
    }
}
