//! `cargo xtask vm VERSION`: boots one of Debian's kernels in an emulated machine and checks memtrace there.
//!
//! The machine is emulated in software by qemu, so no virtualization is needed, and has no disk and no network: its
//! memory holds a file system ([`image`]) with memtrace, the programs to be traced, their libraries, and this very
//! program, which runs there as the first process ([`guest`]), prints one line for each check ([`results`]) and turns
//! the machine off. Kernels, and qemu where it is not installed, come from the package archive that this machine is
//! set up for ([`mirror`], [`archive`]) and stay in `target/vm`; delete that to get them anew.

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

use std::{path::Path, time::Duration};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::{build, run, setup};
use archive::Archives;
use guest::Expectation;

#[derive(Args)]
pub struct Options {
    /// Kernel version: 5.10, 6.1, 6.12 or 7.2
    version: String,
    /// How long the machine may run, in seconds
    #[arg(long, default_value_t = 300)]
    timeout: u64,
    /// Run only those tests whose names contain this, after the checks that always run
    #[arg(long)]
    only: Option<String>,
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

/// Checks memtrace on a kernel; the last line on standard output is the result as JSON.
pub fn vm(options: &Options) -> Result<()> {
    let Some(kernel) = KERNELS.iter().find(|kernel| kernel.version == options.version) else {
        let versions = KERNELS.map(|kernel| kernel.version).join(", ");
        bail!("no kernel {} is known here; there are {versions}", options.version);
    };
    setup::setup()?;
    let directory = build::target_directory()?.join("vm");
    let mut archives = Archives::new(&directory);
    let qemu = qemu::Qemu::find(&directory, &mut archives)?;
    let linux = find_kernel(&directory, &mut archives, kernel)?;
    let mut built = suites::build(&directory)?;
    if let Some(part) = &options.only {
        built.plan.keep_only(part);
    }
    let initramfs = image::write(&directory.join("image"), &built)?;
    let console = directory.join(format!("{}.log", kernel.version));
    eprintln!(
        "vm: Linux {}, console in {}",
        linux.release,
        console.strip_prefix(run::root()?).unwrap_or(&console).display()
    );
    let machine = qemu::Machine {
        kernel: &linux.image,
        initramfs: &initramfs,
        arguments: guest::arguments(kernel.expectation),
        console: &console,
        limit: Duration::from_secs(options.timeout),
    };
    let planned = guest::names(kernel.expectation, &built.plan);
    let left_out: &[_] = match kernel.expectation {
        Expectation::Traces => &built.left_out,
        Expectation::Refusal => &[],
    };
    let ended = qemu.run(&machine)?;
    let text = std::fs::read(&console).with_context(|| console.display().to_string())?;
    let text = String::from_utf8_lossy(&text);
    let outcome = results::Outcome::new(&text, &ended, &planned, left_out);
    print!("{}", outcome.table());
    let verdict = outcome.verdict();
    println!("{}", outcome.line(kernel.version, &linux.release)?);
    if let Err(why) = verdict {
        bail!(
            "Linux {}: {why}\n{}\nThe whole console is in {}",
            linux.release,
            results::tail(&text),
            console.display()
        );
    }
    Ok(())
}

/// A kernel's file and its full version.
struct Linux {
    image: std::path::PathBuf,
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
