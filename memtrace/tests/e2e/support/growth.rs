//! Traces a fixture with the commands that look at memory page by page, both views at a time.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path as FilePath,
};

use serde_json::Value;

use super::{
    build::Fixture,
    compare::{Unit, assert_exact},
    folded,
    memtrace::{self, Memtrace},
    process::Ended,
    smaps,
    start::{Unwind, assert_start},
    target::Target,
    trace::read,
    truth::{Amount, Path, Paths, Truth, amount},
};

/// What stands for pages whose call path nobody knows.
pub const UNATTRIBUTED: &str = "[unattributed]";
/// What stands for calls whose stack could not be kept.
pub const UNKNOWN: &str = "[unknown call path]";

/// Which command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    Faults,
    Mappings,
}

impl Subject {
    pub fn command(self) -> &'static str {
        match self {
            Self::Faults => "pgfaultstacks",
            Self::Mappings => "mmapstacks",
        }
    }

    /// The view of what is there at the end.
    pub fn live(self) -> &'static str {
        match self {
            Self::Faults => "resident",
            Self::Mappings => "mapped",
        }
    }
}

/// How a fixture is traced.
pub struct Growth<'a> {
    pub subject: Subject,
    pub fixture: Fixture,
    pub arguments: &'a [&'a str],
    /// Further arguments of memtrace.
    pub options: &'a [&'a str],
    pub unwind: Unwind,
}

/// A trace that has ended.
pub struct Grown {
    pub truth: Truth,
    pub live: View,
    /// Not there if it was not asked for.
    pub all: Option<View>,
    /// The JSON report of what is there at the end.
    pub report: Value,
    pub memtrace: Ended,
    /// Resident bytes of the target before and after its work, as the kernel gave them to this process.
    pub rss: Option<(u64, u64)>,
}

/// One view of a trace.
pub struct View {
    /// The fixture's own paths from `main` or a thread's function on, in folded stacks, in pages (mappings: bytes).
    pub folded: BTreeMap<Path, u64>,
    /// The same in JSON.
    pub json: Paths,
    /// All others, in JSON: of the bookkeeping, the C library and the loader.
    pub foreign: Paths,
}

impl Growth<'_> {
    /// Starts the fixture, traces its work, ends the trace, and reads both views.
    pub fn run(&self) -> Grown {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let (mut target, memtrace) = self.start(directory.path());
        let before = smaps::rss(target.pid());
        target.go();
        let truth = target.truth();
        let after = smaps::rss(target.pid());
        let memtrace = memtrace.interrupt().success();
        let ended = target.finish();
        assert!(ended.status.success(), "the fixture came to harm: {:?}\n{}", ended.status, ended.stderr);
        self.read(truth, memtrace, directory.path(), before.zip(after))
    }

    /// Runs the fixture as memtrace's command, from its start to its end.
    pub fn run_command(&self) -> Grown {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = directory.path().join("truth.json").display().to_string();
        let mut arguments = vec![self.subject.command().to_owned()];
        arguments.extend(self.outputs(directory.path()));
        arguments.extend(["--".to_owned(), self.fixture.path().display().to_string()]);
        arguments.extend(self.arguments.iter().map(|argument| (*argument).to_owned()));
        arguments.push(file.clone());
        let ended = memtrace::run(&arguments);
        assert_eq!(ended.code(), 5, "the command's status is passed on:\n{}", ended.stderr);
        let truth = Truth::parse(read(FilePath::new(&file)).trim_end());
        self.read(truth, ended, directory.path(), None)
    }

    fn start(&self, directory: &FilePath) -> (Target, Memtrace) {
        let target = Target::start(self.fixture, self.arguments);
        let memtrace = Memtrace::tracing(&self.command_line(target.pid(), directory));
        (target, memtrace)
    }

    fn has_all(&self) -> bool {
        !self.options.contains(&"--kind") && !self.options.contains(&"--exact")
    }

    fn unit(&self) -> &'static str {
        match self.subject {
            Subject::Faults => "pages",
            Subject::Mappings => "bytes",
        }
    }

    fn command_line(&self, pid: u32, directory: &FilePath) -> Vec<String> {
        let mut arguments = vec![self.subject.command().to_owned(), "-p".into(), pid.to_string()];
        arguments.extend(self.outputs(directory));
        arguments
    }

    fn outputs(&self, directory: &FilePath) -> Vec<String> {
        let mut arguments = Vec::new();
        arguments.extend(["--unit", self.unit(), "--unwind", self.unwind.name()].map(str::to_owned));
        if self.has_all() {
            arguments.extend(["--all".to_owned(), format!("--{}", self.subject.live())]);
        }
        for file in ["growth.folded", "growth.json"] {
            arguments.extend(["-o".to_owned(), directory.join(file).display().to_string()]);
        }
        arguments.extend(self.options.iter().map(|option| (*option).to_owned()));
        arguments
    }

    fn read(&self, truth: Truth, memtrace: Ended, directory: &FilePath, rss: Option<(u64, u64)>) -> Grown {
        let text = |view: &str, extension: &str| {
            let name =
                if self.has_all() { format!("growth.{view}.{extension}") } else { format!("growth.{extension}") };
            read(&directory.join(name))
        };
        let of = |name: &str| {
            let report = parse(&text(name, "json"));
            // Growth by the kernel's own count is a view of its own.
            assert!(report["view"] == name || self.options.contains(&"--exact"), "another view: {}", report["view"]);
            let folded = folded::parse(&text(name, "folded"), self.fixture.name());
            let folded = folded.into_iter().map(|(path, value)| (path, Amount { bytes: value, count: 0 })).collect();
            let (folded, _) = split(&folded, &truth, self.unwind);
            let (json, foreign) = split(&held(&report), &truth, self.unwind);
            (
                View { folded: folded.into_iter().map(|(path, amount)| (path, amount.bytes)).collect(), json, foreign },
                report,
            )
        };
        let (live, report) = of(self.subject.live());
        let all = self.has_all().then(|| of("all").0);
        Grown { truth, live, all, report, memtrace, rss }
    }
}

