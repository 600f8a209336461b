//! The tests of the plan, each in a process of its own.

use std::{
    fs::{self, File},
    io,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use super::super::plan::{Plan, Suite};

/// How long one test may take. The slowest takes a third of it.
const LIMIT: Duration = Duration::from_secs(150);
/// Where its output goes.
const OUTPUT: &str = "/tmp/test-output";
/// What its programs are found by.
const PATH: &str = "/usr/bin:/usr/sbin:/bin:/sbin";
/// Most characters of its output that are told.
const MOST: usize = 1500;
/// What libtest prints after the output of tests.
const ENDS: [&str; 2] = ["\nsuccesses:\n", "\nfailures:\n"];

/// Runs one test: what it said.
pub fn run(plan: &Plan, suite: &Suite, test: &str) -> Result<String> {
    let status = finish(plan, suite, test, Path::new(OUTPUT), LIMIT);
    leave_nothing();
    let output = fs::read(OUTPUT).context(OUTPUT)?;
    let output = String::from_utf8_lossy(&output);
    let result = status.and_then(|status| judge(test, status, &output));
    if result.is_err() {
        // For the reader of the console: no line of it may look like the kernel's.
        for line in output.lines() {
            println!("| {line}");
        }
    }
    result
}

fn finish(plan: &Plan, suite: &Suite, test: &str, output: &Path, limit: Duration) -> Result<ExitStatus> {
    let file = File::create(output).with_context(|| output.display().to_string())?;
    let mut child = Command::new(&suite.program)
        .args([test, "--exact", "--show-output"])
        .current_dir(&suite.directory)
        .env("PATH", PATH)
        .envs(plan.variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(file.try_clone().context("the output's file")?)
        .stderr(file)
        .process_group(0)
        .spawn()
        .with_context(|| suite.program.clone())?;
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().context("waiting for the test")? {
            return Ok(status);
        }
        if started.elapsed() >= limit {
            child.kill().context("ending the test")?;
            child.wait().context("waiting for the test")?;
            bail!("not done after {} s", limit.as_secs());
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Ends every other process of the machine.
fn leave_nothing() {
    // SAFETY: neither call has a pointer to anything; the first spares the first process, which calls it (kill(2)).
    unsafe {
        if libc::getpid() != 1 {
            return;
        }
        libc::kill(-1, libc::SIGKILL);
        while libc::waitpid(-1, std::ptr::null_mut(), 0) > 0
            || io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
    }
}

/// What a test program that ran one test says of it: what the test printed, or why it failed.
fn judge(test: &str, status: ExitStatus, output: &str) -> Result<String> {
    let said = said(test, output);
    if !status.success() {
        bail!("{status}: {said}");
    }
    if !output.contains("test result: ok. 1 passed") {
        bail!("no test has passed: {said}");
    }
    Ok(said)
}

/// The part that libtest shows of a test, or everything if there is none.
fn said(test: &str, output: &str) -> String {
    let head = format!("---- {test} stdout ----\n");
    let part = match output.split_once(&head) {
        Some((_, part)) => {
            ENDS.iter().filter_map(|end| part.split(end).next()).min_by_key(|part| part.len()).unwrap_or(part)
        }
        None if output.contains("test result: ok.") => "",
        None => output,
    };
    let lines: Vec<&str> = part.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let text = lines.join("; ");
    if text.chars().count() <= MOST { text } else { text.chars().take(MOST).chain(['…']).collect() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// Has a shell run `script` as if that were a test: its status and its output.
    fn finish_script(name: &str, script: &str, limit: Duration) -> (Result<ExitStatus>, String) {
        let directory = crate::build::target_directory().unwrap().join("xtask-tests/vm");
        fs::create_dir_all(&directory).unwrap();
        let file = directory.join(name);
        fs::write(&file, script).unwrap();
        let output = file.with_extension("out");
        let suite = Suite { name: "e2e".into(), program: "/bin/sh".into(), directory: "/".into(), tests: Vec::new() };
        let status = finish(&Plan::default(), &suite, file.to_str().unwrap(), &output, limit);
        (status, fs::read_to_string(&output).unwrap())
    }

    #[test]
    fn a_test_that_hangs_is_ended() {
        let (status, _) = finish_script("hangs.sh", "exec sleep 1000", Duration::from_millis(100));
        assert_eq!(status.unwrap_err().to_string(), "not done after 0 s");
    }

    #[test]
    fn one_test_is_asked_for() {
        let (status, output) = finish_script("says.sh", "echo $*", Duration::from_secs(60));
        assert!(status.unwrap().success());
        assert_eq!(output, "--exact --show-output\n");
    }

    #[test]
    fn outputs_are_judged() {
        let passed = "\nrunning 1 test\ntest a::b ... ok\n\nsuccesses:\n\n---- a::b stdout ----\n one\ntwo\n\n\nsuccesses:\n    \
                      a::b\n\ntest result: ok. 1 passed; 0 failed;\n";
        let status = |code: i32| std::os::unix::process::ExitStatusExt::from_raw(code << 8);
        assert_eq!(judge("a::b", status(0), passed).unwrap(), "one; two");
        let silent =
            "\nrunning 1 test\ntest a::b ... ok\n\nsuccesses:\n\nsuccesses:\n    a::b\n\ntest result: ok. 1 passed;\n";
        assert_eq!(judge("a::b", status(0), silent).unwrap(), "");
        let failed = "\nrunning 1 test\ntest a::b ... FAILED\n\nfailures:\n\n---- a::b stdout ----\n\nthread 'a::b' panicked at \
                      x.rs:1:\nwhy\n\n\nfailures:\n    a::b\n\ntest result: FAILED. 0 passed; 1 failed;\n";
        let error = judge("a::b", status(101), failed).unwrap_err().to_string();
        assert!(error.contains("101") && error.ends_with("why"), "{error}");
        let none = "\nrunning 0 tests\n\ntest result: ok. 0 passed; 0 failed; 1 filtered out\n";
        assert!(judge("a::b", status(0), none).unwrap_err().to_string().starts_with("no test has passed"));
        let long = format!("---- a::b stdout ----\n{}\n\nsuccesses:\n", "ä".repeat(5000));
        assert_eq!(said("a::b", &long).chars().count(), MOST + 1);
    }
}
