//! How long naming takes: 100,000 addresses of large programs.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::run;

/// What naming may take, in seconds.
const MOST_SECONDS: f64 = 5.0;

/// Names addresses of the C++ compiler proper, of Rust's compiler if it is there, and of memtrace itself, which have no
/// debug information, none, and some; prints one line for each.
pub fn measure(memtrace: &Path) -> Result<()> {
    for file in files(memtrace)? {
        let mut command = Command::new(memtrace);
        let text = run::output(command.arg("bench-names").arg(&file).arg("--lines"))?;
        let report: serde_json::Value = serde_json::from_str(&text).context("what bench-names printed")?;
        let number = |name: &str| report[name].as_f64().with_context(|| format!("no {name} in {text}"));
        let seconds = number("seconds")?;
        let fact = format!(
            "{} addresses of {} ({} of them named, {} frames with those inlined) in {seconds:.2} s, with {:.0} MiB",
            number("addresses")?,
            file.file_name().unwrap_or_default().to_string_lossy(),
            number("named")?,
            number("frames")?,
            number("bytes")? / f64::from(1 << 20),
        );
        println!("{}", super::verdict(&fact, seconds, MOST_SECONDS, "s"));
    }
    println!("\nTo repeat: cargo xtask bench --only symbols");
    Ok(())
}

fn files(memtrace: &Path) -> Result<Vec<PathBuf>> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let cc1plus = run::output(Command::new(compiler).arg("-print-prog-name=cc1plus"))?;
    let sysroot = run::output(Command::new("rustc").args(["--print", "sysroot"]))?;
    let libraries = Path::new(sysroot.trim()).join("lib");
    let driver = std::fs::read_dir(libraries).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let is_driver =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("librustc_driver"));
    let mut files = vec![PathBuf::from(cc1plus.trim())];
    files.extend(driver.filter(is_driver).take(1));
    files.push(memtrace.to_owned());
    Ok(files)
}
