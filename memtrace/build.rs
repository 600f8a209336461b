//! Compiles the eBPF programs and puts the object file where `kernel::object` embeds it from.

#[path = "build/ebpf.rs"]
mod ebpf;

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use ebpf::Toolchain;

fn main() {
    if let Err(message) = build() {
        println!("cargo::error={message}");
        std::process::exit(1);
    }
}

fn build() -> Result<(), String> {
    let manifest = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let root = manifest.parent().ok_or("the memtrace package must be inside its workspace")?;
    for path in [
        "memtrace/build.rs",
        "memtrace/build",
        "memtrace-ebpf/src",
        "memtrace-ebpf/Cargo.toml",
        "memtrace-ebpf/Cargo.lock",
        "memtrace-common/src",
    ] {
        println!("cargo::rerun-if-changed={}", root.join(path).display());
    }
    // The tools are searched on PATH, but a change of PATH alone changes nothing: cargo extends it for what it runs,
    // and would then build again.
    let toolchain = Toolchain::choose(&ebpf::Facts::gather())
        .ok_or("no toolchain for the eBPF programs: run `cargo xtask setup`, which installs one or says how to")?;
    let linker = ebpf::find_linker(root)
        .ok_or("bpf-linker is missing: run `cargo xtask setup`, which installs it into .tools/bin")?;
    println!("cargo::rerun-if-changed={}", linker.display());

    let out = PathBuf::from(variable("OUT_DIR")?);
    let object = compile(toolchain, root, &out.join("ebpf"))?;
    fs::copy(&object, out.join("memtrace.bpf.o")).map_err(|error| format!("{}: {error}", object.display()))?;
    Ok(())
}

fn compile(toolchain: Toolchain, root: &Path, target_dir: &Path) -> Result<PathBuf, String> {
    let output = ebpf::build_command(toolchain, root, target_dir, &[])?
        .output()
        .map_err(|error| format!("cargo for the eBPF programs could not be started: {error}"))?;
    if !output.status.success() {
        let log = String::from_utf8_lossy(&output.stderr);
        for line in log.lines() {
            println!("cargo::warning={line}");
        }
        return Err("the eBPF programs could not be compiled; the compiler's words are above".into());
    }
    Ok(target_dir.join(ebpf::TARGET).join("release/memtrace-ebpf"))
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|error| format!("{name}: {error}"))
}
