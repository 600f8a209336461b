//! Traces a fixture from its `ready` to its `done`, both views at a time.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::AddAssign,
    path::Path as FilePath,
};

use super::{
    build::Fixture,
    compare::{Split, Unit, assert_exact, split},
    cpp_library::without_cpp_library,
    folded,
    json::Report,
    memtrace::Memtrace,
    process::Ended,
    start::Unwind,
    target::Target,
    truth::{Amount, Path, Paths, Truth},
};

/// A trace that has ended.
pub struct Traced {
    pub truth: Truth,
    pub unfreed: View,
    pub all: View,
    /// By the name of their reason.
    pub losses: BTreeMap<String, Amount>,
    pub lower_bound: bool,
    pub memtrace: Ended,
}

/// One view of a trace, in both formats that the tests read.
pub struct View {
    /// The unit of [`Self::folded`].
    pub unit: Unit,
    pub folded: Split<u64>,
    pub json: Split<Amount>,
}

impl View {
    /// Who else allocated.
    pub fn foreign(&self) -> impl Iterator<Item = &Path> {
        self.folded.foreign.keys().chain(self.json.foreign.keys())
    }

    fn assert_exact(&self, what: &str, truth: &Paths) {
        assert_exact(&format!("{what}, folded"), truth, self.unit, &self.folded.own);
        for unit in [Unit::Bytes, Unit::Count] {
            let values = self.json.own.iter().map(|(path, amount)| (path.clone(), unit.of(*amount))).collect();
            assert_exact(&format!("{what}, JSON"), truth, unit, &values);
        }
    }
}

/// How a fixture is traced.
pub struct Trace<'a> {
    pub fixture: Fixture,
    pub arguments: &'a [&'a str],
    /// Further arguments of memtrace.
    pub options: &'a [&'a str],
    pub unwind: Unwind,
}

impl Trace<'_> {
    /// Starts the fixture, traces its work, ends the trace, and reads both views in one unit.
    pub fn run(&self, unit: Unit) -> Traced {
        let mut target = Target::start(self.fixture, self.arguments);
        let directory = tempfile::tempdir().expect("a temporary directory");
        let memtrace = Memtrace::tracing(&self.command_line(unit, target.pid(), directory.path()));
        target.go();
        let truth = target.truth();
        let memtrace = memtrace.interrupt().success();
        let ended = target.finish();
        assert!(ended.status.success(), "the fixture came to harm: {:?}\n{}", ended.status, ended.stderr);
        self.read(unit, truth, memtrace, directory.path())
    }

    /// As [`Self::run`], but the fixture ends by itself, and the trace with it.
    pub fn run_until_exit(&self, unit: Unit) -> Traced {
        let mut target = Target::start(self.fixture, self.arguments);
        let directory = tempfile::tempdir().expect("a temporary directory");
        let memtrace = Memtrace::tracing(&self.command_line(unit, target.pid(), directory.path()));
        target.go();
        let truth = target.truth();
        let ended = target.finish();
        assert!(ended.status.success(), "the fixture came to harm: {:?}\n{}", ended.status, ended.stderr);
        let memtrace = memtrace.end().success();
        self.read(unit, truth, memtrace, directory.path())
    }

    fn command_line(&self, unit: Unit, pid: u32, directory: &FilePath) -> Vec<String> {
        let mut arguments = vec!["memstacks".to_owned(), "-p".into(), pid.to_string()];
        arguments.extend(["--all", "--unfreed", "--unit", unit.name()].map(str::to_owned));
        arguments.extend(["--unwind", self.unwind.name()].map(str::to_owned));
        for file in ["leak.folded", "leak.json"] {
            arguments.extend(["-o".to_owned(), directory.join(file).display().to_string()]);
        }
        arguments.extend(self.options.iter().map(|option| (*option).to_owned()));
        arguments
    }

    fn read(&self, unit: Unit, truth: Truth, memtrace: Ended, directory: &FilePath) -> Traced {
        let text = |name: &str| read(&directory.join(name));
        let view = |name: &str| {
            let report = Report::parse(&text(&format!("leak.{name}.json")));
            let folded = folded::parse(&text(&format!("leak.{name}.folded")), self.fixture.name());
            let view = View {
                unit,
                folded: split(&self.own_frames(folded), &truth, self.unwind),
                json: split(&self.own_frames(report.paths), &truth, self.unwind),
            };
            (view, report.losses, report.lower_bound)
        };
        let ((unfreed, losses, lower_bound), (all, ..)) = (view("unfreed"), view("all"));
        Traced { unfreed, all, losses, lower_bound, memtrace, truth }
    }

    fn own_frames<V: Copy + Default + AddAssign>(&self, reported: BTreeMap<Path, V>) -> BTreeMap<Path, V> {
        if self.fixture == Fixture::Strings { without_cpp_library(&reported) } else { reported }
    }
}

/// Reads a report; panics with its name if it is not there.
pub fn read(path: &FilePath) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

impl Traced {
    /// Panics unless both views say exactly what the fixture says. Who else allocated is not looked at.
    pub fn assert_own_exact(&self) {
        self.unfreed.assert_exact("unfreed", &self.truth.unfreed);
        self.all.assert_exact("all", &self.truth.all);
    }

    /// Panics if anybody else was reported to have allocated.
    pub fn assert_nothing_else(&self) {
        for (what, view) in [("unfreed", &self.unfreed), ("all", &self.all)] {
            let foreign: BTreeSet<_> = view.foreign().map(|path| path.join(";")).collect();
            assert!(foreign.is_empty(), "{what}: call paths that no one allocated by: {foreign:#?}");
        }
    }

    pub fn assert_no_losses(&self) {
        assert!(self.losses.is_empty(), "losses: {:#?}\n{}", self.losses, self.memtrace.stderr);
        assert!(!self.lower_bound);
    }
}

/// Traces a fixture: both views must be exact, nothing else reported, nothing lost.
pub fn assert_exactly_true(fixture: Fixture, arguments: &[&str], unwind: Unwind, unit: Unit) {
    let traced = Trace { fixture, arguments, options: &[], unwind }.run(unit);
    traced.assert_own_exact();
    traced.assert_nothing_else();
    traced.assert_no_losses();
}
