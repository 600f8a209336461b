//! `cargo xtask vm VERSION…`: boots Debian's kernels in emulated machines and runs the privileged tests there.
//!
//! A machine is emulated in software by qemu, so no virtualization is needed, and has no disk and no network: its memory
//! holds a file system ([`image`]) with memtrace, the test programs ([`suites`]), the programs that they trace
//! ([`programs`]), and this very program, which runs there as the first process ([`guest`]), goes through the [`plan`],
//! prints one line for each test ([`results`]) and turns the machine off. Kernels, and qemu where it is not installed,
//! come from the package archive that this machine is set up for ([`mirror`], [`archive`]) and stay in `target/vm`; delete
//! that to get them anew.

mod archive;
mod cpio;
pub mod guest;
mod image;
mod mirror;
mod plan;
mod programs;
mod qemu;
mod results;
mod suites;

use std::{
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;

use crate::{build, run, setup};
use archive::Archives;
use guest::Expectation;

#[derive(Args)]
pub struct Options {
    /// Kernel versions: 5.10, 6.1, 6.12 or 7.2; the machines run at the same time
    #[arg(required = true, value_name = "VERSION")]
    versions: Vec<String>,
    /// How long a machine may run, in seconds
    #[arg(long, default_value_t = 600)]
    timeout: u64,
    /// Run only those tests whose names contain this, after the checks that always run; can be repeated
    #[arg(long, value_name = "PART")]
    only: Vec<String>,
}

/// A kernel that Debian has.
struct Kernel {
    version: &'static str,
    suite: &'static str,
    /// Whether the suite goes over to newer versions.
    moves: bool,
    expectation: Expectation,
}

const KERNELS: [Kernel; 4] = [
    // Too old: without bpf_get_attach_cookie (5.15) and bpf_loop (5.17).
    Kernel { version: "5.10", suite: "bullseye", moves: false, expectation: Expectation::Refusal },
    Kernel { version: "6.1", suite: "bookworm", moves: false, expectation: Expectation::Traces },
    Kernel { version: "6.12", suite: "trixie", moves: false, expectation: Expectation::Traces },
    Kernel { version: "7.2", suite: "sid", moves: true, expectation: Expectation::Traces },
];

/// Checks memtrace on kernels; the last lines on standard output are the results as JSON, one for each kernel.
pub fn vm(options: &Options) -> Result<()> {
    let kernels = options.versions.iter().map(|version| kernel(version)).collect::<Result<Vec<_>>>()?;
    setup::setup()?;
    let directory = build::target_directory()?.join("vm");
    let mut archives = Archives::new(&directory);
    let qemu = qemu::Qemu::find(&directory, &mut archives)?;
    let mut found = Vec::new();
    for kernel in kernels {
        found.push((kernel, find_kernel(&directory, &mut archives, kernel)?));
    }
    let mut built = suites::build(&directory)?;
    if !options.only.is_empty() {
        built.plan.keep_only(&options.only);
    }
    let initramfs = image::write(&directory.join("image"), &built)?;
    let boot = Boot { directory: &directory, qemu: &qemu, built: &built, initramfs: &initramfs };
    let limit = Duration::from_secs(options.timeout);
    // They wait a lot, for grace periods of their kernels.
    let ran: Vec<Result<Ran>> = thread::scope(|scope| {
        let running: Vec<_> =
            found.iter().map(|(kernel, linux)| scope.spawn(|| boot.run(kernel, linux, limit))).collect();
        let panicked = |_| Err(anyhow!("the thread of a machine panicked"));
        running.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    });
    let ran = ran.into_iter().collect::<Result<Vec<Ran>>>()?;
    for Ran { release, outcome, .. } in &ran {
        print!("Linux {release}:\n{}", outcome.table());
    }
    for Ran { version, release, outcome, .. } in &ran {
        println!("{}", outcome.line(version, release)?);
    }
    let failures: Vec<String> = ran.iter().filter_map(Ran::failure).collect();
    if !failures.is_empty() {
        bail!("{}", failures.join("\n"));
    }
    Ok(())
}

fn kernel(version: &str) -> Result<&'static Kernel> {
    KERNELS.iter().find(|kernel| kernel.version == version).with_context(|| {
        let versions = KERNELS.map(|kernel| kernel.version).join(", ");
        format!("no kernel {version} is known here; there are {versions}")
    })
}

/// What all machines have in common.
struct Boot<'a> {
    directory: &'a Path,
    qemu: &'a qemu::Qemu,
    built: &'a suites::Built,
    initramfs: &'a Path,
}

/// A machine that has ended.
struct Ran {
    version: &'static str,
    release: String,
    outcome: results::Outcome,
    console: PathBuf,
    text: String,
}

impl Boot<'_> {
    fn run(&self, kernel: &Kernel, linux: &Linux, limit: Duration) -> Result<Ran> {
        let console = self.directory.join(format!("{}.log", kernel.version));
        eprintln!(
            "vm: Linux {}, console in {}",
            linux.release,
            console.strip_prefix(run::root()?).unwrap_or(&console).display()
        );
        let ended = self.qemu.run(&qemu::Machine {
            kernel: &linux.image,
            initramfs: self.initramfs,
            arguments: guest::arguments(kernel.expectation),
            console: &console,
            limit,
        })?;
        let text = std::fs::read(&console).with_context(|| console.display().to_string())?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let planned = guest::names(kernel.expectation, &self.built.plan);
        let left_out: &[_] = match kernel.expectation {
            Expectation::Traces => &self.built.left_out,
            Expectation::Refusal => &[],
        };
        let outcome = results::Outcome::new(&text, &ended, &planned, left_out);
        Ok(Ran { version: kernel.version, release: linux.release.clone(), outcome, console, text })
    }
}

impl Ran {
    /// Why the result is no success, with the end of the console.
    fn failure(&self) -> Option<String> {
        let why = self.outcome.verdict().err()?;
        Some(format!(
            "Linux {}: {why}\n{}\nThe whole console is in {}",
            self.release,
            results::tail(&self.text),
            self.console.display()
        ))
    }
}

/// A kernel's file and its full version.
struct Linux {
    image: PathBuf,
    release: String,
}

fn find_kernel(directory: &Path, archives: &mut Archives, kernel: &Kernel) -> Result<Linux> {
    let place = directory.join("kernel").join(kernel.version);
    let image = place.join("vmlinuz");
    let name = place.join("release");
    if !image.is_file() || !name.is_file() {
        let archive = archives.open(kernel.suite)?;
        let release = archive.kernel_release()?;
        if !is_version(&release, kernel.version) {
            if !kernel.moves {
                bail!("{}'s kernel is {release}, not {}", kernel.suite, kernel.version);
            }
            eprintln!("vm: {} has gone over to {release}: that is run in place of {}", kernel.suite, kernel.version);
        }
        archive.kernel_image(&release, &image)?;
        std::fs::write(&name, &release).with_context(|| name.display().to_string())?;
    }
    let release = std::fs::read_to_string(&name).with_context(|| name.display().to_string())?;
    Ok(Linux { image, release })
}

/// Whether `release` (`6.12.117+deb13-cloud-amd64`) is one of `version` (`6.12`).
fn is_version(release: &str, version: &str) -> bool {
    release.strip_prefix(version).is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_releases() {
        assert!(is_version("6.1.0-50-cloud-amd64", "6.1"));
        assert!(is_version("7.2-cloud-amd64", "7.2"));
        assert!(!is_version("6.12.117+deb13-cloud-amd64", "6.1"));
        assert!(!is_version("7.3.1", "7.2"));
    }
}
