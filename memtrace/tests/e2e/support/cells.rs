//! Builds the programs of the cells: a language, an allocator, and the way the allocator comes into the process.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use super::{
    build::{artifact, run, sources_directory},
    cargo::{self, StaticLibrary},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    C,
    Cpp,
    Rust,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocator {
    Glibc,
    Jemalloc,
    /// Of a crate: its functions are named `_rjem_malloc`, ….
    PrefixedJemalloc,
    Tcmalloc,
    Mimalloc,
    /// The C library's as well as its allocator.
    Musl,
    Scudo,
    /// Of a crate.
    Snmalloc,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A shared library that the program needs.
    Dynamic,
    /// Linked into the program, which still needs other shared libraries, except where the allocator is the C library's.
    Static,
    /// By LD_PRELOAD, in a program that knows nothing of it.
    Preloaded,
    /// Needed by a library that is opened before the trace.
    Dlopened,
    /// Linked into a library that is opened before the trace.
    DlopenedStatic,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub language: Language,
    pub allocator: Allocator,
    pub way: Way,
}

/// As distributions compile, but that nothing merges or inlines functions.
const FLAGS: [&str; 12] = [
    "-O2",
    "-g",
    "-Wall",
    "-Wextra",
    "-pthread",
    "-fPIC",
    "-fomit-frame-pointer",
    "-fno-optimize-sibling-calls",
    "-fno-builtin",
    "-fno-ipa-icf",
    "-fno-ipa-ra",
    "-fcf-protection=none",
];

impl Cell {
    /// The command that starts the program. Builds it first.
    pub fn command(self) -> Command {
        let program = self.program();
        match self.way {
            Way::Dlopened | Way::DlopenedStatic => {
                let mut command = Command::new(host());
                let how = if self.allocator == Allocator::Glibc { "namespace" } else { "early" };
                // jemalloc's variables of threads have to be at a fixed place, for which glibc keeps little room.
                command.arg(how).arg(program).env("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=16384");
                command
            }
            Way::Preloaded => {
                let mut command = Command::new(program);
                command.env("LD_PRELOAD", self.shared_library());
                command
            }
            Way::Dynamic | Way::Static => Command::new(program),
        }
    }

    /// The command that starts a host that opens the cell's library when it is told to.
    pub fn late_command(self) -> Command {
        assert!(self.is_library(), "{self:?} is no library");
        let mut command = Command::new(host());
        command.arg("late").arg(self.program()).env("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=16384");
        command
    }

    /// The program, or the library for a host to open.
    fn program(self) -> PathBuf {
        // The program knows nothing of what will be preloaded.
        let allocator = if self.way == Way::Preloaded { Allocator::Glibc } else { self.allocator };
        let way = match self.way {
            Way::Preloaded => Way::Dynamic,
            way => way,
        };
        let built = Self { allocator, way, ..self };
        let name = format!("cell-{:?}-{allocator:?}-{way:?}", self.language).to_lowercase();
        artifact(&name, |path| built.link(path))
    }

    fn link(self, path: &Path) {
        let musl = self.allocator == Allocator::Musl;
        let compiler = match self.language {
            _ if musl => "musl-gcc",
            Language::Cpp => "c++",
            _ => "cc",
        };
        let mut command = Command::new(compiler);
        command.args(["-pthread", "-o"]).arg(path);
        if self.is_library() {
            command.arg("-shared");
        } else {
            command.arg(self.object("alloc_main.c", &[]));
        }
        if self.way == Way::Static && matches!(self.allocator, Allocator::Glibc | Allocator::Musl) {
            command.arg("-static");
        }
        // The work itself, then what it calls.
        match self.language {
            Language::C => command.args(self.c_objects()),
            Language::Cpp => command.args(self.cpp_objects()),
            Language::Rust if musl => {
                command.arg(cargo::musl_library()).arg(self.object("alloc_musl.c", &[])).arg("-lgcc_eh")
            }
            Language::Rust => {
                let library = match self.allocator {
                    Allocator::PrefixedJemalloc => StaticLibrary::Jemalloc,
                    Allocator::Mimalloc if self.is_static() => StaticLibrary::Mimalloc,
                    Allocator::Snmalloc => StaticLibrary::Snmalloc,
                    _ => StaticLibrary::Plain,
                };
                // Nothing in a library asks for it.
                command.arg("-Wl,-u,cell_main").arg(library.path())
            }
        };
        command.args(["fixture.c", "alloc_book.c"].map(|source| self.object(source, &[])));
        command.args(self.allocator_arguments());
        match self.language {
            Language::Rust if !musl => {
                // A static program has no use for the shared one.
                let unwinder = if self.way == Way::Static { "-lgcc_eh" } else { "-lgcc_s" };
                command.args([unwinder, "-lm", "-ldl"]);
            }
            _ => {}
        }
        if self.is_library() && self.language == Language::Rust {
            command.arg("-Wl,--export-dynamic-symbol=cell_main");
        }
        run(command, compiler);
    }

