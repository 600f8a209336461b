//! The C programs that `demo` and `bench` trace: compiled from text that is part of this program, told what to do by
//! lines on their standard input, and answering with lines on their standard output.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::run;

/// Compiles `source` to `directory/name`, with frame pointers, and returns the program's path.
pub fn compile(directory: &Path, name: &str, source: &str, optimization: &str) -> Result<PathBuf> {
    fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    let file = directory.join(name).with_extension("c");
    fs::write(&file, source).with_context(|| file.display().to_string())?;
    let program = directory.join(name);
    run::output(
        Command::new("cc")
            .args([optimization, "-g", "-Wall", "-Wextra", "-Werror"])
            // Every call stays a call with a frame of its own, and every allocation stays.
            .args(["-fno-omit-frame-pointer", "-fno-optimize-sibling-calls"])
            .args(["-fno-builtin", "-pthread", "-o"])
            .args([&program, &file]),
    )?;
    Ok(program)
}

/// A running program. It is ended when this value goes out of scope.
pub struct Workload {
    name: String,
    child: Child,
    /// Closed when it is to end by itself.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Workload {
    /// Starts `program`; it answers its first line when it is ready.
    pub fn start(program: &Path, arguments: &[&str]) -> Result<Self> {
        let mut command = run::plain(program);
        command.args(arguments);
        let name = run::line(&command);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("could not start: {name}"))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("no pipes to {name}");
        };
        let mut workload = Self { name, child, input: Some(input), output: BufReader::new(output) };
        let answer = workload.answer()?;
        if answer != "ready" {
            bail!("{} answered {answer:?} in place of \"ready\"", workload.name);
        }
        Ok(workload)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line and waits for the answer.
    pub fn ask(&mut self, line: &str) -> Result<String> {
        let input = self.input.as_mut().with_context(|| format!("{} has been told to end", self.name))?;
        writeln!(input, "{line}").with_context(|| format!("writing to {}", self.name))?;
        self.answer()
    }

    /// Lets it end by itself, and fails unless it succeeds.
    pub fn finish(mut self) -> Result<()> {
        self.input = None;
        let status = self.child.wait().with_context(|| format!("waiting for {}", self.name))?;
        if !status.success() {
            bail!("{} failed ({status})", self.name);
        }
        Ok(())
    }

    fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line).with_context(|| format!("reading from {}", self.name))?;
        if !line.ends_with('\n') {
            let status = self.child.wait()?;
            bail!("{} ended without an answer ({status})", self.name);
        }
        line.pop();
        Ok(line)
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        // Fails only if it has ended, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn directory(test: &str) -> PathBuf {
        crate::build::target_directory().unwrap().join("xtask-tests").join(test)
    }

    #[test]
    fn a_program_that_ends_is_an_error() {
        let source = "#include <stdio.h>\nint main(void) { puts(\"ready\"); return 3; }\n";
        let program = compile(&directory("ends"), "ends", source, "-O1").unwrap();
        let mut workload = Workload::start(&program, &[]).unwrap();
        let error = loop {
            // The first line may still fit into the pipe.
            if let Err(error) = workload.ask("go") {
                break error.to_string();
            }
        };
        assert!(error.contains("ends"), "{error}");
    }

    #[test]
    fn a_program_that_is_not_ready_is_an_error() {
        let source = "#include <stdio.h>\nint main(void) { puts(\"no\"); return 0; }\n";
        let program = compile(&directory("unready"), "unready", source, "-O1").unwrap();
        let error = Workload::start(&program, &[]).err().unwrap().to_string();
        assert!(error.contains("answered \"no\""), "{error}");
    }

    #[test]
    fn the_compilers_words_are_in_the_error() {
        let error = compile(&directory("wrong"), "wrong", "int main(void) { return x; }\n", "-O1").unwrap_err();
        assert!(error.to_string().contains("undeclared"), "{error}");
    }
}
