//! Compiles the eBPF programs and puts the object file where `kernel::object` embeds it from.
//!
//! The eBPF target needs `core` built from source by a compiler whose LLVM is the one that bpf-linker was linked
//! with. Two toolchains can do that, tried in this order:
//!
//! 1. Debian's and Ubuntu's `rustc-web` with `rust-web-src`, and a bpf-linker in `.tools/bin` (`cargo xtask setup`);
//! 2. rustup's nightly with the `rust-src` component, and a bpf-linker in `.tools/bin` or on `PATH`.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const TARGET: &str = "bpfel-unknown-none";
/// Debian's compiler, and the source of `core` that belongs to it.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
const DEBIAN_CORE: &str = "/usr/lib/rustlib/src/rust/library/core/Cargo.toml";

fn main() {
    if let Err(message) = build() {
        println!("cargo::error={message}");
        std::process::exit(1);
    }
}

fn build() -> Result<(), String> {
    let manifest = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let root = manifest.parent().ok_or("the memtrace package must be inside its workspace")?;
    let source = root.join("memtrace-ebpf");
    for path in ["memtrace-ebpf/src", "memtrace-ebpf/Cargo.toml", "memtrace-ebpf/Cargo.lock", "memtrace-common/src"] {
        println!("cargo::rerun-if-changed={}", root.join(path).display());
    }
    println!("cargo::rerun-if-env-changed=PATH");

    let out = PathBuf::from(variable("OUT_DIR")?);
    let tools = root.join(".tools/bin");
    let linker = find_linker(&tools)
        .ok_or("bpf-linker is missing: run `cargo xtask setup`, which installs it into .tools/bin")?;
    println!("cargo::rerun-if-changed={}", linker.display());
    let mut command = toolchain()?;
    let target_dir = out.join("ebpf");
    command
        .args(["build", "--release", "--locked", "-Z", "build-std=core", "--target", TARGET, "--target-dir"])
        .arg(&target_dir)
        .current_dir(&source)
        .env("PATH", path_with(&tools)?)
        // What cargo sets for this script is meant for the host build.
        .env_remove("RUSTC_WRAPPER")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTFLAGS")
        .env_remove("RUSTDOC")
        .env_remove("CARGO_TARGET_DIR")
        .env_remove("CARGO_BUILD_TARGET")
        .env(
            "CARGO_ENCODED_RUSTFLAGS",
            [
                "--cfg",
                "bpf_target_arch=\"x86_64\"",
                // BTF, which the verifier wants for callbacks and prints in its log.
                "-Cdebuginfo=2",
                "-Clink-arg=--btf",
                // 32-bit ALU operations and atomic operations that return a value.
                "-Ctarget-cpu=v3",
            ]
            .join("\x1f"),
        );
    let output =
        command.output().map_err(|error| format!("cargo for the eBPF programs could not be started: {error}"))?;
    if !output.status.success() {
        let log = String::from_utf8_lossy(&output.stderr);
        for line in log.lines() {
            println!("cargo::warning={line}");
        }
        return Err("the eBPF programs could not be compiled; the compiler's words are above".into());
    }
    let object = target_dir.join(TARGET).join("release/memtrace-ebpf");
    fs::copy(&object, out.join("memtrace.bpf.o")).map_err(|error| format!("{}: {error}", object.display()))?;
    Ok(())
}

/// The cargo command of the first toolchain that is there.
fn toolchain() -> Result<Command, String> {
    if Path::new(DEBIAN_RUSTC).exists() && Path::new(DEBIAN_CORE).exists() {
        let mut command = Command::new(variable("CARGO")?);
        // Allows the unstable cargo and compiler features that building for the eBPF target takes.
        command.env("RUSTC", DEBIAN_RUSTC).env("RUSTC_BOOTSTRAP", "1");
        command.env_remove("RUSTUP_TOOLCHAIN");
        return Ok(command);
    }
    let sysroot = Command::new("rustup")
        .args(["run", "nightly", "rustc", "--print", "sysroot"])
        .output()
        .ok()
        .filter(|output| output.status.success())
        .map(|output| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()));
    if let Some(sysroot) = sysroot
        && sysroot.join("lib/rustlib/src/rust/library/core/Cargo.toml").exists()
    {
        let mut command = Command::new("rustup");
        command.args(["run", "nightly", "cargo"]).env_remove("RUSTC");
        return Ok(command);
    }
    Err("no toolchain for the eBPF programs: run `cargo xtask setup` (it installs rustc-web and rust-web-src on \
         Debian and Ubuntu), or `rustup toolchain install nightly --component rust-src`"
        .into())
}

fn find_linker(tools: &Path) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    std::iter::once(tools.to_path_buf())
        .chain(env::split_paths(&path))
        .map(|directory| directory.join("bpf-linker"))
        .find(|file| file.is_file())
}

fn path_with(tools: &Path) -> Result<OsString, String> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::join_paths(std::iter::once(tools.to_path_buf()).chain(env::split_paths(&path)))
        .map_err(|error| format!("PATH: {error}"))
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|error| format!("{name}: {error}"))
}
