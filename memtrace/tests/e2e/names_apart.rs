//! Programs whose names are not in them: in a debug file of the target's own root directory, in a small symbol table, at
//! a server.

use std::{
    ffi::OsStr,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::TcpListener,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use tempfile::TempDir;

use crate::support::{
    build::Fixture,
    memtrace::{Memtrace, command},
    process::Process,
    root::turn,
    target::Target,
    trace::read,
};

/// What is reported where the name of the fixture's local function is known, from `main` on.
const NAMED: &str = ";main;local;hidden;malloc 47\n";

fn run(command: &mut Command) {
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Copies a file, with objcopy's changes.
fn objcopy<A: AsRef<OsStr>>(arguments: &[A], from: &Path, to: &Path) {
    run(Command::new("objcopy").args(arguments).arg(from).arg(to));
}

/// A root directory with the fixture in it, stripped, and what it needs to run.
struct Chroot(TempDir);

impl Chroot {
    fn new() -> Self {
        let root = Self(tempfile::tempdir().unwrap());
        let output = Command::new("ldd").arg(Fixture::NamesSplit.path()).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let libraries = text.split_ascii_whitespace().filter(|word| word.starts_with('/'));
        for library in libraries {
            root.put(&fs::read(library).unwrap(), library);
            run(Command::new("chmod").arg("755").arg(root.path(library)));
        }
        root.place("--strip-all", "/usr/bin/names");
        root
    }

    fn path(&self, inside: &str) -> PathBuf {
        self.0.path().join(inside.trim_start_matches('/'))
    }

    /// Makes a file.
    fn put(&self, content: &[u8], inside: &str) {
        fs::create_dir_all(self.path(inside).parent().unwrap()).unwrap();
        fs::write(self.path(inside), content).unwrap();
    }

    /// Puts a part of the fixture there.
    fn place(&self, part: &str, inside: &str) {
        fs::create_dir_all(self.path(inside).parent().unwrap()).unwrap();
        objcopy(&[part], &Fixture::NamesSplit.path(), &self.path(inside));
    }

    /// Adds a section to the program.
    fn add_section(&self, name: &str, content: &[u8]) {
        self.put(content, "/section");
        let section = format!("{name}={}", self.path("/section").display());
        objcopy(&["--add-section", &section], &self.path("/usr/bin/names"), &self.path("/new"));
        fs::rename(self.path("/new"), self.path("/usr/bin/names")).unwrap();
    }

    fn start(&self) -> Target {
        Target::of(Command::new("chroot").arg(self.0.path()).args(["/usr/bin/names", "local"]))
    }

    /// What memtrace reports; with `exit`, when the target has ended.
    fn folded(&self, memtrace: impl FnOnce(&str, &str) -> Memtrace, exit: bool) -> String {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("leak.folded");
        let mut target = self.start();
        let memtrace = memtrace(&target.pid().to_string(), &path.display().to_string());
        target.go();
        target.truth();
        if exit {
            target.finish();
            memtrace.end().success();
        } else {
            memtrace.interrupt().success();
            target.finish();
        }
        read(&path)
    }

    fn report(&self) -> String {
        self.folded(|pid, path| Memtrace::tracing(&["memstacks", "-p", pid, "-o", path]), false)
    }
}

#[test]
fn a_stripped_program_has_no_names_and_says_so() {
    let _turn = turn();
    let text = Chroot::new().report();
    assert!(text.contains(";[unknown] (names+0x") && !text.contains("hidden"), "{text}");
}

#[test]
fn a_debug_file_by_build_id_in_the_targets_root() {
    let _turn = turn();
    let root = Chroot::new();
    root.place("--only-keep-debug", "/usr/lib/debug/.build-id/fe/edfacefeedface0123456789abcdef01234567.debug");
    assert!(root.report().ends_with(NAMED));
    // The root directory is held open.
    let after = root.folded(|pid, path| Memtrace::tracing(&["memstacks", "-p", pid, "-o", path]), true);
    assert!(after.ends_with(NAMED), "{after}");
}

#[test]
fn a_debug_file_by_link_in_the_targets_root() {
    let _turn = turn();
    let root = Chroot::new();
    root.place("--only-keep-debug", "/usr/lib/debug/usr/bin/names.debug");
    let link = format!("--add-gnu-debuglink={}", root.path("/usr/lib/debug/usr/bin/names.debug").display());
    objcopy(&[&link], &root.path("/usr/bin/names"), &root.path("/new"));
    fs::rename(root.path("/new"), root.path("/usr/bin/names")).unwrap();
    let text = root.report();
    assert!(text.ends_with(NAMED), "{text}");
    // A file with another content.
    let mut content = fs::read(root.path("/usr/lib/debug/usr/bin/names.debug")).unwrap();
    content.push(0);
    root.put(&content, "/usr/lib/debug/usr/bin/names.debug");
    assert!(root.report().contains(";[unknown] (names+0x"));
}

/// A link that is absolute, or goes up, ends in the target's root, although the file exists outside.
#[test]
fn links_do_not_lead_out_of_the_targets_root() {
    let _turn = turn();
    let (root, outside) = (Chroot::new(), tempfile::tempdir().unwrap());
    let debug = outside.path().join("names.debug");
    objcopy(&["--only-keep-debug"], &Fixture::NamesSplit.path(), &debug);
    let place = root.path("/usr/lib/debug/.build-id/fe");
    fs::create_dir_all(&place).unwrap();
    let link = place.join("edfacefeedface0123456789abcdef01234567.debug");
    for target in [debug.clone(), Path::new(&"../".repeat(20)).join(debug.strip_prefix("/").unwrap())] {
        symlink(target, &link).unwrap();
        assert!(root.report().contains(";[unknown] (names+0x"));
        fs::remove_file(&link).unwrap();
    }
}

#[test]
fn a_small_symbol_table() {
    let _turn = turn();
    let root = Chroot::new();
    root.place("--only-keep-debug", "/table");
    run(Command::new("xz").arg(root.path("/table")));
    root.add_section(".gnu_debugdata", &fs::read(root.path("/table.xz")).unwrap());
    assert!(root.report().ends_with(NAMED));
}

/// Answers every request for the fixture's build ID with its debug file.
fn server(debug: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    // It ends with the tests.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let request = lines.next().unwrap().unwrap();
            while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
            let wanted = "GET /buildid/feedfacefeedface0123456789abcdef01234567/debuginfo ";
            let (status, body) = if request.starts_with(wanted) { ("200 OK", &debug[..]) } else { ("404 No", &[][..]) };
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
        }
    });
    url
}