/// Reads a JSON report. Panics if its sum is not its total.
pub fn parse(text: &str) -> Value {
    let report: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("no JSON: {error}: {text}"));
    let mut total = Amount::default();
    for stack in report["stacks"].as_array().expect("stacks") {
        total += amount(stack);
    }
    assert_eq!(total, amount(&report["total"]), "the total is another than the sum");
    report
}

/// What each path of a report holds. Panics if two stacks have the same names.
pub fn held(report: &Value) -> Paths {
    let mut paths = Paths::new();
    for stack in report["stacks"].as_array().expect("stacks") {
        let amount = amount(stack);
        if amount != Amount::default() {
            let before = paths.insert(frames(stack), amount);
            assert!(before.is_none(), "a second stack with these names: {stack}");
        }
    }
    paths
}

/// The names of a stack of a report, root first.
pub fn frames(stack: &Value) -> Path {
    let frames = stack["frames"].as_array().expect("frames");
    frames.iter().map(|frame| frame.as_str().expect("a name").to_owned()).collect()
}

/// A path without the C library's own functions between the caller and the system call, and with one name for one function.
fn clean(path: &Path) -> Path {
    const CALLS: [&str; 7] = ["mmap", "munmap", "brk", "mremap", "shmat", "madvise", "mlock"];
    let wraps = |frame: &String| {
        let name = frame.trim_start_matches("__GI_").trim_start_matches("__");
        CALLS.contains(&name)
            || ["mmap64", "sbrk", "brk_call"].contains(&name)
            || frame.starts_with("[unknown] (libc.so.6+0x")
    };
    let mut path = path.clone();
    let Some(leaf) = path.pop() else { return path };
    if CALLS.contains(&leaf.as_str()) {
        while path.last().is_some_and(wraps) {
            path.pop();
        }
    }
    path.push(if ["__libc_read", "__GI___libc_read", "__read"].contains(&leaf.as_str()) {
        "read".into()
    } else {
        leaf
    });
    path
}

