//! `cargo xtask setup`: looks what building and testing take, and installs what is missing.

mod apt;
mod linker;
mod os;

use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::{
    ebpf::{Facts, Toolchain},
    run,
};

/// A program that building or testing starts, or a file that it needs, and Debian's package that has it.
struct Program {
    /// Of a program in `PATH`, or a file's path.
    name: &'static str,
    package: &'static str,
    purpose: &'static str,
}

const PROGRAMS: [Program; 16] = [
    program("cc", "gcc", "links Rust programs, builds the tests' programs"),
    program("c++", "g++", "builds the tests' C++ programs"),
    program("python3", "python3", "a program that the tests trace"),
    program("sqlite3", "sqlite3", "a program that the tests trace"),
    program("jq", "jq", "a program that the tests trace"),
    program("setpriv", "util-linux", "runs memtrace without privileges"),
    program("musl-gcc", "musl-tools", "builds the tests' programs for musl"),
    program("redis-check-rdb", "redis-tools", "redis's server under another name, which the tests trace"),
    program("redis-benchmark", "redis-tools", "loads the server that the tests trace"),
    program("nginx", "nginx", "a server that the tests trace"),
    program("node", "nodejs", "a program that the tests trace"),
    program("/usr/bin/python3-config", "python3-dev", "builds the tests' Python module"),
    program("/usr/lib/x86_64-linux-gnu/libjemalloc_pic.a", "libjemalloc-dev", ALLOCATOR),
    program("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.a", "libgoogle-perftools-dev", ALLOCATOR),
    program("/usr/lib/x86_64-linux-gnu/libmimalloc.so", "libmimalloc-dev", ALLOCATOR),
    program(
        "/usr/lib/llvm-16/lib/clang/16/lib/linux/libclang_rt.scudo_standalone-x86_64.so",
        "libclang-rt-16-dev",
        ALLOCATOR,
    ),
];

/// Purpose of a library.
const ALLOCATOR: &str = "an allocator that the tests' programs use";

const fn program(name: &'static str, package: &'static str, purpose: &'static str) -> Program {
    Program { name, package, purpose }
}

/// Installs what this machine lacks, or says what has to be installed.
pub fn setup() -> Result<()> {
    let root = run::root()?;
    let missing = missing_programs();
    let toolchain = Toolchain::choose(&Facts::gather());
    let linker = match toolchain {
        Some(toolchain) => linker::find(toolchain, &root)?,
        None => linker::Found::Missing,
    };
    if let (true, Some(toolchain), linker::Found::Usable(path)) = (missing.is_empty(), toolchain, &linker) {
        report(toolchain, path, &root)?;
        return Ok(());
    }

    let needs = Needs { missing, toolchain, linker };
    let release = os::Release::read()?;
    if !release.is_debian_like() || !run::on_path("apt-get") {
        bail!("{}", needs.instructions(&release));
    }
    needs.install(&root)
}

/// Installs those of the packages of which a file is missing.
pub fn packages(files: &[(&Path, &str)]) -> Result<()> {
    let missing: Vec<String> =
        files.iter().filter(|(file, _)| !file.exists()).map(|(_, package)| (*package).to_owned()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    apt::Apt::default().install(&missing)?;
    match files.iter().find(|(file, _)| !file.exists()) {
        Some((file, package)) => bail!("package {package} has no {}", file.display()),
        None => Ok(()),
    }
}

fn missing_programs() -> Vec<&'static Program> {
    PROGRAMS.iter().filter(|program| !run::on_path(program.name)).collect()
}

fn report(toolchain: Toolchain, linker: &Path, root: &Path) -> Result<()> {
    let version = run::output(toolchain.rustc().arg("--version"))?;
    let source = match toolchain {
        Toolchain::Distribution => "the distribution's",
        Toolchain::Nightly => "rustup nightly's",
    };
    eprintln!(
        "setup: nothing is missing: {}; eBPF compiler: {source} {}; linker: {}",
        PROGRAMS.map(|program| program.name).join(", "),
        version.trim(),
        linker.strip_prefix(root).unwrap_or(linker).display()
    );
    Ok(())
}

/// What this machine lacks.
struct Needs {
    missing: Vec<&'static Program>,
    toolchain: Option<Toolchain>,
    linker: linker::Found,
}

