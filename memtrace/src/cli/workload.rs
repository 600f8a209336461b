//! `memtrace __workload`: the program that `memtrace selftest` traces, so that no compiler is needed for it.
//!
//! It answers commands, one a line, on standard input with one line each on standard output:
//!
//! | command | answer |
//! | --- | --- |
//! | (at the start) | `ready` |
//! | `exact` | the [`Truth`] of what it has just allocated and freed, as JSON |
//! | `pairs N` | nanoseconds that N pairs of `malloc(64)` and `free` took |
//! | `quit`, or the end of the input | none: it ends |
//!
//! Between `ready` and the end nothing in the process allocates but the calls that the truth counts: threads are started
//! before, input and output go through buffers on the stack. So what a trace of the whole process adds up to has to be
//! the truth, to the byte.

mod calls;

use std::{
    borrow::Cow,
    fs::File,
    io::{self, Read as _, Write as _},
    os::fd::AsFd as _,
    process::ExitCode,
    sync::{
        Arc, Barrier, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Instant,
};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

use calls::{Exchange, FUNCTIONS, Tally};

/// Threads that allocate at the same time.
const THREADS: usize = 4;
/// Longest command.
const MAX_LINE: usize = 64;
/// Longest answer.
const MAX_ANSWER: usize = 4096;

/// What was allocated by which function, counted where the calls were made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Truth {
    /// One entry for each function.
    pub functions: [FunctionTruth; FUNCTIONS.len()],
    /// Calls that returned no block.
    pub failed: u64,
}

/// The blocks of one function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionTruth {
    /// Its name.
    pub name: Cow<'static, str>,
    /// Bytes asked for by calls that returned a block.
    pub allocated_bytes: u64,
    /// Those calls.
    pub allocated_count: u64,
    /// Bytes of its blocks that were not freed.
    pub unfreed_bytes: u64,
    /// Those blocks.
    pub unfreed_count: u64,
}

impl Truth {
    fn new(tally: &Tally) -> Self {
        let mut index = 0;
        Self {
            functions: FUNCTIONS.map(|name| {
                let (allocated, freed) = tally.of(index);
                index += 1;
                FunctionTruth {
                    name: Cow::Borrowed(name),
                    allocated_bytes: allocated.bytes,
                    allocated_count: allocated.count,
                    unfreed_bytes: allocated.bytes - freed.bytes,
                    unfreed_count: allocated.count - freed.count,
                }
            }),
            failed: tally.failed(),
        }
    }
}

/// What the threads have in common.
struct Shared {
    /// All threads and the main thread meet here at the begin and at the end of a run.
    meeting: Barrier,
    quit: AtomicBool,
    exchange: Exchange<THREADS>,
    tally: Mutex<Tally>,
}

/// Runs the command.
///
/// # Errors
/// Standard input or output fails, or a command is none.
pub fn run() -> anyhow::Result<ExitCode> {
    // Unlike the standard streams these have no buffer, which would be allocated at its first use.
    let stdin = io::stdin().as_fd().try_clone_to_owned().context("standard input")?;
    let stdout = io::stdout().as_fd().try_clone_to_owned().context("standard output")?;
    let (mut input, mut output) = (File::from(stdin), File::from(stdout));
    let shared = Arc::new(Shared {
        meeting: Barrier::new(THREADS + 1),
        quit: AtomicBool::new(false),
        exchange: Exchange::new(),
        tally: Mutex::new(Tally::default()),
    });
    let threads: Vec<_> = (0..THREADS)
        .map(|number| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || work(number, &shared))
        })
        .collect();
    // The first meeting: once it is over, no thread is still being set up.
    shared.meeting.wait();
    let answered = answer(&mut input, &mut output, &shared);
    shared.quit.store(true, Ordering::Relaxed);
    shared.meeting.wait();
    for thread in threads {
        if thread.join().is_err() {
            bail!("a thread of the workload failed");
        }
    }
    answered.map(|()| ExitCode::SUCCESS)
}