#[test]
fn a_debug_file_from_a_server_only_when_asked_for() {
    let _turn = turn();
    let (root, cache) = (Chroot::new(), tempfile::tempdir().unwrap());
    let debug = cache.path().join("debug");
    objcopy(&["--only-keep-debug"], &Fixture::NamesSplit.path(), &debug);
    let url = server(fs::read(&debug).unwrap());
    let report = |option: bool| {
        let start = |pid: &str, path: &str| {
            let mut command = command(&["memstacks", "-p", pid, "-o", path]);
            command.args(option.then_some("--debuginfod"));
            command.env("DEBUGINFOD_URLS", &url).env("DEBUGINFOD_CACHE_PATH", cache.path().join("cache"));
            Memtrace::tracing_by(Process::start(&mut command))
        };
        root.folded(start, false)
    };
    assert!(report(false).contains(";[unknown] (names+0x"));
    assert!(!cache.path().join("cache").exists());
    assert!(report(true).ends_with(NAMED));
    let kept = cache.path().join("cache/feedfacefeedface0123456789abcdef01234567/debuginfo");
    assert_eq!(fs::read(kept).unwrap(), fs::read(debug).unwrap());
}

#[test]
fn servers_have_to_be_named() {
    let mut command = command(&["memstacks", "-p", "1", "--debuginfod"]);
    let ended = Process::start(command.env("DEBUGINFOD_URLS", "")).end();
    assert_eq!(ended.code(), 2, "{}", ended.stderr);
    assert!(ended.stderr.contains("DEBUGINFOD_URLS"), "{}", ended.stderr);
}
