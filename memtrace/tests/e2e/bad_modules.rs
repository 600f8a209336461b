//! Targets that map damaged, hostile, changing and very many files: what they allocate themselves is exact all the same, and
//! the report names what could not be used.

use std::{
    ffi::OsStr,
    fs,
    os::unix::{ffi::OsStrExt as _, fs::PermissionsExt as _},
    path::Path,
    time::Instant,
};

use serde_json::Value;
use tempfile::TempDir;

use crate::{
    stacks::own,
    support::{
        build::Fixture,
        compare::{Unit, assert_exact},
        folded,
        memtrace::Memtrace,
        process::Ended,
        root::turn,
        target::Target,
        trace::read,
    },
};

/// The files of a target: what it maps as code, and what it opens as libraries.
struct Files {
    directory: TempDir,
    /// What an intact library has in it.
    whole: Vec<u8>,
}

impl Files {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        for name in ["mapped", "opened"] {
            fs::create_dir(directory.path().join(name)).expect("a directory");
        }
        Self { directory, whole: fs::read(Fixture::StacksLibrary.path()).expect("the library") }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    fn map(&self, name: impl AsRef<OsStr>, content: &[u8]) {
        fs::write(self.path("mapped").join(name.as_ref()), content).expect("a file");
    }

    fn open(&self, count: usize) {
        for number in 0..count {
            fs::write(self.path(&format!("opened/library{number}.so")), &self.whole).expect("a file");
        }
    }

    /// Traces the target, with what `change` does to the files after they have been mapped, and again during the trace.
    /// Panics unless its own paths are exact.
    fn trace(&self, mapped: impl FnOnce(&Path), change: impl FnOnce(&Path)) -> (Ended, Value) {
        let [mapped_in, opened_in] = ["mapped", "opened"].map(|name| self.path(name).display().to_string());
        let mut target = Target::start(Fixture::Modules, &[&mapped_in, &opened_in]);
        mapped(mapped_in.as_ref());
        let files = ["all.folded", "all.json", "all.txt"].map(|name| self.path(name).display().to_string());
        let pid = target.pid().to_string();
        let mut command = vec!["memstacks", "-p", &pid, "--all"];
        files.iter().for_each(|file| command.extend(["-o", file]));
        let start = Instant::now();
        let memtrace = Memtrace::tracing(&command);
        println!("recording after {:?}", start.elapsed());
        target.go();
        target.wait_for("before");
        change(mapped_in.as_ref());
        target.go();
        let truth = target.truth();
        let start = Instant::now();
        let ended = memtrace.interrupt().success();
        println!("report after {:?}", start.elapsed());
        let status = target.finish().status;
        assert!(status.success(), "the fixture came to harm: {status:?}");
        assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
        let folded = folded::parse(&read(files[0].as_ref()), Fixture::Modules.name());
        assert_exact("all", &truth.all, Unit::Bytes, &own(&truth, &folded, str::to_owned).paths);
        let text = read(files[2].as_ref());
        let harmful = |character: char| character.is_control() && character != '\n';
        assert_eq!(text.find(harmful), None, "{text:?}");
        let ended = Ended { stdout: text, ..ended };
        (ended, serde_json::from_str(&read(files[1].as_ref())).expect("JSON"))
    }
}

/// The modules that are not unwound by rows, and why.
fn without_rows(report: &Value) -> Vec<(String, String)> {
    let list = report["coverage"]["unwinding"]["without_rows"].as_array().expect("a list");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    list.iter().map(|problem| (text(&problem["module"]), text(&problem["problem"]))).collect()
}

