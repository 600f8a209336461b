//! `memtrace selftest`: how exact and how costly tracing is on this very kernel.

mod report;

use std::{
    io::{self, IsTerminal as _, Write as _},
    os::fd::OwnedFd,
    process::{Child, ChildStdin, Command, ExitCode, Stdio},
};

use anyhow::{Context as _, bail};
use tokio::net::unix::pipe::Receiver;

use super::{
    FAILURE, colour,
    options::budget,
    session::{Ask, Options, Probes, Session},
    workload::Truth,
};
use crate::{
    kernel::budget::{Budget, DEFAULT_MIB, MIN_MIB},
    target::Process,
};
use report::{Cost, Exactness, Report};

/// How often each kind of run is measured.
const ROUNDS: usize = 5;
/// Pairs of a run without probes (about 10 ms), and of one with them (about 0.2 s).
const PAIRS_UNTRACED: u64 = 1_000_000;
const PAIRS_TRACED: u64 = 50_000;
/// Longest answer of the workload.
const MAX_ANSWER: usize = 64 * 1024;

/// Traces a known workload and tells how exact and how costly that is on this machine
///
/// Takes some seconds. Exits with 1 if a number differs from the truth.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Prints JSON
    #[arg(long)]
    json: bool,
    /// Memory for the kernel side's tables, MiB
    #[arg(long, value_name = "MIB", value_parser = budget, default_value_t = DEFAULT_MIB)]
    memory_budget: u32,
    /// Leaves out the cost, for machines where it says nothing
    #[arg(long, hide = true)]
    exact_only: bool,
}

/// Runs the command.
///
/// # Errors
/// The workload can't be started or traced.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("the runtime can't be started")?;
    let report = runtime.block_on(measure(args))?;
    let text = if args.json { report.json()? } else { report.text(colour(io::stdout().is_terminal())) };
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("standard output")?;
    Ok(if report.exactness.is_exact() { ExitCode::SUCCESS } else { ExitCode::from(FAILURE) })
}

async fn measure(args: &Args) -> anyhow::Result<Report> {
    let budget = Budget::from_mebibytes(args.memory_budget);
    let mut workload = Workload::start().await?;
    let exactness = exactness(&mut workload, budget).await?;
    let cost = if args.exact_only { None } else { Some(cost(&mut workload, budget).await?) };
    Ok(Report { exactness, cost })
}

async fn cost(workload: &mut Workload, budget: Budget) -> anyhow::Result<Cost> {
    let (mut untraced, mut empty, mut traced) = ([0.0; ROUNDS], [0.0; ROUNDS], [0.0; ROUNDS]);
    for round in 0..ROUNDS {
        untraced[round] = workload.pairs(PAIRS_UNTRACED).await?;
        for (probes, budget, times) in
            [(Probes::Empty, Budget::from_mebibytes(MIN_MIB), &mut empty), (Probes::Recording, budget, &mut traced)]
        {
            let mut session = workload.attach(budget, probes)?;
            session.start()?;
            times[round] = workload.pairs(PAIRS_TRACED).await?;
        }
    }
    Ok(Cost::new(untraced, empty, traced))
}

async fn exactness(workload: &mut Workload, budget: Budget) -> anyhow::Result<Exactness> {
    let mut session = workload.attach(budget, Probes::Recording)?;
    let names = session
        .discovery()
        .sites
        .iter()
        .map(|site| [site.function.clone().into_owned()].into_iter().chain(site.aliases.clone()).collect())
        .collect::<Vec<Vec<String>>>();
    session.start()?;
    workload.ask("exact")?;
    let mut answer = None;
    let answered = async { answer = Some(workload.answer().await) };
    let end = session.run(None, answered, std::future::pending(), |_, _| {}).await?;
    let Some(answer) = answer else { bail!("the workload ended while it was traced ({end:?})") };
    let truth: Truth = serde_json::from_str(&answer?).context("the workload's answer")?;
    let finished = session.finish(end, &Ask::HEAP)?;
    Ok(Exactness::new(&truth, &names, &finished.profile, &finished.imbalances))
}

/// The running workload. Dropping it ends it.
struct Workload {
    child: Child,
    input: ChildStdin,
    output: Receiver,
}

impl Workload {
    /// Starts it and waits until it is ready.
    async fn start() -> anyhow::Result<Self> {
        // The program itself, even if its file has been replaced meanwhile.
        let mut child = Command::new("/proc/self/exe")
            .arg("__workload")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("the workload can't be started")?;
        let input = child.stdin.take().context("standard input of the workload")?;
        let output = child.stdout.take().context("standard output of the workload")?;
        let output = Receiver::from_owned_fd(OwnedFd::from(output)).context("standard output of the workload")?;
        let mut workload = Self { child, input, output };
        match workload.answer().await?.as_str() {
            "ready" => Ok(workload),
            other => bail!("the workload says {other:?} instead of being ready"),
        }
    }

    fn attach(&self, budget: Budget, probes: Probes) -> anyhow::Result<Session> {
        Session::attach(Process::open(self.child.id())?, None, &Options::plain(budget), probes)
    }

    fn ask(&mut self, command: &str) -> anyhow::Result<()> {
        writeln!(self.input, "{command}").context("the workload can't be asked")
    }

    /// One line of its output.
    async fn answer(&mut self) -> anyhow::Result<String> {
        let mut line = Vec::new();
        let mut buffer = [0; 4096];
        while !line.ends_with(b"\n") {
            self.output.readable().await.context("the workload's answer")?;
            match self.output.try_read(&mut buffer) {
                Ok(0) => bail!("the workload ended without an answer"),
                Ok(length) => line.extend(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context("the workload's answer"),
            }
            if line.len() > MAX_ANSWER {
                bail!("the workload's answer is too long");
            }
        }
        line.pop();
        String::from_utf8(line).context("the workload's answer")
    }

    /// Nanoseconds of one pair of malloc(64) and free, by the mean over `number`.
    async fn pairs(&mut self, number: u64) -> anyhow::Result<f64> {
        self.ask(&format!("pairs {number}"))?;
        let nanoseconds: f64 = self.answer().await?.parse().context("the workload's answer")?;
        Ok(nanoseconds / number as f64)
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
