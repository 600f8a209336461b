//! The options that say which processes to trace.

use std::{convert::Infallible, ffi::OsString, path::PathBuf};

use crate::target::{PidNamespace, Selection};

/// Which processes to trace, or the command to start.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("target").required(true).args(
    ["pid", "comm", "cgroup", "container", "all_processes", "command"]
))]
pub struct Targets {
    /// Processes to trace
    #[arg(short, long, value_name = "PID", value_delimiter = ',', value_parser = pid)]
    pid: Vec<u32>,
    /// Takes the numbers after -p for those inside a pid namespace: that of the process NS, or of a file such as
    /// /proc/PID/ns/pid
    #[arg(long, value_name = "NS", value_parser = pid_namespace, requires = "pid",
        conflicts_with_all = ["comm", "cgroup", "container", "all_processes", "command"])]
    pid_ns: Option<PidNamespace>,
    /// Traces the processes of that command name, also those that appear later. "*" stands for any characters, "?" for any
    /// one of them
    #[arg(long, value_name = "NAME", value_parser = not_empty)]
    comm: Option<String>,
    /// Traces the processes in a cgroup and in those below it, also those that appear later: a path such as
    /// /sys/fs/cgroup/system.slice/nginx.service, or one from /proc/PID/cgroup
    #[arg(long, value_name = "PATH", value_parser = clap::builder::PathBufValueParser::new())]
    cgroup: Option<PathBuf>,
    /// Traces the processes in a container, also those that appear later: its id, or the first 12 digits of it or more
    /// (Docker, containerd, Podman, CRI-O, Kubernetes), or the name of an LXC container
    #[arg(long, value_name = "ID", value_parser = not_empty)]
    container: Option<String>,
    /// Traces all processes but memtrace itself, also those that appear later
    #[arg(long)]
    all_processes: bool,
    /// Command to start and trace; its exit status becomes memtrace's
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

impl Targets {
    /// The processes to trace; `None` if there is a command to start.
    ///
    /// # Errors
    /// If nothing was asked for, which the command line does not allow.
    pub fn selection(&self) -> anyhow::Result<Option<Selection>> {
        let selection = if !self.command.is_empty() {
            return Ok(None);
        } else if !self.pid.is_empty() {
            Selection::pids(&self.pid, self.pid_ns.clone())
        } else if let Some(name) = &self.comm {
            Selection::comm(name)
        } else if let Some(path) = &self.cgroup {
            Selection::cgroup(path)
        } else if let Some(id) = &self.container {
            Selection::container(id)
        } else if self.all_processes {
            Selection::all()
        } else {
            anyhow::bail!("no process was named");
        };
        Ok(Some(selection))
    }

    /// The command to start, with its arguments; empty if processes were named.
    pub fn command(&self) -> &[OsString] {
        &self.command
    }
}

fn pid(text: &str) -> Result<u32, String> {
    text.parse().ok().filter(|pid| *pid > 0).ok_or_else(|| "must be the number of a process".to_owned())
}

fn pid_namespace(text: &str) -> Result<PidNamespace, String> {
    not_empty(text)?.parse().map_err(|never: Infallible| match never {})
}

fn not_empty(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("must not be empty".to_owned()) } else { Ok(text.to_owned()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use std::ffi::OsStr;

    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        targets: Targets,
    }

    fn described(arguments: &str) -> Result<Option<String>, clap::error::ErrorKind> {
        let arguments = std::iter::once("memtrace").chain(arguments.split_whitespace());
        let cli = Cli::try_parse_from(arguments).map_err(|error| error.kind())?;
        Ok(cli.targets.selection().unwrap().map(|selection| selection.describe()))
    }

    #[test]
    fn what_is_selected() {
        for (arguments, expected) in [
            ("-p 41", "process 41"),
            ("-p 43,41 --pid 42 -p 41", "processes 41, 42, 43"),
            ("-p 7 --pid-ns 41", "process 7 of the pid namespace of process 41"),
            ("-p 7 --pid-ns /proc/41/ns/pid", "process 7 of the pid namespace of \"/proc/41/ns/pid\""),
            ("--comm nginx", "processes named \"nginx\""),
            ("--comm ngi*", "processes named like \"ngi*\""),
            ("--comm a-very-long-name", "processes named \"a-very-long-nam\""),
            ("--cgroup /system.slice", "processes in the cgroup \"/system.slice\""),
            ("--container web", "processes in the container \"web\""),
            ("--all-processes", "all processes"),
        ] {
            assert_eq!(described(arguments), Ok(Some(expected.to_owned())), "{arguments}");
        }
        assert_eq!(described("-- true --comm x"), Ok(None));
    }

    #[test]
    fn one_kind_of_target_is_needed_and_only_one() {
        use clap::error::ErrorKind::{ArgumentConflict, MissingRequiredArgument, ValueValidation};
        assert_eq!(described(""), Err(MissingRequiredArgument));
        assert_eq!(described("--pid-ns 41"), Err(MissingRequiredArgument));
        for both in [
            "-p 41 --comm x",
            "--all-processes -p 41",
            "--cgroup / --container x",
            "--comm x -- true",
            "--comm x --pid-ns 41",
            "--pid-ns 41 -- true",
        ] {
            assert_eq!(described(both), Err(ArgumentConflict), "{both}");
        }
        for wrong in ["-p 0", "-p -1", "-p x", "-p 41,", "--comm=", "--pid-ns= -p 1", "--container="] {
            let kind = described(wrong).unwrap_err();
            assert!(matches!(kind, ValueValidation | clap::error::ErrorKind::UnknownArgument), "{wrong}: {kind:?}");
        }
    }

    #[test]
    fn the_command_keeps_its_arguments() {
        let cli = Cli::try_parse_from(["memtrace", "--", "true", "-p", "1"]).unwrap();
        assert_eq!(cli.targets.command(), ["true", "-p", "1"].map(OsStr::new));
    }
}
