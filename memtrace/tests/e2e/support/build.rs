//! Compiles the fixtures, each once per run of the tests, or takes those that were brought along.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, OnceLock},
};

/// Variable that names a directory of compiled fixtures: those in it are used as they are, others are compiled into it.
/// So they can be taken to a machine without a compiler.
const DIRECTORY: &str = "MEMTRACE_FIXTURES";

/// How ordinary fixtures are compiled: stacks are walked by frame pointers, and neither inlining nor the compiler's
/// own knowledge of malloc may change what the sources say.
const FLAGS: [&str; 9] = [
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-pthread",
    "-fno-omit-frame-pointer",
    "-fno-optimize-sibling-calls",
    "-fno-builtin",
    // What some distributions switch on by default would add calls to the sources.
    "-fcf-protection=none",
];

/// How programs that care for nobody's tracing are compiled.
const PLAIN: [&str; 5] = ["-O2", "-fomit-frame-pointer", "-Wall", "-Wextra", "-pthread"];

/// How programs are compiled from which stacks are walked by their unwind tables: as distributions do, but that nothing
/// merges or inlines functions.
const PLAIN_FLAGS: [&str; 12] = [
    "-O2",
    "-g",
    "-Wall",
    "-Wextra",
    "-pthread",
    "-fomit-frame-pointer",
    "-fno-optimize-sibling-calls",
    "-fno-builtin",
    "-fno-ipa-icf",
    "-fno-ipa-ra",
    "-fcf-protection=none",
    // The deepest paths have some 150 functions.
    "-DMAX_CHAIN=200",
];

/// A compiled fixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fixture {
    Truth,
    TruthLibrary,
    /// [`Self::Truth`], compiled as plain programs are.
    PlainTruth,
    /// [`Self::TruthLibrary`], compiled as plain libraries are.
    PlainTruthLibrary,
    Rules,
    Cpp,
    /// Compiled as plain programs are, with the C++ library's own operators.
    Strings,
    Busy,
    Start,
    /// Without frame pointers; functions of libraries are bound at their first call.
    Stacks,
    /// The same, bound at the start.
    StacksNow,
    /// The same, at fixed addresses.
    StacksFixed,
    StacksLibrary,
    StacksLibraryLarge,
    /// Without any shared library.
    Static,
    /// Of the other word size.
    Tiny32,
}

impl Fixture {
    /// Every one. (Its length is that of the enumeration.)
    pub const ALL: [Self; Self::Tiny32 as usize + 1] = [
        Self::Truth,
        Self::TruthLibrary,
        Self::PlainTruth,
        Self::PlainTruthLibrary,
        Self::Rules,
        Self::Cpp,
        Self::Strings,
        Self::Busy,
        Self::Start,
        Self::Stacks,
        Self::StacksNow,
        Self::StacksFixed,
        Self::StacksLibrary,
        Self::StacksLibraryLarge,
        Self::Static,
        Self::Tiny32,
    ];

    /// Where it is; compiles it first if this run of the tests has not done so, and it was not brought along.
    ///
    /// Panics with the compiler's words if that fails.
    pub fn path(self) -> PathBuf {
        static DONE: OnceLock<Mutex<Vec<Fixture>>> = OnceLock::new();
        // A test that panicked here has left nothing half done: files appear by renaming.
        let mut done = DONE.get_or_init(Mutex::default).lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let path = directory().join(self.name());
        if !done.contains(&self) {
            let brought = std::env::var_os(DIRECTORY).is_some() && path.exists();
            if !brought {
                self.compile(&path);
            }
            done.push(self);
        }
        path
    }

