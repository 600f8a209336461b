//! Builds the privileged tests and the programs that they trace, on the machine that has compilers.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::plan::{self, LeftOut, Plan, Suite};
use crate::run;

/// The test targets, each with a test of its own that compiles the programs it traces, if it has some.
const TARGETS: [(&str, Option<&str>); 3] =
    [("doctor", None), ("e2e", Some("fixtures::every_fixture_compiles")), ("oracle", Some("the_programs_compile"))];

/// Names the directory of the programs to be traced (memtrace/tests/e2e/support/build.rs, memtrace/tests/oracle/programs.rs).
const FIXTURES: &str = "MEMTRACE_FIXTURES";

/// What has been built.
pub struct Built {
    pub plan: Plan,
    pub left_out: Vec<LeftOut>,
    /// The program that the tests start.
    pub memtrace: PathBuf,
    /// A directory of programs and libraries.
    pub fixtures: PathBuf,
}

/// Builds everything. In release mode: emulation is slow enough.
pub fn build(directory: &Path) -> Result<Built> {
    let fixtures = directory.join("fixtures");
    // What is there is not compiled again.
    if fixtures.exists() {
        fs::remove_dir_all(&fixtures).with_context(|| fixtures.display().to_string())?;
    }
    fs::create_dir_all(&fixtures).with_context(|| fixtures.display().to_string())?;
    let executables = executables()?;
    let package = run::root()?.join("memtrace");
    let mut built = Built {
        plan: Plan::default(),
        left_out: Vec::new(),
        memtrace: executable(&executables, "bin", "memtrace")?,
        fixtures: fixtures.clone(),
    };
    built.plan.variables.push((FIXTURES.to_owned(), text(&fixtures)?));
    for (name, compiles) in TARGETS {
        let program = executable(&executables, "test", name)?;
        if let Some(test) = compiles {
            let mut command = run::plain(&program);
            command.args([test, "--exact"]).env(FIXTURES, &fixtures).current_dir(&package);
            let said = run::output(&mut command)?;
            if !said.contains(" 1 passed") {
                bail!("the programs that {name} traces were not compiled:\n{said}");
            }
        }
        let list = run::output(run::plain(&program).args(["--list", "--format", "terse"]).current_dir(&package))?;
        let mut suite =
            Suite { name: name.to_owned(), program: text(&program)?, directory: text(&package)?, tests: tests(&list) };
        built.left_out.extend(plan::leave_out(&mut suite));
        built.plan.suites.push(suite);
    }
    let stale = plan::stale(&built.left_out);
    if !stale.is_empty() {
        bail!("tests to be left out are not there (any more): {}", stale.join(", "));
    }
    Ok(built)
}

fn text(path: &Path) -> Result<String> {
    Ok(path.to_str().with_context(|| format!("not UTF-8: {}", path.display()))?.to_owned())
}

/// What cargo says it has built: one JSON document on each line.
fn executables() -> Result<String> {
    let mut command = run::cargo("test")?;
    command.args(["--release", "--locked", "--package", "memtrace", "--no-run", "--message-format", "json"]);
    for (name, _) in TARGETS {
        command.args(["--test", name]);
    }
    let line = run::line(&command);
    eprintln!("+ {line}");
    // What it does goes to the terminal.
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("could not start: {line}"))?;
    if !output.status.success() {
        bail!("failed ({}): {line}", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("not UTF-8: output of {line}"))
}

fn executable(messages: &str, kind: &str, name: &str) -> Result<PathBuf> {
    let of_message = |line: &str| {
        let message: Value = serde_json::from_str(line).ok()?;
        let target = &message["target"];
        let wanted = target["name"] == name && target["kind"].as_array()?.iter().any(|one| one == kind);
        if wanted { message["executable"].as_str().map(PathBuf::from) } else { None }
    };
    messages.lines().find_map(of_message).with_context(|| format!("cargo has built no {kind} {name}"))
}

/// The names in a test program's terse list: `truth::some_test: test`.
fn tests(list: &str) -> Vec<String> {
    list.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn executables_among_messages() {
        let messages = "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"memtrace\",\"kind\":[\"lib\"]},\"executable\":null}\n\
             {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"memtrace\",\"kind\":[\"bin\"]},\"executable\":\"/t/memtrace\"}\n\
             {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"e2e\",\"kind\":[\"test\"]},\"executable\":\"/t/e2e-1\"}\n";
        assert_eq!(executable(messages, "bin", "memtrace").unwrap(), Path::new("/t/memtrace"));
        assert_eq!(executable(messages, "test", "e2e").unwrap(), Path::new("/t/e2e-1"));
        assert!(executable(messages, "test", "oracle").is_err());
    }

    #[test]
    fn names_of_a_list() {
        assert_eq!(tests("a::b: test\nc: test\n\n2 tests, 0 benchmarks\nd: benchmark\n"), ["a::b", "c"]);
    }
}