#[test]
fn damaged_and_changing_files() {
    let _turn = turn();
    let files = Files::new();
    files.open(1);
    let whole = &files.whole;
    files.map("half.so", &whole[..whole.len() / 2]);
    files.map("headers.so", &whole[..0x100]);
    files.map("short.so", &whole[..20]);
    files.map("text.so", b"not a library\n");
    let mut many_headers = whole.clone();
    many_headers[0x38..0x3a].fill(0xff);
    files.map("many_headers.so", &many_headers);
    let mut far_sections = whole.clone();
    far_sections[0x28..0x30].fill(0x7f);
    files.map("far_sections.so", &far_sections);
    for name in ["shrinks.so", "replaced.so", "deleted.so", "secret.so", "really (deleted)"] {
        files.map(name, whole);
    }
    let names: [&[u8]; 4] = [b"line\nbreak.so", b"\x1b[31mred.so", b"no\xffutf8.so", "\u{202e}os.turned".as_bytes()];
    names.iter().for_each(|name| files.map(OsStr::from_bytes(name), &whole[..0x100]));
    let mapped = |directory: &Path| {
        fs::remove_file(directory.join("deleted.so")).unwrap();
        // Root, which memtrace runs as, can read it still.
        fs::set_permissions(directory.join("secret.so"), fs::Permissions::from_mode(0o000)).unwrap();
    };
    let change = |directory: &Path| {
        fs::File::options().write(true).open(directory.join("shrinks.so")).unwrap().set_len(100).unwrap();
        fs::write(directory.join("new"), b"\x7fELF and nothing else").unwrap();
        fs::rename(directory.join("new"), directory.join("replaced.so")).unwrap();
    };
    let (ended, report) = files.trace(mapped, change);
    let problems = without_rows(&report);
    let reason = |module: &str| {
        let found = problems.iter().find(|(name, _)| name == module);
        found.unwrap_or_else(|| panic!("nothing is said of {module}: {problems:#?}")).1.as_str()
    };
    assert!(reason("headers.so").contains("damaged"), "{}", reason("headers.so"));
    assert!(reason("many_headers.so").contains("program headers"), "{}", reason("many_headers.so"));
    // What is no module is nothing unusual.
    for whole in ["deleted.so", "secret.so", "shrinks.so", "replaced.so", "really", "library0.so", "text.so"] {
        assert!(!problems.iter().any(|(name, _)| name == whole), "{whole}: {problems:#?}");
    }
    // Names are as they are for programs, and escaped for people.
    assert!(reason("line\nbreak.so").contains("damaged"));
    for escaped in ["line\\u{a}break.so", "\\u{1b}[31mred.so", "no\u{fffd}utf8.so", "\\u{202e}os.turned"] {
        assert!(ended.stdout.contains(&format!("no rows for {escaped}: ")), "{escaped}: {}", ended.stdout);
        assert!(!ended.stderr.contains(['\u{1b}', '\u{202e}']), "{}", ended.stderr);
    }
}

#[test]
fn thousands_of_libraries() {
    let _turn = turn();
    let files = Files::new();
    files.open(3000);
    let (_, report) = files.trace(|_| {}, |_| {});
    assert_eq!(without_rows(&report), []);
    assert_eq!(report["coverage"]["truncated"].as_array().map(Vec::len), Some(0), "{}", report["coverage"]);
}

/// What is said of thousands of files that can't be used fits on a page.
#[test]
fn thousands_of_damaged_files() {
    let _turn = turn();
    let files = Files::new();
    files.open(1);
    for number in 0..2000 {
        let length = 64 + number * (files.whole.len() - 64) / 2000;
        let mut content = files.whole[..length].to_vec();
        // The headers of every second one, the contents of the others.
        content[0x38] ^= [0xff, 0][number % 2];
        files.map(format!("damaged{number}.so"), &content);
    }
    let (ended, report) = files.trace(|_| {}, |_| {});
    let problems = without_rows(&report);
    assert!(problems.len() > 1000, "{}", problems.len());
    let lines = ended.stdout.lines().count() + ended.stderr.lines().count();
    assert!(lines < 100, "{lines} lines:\n{}{}", ended.stdout, ended.stderr);
}
