//! The emulator: the machine's own, or one from Debian's packages in a directory of its own, with all its libraries.

use std::{
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use super::{archive::Archives, results::Ended};
use crate::run;

const NAME: &str = "qemu-system-x86_64";
/// The suite to take qemu from: Debian's stable one.
const SUITE: &str = "trixie";
const MEMORY: &str = "1024";
const CPUS: &str = "2";

/// A way to start qemu.
pub struct Qemu {
    /// The directory with Debian's packages; `None` for the machine's own.
    root: Option<PathBuf>,
}

/// A machine to emulate.
pub struct Machine<'a> {
    pub kernel: &'a Path,
    pub initramfs: &'a Path,
    /// For the kernel's command line, besides where its console is.
    pub arguments: String,
    /// File that all that is said on the console goes to.
    pub console: &'a Path,
    pub limit: Duration,
}

impl Qemu {
    /// Finds qemu, or gets it. Nothing is installed for that: the packages of a machine may not agree with it.
    pub fn find(directory: &Path, archives: &mut Archives) -> Result<Self> {
        if run::on_path(NAME) {
            return Ok(Self { root: None });
        }
        let root = directory.join("qemu");
        let complete = root.join("complete");
        if !complete.is_file() {
            eprintln!("vm: {NAME} is missing: getting it from Debian's packages");
            archives.open(SUITE)?.extract_with_dependencies("qemu-system-x86", &root)?;
            fs::write(&complete, "").with_context(|| complete.display().to_string())?;
        }
        Ok(Self { root: Some(root) })
    }

    fn command(&self) -> Command {
        let Some(root) = &self.root else { return run::plain(NAME) };
        let libraries = root.join("usr/lib/x86_64-linux-gnu");
        // With its own dynamic loader and C library, which may be newer than the machine's.
        let mut command = run::plain(libraries.join("ld-linux-x86-64.so.2"));
        let mut path = libraries.clone().into_os_string();
        path.push(":");
        path.push(libraries.join("pulseaudio"));
        command.arg("--library-path").arg(path).arg(root.join("usr/bin").join(NAME));
        command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
        for data in ["usr/share/qemu", "usr/share/seabios"] {
            command.arg("-L").arg(root.join(data));
        }
        command
    }

    /// Runs a machine until it turns itself off or its time has passed.
    pub fn run(&self, machine: &Machine) -> Result<Ended> {
        let console = File::create(machine.console).with_context(|| machine.console.display().to_string())?;
        let mut command = self.command();
        command
            .args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", CPUS, "-m", MEMORY])
            // A panic reboots, and that ends it.
            .args(["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"])
            .arg("-kernel")
            .arg(machine.kernel)
            .arg("-initrd")
            .arg(machine.initramfs)
            .arg("-append")
            .arg(format!("console=ttyS0 panic=-1 quiet loglevel=5 {}", machine.arguments))
            .stdin(Stdio::null())
            .stdout(console.try_clone().context("the console's file")?)
            .stderr(console);
        let line = run::line(&command);
        if env::var_os("MEMTRACE_VM_VERBOSE").is_some() {
            eprintln!("+ {line}");
        }
        let mut running = Running(command.spawn().with_context(|| format!("could not start: {line}"))?);
        let started = Instant::now();
        loop {
            if let Some(status) = running.0.try_wait().context("waiting for qemu")? {
                if !status.success() {
                    let said = fs::read_to_string(machine.console).unwrap_or_default();
                    bail!("qemu failed ({status}): {line}\n{}", super::results::tail(&said));
                }
                return Ok(Ended::Exited(status.to_string()));
            }
            if started.elapsed() >= machine.limit {
                return Ok(Ended::Timeout(machine.limit.as_secs()));
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The process, which is ended when this value goes out of scope.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Fails only if it has ended, which is what is wanted.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
