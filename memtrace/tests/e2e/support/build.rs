//! Compiles the fixtures, each once per run of the tests, or takes those that were brought along.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex, OnceLock, PoisonError},
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

/// Build ID of the fixture whose debug file is elsewhere.
pub const NAMES_BUILD_ID: &str = "-Wl,--build-id=0xfeedfacefeedface0123456789abcdef01234567";
/// What the libraries of the stacks' fixtures use of the program.
const EXPORT: &str = "-Wl,--export-dynamic-symbol=loader_hook";

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
    /// The same, without any shared library.
    StartStatic,
    /// Without frame pointers; functions of libraries are bound at their first call.
    Stacks,
    /// The same, bound at the start.
    StacksNow,
    /// The same, at fixed addresses.
    StacksFixed,
    /// The same as the first, with tracking of indirect branches, for which there are two linkage tables.
    StacksTracked,
    /// The same, without any shared library.
    StacksStatic,
    /// The same, and at any address.
    StacksStaticPie,
    StacksLibrary,
    StacksLibraryLarge,
    /// Its resident pages are known.
    Pages,
    /// The same, compiled as plain programs are.
    PlainPages,
    /// Its address space is known.
    Space,
    /// The same, compiled as plain programs are.
    PlainSpace,
    /// Opens [`Self::SpaceLeakLibrary`]; both are compiled as plain programs are.
    SpaceLeak,
    SpaceLeakLibrary,
    /// One function allocates, another touches.
    Touched,
    /// Has allocators of its own.
    Custom,
    /// Functions that are hard to name; nothing moved or aligned.
    Names,
    /// The same with a build ID of its own, to be split.
    NamesSplit,
    /// Libraries of one size whose functions have other names.
    NamesFirst,
    NamesSecond,
    NamesCpp,
    /// Bound at its first calls.
    LoaderLibrary,
    /// A library with a large unwind table.
    StacksHuge,
    /// The same as the former, bound when it is opened; variables of threads are found by descriptors.
    LoaderLibraryNow,
    /// Uses the first of them.
    LoaderUser,
    /// Maps and opens the files that it is told.
    Modules,
    /// Without any shared library, and without symbols.
    Stripped,
    /// Does as it is told.
    Targets,
    /// The same code at the same addresses in both, by other names.
    TargetsAlpha,
    TargetsBeta,
    /// Without any shared library.
    TargetsStatic,
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
        Self::StartStatic,
        Self::Stacks,
        Self::StacksNow,
        Self::StacksFixed,
        Self::StacksTracked,
        Self::StacksStatic,
        Self::StacksStaticPie,
        Self::StacksLibrary,
        Self::StacksLibraryLarge,
        Self::Pages,
        Self::PlainPages,
        Self::Space,
        Self::PlainSpace,
        Self::SpaceLeak,
        Self::SpaceLeakLibrary,
        Self::Touched,
        Self::Custom,
        Self::Names,
        Self::NamesSplit,
        Self::NamesFirst,
        Self::NamesSecond,
        Self::NamesCpp,
        Self::LoaderLibrary,
        Self::StacksHuge,
        Self::LoaderLibraryNow,
        Self::LoaderUser,
        Self::Modules,
        Self::Stripped,
        Self::Targets,
        Self::TargetsAlpha,
        Self::TargetsBeta,
        Self::TargetsStatic,
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
            Self::StartStatic => "start-static",
            Self::Stacks => "stacks",
            Self::StacksNow => "stacks-now",
            Self::StacksFixed => "stacks-fixed",
            Self::StacksTracked => "stacks-tracked",
            Self::StacksStatic => "stacks-static",
            Self::StacksStaticPie => "stacks-spie",
            Self::StacksLibrary => "stacks_small.so",
            Self::StacksLibraryLarge => "stacks_large.so",
            Self::Pages => "pages",
            Self::PlainPages => "plain-pages",
            Self::Space => "space",
            Self::PlainSpace => "plain-space",
            Self::SpaceLeak => "space-leak",
            Self::SpaceLeakLibrary => "space_leak.so",
            Self::Touched => "touched",
            Self::Custom => "alloc_custom",
            Self::Names => "names",
            Self::NamesSplit => "names-split",
            Self::NamesFirst => "names_first.so",
            Self::NamesSecond => "names_secnd.so",
            Self::NamesCpp => "names-cpp",
            Self::LoaderLibrary => "loader_lazy.so",
            Self::StacksHuge => "stacks_huge.so",
            Self::LoaderLibraryNow => "loader_now.so",
            Self::LoaderUser => "loader_user.so",
            Self::Modules => "modules",
            Self::Stripped => "stripped",
            Self::Targets => "targets",
            Self::TargetsAlpha => "targets-alpha",
            Self::TargetsBeta => "targets-beta",
            Self::TargetsStatic => "targets-static",
            Self::Tiny32 => "tiny32",
        }
    }

    /// Whether functions of libraries are bound at their first call.
    pub fn binds_late(self) -> bool {
        matches!(self, Self::Stacks | Self::StacksTracked)
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
            Self::Stacks
            | Self::StacksNow
            | Self::StacksFixed
            | Self::StacksTracked
            | Self::StacksStatic
            | Self::StacksStaticPie => &[
                "stacks.c",
                "stacks_chain.c",
                "stacks_switch.c",
                "stacks_shape.c",
                "stacks_loader.c",
                "stacks_late.c",
                "stacks_asm.S",
                "fixture.c",
            ],
            Self::LoaderLibrary | Self::LoaderLibraryNow => &["stacks_loader_lib.c"],
            Self::LoaderUser => &["stacks_loader_user.c"],
            Self::StacksHuge => &["stacks_huge.S"],
            Self::StacksLibrary | Self::StacksLibraryLarge => &["stacks_lib.c"],
            Self::Busy => &["busy.c", "fixture.c"],
            Self::Start | Self::StartStatic => &["start.c", "fixture.c"],
            Self::Modules => &["modules.c", "fixture.c"],
            Self::Stripped => &["plain.c", "fixture.c"],
            Self::Pages | Self::PlainPages => &[
                "pages.c",
                "pages_book.c",
                "pages_anonymous.c",
                "pages_filled.c",
                "pages_files.c",
                "pages_life.c",
                "fixture.c",
            ],
            Self::Space | Self::PlainSpace => {
                &["space.c", "space_ranges.c", "space_threads.c", "pages_book.c", "fixture.c"]
            }
            Self::SpaceLeak => &["space_leak.c", "fixture.c"],
            Self::SpaceLeakLibrary => &["space_leak_lib.c"],
            Self::Touched => &["touched.c", "fixture.c"],
            Self::Custom => &["alloc_custom.c", "fixture.c"],
            Self::Names | Self::NamesSplit => &["names.c", "fixture.c"],
            Self::NamesFirst | Self::NamesSecond => &["names_lib.c"],
            Self::NamesCpp => &["names.cpp"],
            Self::Targets | Self::TargetsAlpha | Self::TargetsBeta | Self::TargetsStatic => {
                &["targets.c", "targets_tasks.c", "fixture.c"]
            }
            Self::Tiny32 => &["tiny32.S"],
        }
    }

    fn compile(self, path: &Path) {
        let compiler = match self {
            Self::Cpp | Self::Strings | Self::NamesCpp => std::env::var("CXX").unwrap_or_else(|_| "c++".into()),
            _ => std::env::var("CC").unwrap_or_else(|_| "cc".into()),
        };
        let unfinished = path.with_extension(format!("{}.tmp", std::process::id()));
        let mut command = Command::new(&compiler);
        command.current_dir(sources_directory());
        match self {
            Self::Tiny32 => command.args(["-m32", "-nostdlib", "-static"]),
            Self::Stripped => command.args(FLAGS).args(["-static", "-s"]),
            Self::TargetsAlpha => command.args(FLAGS).args(["-no-pie", "-DPREFIX=alpha_"]),
            Self::TargetsBeta => command.args(FLAGS).args(["-no-pie", "-DPREFIX=beta_"]),
            Self::TargetsStatic => command.args(FLAGS).arg("-static"),
            Self::StartStatic => command.args(FLAGS).arg("-static-pie"),
            Self::TruthLibrary => command.args(FLAGS).args(["-shared", "-fPIC"]),
            // The library uses the executable's bookkeeping.
            Self::Truth => command.args(FLAGS).arg("-rdynamic"),
            Self::PlainTruthLibrary => command.args(PLAIN).args(["-shared", "-fPIC"]),
            Self::PlainTruth => command.args(PLAIN).arg("-rdynamic"),
            Self::Strings => command.args(PLAIN),
            Self::Stacks => command.args(PLAIN_FLAGS).args(["-Wl,-z,lazy", EXPORT]),
            Self::StacksTracked => {
                let flags = ["-fcf-protection=full", "-Wl,-z,lazy,-z,ibtplt", EXPORT];
                command.args(PLAIN_FLAGS).args(flags)
            }
            Self::StacksNow => command.args(PLAIN_FLAGS).args(["-Wl,-z,now", EXPORT]),
            Self::StacksFixed => command.args(PLAIN_FLAGS).args(["-no-pie", EXPORT]),
            // dlopen is there, but needs the shared library to work; so the linker warns.
            Self::StacksStatic => command.args(PLAIN_FLAGS).args(["-static", "-Wl,--no-warnings"]),
            Self::StacksStaticPie => command.args(PLAIN_FLAGS).args(["-static-pie", "-Wl,--no-warnings"]),
            Self::Pages | Self::Space => command.args(FLAGS).arg("-DFRAMES"),
            Self::PlainPages | Self::PlainSpace | Self::SpaceLeak | Self::Modules => command.args(PLAIN_FLAGS),
            Self::SpaceLeakLibrary => command.args(PLAIN_FLAGS).args(["-shared", "-fPIC"]),
            Self::StacksLibrary => command.args(PLAIN_FLAGS).args(["-shared", "-fPIC"]),
            Self::StacksHuge => command.args(["-shared", "-nostdlib"]),
            Self::LoaderUser => command.args(PLAIN_FLAGS).args(["-Wl,-z,now", "-shared", "-fPIC"]),
            Self::LoaderLibrary => command.args(PLAIN_FLAGS).args(["-Wl,-z,lazy", "-shared", "-fPIC"]),
            Self::LoaderLibraryNow => {
                command.args(PLAIN_FLAGS).args(["-Wl,-z,now", "-mtls-dialect=gnu2", "-shared", "-fPIC"])
            }
            Self::StacksLibraryLarge => command.args(PLAIN_FLAGS).args(["-DLARGE", "-shared", "-fPIC"]),
            Self::Names => command.args(FLAGS).args(["-falign-functions=1", "-fno-toplevel-reorder", "-rdynamic"]),
            Self::NamesSplit => command.args(FLAGS).arg(NAMES_BUILD_ID),
            Self::NamesFirst => command.args(FLAGS).args(["-shared", "-fPIC", "-DNAME=in_first"]),
            Self::NamesSecond => command.args(FLAGS).args(["-shared", "-fPIC", "-DNAME=in_secnd"]),
            _ => command.args(FLAGS),
        };
        command.arg("-o").arg(&unfinished).args(self.sources());
        match self {
            Self::Cpp | Self::Strings | Self::NamesCpp => command.arg(c_object("fixture.c", &FLAGS)),
            Self::Truth
            | Self::PlainTruth
            | Self::Stacks
            | Self::StacksNow
            | Self::StacksFixed
            | Self::SpaceLeak
            | Self::Modules
            | Self::Names
            | Self::NamesSplit => command.arg("-ldl"),
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

/// The file `name` in the directory of fixtures, made once in a run of the tests: `make` is given a path to make it at.
/// Several are made at a time.
pub fn artifact(name: &str, make: impl FnOnce(&Path)) -> PathBuf {
    type Making = BTreeMap<String, Arc<OnceLock<PathBuf>>>;
    static MADE: Mutex<Making> = Mutex::new(Making::new());
    let cell = {
        // A test that panicked here has left nothing half done.
        let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(made.entry(name.to_owned()).or_default())
    };
    let path = cell.get_or_init(|| {
        let path = directory().join(name);
        let unfinished = directory().join(format!("{}.{name}", std::process::id()));
        make(&unfinished);
        std::fs::rename(&unfinished, &path).expect("what was compiled can be renamed");
        path
    });
    path.clone()
}

/// Runs a compiler; panics with its words if it fails.
pub fn run(mut command: Command, compiler: &str) {
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

/// Where compiled fixtures are.
pub fn directory() -> PathBuf {
    let directory = std::env::var_os(DIRECTORY)
        .map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("fixtures"), PathBuf::from);
    std::fs::create_dir_all(&directory).expect("the directory for the compiled fixtures can be made");
    directory
}

pub fn sources_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}