    fn is_library(self) -> bool {
        matches!(self.way, Way::Dlopened | Way::DlopenedStatic)
    }

    fn is_static(self) -> bool {
        matches!(self.way, Way::Static | Way::DlopenedStatic)
    }

    fn c_objects(self) -> Vec<PathBuf> {
        match self.allocator {
            Allocator::Jemalloc => vec![self.object("alloc_c.c", &[]), self.object("alloc_jemalloc.c", &[])],
            Allocator::PrefixedJemalloc => {
                ["alloc_c.c", "alloc_jemalloc.c"].map(|source| self.object(source, &["-DPREFIX=_rjem_"])).to_vec()
            }
            // Linked statically it leaves the C library's names alone.
            Allocator::Mimalloc if self.is_static() => {
                vec![self.object("alloc_c.c", &["-DPREFIX=mi_"]), self.object("alloc_mimalloc.c", &[])]
            }
            Allocator::Mimalloc => vec![self.object("alloc_c.c", &[]), self.object("alloc_mimalloc.c", &[])],
            _ => vec![self.object("alloc_c.c", &[])],
        }
    }

    fn cpp_objects(self) -> Vec<PathBuf> {
        match self.allocator {
            Allocator::Jemalloc => vec![self.object("alloc_cpp.cpp", &[]), self.object("alloc_jemalloc.c", &[])],
            Allocator::Mimalloc if self.is_static() => {
                let operators = "-DNEW_DELETE=<mimalloc-new-delete.h>";
                vec![self.object("alloc_cpp.cpp", &[operators]), self.object("alloc_mimalloc.c", &[])]
            }
            Allocator::Mimalloc => vec![self.object("alloc_cpp.cpp", &[]), self.object("alloc_mimalloc.c", &[])],
            _ => vec![self.object("alloc_cpp.cpp", &[])],
        }
    }

    /// Compiles one source, once for all cells that need it with these definitions.
    fn object(self, source: &str, definitions: &[&str]) -> PathBuf {
        let compiler = match self.allocator {
            Allocator::Musl => "musl-gcc",
            _ if source.ends_with(".cpp") => "c++",
            _ => "cc",
        };
        let defined: String = definitions.concat().chars().filter(char::is_ascii_alphanumeric).collect();
        artifact(&format!("{source}.{compiler}{defined}.o"), |path| {
            let mut command = Command::new(compiler);
            command.current_dir(sources_directory()).args(FLAGS).args(definitions);
            if source.ends_with(".cpp") {
                command.arg("-std=c++17");
            }
            command.args(["-c", source, "-o"]).arg(path);
            run(command, compiler);
        })
    }

