//! A memtrace process that attaches to a running program.

use std::{
    ffi::OsStr,
    io::{BufRead, BufReader, Read},
    mem::MaybeUninit,
    path::Path,
    process::{Child, Stdio},
    sync::mpsc::{self, Receiver},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::run;

/// What memtrace's line on standard error begins with once it records.
const RECORDING: &str = "tracing ";
/// Attaching takes well under a second; naming the symbols of a large program at the end takes longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// A memtrace process that records. It is killed if this value goes out of scope before it is finished.
#[derive(Debug)]
pub struct Tracer {
    line: String,
    child: Child,
    finished: bool,
    output: Option<JoinHandle<std::io::Result<String>>>,
    words: Option<JoinHandle<String>>,
    /// From its start to the moment it recorded.
    pub attach: Duration,
}

/// A memtrace process that has ended.
#[derive(Debug)]
pub struct Finished {
    /// What it wrote on standard output.
    pub output: String,
    /// From its interruption to its end.
    pub detach: Duration,
    /// User and system time of its whole life.
    pub cpu: Duration,
}

impl Tracer {
    /// Starts memtrace and waits until it records. What it says on standard error is passed on, or, if `quiet`, kept
    /// for the error in case it fails.
    pub fn start<S: AsRef<OsStr>>(memtrace: &Path, arguments: &[S], quiet: bool) -> Result<Self> {
        let mut command = run::plain(memtrace);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let line = run::line(&command);
        if !quiet {
            eprintln!("+ {line}");
        }
        let started = Instant::now();
        let mut child = command.spawn().with_context(|| format!("could not start: {line}"))?;
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
            bail!("no pipes to {line}");
        };
        let (recording, words) = watch(stderr, quiet);
        let mut tracer = Self {
            line,
            child,
            finished: false,
            // A thread of its own, so that a full pipe stops nobody.
            output: Some(thread::spawn(|| std::io::read_to_string(stdout))),
            words: Some(words),
            attach: Duration::ZERO,
        };
        match recording.recv_timeout(PATIENCE) {
            Ok(moment) => tracer.attach = moment - started,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                bail!("did not record within {} s: {}", PATIENCE.as_secs(), tracer.line)
            }
            // Its standard error is closed: it has ended.
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let status = tracer.wait()?.0;
                let words = tracer.words();
                bail!("ended before it recorded ({status}): {}{words}", tracer.line)
            }
        }
        Ok(tracer)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// User and system time used up to now.
    pub fn cpu(&self) -> Result<Duration> {
        let mut clock = 0;
        let pid = self.child.id().cast_signed();
        // SAFETY: `clock` outlives the call, which only writes to it.
        let error = unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) };
        if error != 0 {
            bail!("no clock of process {pid}: error {error}");
        }
        let mut time = MaybeUninit::<libc::timespec>::uninit();
        // SAFETY: `time` outlives the call, which only writes to it.
        if unsafe { libc::clock_gettime(clock, time.as_mut_ptr()) } != 0 {
            return Err(std::io::Error::last_os_error()).context("reading a process's clock");
        }
        // SAFETY: the call has succeeded, so it has filled all of it.
        let time = unsafe { time.assume_init() };
        Ok(Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec)?))
    }

    /// Interrupts it as Ctrl-C does and waits for its end; fails unless it succeeds.
    pub fn finish(mut self) -> Result<Finished> {
        let started = Instant::now();
        // SAFETY: kill touches no memory; the process is a child that has not been waited for, so the number is its.
        if unsafe { libc::kill(self.child.id().cast_signed(), libc::SIGINT) } != 0 {
            return Err(std::io::Error::last_os_error()).context("interrupting memtrace");
        }
        let (status, cpu) = self.wait()?;
        let detach = started.elapsed();
        let words = self.words();
        if status != "exit status 0" {
            bail!("failed ({status}): {}{words}", self.line);
        }
        let output = match self.output.take().map(JoinHandle::join) {
            Some(Ok(output)) => output.with_context(|| format!("reading from {}", self.line))?,
            _ => bail!("the output was lost of {}", self.line),
        };
        Ok(Finished { output, detach, cpu })
    }

    /// Waits until all it said on standard error has been passed on; what was kept of it, each line after a newline.
    fn words(&mut self) -> String {
        self.words.take().and_then(|words| words.join().ok()).unwrap_or_default()
    }

    /// Waits for its end: how it ended, and its user and system time.
    fn wait(&mut self) -> Result<(String, Duration)> {
        let mut status = 0;
        let mut usage = MaybeUninit::<libc::rusage>::zeroed();
        // Not `Child::wait`, which does not tell the time it used.
        loop {
            // SAFETY: both outlive the call, which only writes to them.
            let waited = unsafe { libc::wait4(self.child.id().cast_signed(), &raw mut status, 0, usage.as_mut_ptr()) };
            if waited > 0 {
                break;
            }
            let error = std::io::Error::last_os_error();
            if error.kind() != std::io::ErrorKind::Interrupted {
                return Err(error).context("waiting for memtrace");
            }
        }
        self.finished = true;
        // SAFETY: only numbers, of which all-zero is a value, and filled by the call that succeeded.
        let usage = unsafe { usage.assume_init() };
        let cpu = duration(usage.ru_utime)? + duration(usage.ru_stime)?;
        let status = if libc::WIFSIGNALED(status) {
            format!("signal {}", libc::WTERMSIG(status))
        } else {
            format!("exit status {}", libc::WEXITSTATUS(status))
        };
        Ok((status, cpu))
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        if !self.finished {
            // Fails only if it has ended, which is what is wanted.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn duration(time: libc::timeval) -> Result<Duration> {
    Ok(Duration::from_secs(u64::try_from(time.tv_sec)?) + Duration::from_micros(u64::try_from(time.tv_usec)?))
}

/// Passes lines on or keeps them, and tells the moment of the one that says that memtrace records.
fn watch(stderr: impl Read + Send + 'static, quiet: bool) -> (Receiver<Instant>, JoinHandle<String>) {
    let (sender, receiver) = mpsc::channel();
    let words = thread::spawn(move || {
        let mut sender = Some(sender);
        let mut kept = String::new();
        for line in BufReader::new(stderr).split(b'\n') {
            let Ok(line) = line else { break };
            let line = String::from_utf8_lossy(&line);
            if line.starts_with(RECORDING)
                && let Some(sender) = sender.take()
            {
                // Nobody listens any more after the patience is over.
                let _ = sender.send(Instant::now());
            }
            if quiet {
                kept.push_str("\n  ");
                kept.push_str(&line);
            } else {
                eprintln!("  {line}");
            }
        }
        kept
    });
    (receiver, words)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn start(script: &str) -> Result<Tracer> {
        Tracer::start(Path::new("sh"), &["-c", script], true)
    }

    #[test]
    fn interrupted_while_it_records() {
        let script =
            "trap 'echo result; exit 0' INT; echo a warning >&2; echo tracing 12 >&2; while :; do sleep 0.01; done";
        let tracer = start(script).unwrap();
        assert!(tracer.attach > Duration::ZERO);
        assert!(tracer.cpu().unwrap() > Duration::ZERO);
        let finished = tracer.finish().unwrap();
        assert_eq!(finished.output, "result\n");
        assert!(finished.cpu > Duration::ZERO);
    }

    #[test]
    fn ended_before_it_records() {
        let error = start("echo 'no such process' >&2; exit 3").unwrap_err().to_string();
        assert!(error.starts_with("ended before it recorded (exit status 3)"), "{error}");
        assert!(error.ends_with("\n  no such process"), "{error}");
    }

    #[test]
    fn failing_at_its_end() {
        let script = "trap 'echo why >&2; exit 1' INT; echo tracing 12 >&2; while :; do sleep 0.01; done";
        let error = start(script).unwrap().finish().unwrap_err().to_string();
        assert!(error.starts_with("failed (exit status 1)"), "{error}");
        assert!(error.ends_with("\n  why"), "{error}");
    }

    #[test]
    fn killed_by_a_signal() {
        let script = "echo tracing 12 >&2; exec sleep 60";
        let error = start(script).unwrap().finish().unwrap_err().to_string();
        assert!(error.starts_with("failed (signal 2)"), "{error}");
    }
}
