//! A child process whose output is read line by line, with a limit on every wait.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::process::ExitStatusExt as _,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

/// Longest wait for anything: only there so that a hang becomes a message. Nothing relies on it.
pub const LIMIT: Duration = Duration::from_secs(180);

/// Repeats `check` until it gives something, at most for [`LIMIT`].
pub fn wait_for<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = check() {
            return value;
        }
        assert!(start.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// The process that process `parent` has started; waits until there is one.
pub fn child_of(parent: u32) -> u32 {
    wait_for("a child process", || children_of(parent).first().copied())
}

/// The processes that process `parent` has started.
pub fn children_of(parent: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").expect("/proc can be read");
    let child = |entry: std::io::Result<fs::DirEntry>| {
        let pid: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
        // The command name, which can hold anything, ends with the last parenthesis (proc_pid_stat(5)).
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields = stat.rsplit_once(')')?.1;
        (fields.split_whitespace().nth(1)?.parse() == Ok(parent)).then_some(pid)
    };
    entries.filter_map(child).collect()
}

/// Sends a signal to a process that still runs.
pub fn signal(pid: u32, signal: libc::c_int) {
    let id = libc::pid_t::try_from(pid).expect("a pid fits");
    // SAFETY: a system call without pointers.
    let result = unsafe { libc::kill(id, signal) };
    assert_eq!(result, 0, "signal {signal} can't be sent to process {pid}");
}

/// A running child. Dropping it kills it.
pub struct Process {
    child: Child,
    name: String,
    stdin: Option<ChildStdin>,
    stdout: Lines,
    stderr: Lines,
}

/// What a process that has ended left.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// Exit code; panics if a signal ended the process.
    pub fn code(&self) -> i32 {
        match self.status.code() {
            Some(code) => code,
            None => panic!("ended by signal {:?}:\n{}", self.status.signal(), self.stderr),
        }
    }
}

impl Process {
    pub fn start(command: &mut Command) -> Self {
        let name = format!("{command:?}");
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{name} does not start: {error}"));
        let stdin = child.stdin.take();
        let stdout = Lines::of(child.stdout.take().expect("stdout is a pipe"));
        let stderr = Lines::of(child.stderr.take().expect("stderr is a pipe"));
        Self { child, name, stdin, stdout, stderr }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line.
    pub fn send(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().expect("the input is open");
        writeln!(stdin, "{line}").unwrap_or_else(|error| panic!("{}: no line can be sent: {error}", self.name));
    }

    /// Sends a line and closes its input; nobody may be there any more to read it.
    pub fn send_last(&mut self, line: &str) {
        if let Some(mut stdin) = self.stdin.take() {
            let _ = writeln!(stdin, "{line}");
        }
    }

    /// Closes its input.
    pub fn close_input(&mut self) {
        self.stdin = None;
    }

    /// The next line of standard output; panics if it ends first.
    pub fn line(&mut self) -> String {
        match self.stdout.next() {
            Some(line) => line,
            None => {
                let status = self.child.wait();
                panic!("{}: no more output, {status:?}, standard error:\n{}", self.name, self.stderr.rest())
            }
        }
    }

    /// Reads standard error up to the first line that starts with `prefix`; panics if it ends first.
    pub fn wait_for_error_line(&mut self, prefix: &str) -> String {
        self.wait_for_error(&format!("line `{prefix}…`"), |line| line.starts_with(prefix))
    }

    /// Reads standard error up to the first line for which `is_it` holds; panics with `what` if it ends first.
    pub fn wait_for_error(&mut self, what: &str, is_it: impl Fn(&str) -> bool) -> String {
        loop {
            match self.stderr.next() {
                Some(line) if is_it(&line) => return line,
                Some(_) => {}
                None => {
                    let status = self.child.wait();
                    panic!("{}: no {what}, {status:?}, standard error:\n{}", self.name, self.stderr.text)
                }
            }
        }
    }

    /// What has come on standard error so far, without waiting.
    pub fn error_so_far(&mut self) -> &str {
        while let Ok(line) = self.stderr.receiver.try_recv() {
            self.stderr.keep(&line);
        }
        &self.stderr.text
    }

    /// Sends a signal; the child has not been waited for, so that its id is no one else's.
    pub fn signal(&self, number: libc::c_int) {
        signal(self.child.id(), number);
    }

    /// Its status if it has ended.
    pub fn try_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be waited for")
    }

    /// Waits for its end.
    pub fn end(mut self) -> Ended {
        let name = self.name.clone();
        let status = wait_for(&format!("the end of {name}"), || self.try_status());
        Ended { status, stdout: self.stdout.rest(), stderr: self.stderr.rest() }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has often ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The lines of a pipe, read by a thread so that the writer never blocks.
struct Lines {
    receiver: Receiver<String>,
    /// Everything taken so far.
    text: String,
}

impl Lines {
    fn of(pipe: impl Read + Send + 'static) -> Self {
        let (sender, receiver) = channel();
        thread::spawn(move || {
            let mut reader = BufReader::new(pipe);
            let mut line = Vec::new();
            while reader.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
                let text = String::from_utf8_lossy(&line).trim_end_matches('\n').to_owned();
                if sender.send(text).is_err() {
                    break;
                }
                line.clear();
            }
        });
        Self { receiver, text: String::new() }
    }

    fn keep(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    /// The next line; `None` at the end.
    fn next(&mut self) -> Option<String> {
        match self.receiver.recv_timeout(LIMIT) {
            Ok(line) => {
                self.keep(&line);
                Some(line)
            }
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("no line within {LIMIT:?}; so far:\n{}", self.text),
        }
    }

    fn rest(&mut self) -> String {
        while self.next().is_some() {}
        std::mem::take(&mut self.text)
    }
}