    /// What the linker needs for the allocator.
    fn allocator_arguments(self) -> Vec<String> {
        let of_crate = |library: StaticLibrary, name: &str| {
            if self.language == Language::Rust {
                // It is in the Rust library.
                vec![]
            } else {
                vec![library.native(name).display().to_string()]
            }
        };
        let of_system = |name: &str| vec![library(name), "-lstdc++".into(), "-lm".into(), "-ldl".into()];
        match (self.allocator, self.is_static()) {
            (Allocator::Glibc | Allocator::Musl, _) => vec![],
            (Allocator::PrefixedJemalloc, _) => of_crate(StaticLibrary::Jemalloc, "libjemalloc_pic.a"),
            (Allocator::Mimalloc, true) => of_crate(StaticLibrary::Mimalloc, "libmimalloc.a"),
            (Allocator::Snmalloc, _) => vec!["-lstdc++".into()],
            (Allocator::Jemalloc, true) => of_system("libjemalloc_pic.a"),
            (Allocator::Tcmalloc, true) => of_system("libtcmalloc_minimal.a"),
            (Allocator::Scudo, true) => {
                let mut arguments = vec!["-Wl,--whole-archive".into(), scudo("standalone", "a").display().to_string()];
                if self.language == Language::Cpp {
                    arguments.push(scudo("standalone_cxx", "a").display().to_string());
                }
                arguments.push("-Wl,--no-whole-archive".into());
                arguments
            }
            (_, false) => {
                let path = self.shared_library();
                // Before the C++ library, and whether or not the program names a function of its own.
                vec!["-Wl,--no-as-needed".into(), path.display().to_string(), format!("-Wl,-rpath,{}", parent(&path))]
            }
        }
    }

    fn shared_library(self) -> PathBuf {
        match self.allocator {
            Allocator::Jemalloc => library("libjemalloc.so").into(),
            Allocator::Tcmalloc => library("libtcmalloc_minimal.so").into(),
            Allocator::Mimalloc => library("libmimalloc.so").into(),
            Allocator::Scudo => scudo("standalone", "so"),
            _ => panic!("{self:?}: there is no such library"),
        }
    }

    /// The beginnings of the file names that the allocator's code can be in.
    pub fn modules(self) -> &'static [&'static str] {
        match (self.allocator, self.is_static()) {
            (Allocator::Glibc, false) => &["libc.so.6"],
            // One file under two names.
            (Allocator::Musl, false) => &["libc.so", "ld-musl-x86_64.so.1"],
            (Allocator::Jemalloc, false) => &["libjemalloc.so"],
            (Allocator::Tcmalloc, false) => &["libtcmalloc_minimal.so"],
            (Allocator::Mimalloc, false) => &["libmimalloc.so"],
            (Allocator::Scudo, false) => &["libclang_rt.scudo"],
            _ => &["cell-"],
        }
    }

    /// Whether the process calls the C library's own functions for memory, alone or beside the allocator.
    pub fn uses_libc(self) -> bool {
        let names_of_its_own = matches!(
            (self.allocator, self.is_static()),
            (Allocator::PrefixedJemalloc | Allocator::Snmalloc | Allocator::Glibc, _) | (Allocator::Mimalloc, true)
        );
        let opened = matches!(self.way, Way::Dlopened | Way::DlopenedStatic);
        names_of_its_own || opened
    }
}

fn host() -> PathBuf {
    artifact("cell-host", |path| {
        let mut command = Command::new("cc");
        command.current_dir(sources_directory()).args(["-O2", "-Wall", "-Wextra", "alloc_host.c", "-ldl", "-o"]);
        command.arg(path);
        run(command, "cc");
    })
}

/// Where the compiler finds a library of the system.
fn library(name: &str) -> String {
    let output = Command::new("cc").arg(format!("-print-file-name={name}")).output().expect("cc starts");
    let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    assert!(path.starts_with('/'), "there is no {name} on this system: `cargo xtask setup` installs it");
    path
}

/// Scudo as LLVM's packages bring it.
fn scudo(part: &str, extension: &str) -> PathBuf {
    let clang = Path::new("/usr/lib/llvm-16/lib/clang/16/lib/linux");
    let path = clang.join(format!("libclang_rt.scudo_{part}-x86_64.{extension}"));
    assert!(path.exists(), "there is no {}: `cargo xtask setup` installs it", path.display());
    path
}

fn parent(path: &Path) -> std::path::Display<'_> {
    path.parent().unwrap_or(Path::new("/")).display()
}
