//! Processes that do as they are told, line by line, and a memtrace that traces several of them: what each has allocated is
//! known from what it was told.

use std::{
    collections::BTreeMap,
    fs,
    ops::{Deref, DerefMut},
    path::Path,
    process::Command,
};

use serde_json::Value;
use tempfile::TempDir;

use super::{
    build::Fixture,
    memtrace,
    process::{Ended, Process, wait_for},
    start::TRUNCATED,
    trace::read,
    truth::{Amount, amount},
};

/// A process that does as it is told (tests/fixtures/targets.c).
pub struct Told {
    process: Process,
}

impl Told {
    /// Starts the fixture.
    pub fn start(fixture: Fixture) -> Self {
        Self::by(&mut Command::new(fixture.path()))
    }

    /// Starts it by a command, and waits for its `ready`.
    pub fn by(command: &mut Command) -> Self {
        let mut told = Self { process: Process::start(command) };
        told.wait_ready();
        told
    }

    /// Waits until it, or the program that it executed, or one that it hands lines to, is ready.
    pub fn wait_ready(&mut self) {
        assert_eq!(self.process.line(), "ready");
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Tells it to do something, and waits until it has.
    pub fn tell(&mut self, line: &str) {
        assert_eq!(self.answer(line), "ok", "{line}");
    }

    /// Tells it to do something, and waits for the number that it answers.
    pub fn ask(&mut self, line: &str) -> u32 {
        self.answer(line).parse().expect("a number")
    }

    /// Tells it to execute another program, and waits for that.
    pub fn execute(&mut self, line: &str) {
        assert_eq!(self.answer(line), "ready", "{line}");
    }

    fn answer(&mut self, line: &str) -> String {
        self.process.send(line);
        self.process.line()
    }

    /// Lets it end.
    pub fn end(mut self) {
        self.tell("end");
        let ended = self.process.end();
        assert!(ended.status.success(), "it came to harm: {ended:?}");
    }
}

/// A memtrace that traces any number of processes, both views at a time.
pub struct Tracing {
    process: Process,
    directory: TempDir,
}

impl Deref for Tracing {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl DerefMut for Tracing {
    fn deref_mut(&mut self) -> &mut Process {
        &mut self.process
    }
}

impl Tracing {
    /// Traces by `memstacks --by process`, and waits until it records.
    pub fn start(options: &[&str]) -> Self {
        Self::of("memstacks", &[&["--by", "process"], options].concat())
    }

    /// The same for any command and split. `-- CMD` must come last in `options`.
    pub fn of(command: &str, options: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let output = |name: &str| directory.path().join(name).display().to_string();
        let (json, folded) = (output("held.json"), output("held.folded"));
        let live = match command {
            "memstacks" => "--unfreed",
            "pgfaultstacks" => "--resident",
            _ => "--mapped",
        };
        let mut command = memtrace::command(&[command, "-v", "--all", live, "-o", &json, "-o", &folded]);
        let mut process = Process::start(command.args(options));
        process.wait_for_error_line("tracing ");
        Self { process, directory }
    }

    /// Waits until it has said something.
    pub fn wait_until_said(&mut self, what: &str) {
        wait_for(&format!("{what:?} among what memtrace says"), || {
            self.process.error_so_far().contains(what).then_some(())
        });
    }

    /// Waits until it traces a process that was not there at the start.
    pub fn wait_until_traced(&mut self, pid: u32) {
        self.wait_until_said(&format!("(pid {pid}) too"));
    }

    /// Ends the trace as Ctrl-C does.
    pub fn interrupt(self) -> Report {
        self.process.signal(libc::SIGINT);
        self.finish()
    }