/// Tells the fixture's own paths, start code taken off, from those of others: its own end in functions that the truth
/// has as the last two of a path.
fn split(reported: &Paths, truth: &Truth, unwind: Unwind) -> (Paths, Paths) {
    let known = || truth.unfreed.keys().chain(truth.all.keys());
    let ends: BTreeSet<&[String]> = known().map(|path| &path[path.len() - 2..]).collect();
    let roots: BTreeSet<&str> = known().map(|path| path[0].as_str()).collect();
    let (mut own, mut foreign) = (Paths::new(), Paths::new());
    for (path, amount) in reported {
        let path = clean(path);
        if path.len() < 2 || !ends.contains(&path[path.len() - 2..]) {
            *foreign.entry(path).or_default() += *amount;
            continue;
        }
        let root = path.iter().position(|frame| roots.contains(frame.as_str()));
        let root = root.unwrap_or_else(|| panic!("a call path without a root: {}", path.join(";")));
        assert_start(&path, root, unwind);
        *own.entry(path[root..].to_vec()).or_default() += *amount;
    }
    (own, foreign)
}

impl View {
    fn assert_exact(&self, what: &str, truth: &Paths, subject: Subject) {
        let of =
            |unit: Unit, paths: &Paths| paths.iter().map(|(path, amount)| (path.clone(), unit.of(*amount))).collect();
        assert_exact(&format!("{what}, JSON"), truth, Unit::Bytes, &of(Unit::Bytes, &self.json));
        if subject == Subject::Faults {
            assert_exact(&format!("{what}, JSON"), truth, Unit::Count, &of(Unit::Count, &self.json));
        }
        let unit = if subject == Subject::Faults { Unit::Count } else { Unit::Bytes };
        assert_exact(&format!("{what}, folded"), truth, unit, &self.folded);
    }

    /// Bytes of a pseudo path.
    pub fn pseudo(&self, name: &str) -> u64 {
        self.foreign.get(&vec![name.to_owned()]).map_or(0, |amount| amount.bytes)
    }

    /// Bytes of all paths.
    pub fn total(&self) -> u64 {
        self.json.values().chain(self.foreign.values()).map(|amount| amount.bytes).sum()
    }
}

impl Grown {
    fn subject(&self) -> Subject {
        match self.report["subject"].as_str() {
            Some("faults" | "exact") => Subject::Faults,
            Some("mappings") => Subject::Mappings,
            other => panic!("another subject: {other:?}"),
        }
    }

    /// Panics unless what is there at the end is exactly what the fixture says.
    pub fn assert_live_exact(&self) {
        if self.report["subject"] == "exact" {
            // What is counted there are changes, not pages.
            let bytes = self.live.json.iter().map(|(path, amount)| (path.clone(), amount.bytes)).collect();
            assert_exact("exact, JSON", &self.truth.unfreed, Unit::Bytes, &bytes);
            return assert_exact("exact, folded", &self.truth.unfreed, Unit::Count, &self.live.folded);
        }
        self.live.assert_exact(self.subject().live(), &self.truth.unfreed, self.subject());
    }

    /// Panics unless all faults, or all bytes and calls, are exactly what the fixture says.
    pub fn assert_all_exact(&self) {
        let all = self.all.as_ref().expect("the view of all was asked for");
        all.assert_exact("all", &self.truth.all, self.subject());
        if self.subject() == Subject::Mappings {
            let calls = all.json.iter().map(|(path, amount)| (path.clone(), amount.count)).collect();
            assert_exact("all, JSON", &self.truth.all, Unit::Count, &calls);
        }
    }

    /// Panics if anything has no call path.
    pub fn assert_all_known(&self) {
        for view in [Some(&self.live), self.all.as_ref()].into_iter().flatten() {
            for name in [UNATTRIBUTED, UNKNOWN] {
                assert_eq!(view.pseudo(name), 0, "bytes under {name}: {:#?}", view.foreign);
            }
        }
    }

    /// By the name of their reason.
    pub fn losses(&self) -> BTreeMap<String, Amount> {
        let losses = self.report["coverage"]["losses"].as_array().expect("losses");
        losses.iter().map(|loss| (loss["name"].as_str().expect("a name").to_owned(), amount(loss))).collect()
    }

    pub fn lower_bound(&self) -> bool {
        self.report["lower_bound"].as_bool().expect("lower_bound")
    }

    pub fn assert_no_losses(&self) {
        assert!(self.losses().is_empty(), "losses: {:#?}\n{}", self.losses(), self.memtrace.stderr);
        assert!(!self.lower_bound());
    }
}