impl Needs {
    /// Installs all of it on a system with apt-get.
    fn install(&self, root: &Path) -> Result<()> {
        let mut apt = apt::Apt::default();
        let mut packages: Vec<String> = self.missing.iter().map(|program| program.package.to_owned()).collect();
        for program in &self.missing {
            eprintln!("setup: {} is missing: {}", program.name, program.purpose);
        }
        if self.toolchain.is_none() {
            eprintln!("setup: no compiler for the eBPF programs");
            packages.extend(apt.rust_packages()?);
        }
        apt.install(&packages)?;

        if let Some(program) = missing_programs().first() {
            bail!("{} is still missing with package {} installed", program.name, program.package);
        }
        let toolchain = Toolchain::choose(&Facts::gather())
            .context("the eBPF programs' compiler is still missing after its installation")?;
        if !matches!(self.linker, linker::Found::Usable(_)) {
            match &self.linker {
                linker::Found::Unusable(path, why) => {
                    eprintln!("setup: {} cannot be used: {why}", path.display());
                }
                _ => eprintln!("setup: bpf-linker is missing"),
            }
            linker::install(toolchain, root, &mut apt)?;
        }
        match linker::find(toolchain, root)? {
            linker::Found::Usable(path) => report(toolchain, &path, root),
            linker::Found::Unusable(path, why) => {
                bail!("{} cannot be used: {why}", path.display())
            }
            linker::Found::Missing => bail!("bpf-linker is still missing after its installation"),
        }
    }

    /// What to do on a system without apt-get.
    fn instructions(&self, release: &os::Release) -> String {
        let mut text =
            format!("on {} this has to be installed by hand, then run `cargo xtask setup` again:", release.name());
        for program in &self.missing {
            text.push_str(&format!(
                "\n  - the program {} ({}; in Debian's package {})",
                program.name, program.purpose, program.package
            ));
        }
        if self.toolchain.is_none() {
            text.push_str(&format!("\n  - a compiler for the eBPF programs: {NIGHTLY}"));
        }
        let compiler = self.toolchain.and_then(|toolchain| linker::compiler_llvm(toolchain).ok());
        let instructions = linker::instructions(compiler);
        match &self.linker {
            linker::Found::Usable(_) => {}
            linker::Found::Missing => text.push_str(&format!("\n  - {instructions}")),
            linker::Found::Unusable(path, why) => text
                .push_str(&format!("\n  - {instructions} in place of {}, which cannot be used: {why}", path.display())),
        }
        text
    }
}

/// How rustup brings the eBPF programs' compiler.
const NIGHTLY: &str = "rustup toolchain install nightly --profile minimal --component rust-src";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ebpf;

    #[test]
    fn the_distributions_compiler_is_preferred_if_new_enough() {
        let choose = |distribution, nightly| Toolchain::choose(&Facts { distribution, nightly });
        assert_eq!(choose(Some((1, 96)), true), Some(Toolchain::Distribution));
        assert_eq!(choose(Some((1, 88)), false), Some(Toolchain::Distribution));
        assert_eq!(choose(Some((1, 63)), true), Some(Toolchain::Nightly));
        assert_eq!(choose(Some((1, 63)), false), None);
        assert_eq!(choose(None, true), Some(Toolchain::Nightly));
        assert_eq!(choose(None, false), None);
    }

    #[test]
    fn versions_of_compilers_and_packages() {
        assert_eq!(ebpf::version("rustc 1.96.0 (ac68faa20 2026-05-25)"), Some((1, 96)));
        assert_eq!(ebpf::version("1.85.0+dfsg3-1~deb12u3"), Some((1, 85)));
        assert_eq!(ebpf::version("(none)"), None);
    }

    #[test]
    fn instructions_name_everything_that_is_missing() {
        let needs =
            Needs { missing: vec![&PROGRAMS[0], &PROGRAMS[5]], toolchain: None, linker: linker::Found::Missing };
        let text = needs.instructions(&os::Release::parse("NAME=\"Fedora Linux\"\nID=fedora\n"));
        for word in ["Fedora Linux", "cc", "setpriv", NIGHTLY, "bpf-linker"] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
}
