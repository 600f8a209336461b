//! `cargo xtask build`.

use std::path::PathBuf;

use anyhow::Result;

use crate::{run, setup};

/// Sets up and builds in release mode.
pub fn build() -> Result<()> {
    let binary = memtrace()?;
    eprintln!("built {}", binary.display());
    Ok(())
}

/// Sets up and builds; the path of the memtrace binary.
pub fn memtrace() -> Result<PathBuf> {
    setup::setup()?;
    run::run(run::cargo("build")?.args(["--release", "--locked", "--package", "memtrace"]))?;
    Ok(target_directory()?.join("release/memtrace"))
}

/// Where cargo puts what it builds.
pub fn target_directory() -> Result<PathBuf> {
    let root = run::root()?;
    // A relative directory is meant from where cargo was started; joining leaves an absolute one as it is.
    Ok(match std::env::var_os("CARGO_TARGET_DIR") {
        Some(directory) => std::env::current_dir()?.join(directory),
        None => root.join("target"),
    })
}
