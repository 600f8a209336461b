//! Builds the Rust sources of the fixtures.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use serde_json::Value;

use super::build::{directory, sources_directory};

/// A library with the work of a cell in Rust.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StaticLibrary {
    /// With the system's allocator.
    Plain,
    Jemalloc,
    Mimalloc,
    Snmalloc,
}

/// What cargo has built.
struct Built {
    /// Every artifact's file.
    files: Vec<PathBuf>,
    /// The directories that build scripts wrote to.
    out: Vec<PathBuf>,
}

impl StaticLibrary {
    pub fn path(self) -> PathBuf {
        let name = match self {
            Self::Plain => "libcell_plain.a",
            Self::Jemalloc => "libcell_jemalloc.a",
            Self::Mimalloc => "libcell_mimalloc.a",
            Self::Snmalloc => "libcell_snmalloc.a",
        };
        built().file(name)
    }

    /// A C library that the crate of the allocator has built.
    pub fn native(self, name: &str) -> PathBuf {
        let places = built().out.iter().flat_map(|out| [out.join(name), out.join("lib").join(name)]);
        places.into_iter().find(|path| path.exists()).unwrap_or_else(|| panic!("{self:?} has built no {name}"))
    }
}

/// A program of its own with a static jemalloc.
pub fn program(name: &str) -> PathBuf {
    built().file(name)
}

/// The library with the system's allocator for musl, for which the standard library is compiled as well.
pub fn musl_library() -> PathBuf {
    static BUILT: OnceLock<Built> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        // The compiler that builds the eBPF programs comes with the library's source: the distribution's, or nightly.
        let distribution = "/usr/bin/rustc";
        let compiler = if Path::new(distribution).exists() {
            [("RUSTC", distribution), ("RUSTC_BOOTSTRAP", "1")]
        } else {
            [("RUSTUP_TOOLCHAIN", "nightly"), ("CARGO_TERM_COLOR", "never")]
        };
        // In a directory of its own, so that neither waits for the other.
        build(
            "rust-musl",
            &["-Z", "build-std=std,panic_abort", "--target", "x86_64-unknown-linux-musl", "--package", "cell-plain"],
            &compiler,
        )
    });
    built.file("libcell_plain.a")
}

fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| build("rust", &[], &[]))
}

fn build(target: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Built {
    let mut command = Command::new("cargo");
    command
        .current_dir(sources_directory().join("rust-cells"))
        .args(["build", "--release", "--locked", "--message-format=json-render-diagnostics", "--target-dir"])
        .arg(directory().join(target))
        .args(arguments)
        // What cargo tells its tests is about memtrace's compiler.
        .env_remove("LD_LIBRARY_PATH")
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .envs(variables.iter().copied());
    let output = command.output().unwrap_or_else(|error| panic!("cargo does not start: {error}"));
    assert!(
        output.status.success(),
        "a test program can't be compiled: {command:?} ended with {}:\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let mut built = Built { files: vec![], out: vec![] };
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let message: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("no message: {error}: {line}"));
        let files = message["filenames"].as_array().into_iter().flatten().chain([&message["executable"]]);
        built.files.extend(files.filter_map(Value::as_str).map(PathBuf::from));
        built.out.extend(message["out_dir"].as_str().map(PathBuf::from));
    }
    built
}

impl Built {
    fn file(&self, name: &str) -> PathBuf {
        let is_it = |path: &&PathBuf| path.file_name().is_some_and(|file| file == name);
        self.files.iter().find(is_it).unwrap_or_else(|| panic!("cargo has built no {name}")).clone()
    }
}
