//! Child processes: says what is started, and names the command that failed.

use std::{
    env,
    ffi::OsStr,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

/// The workspace's root directory.
pub fn root() -> Result<PathBuf> {
    let package =
        env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let root = package.parent().context("the xtask package must be inside its workspace")?;
    Ok(root.to_owned())
}

/// The cargo that started this program, run in the workspace's root.
pub fn cargo(subcommand: &str) -> Result<Command> {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
    command.arg(subcommand).current_dir(root()?);
    Ok(command)
}

/// A command that is started as if from a shell: without the library path that cargo sets for what it runs.
pub fn plain(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env_remove("LD_LIBRARY_PATH");
    command
}

/// Prints the command, runs it to its end and fails unless it succeeds.
pub fn run(command: &mut Command) -> Result<()> {
    let line = line(command);
    eprintln!("+ {line}");
    let status = command.stdin(Stdio::null()).status().with_context(|| format!("could not start: {line}"))?;
    if !status.success() {
        bail!("failed ({status}): {line}");
    }
    Ok(())
}

/// What a command prints on its standard output. Its standard error goes into the error if it fails.
pub fn output(command: &mut Command) -> Result<String> {
    let line = line(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("could not start: {line}"))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        bail!("failed ({}): {line}\n{}", output.status, words.trim_end());
    }
    String::from_utf8(output.stdout).with_context(|| format!("not UTF-8: output of {line}"))
}

/// Whether a program of this name is in one of the directories of `PATH`.
pub fn on_path(program: &str) -> bool {
    find(program).is_some()
}

/// The program of this name in the directories of `PATH`.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).map(|directory| directory.join(program)).find(|path| path.is_file())
}

/// Fails with one sentence unless this process is root; `what` says what needs it.
pub fn need_root(what: &str) -> Result<()> {
    if is_root() {
        return Ok(());
    }
    let words: Vec<_> = env::args().skip(1).collect();
    bail!(
        "{what} root: to trace a program is to attach eBPF programs to it. Run it again as root:\n    sudo -E env \
         \"PATH=$PATH\" cargo xtask {}",
        words.join(" ")
    )
}

/// Whether this process is root.
pub fn is_root() -> bool {
    // SAFETY: geteuid takes nothing, touches no memory and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// The command as one would type it, with the variables it sets.
pub fn line(command: &Command) -> String {
    let variables = command.get_envs().filter_map(|(name, value)| {
        let value = value?;
        // cargo's own encoding, with separators that no terminal shows.
        (name != "CARGO_ENCODED_RUSTFLAGS" && name != "PATH").then(|| format!("{}={}", name.display(), quoted(value)))
    });
    let program = match command.get_program() {
        path if env::var_os("CARGO").is_some_and(|cargo| cargo == path) => OsStr::new("cargo"),
        path => path,
    };
    let words = std::iter::once(program).chain(command.get_args()).map(quoted);
    variables.chain(words).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_=./:,+@%".contains(&byte);
    if !word.is_empty() && word.bytes().all(plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_failure_names_the_command() {
        let error = run(Command::new("false").arg("two words")).unwrap_err();
        assert_eq!(error.to_string(), "failed (exit status: 1): false 'two words'");
        let error = output(Command::new("sh").args(["-c", "echo why >&2; exit 3"])).unwrap_err();
        assert_eq!(error.to_string(), "failed (exit status: 3): sh -c 'echo why >&2; exit 3'\nwhy");
        let error = run(&mut Command::new("/no/such program")).unwrap_err();
        assert_eq!(error.to_string(), "could not start: '/no/such program'");
    }

    #[test]
    fn a_command_line_shows_what_it_sets() {
        let mut command = Command::new("cargo");
        command.arg("it's").env("PREFIX", "/usr/lib").env("PATH", "/bin");
        assert_eq!(line(&command), r"PREFIX=/usr/lib cargo 'it'\''s'");
    }
}