    /// The file name, which is the process's command name as well.
    pub fn name(self) -> &'static str {
        match self {
            Self::Truth => "truth",
            Self::TruthLibrary => "truth_lib.so",
            Self::PlainTruth => "plain_truth",
            Self::PlainTruthLibrary => "plain_lib.so",
            Self::Rules => "rules",
            Self::Cpp => "cpp",
            Self::Strings => "strings",
            Self::Busy => "busy",
            Self::Start => "start",
            Self::Stacks => "stacks",
            Self::StacksNow => "stacks-now",
            Self::StacksFixed => "stacks-fixed",
            Self::StacksLibrary => "stacks_small.so",
            Self::StacksLibraryLarge => "stacks_large.so",
            Self::Static => "static",
            Self::Tiny32 => "tiny32",
        }
    }

    fn sources(self) -> &'static [&'static str] {
        match self {
            Self::Truth | Self::PlainTruth => &["truth.c", "fixture.c"],
            Self::TruthLibrary | Self::PlainTruthLibrary => &["truth_lib.c"],
            Self::Rules => {
                &["rules.c", "rules_calls.c", "rules_jumps.c", "rules_threads.c", "rules_life.c", "fixture.c"]
            }
            Self::Cpp => &["cpp.cpp"],
            Self::Strings => &["strings.cpp"],
            Self::Stacks | Self::StacksNow | Self::StacksFixed => {
                &["stacks.c", "stacks_chain.c", "stacks_switch.c", "stacks_shape.c", "stacks_asm.S", "fixture.c"]
            }
            Self::StacksLibrary | Self::StacksLibraryLarge => &["stacks_lib.c"],
            Self::Busy => &["busy.c", "fixture.c"],
            Self::Start => &["start.c", "fixture.c"],
            Self::Static => &["plain.c", "fixture.c"],
            Self::Tiny32 => &["tiny32.S"],
        }
    }

    fn compile(self, path: &Path) {
        let compiler = match self {
            Self::Cpp | Self::Strings => std::env::var("CXX").unwrap_or_else(|_| "c++".into()),
            _ => std::env::var("CC").unwrap_or_else(|_| "cc".into()),
        };
        let unfinished = path.with_extension(format!("{}.tmp", std::process::id()));
        let mut command = Command::new(&compiler);
        command.current_dir(sources_directory());
        match self {
            Self::Tiny32 => command.args(["-m32", "-nostdlib", "-static"]),
            Self::Static => command.args(FLAGS).arg("-static"),
            Self::TruthLibrary => command.args(FLAGS).args(["-shared", "-fPIC"]),
            // The library uses the executable's bookkeeping.
            Self::Truth => command.args(FLAGS).arg("-rdynamic"),
            Self::PlainTruthLibrary => command.args(PLAIN).args(["-shared", "-fPIC"]),
            Self::PlainTruth => command.args(PLAIN).arg("-rdynamic"),
            Self::Strings => command.args(PLAIN),
            Self::Stacks => command.args(PLAIN_FLAGS).arg("-Wl,-z,lazy"),
            Self::StacksNow => command.args(PLAIN_FLAGS).arg("-Wl,-z,now"),
            Self::StacksFixed => command.args(PLAIN_FLAGS).arg("-no-pie"),
            Self::StacksLibrary => command.args(PLAIN_FLAGS).args(["-shared", "-fPIC"]),
            Self::StacksLibraryLarge => command.args(PLAIN_FLAGS).args(["-DLARGE", "-shared", "-fPIC"]),
            _ => command.args(FLAGS),
        };
        command.arg("-o").arg(&unfinished).args(self.sources());
        match self {
            Self::Cpp | Self::Strings => command.arg(c_object("fixture.c", &FLAGS)),
            Self::Truth | Self::PlainTruth | Self::Stacks | Self::StacksNow | Self::StacksFixed => command.arg("-ldl"),
            _ => &mut command,
        };
        run(command, &compiler);
        std::fs::rename(&unfinished, path).expect("the compiled fixture can be renamed");
    }
}

/// The object file of a C source, for the C++ fixture.
fn c_object(source: &str, flags: &[&str]) -> PathBuf {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let object = directory().join(format!("{source}.{}.o", flags.len()));
    let mut command = Command::new(&compiler);
    command.current_dir(sources_directory()).args(flags).args(["-c", source, "-o"]).arg(&object);
    run(command, &compiler);
    object
}

fn run(mut command: Command, compiler: &str) {
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => panic!(
            "the test programs can't be compiled: `{compiler}` does not start ({error}); install a C and C++ compiler \
             (Debian: gcc, g++, libc6-dev) or set CC and CXX"
        ),
    };
    assert!(
        output.status.success(),
        "a test program can't be compiled: {command:?} ended with {}:\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

fn directory() -> PathBuf {
    let directory = std::env::var_os(DIRECTORY)
        .map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("fixtures"), PathBuf::from);
    std::fs::create_dir_all(&directory).expect("the directory for the compiled fixtures can be made");
    directory
}

fn sources_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}
