//! `cargo xtask test`.

use anyhow::Result;
use clap::Args;

use crate::{run, setup};

#[derive(Args)]
pub struct Options {
    /// Passed on to cargo test, for example a test's name, or `-- --nocapture`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<String>,
}

/// Sets up and runs every test in debug mode, so that memtrace checks its invariants at the end of each trace.
pub fn test(options: &Options) -> Result<()> {
    // Before the build: that takes minutes.
    run::need_root("the tests that trace programs would fail, since they need")?;
    setup::setup()?;
    run::run(run::cargo("test")?.args(["--workspace", "--locked"]).args(&options.arguments))
}