    /// Waits for its end.
    pub fn finish(self) -> Report {
        let Self { process, directory } = self;
        let ended = process.end();
        let ended = ended.success();
        Report::read(directory.path(), ended)
    }
}

/// A process, or a part of one, and the function that allocated: its command name, process id, function.
pub type Holder = (String, u32, String);

/// What was reported.
pub struct Report {
    pub all: BTreeMap<Holder, Amount>,
    /// Or resident, or mapped.
    pub live: BTreeMap<Holder, Amount>,
    /// Frames of what none of the fixtures' functions has allocated, in any view.
    pub foreign: Vec<String>,
    /// The document on what is live.
    pub json: Value,
    pub folded: String,
    pub memtrace: Ended,
}

/// Functions that are told to allocate.
fn is_told(function: &str) -> bool {
    let bare = function.trim_start_matches("alpha_").trim_start_matches("beta_");
    ["leak_a", "leak_b", "leak_c", "resize", "touch_a", "touch_b"].contains(&bare)
}

impl Report {
    fn read(directory: &Path, memtrace: Ended) -> Self {
        let mut documents: Vec<(String, Value)> = fs::read_dir(directory)
            .expect("the outputs")
            .map(|entry| entry.expect("an output").path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
            .map(|path| {
                let value = serde_json::from_str(&read(&path)).expect("JSON");
                (path.file_name().expect("a name").to_string_lossy().into_owned(), value)
            })
            .collect();
        documents.sort_by_key(|(name, _)| !name.contains(".all."));
        let [(_, all), (live_name, live)] = &documents[..] else { panic!("two views: {documents:?}") };
        let mut foreign = Vec::new();
        Self {
            all: holders(all, &mut foreign),
            live: holders(live, &mut foreign),
            foreign,
            json: live.clone(),
            folded: read(&directory.join(live_name.replace(".json", ".folded"))),
            memtrace,
        }
    }

    /// Entries of a process id, in the order of the report.
    pub fn processes(&self, pid: u32) -> Vec<&Value> {
        let all = self.json["processes"].as_array().expect("processes");
        all.iter().filter(|process| process["pid"] == pid).collect()
    }

    /// Panics unless nothing was lost, and nobody else has allocated.
    pub fn assert_nothing_else(&self) {
        self.assert_no_losses();
        assert!(self.foreign.is_empty(), "{:#?}", self.foreign);
    }

    pub fn assert_no_losses(&self) {
        let losses = &self.json["coverage"]["losses"];
        assert_eq!(losses, &Value::Array(Vec::new()), "{}", self.memtrace.stderr);
        // What a process called before its probes were in place is not known: that is said.
        let processes = self.json["processes"].as_array().expect("processes");
        let unseen = processes.iter().any(|process| !process["unseen_ns"].is_null());
        // Page faults and system calls are seen from the first on.
        let expected = unseen && self.json["subject"] == "heap";
        assert_eq!(self.json["lower_bound"], expected, "{:#}", self.json["processes"]);
    }

    pub fn event(&self, name: &str) -> u64 {
        self.json["coverage"]["events"][name].as_u64().expect("a number")
    }

    /// The same as [`Self::live`], from folded stacks: bytes.
    pub fn folded(&self) -> BTreeMap<(String, String), u64> {
        let mut sums = BTreeMap::new();
        for line in self.folded.lines() {
            let (path, value) = line.rsplit_once(' ').expect("a value");
            let mut frames = path.split(';');
            let root = frames.next().expect("a root").to_owned();
            if let Some(function) = frames.find(|frame| is_told(frame)) {
                *sums.entry((root, function.to_owned())).or_default() += value.parse::<u64>().expect("a number");
            }
        }
        sums
    }
}

fn holders(document: &Value, foreign: &mut Vec<String>) -> BTreeMap<Holder, Amount> {
    let mut held: BTreeMap<Holder, Amount> = BTreeMap::new();
    for stack in document["stacks"].as_array().expect("stacks") {
        let frames: Vec<&str> =
            stack["frames"].as_array().expect("frames").iter().map(|frame| frame.as_str().expect("a name")).collect();
        let amount = amount(stack);
        if amount == Amount::default() {
            continue;
        }
        let pid = stack["process"]
            .as_u64()
            .map_or(0, |process| document["processes"][process as usize]["pid"].as_u64().expect("a pid"));
        // What the C library's code makes resident by being run is its own.
        let of_others = document["subject"] == "faults" && !frames.last().is_some_and(|frame| is_told(frame));
        match frames.iter().find(|frame| is_told(frame)).filter(|_| !of_others) {
            Some(function) => {
                assert!(!frames[0].starts_with(TRUNCATED), "a cut path: {frames:?}");
                let comm = stack["comm"].as_str().expect("a name").to_owned();
                *held.entry((comm, pid as u32, (*function).to_owned())).or_default() += amount;
            }
            None => foreign.push(format!("{}: {}", stack["comm"], frames.join(";"))),
        }
    }
    held
}

/// Of a function: its name, bytes and blocks.
type Function<'a> = (&'a str, u64, u64);

/// What processes hold: of each, its name and process id, and the functions with their bytes and blocks.
pub fn held(processes: &[(&str, u32, &[Function<'_>])]) -> BTreeMap<Holder, Amount> {
    let mut held = BTreeMap::new();
    for (comm, pid, functions) in processes {
        for (function, bytes, count) in *functions {
            let key = ((*comm).to_owned(), *pid, (*function).to_owned());
            held.insert(key, Amount { bytes: *bytes, count: *count });
        }
    }
    held
}
