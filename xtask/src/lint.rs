//! `cargo xtask lint`.

use anyhow::{Context, Result, bail};

use crate::{build, ebpf, run, setup};

const EBPF_MANIFEST: &str = "memtrace-ebpf/Cargo.toml";

/// Checks formatting and lints on both sides, warnings denied.
pub fn lint() -> Result<()> {
    for component in ["fmt", "clippy"] {
        if run::output(run::cargo(component)?.arg("--version")).is_err() {
            bail!("cargo {component} is missing: run `rustup component add rustfmt clippy`");
        }
    }
    setup::setup()?;

    run::run(run::cargo("fmt")?.args(["--all", "--check"]))?;
    run::run(run::cargo("fmt")?.args(["--check", "--manifest-path", EBPF_MANIFEST]))?;
    run::run(
        run::cargo("clippy")?.args(["--workspace", "--all-targets", "--locked"]).args(["--", "--deny", "warnings"]),
    )?;
    clippy_ebpf()?;
    build_ebpf()
}

/// Clippy has no `core` for the eBPF target, so it checks the programs as if they were for this machine: the code is
/// the same, and checking stops before the assembly in it is translated.
fn clippy_ebpf() -> Result<()> {
    let target = build::target_directory()?.join("ebpf-clippy");
    run::run(
        run::cargo("clippy")?
            .args(["--locked", "--manifest-path", EBPF_MANIFEST, "--target-dir"])
            .arg(target)
            .args(["--", "--deny", "warnings"])
            // Unstable features; and which machine's registers the programs read.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", "--cfg bpf_target_arch=\"x86_64\""),
    )
}

/// The programs as they are used, with the compiler's warnings denied; the build script does not deny them, so that
/// a newer compiler's new warning keeps nobody from building.
fn build_ebpf() -> Result<()> {
    let toolchain = ebpf::Toolchain::choose(&ebpf::Facts::gather()).context("no toolchain for the eBPF programs")?;
    let target = build::target_directory()?.join("ebpf-lint");
    let mut command =
        ebpf::build_command(toolchain, &run::root()?, &target, &["-Dwarnings"]).map_err(anyhow::Error::msg)?;
    run::run(&mut command)
}