fn work(number: usize, shared: &Shared) {
    shared.meeting.wait();
    loop {
        shared.meeting.wait();
        if shared.quit.load(Ordering::Relaxed) {
            return;
        }
        let tally = calls::run(number, &shared.exchange);
        shared.tally.lock().unwrap_or_else(PoisonError::into_inner).add(&tally);
        shared.meeting.wait();
    }
}

/// Answers commands until the last.
fn answer(input: &mut File, output: &mut File, shared: &Shared) -> anyhow::Result<()> {
    output.write_all(b"ready\n").context("standard output")?;
    let mut line = [0; MAX_LINE];
    loop {
        let command = read_line(input, &mut line).context("standard input")?;
        let mut buffer = [0; MAX_ANSWER];
        let mut rest = &mut buffer[..];
        match command.split_once(' ').unwrap_or((command, "")) {
            ("exact", "") => {
                *shared.tally.lock().unwrap_or_else(PoisonError::into_inner) = Tally::default();
                shared.meeting.wait();
                shared.meeting.wait();
                let truth = Truth::new(&shared.tally.lock().unwrap_or_else(PoisonError::into_inner));
                serde_json::to_writer(&mut rest, &truth).context("the truth")?;
            }
            ("pairs", number) => {
                let number = number.parse().context("the number of pairs")?;
                let start = Instant::now();
                calls::pairs(number);
                write!(rest, "{}", start.elapsed().as_nanos()).context("the time")?;
            }
            ("quit" | "", "") => return Ok(()),
            _ => bail!("{command:?} is no command of the workload"),
        }
        rest.write_all(b"\n").context("the answer")?;
        let length = MAX_ANSWER - rest.len();
        output.write_all(&buffer[..length]).context("standard output")?;
    }
}

/// Reads one line, without its end; nothing at the end of the input.
fn read_line<'a>(input: &mut File, line: &'a mut [u8; MAX_LINE]) -> io::Result<&'a str> {
    let mut length = 0;
    loop {
        let Some(byte) = line.get_mut(length..=length) else { return Err(io::ErrorKind::InvalidData.into()) };
        if input.read(byte)? == 0 || byte == b"\n" {
            break;
        }
        length += 1;
    }
    std::str::from_utf8(&line[..length]).map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn truth() -> Truth {
        let exchange = Exchange::<1>::new();
        Truth::new(&calls::run(0, &exchange))
    }

    #[test]
    fn every_function_allocates_and_leaves_blocks() {
        let truth = truth();
        for function in &truth.functions {
            assert!(function.unfreed_count > 0 && function.unfreed_bytes > 0, "{function:?}");
            assert!(function.allocated_bytes >= function.unfreed_bytes, "{function:?}");
        }
        assert!(truth.functions.iter().map(|function| function.allocated_count).sum::<u64>() > 50_000);
        assert!(truth.failed > 0);
    }

    #[test]
    fn runs_are_alike() {
        assert_eq!(truth(), truth());
    }

    #[test]
    fn an_answer_fits_its_buffer() {
        let mut truth = truth();
        for function in &mut truth.functions {
            function.allocated_bytes = u64::MAX;
            function.allocated_count = u64::MAX;
            function.unfreed_bytes = u64::MAX;
            function.unfreed_count = u64::MAX;
        }
        let text = serde_json::to_string(&truth).unwrap();
        assert!(text.len() < MAX_ANSWER, "{}", text.len());
        assert_eq!(serde_json::from_str::<Truth>(&text).unwrap(), truth);
    }

    #[test]
    fn lines() {
        use std::io::Seek as _;
        let read = |text: &[u8]| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(text).unwrap();
            file.rewind().unwrap();
            read_line(&mut file, &mut [0; MAX_LINE]).map(String::from)
        };
        assert_eq!(read(b"exact\nmore").unwrap(), "exact");
        assert_eq!(read(b"quit").unwrap(), "quit");
        assert_eq!(read(b"").unwrap(), "");
        assert!(read(&[b'x'; MAX_LINE + 1]).is_err());
        assert!(read(b"\xff\n").is_err());
    }
}
