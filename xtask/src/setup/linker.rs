//! bpf-linker: finding one that understands the compiler, and building one.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::{NIGHTLY, apt::Apt};
use crate::{
    build,
    ebpf::{self, Toolchain},
    run,
};

const VERSION: &str = "0.13.0";
/// LLVM versions that this version of bpf-linker can be built with.
const LLVM_VERSIONS: std::ops::RangeInclusive<u32> = 21..=23;

/// What there is.
#[derive(Debug)]
pub enum Found {
    /// A linker that links what the compiler writes.
    Usable(PathBuf),
    /// A linker that does not, and its words.
    Unusable(PathBuf, String),
    /// None in `.tools/bin`, none on `PATH`.
    Missing,
}

/// Looks for the linker that the build will take, and compares its LLVM with the compiler's.
pub fn find(toolchain: Toolchain, root: &Path) -> Result<Found> {
    let Some(linker) = ebpf::find_linker(root) else {
        return Ok(Found::Missing);
    };
    let compiler = compiler_llvm(toolchain)?;
    Ok(match linker_llvm(&linker) {
        Ok(version) if version >= compiler => Found::Usable(linker),
        Ok(version) => Found::Unusable(
            linker,
            format!("it has LLVM {version}, the compiler LLVM {compiler}, whose output it may not understand"),
        ),
        Err(error) => Found::Unusable(linker, format!("{error:#}")),
    })
}

/// LLVM version of the compiler.
pub fn compiler_llvm(toolchain: Toolchain) -> Result<u32> {
    llvm_version(&run::output(toolchain.rustc().arg("-vV"))?).context("rustc -vV does not tell its LLVM version")
}

/// Asks the LLVM in the linker itself: the linker's own version says nothing about it, and a shared LLVM may have
/// gone with an upgrade.
fn linker_llvm(linker: &Path) -> Result<u32> {
    let directory = build::target_directory()?.join("setup");
    // LLVM ends the linker once it has told its version, so neither file is touched; the linker wants their names.
    let told = run::output(
        Command::new(linker)
            .args(["--target", "bpfel", "--llvm-args=--version", "--output"])
            .arg(directory.join("none.o"))
            .arg(directory.join("none.bc")),
    )?;
    llvm_version(&told).with_context(|| format!("it does not tell its LLVM version: {told:?}"))
}

/// Builds bpf-linker into `.tools`, with an LLVM from the distribution's packages.
pub fn install(toolchain: Toolchain, root: &Path, apt: &mut Apt) -> Result<()> {
    let compiler = compiler_llvm(toolchain)?;
    let packages: Vec<String> =
        LLVM_VERSIONS.filter(|version| *version >= compiler).map(|version| format!("llvm-{version}-dev")).collect();
    let Some(package) = apt.first_available(&packages)? else {
        bail!(
            "the eBPF programs' compiler has LLVM {compiler}, and this release has none of the packages {} to build \
             bpf-linker with. Install {}. Its compiler can be rustup's: {NIGHTLY}",
            packages.join(" "),
            instructions(Some(compiler))
        );
    };
    let name = package.trim_end_matches("-dev");
    apt.install(&[package.clone(), "zlib1g-dev".into(), "libzstd-dev".into()])?;
    run::run(
        run::cargo("install")?
            .args(["bpf-linker", "--version", VERSION, "--locked", "--force"])
            .args(["--no-default-features", "--features", name, "--root"])
            .arg(root.join(".tools"))
            .env("LLVM_PREFIX", Path::new("/usr/lib").join(name)),
    )
}

/// How to get a linker where no package brings its LLVM, for a compiler with that of version `compiler`.
pub fn instructions(compiler: Option<u32>) -> String {
    let llvm = compiler.map_or_else(
        || "the LLVM version that the eBPF programs' `rustc -vV` names".to_owned(),
        |version| format!("LLVM {version}"),
    );
    format!(
        "bpf-linker {VERSION} or newer, in PATH or in .tools/bin, built with {llvm} or newer: the prebuilt program of \
         its release page, or `cargo binstall bpf-linker`, or, with the development files of LLVM N, zlib and zstd, \
         `LLVM_PREFIX=$(llvm-config --prefix) cargo install bpf-linker --version {VERSION} --locked \
         --no-default-features --features llvm-N --root .tools`"
    )
}

/// 22 of `LLVM version: 22.1.8`, as compilers write it, or of `LLVM version 22.1.8`, as LLVM does.
fn llvm_version(text: &str) -> Option<u32> {
    let (_, after) = text.split_once("LLVM version")?;
    let number = after.trim_start_matches(':').trim_start();
    number.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llvm_version_of_a_compiler_and_of_a_linker() {
        assert_eq!(llvm_version("rustc 1.96.0\nhost: x\nLLVM version: 22.1.8\n"), Some(22));
        assert_eq!(llvm_version("Debian LLVM version 22.1.8\n  Optimized build."), Some(22));
        assert_eq!(llvm_version("LLVM (http://llvm.org/):\n  LLVM version 21.1.0-rc1\n"), Some(21));
        assert_eq!(llvm_version("rustc 1.96.0\n"), None);
    }
}
