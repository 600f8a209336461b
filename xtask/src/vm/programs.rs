//! The machine's real programs: those that the tests start or trace, with what they read.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::run;

/// Programs of which nothing is needed but themselves and their libraries.
pub const PLAIN: [&str; 11] =
    ["cat", "echo", "nice", "nsenter", "perl", "setpriv", "sh", "sleep", "sqlite3", "true", "unshare"];

/// Runs a script, and then tells which files the interpreter has read modules from.
const MODULES: &str = "\
import runpy, sys
runpy.run_path(sys.argv[1])
print('interpreter', sys.executable)
for module in list(sys.modules.values()):
    for name in ('__file__', '__cached__'):
        file = getattr(module, name, None)
        if file and file.startswith('/'):
            print('file', file)
";

/// An interpreter, and the files that it reads when it runs one script.
pub struct Python {
    pub interpreter: PathBuf,
    pub files: BTreeSet<PathBuf>,
}

/// Where a program is.
pub fn find(name: &str) -> Result<PathBuf> {
    run::find(name).with_context(|| format!("{name} is missing, which the tests start"))
}

/// The interpreter behind `python3`, with what it needs to run `script`.
pub fn python(script: &Path) -> Result<Python> {
    let said = run::output(run::plain("python3").args(["-c", MODULES]).arg(script))?;
    parse(&said)
}

fn parse(said: &str) -> Result<Python> {
    let values = |word: &'static str| {
        said.lines().filter_map(move |line| line.strip_prefix(word)?.strip_prefix(' ')).map(PathBuf::from)
    };
    let interpreter = values("interpreter").next().with_context(|| format!("python3 names no interpreter:\n{said}"))?;
    // Not every module was compiled into a file.
    Ok(Python { interpreter, files: values("file").filter(|file| file.is_file()).collect() })
}

/// The shared libraries that a program is started with, and its dynamic loader.
pub fn needed(program: &Path) -> Result<Vec<String>> {
    // It fails where there is nothing to load, which is right for static programs.
    let output = Command::new("ldd").env_remove("LD_LIBRARY_PATH").arg(program).output().context("ldd")?;
    Ok(libraries(&String::from_utf8_lossy(&output.stdout)))
}

/// The paths in what ldd prints: `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f…)`.
fn libraries(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| {
            let (path, _) = line.split_once("=>").map_or(line, |(_, path)| path).trim().rsplit_once(" (0x")?;
            path.starts_with('/').then(|| path.to_owned())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn libraries_and_the_loader() {
        let text = "\tlinux-vdso.so.1 (0x00007f2b5122b000)\n\
                    \tlibgcc_s.so.1 => /lib/x86_64-linux-gnu/libgcc_s.so.1 (0x00007f2b511cb000)\n\
                    \tlibnone.so => not found\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f2b5122d000)\n";
        assert_eq!(libraries(text), ["/lib/x86_64-linux-gnu/libgcc_s.so.1", "/lib64/ld-linux-x86-64.so.2"]);
        assert_eq!(libraries("\tstatically linked\n"), [""; 0]);
    }

    #[test]
    fn what_an_interpreter_says() {
        let python =
            parse("file of the script\ninterpreter /usr/bin/x\nfile /nonexistent\nfile /proc/self/maps\n").unwrap();
        assert_eq!(python.interpreter, Path::new("/usr/bin/x"));
        assert_eq!(python.files.into_iter().collect::<Vec<_>>(), [Path::new("/proc/self/maps")]);
        assert!(parse("file /proc/self/maps\n").is_err());
    }
}
