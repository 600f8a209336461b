//! Where the compiler and the linker of the eBPF programs come from, and the command that builds them. The build
//! script and `cargo xtask` include this one file, so that setup checks what the build will use.
//!
//! The eBPF target needs `core` built from source, with unstable options, and a linker whose LLVM reads what the
//! compiler's LLVM writes: the linker's must be the same or newer.
#![allow(dead_code, reason = "the build script and xtask each use a part of it")]

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

/// The target of the eBPF programs: 64-bit little-endian eBPF.
pub const TARGET: &str = "bpfel-unknown-none";

/// Oldest compiler taken from the distribution, as (major, minor): what the workspace asks for. An older one would
/// fail on memtrace's code with messages that do not tell why.
const OLDEST_RUSTC: (u32, u32) = (1, 88);

const DISTRIBUTION_RUSTC: &str = "/usr/bin/rustc";
/// Where Debian and Ubuntu put the source of `core` that belongs to [`DISTRIBUTION_RUSTC`].
const DISTRIBUTION_CORE: &str = "/usr/lib/rustlib/src/rust/library/core/Cargo.toml";

/// A compiler that can build for [`TARGET`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Toolchain {
    /// `/usr/bin/rustc` of Debian's and Ubuntu's packages, with the source of its standard library.
    Distribution,
    /// rustup's nightly with its `rust-src` component.
    Nightly,
}

/// What [`Toolchain::choose`] decides from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Version of the distribution's compiler, if it and its library source are there.
    pub distribution: Option<(u32, u32)>,
    /// Whether rustup's nightly and its `rust-src` are there.
    pub nightly: bool,
}

impl Facts {
    /// Looks at this machine.
    pub fn gather() -> Self {
        let distribution = Path::new(DISTRIBUTION_CORE)
            .exists()
            .then(|| stdout(Command::new(DISTRIBUTION_RUSTC).arg("--version")))
            .flatten()
            .and_then(|text| version(&text));
        // rustup is asked only if need be: its answer takes longer than everything else here.
        let nightly = !distribution.is_some_and(new_enough)
            && stdout(Command::new("rustup").args(["run", "nightly", "rustc", "--print", "sysroot"])).is_some_and(
                |sysroot| Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core/Cargo.toml").exists(),
            );
        Self { distribution, nightly }
    }
}

impl Toolchain {
    /// The distribution's compiler if it is new enough, else rustup's nightly.
    pub fn choose(facts: &Facts) -> Option<Self> {
        if facts.distribution.is_some_and(new_enough) {
            Some(Self::Distribution)
        } else if facts.nightly {
            Some(Self::Nightly)
        } else {
            None
        }
    }

    /// Its compiler, with unstable features allowed.
    pub fn rustc(self) -> Command {
        let mut command = match self {
            Self::Distribution => Command::new(DISTRIBUTION_RUSTC),
            Self::Nightly => rustup_nightly("rustc"),
        };
        command.env("RUSTC_BOOTSTRAP", "1");
        command
    }

    fn cargo(self) -> Command {
        let mut command = match self {
            Self::Distribution => {
                let mut command = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
                command.env("RUSTC", DISTRIBUTION_RUSTC);
                command
            }
            Self::Nightly => {
                let mut command = rustup_nightly("cargo");
                command.env_remove("RUSTC");
                command
            }
        };
        command.env("RUSTC_BOOTSTRAP", "1");
        command
    }
}

/// The bpf-linker of `.tools/bin` under the workspace's root, else one on `PATH`.
pub fn find_linker(root: &Path) -> Option<PathBuf> {
    search_path(root).map(|directory| directory.join("bpf-linker")).find(|file| file.is_file())
}

/// The command that builds the eBPF programs into `target_dir`, with `rustc_flags` besides what they always take.
///
/// # Errors
/// One sentence if `PATH` cannot be extended.
pub fn build_command(
    toolchain: Toolchain,
    root: &Path,
    target_dir: &Path,
    rustc_flags: &[&str],
) -> Result<Command, String> {
    let path = env::join_paths(search_path(root)).map_err(|error| format!("PATH: {error}"))?;
    let mut command = toolchain.cargo();
    command
        .args(["build", "--release", "--locked", "-Z", "build-std=core"])
        .args(["--target", TARGET, "--target-dir"])
        .arg(target_dir)
        .current_dir(root.join("memtrace-ebpf"))
        .env("PATH", path)
        .env("CARGO_ENCODED_RUSTFLAGS", encoded_flags(rustc_flags));
    // What these say is meant for the host's build.
    for name in
        ["RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "RUSTFLAGS", "RUSTDOC", "CARGO_TARGET_DIR", "CARGO_BUILD_TARGET"]
    {
        command.env_remove(name);
    }
    Ok(command)
}

fn encoded_flags(more: &[&str]) -> OsString {
    let mut flags = vec![
        "--cfg",
        "bpf_target_arch=\"x86_64\"",
        // BTF, which the verifier wants for callbacks and prints in its log.
        "-Cdebuginfo=2",
        "-Clink-arg=--btf",
        // 32-bit ALU operations and atomic operations that return a value.
        "-Ctarget-cpu=v3",
    ];
    flags.extend(more);
    flags.join("\x1f").into()
}

fn search_path(root: &Path) -> impl Iterator<Item = PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let directories: Vec<_> = env::split_paths(&path).collect();
    std::iter::once(root.join(".tools/bin")).chain(directories)
}

/// Whether a compiler of this version can build memtrace.
pub fn new_enough(version: (u32, u32)) -> bool {
    version >= OLDEST_RUSTC
}

fn rustup_nightly(program: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", program]);
    command
}

/// What a command prints, if it can be started and succeeds.
fn stdout(command: &mut Command) -> Option<String> {
    let output = command.output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// (1, 96) of `rustc 1.96.0 (…)`, or of a package version `1.96.0+dfsg1-1`.
pub fn version(text: &str) -> Option<(u32, u32)> {
    let number = text.strip_prefix("rustc ").unwrap_or(text);
    let mut parts = number.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}
