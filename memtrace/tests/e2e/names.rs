//! Names and lines of functions that are hard to name: inlined ones, generated ones, those in files without a name.

use std::{fs, process::Command};

use crate::support::{
    build::Fixture,
    compare::Unit,
    folded,
    json::Report,
    memtrace::Memtrace,
    root::turn,
    start::Unwind,
    target::Target,
    trace::{Trace, read},
    truth::{Amount, Path, Paths, Truth},
};

fn trace<'a>(arguments: &'a [&'a str]) -> Trace<'a> {
    Trace { fixture: Fixture::Names, arguments, options: &[], unwind: Unwind::Auto }
}

/// The part of every path that the fixture knows: from `main` on. With source lines, frames have a suffix.
fn from_main<V: Copy>(paths: impl IntoIterator<Item = (Path, V)>) -> Vec<(Path, V)> {
    let is_main = |frame: &String| frame == "main" || frame.starts_with("main (");
    paths
        .into_iter()
        .filter_map(|(path, value)| Some((path[path.iter().position(is_main)?..].to_vec(), value)))
        .collect()
}

fn bytes(paths: &Paths) -> Vec<(Path, u64)> {
    paths.iter().map(|(path, amount)| (path.clone(), amount.bytes)).collect()
}

/// Every line is the one that the fixture's compiler put there: of the call in every caller, inlined ones included.
#[test]
fn lines_of_all_frames() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name).display().to_string();
    let mut target = Target::start(Fixture::Names, &["lines"]);
    let pid = target.pid().to_string();
    let memtrace = Memtrace::tracing(&[
        "memstacks",
        "-p",
        &pid,
        "--lines",
        "-o",
        &file("l.folded"),
        "-o",
        &file("l.json"),
        "-o",
        "-",
    ]);
    target.go();
    let truth = target.truth();
    let ended = memtrace.interrupt().success();
    target.finish();
    assert_eq!(truth.unfreed.len(), 2);
    let found = from_main(folded::parse(&read(&directory.path().join("l.folded")), Fixture::Names.name()));
    assert_eq!(found, bytes(&truth.unfreed));
    // In JSON the names are as without lines, and the paths of the files are whole.
    let text = read(&directory.path().join("l.json"));
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut from_json = Vec::new();
    for stack in json["stacks"].as_array().unwrap() {
        let (names, lines) = (stack["frames"].as_array().unwrap(), stack["lines"].as_array().unwrap());
        assert_eq!(names.len(), lines.len());
        let frame = |(name, line): (&serde_json::Value, &serde_json::Value)| match line["file"].as_str() {
            Some(file) if file.ends_with("names.c") => format!("{} (names.c:{})", name.as_str().unwrap(), line["line"]),
            _ => name.as_str().unwrap().to_owned(),
        };
        from_json.push((names.iter().zip(lines).map(frame).collect::<Path>(), stack["bytes"].as_u64().unwrap()));
    }
    from_json.sort();
    assert_eq!(from_main(from_json), bytes(&truth.unfreed));
    // The table has the inner one as its headline.
    let (path, _) = bytes(&truth.unfreed).remove(0);
    assert!(ended.stdout.contains(&format!("      {}  via malloc\n", path[path.len() - 2])), "{}", ended.stdout);
    // Without the option, both paths are one.
    let plain = trace(&["lines"]).run(Unit::Bytes);
    let path = ["main", "lines", "outer", "middle", "inner", "malloc"].map(str::to_owned).to_vec();
    assert_eq!(from_main(plain.unfreed.json.foreign), [(path, Amount { bytes: 34, count: 2 })]);
}

/// The return address is the next function's first byte.
#[test]
fn a_call_that_ends_a_function() {
    let _turn = turn();
    let traced = trace(&["noreturn"]).run(Unit::Bytes);
    assert_eq!(traced.truth.fact("return address is the next function's"), 1);
    traced.assert_own_exact();
    traced.assert_nothing_else();
    traced.assert_no_losses();
}

/// Whether `text` is what a fixture says, with nothing else unfreed.
fn assert_unfreed(text: &str, comm: &str, truth: &Truth) {
    assert_eq!(from_main(folded::parse(text, comm)), bytes(&truth.unfreed), "{text}");
}

/// The map is in the target's own `/tmp`, under the number that the target has there, and it changes during the trace.
#[test]
fn generated_code_in_a_container_has_names() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("leak.folded");
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"]);
    // Where the fixture is may be below /tmp.
    command.arg("mkdir -p $0 && mount --bind \"$0\" /mnt && mount -t tmpfs none /tmp && exec /mnt/names jit");
    command.arg(Fixture::Names.path().parent().unwrap());
    let mut target = Target::child_of(&mut command);
    let pid = target.pid().to_string();
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid, "-o", &path.display().to_string()]);
    target.go();
    let truth = target.truth();
    let ended = memtrace.interrupt().success();
    assert_unfreed(&read(&path), Fixture::Names.name(), &truth);
    assert!(!ended.stderr.contains("perf map"), "{}", ended.stderr);
    assert!(target.finish().status.success());
}

/// A map that another user wrote is not believed.
#[test]
fn a_map_of_generated_code_by_another_user_is_not_used() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("leak.folded");
    let mut target = Target::start(Fixture::Names, &["jit"]);
    let map = format!("/tmp/perf-{}.map", target.pid());
    std::os::unix::fs::chown(&map, Some(65_534), None).unwrap();
    let pid = target.pid().to_string();
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid, "-o", &path.display().to_string()]);
    target.go();
    target.truth();
    memtrace.interrupt().success();
    target.finish();
    fs::remove_file(&map).unwrap();
    let text = read(&path);
    assert!(!text.contains("jit::") && text.contains(";jit_call;[unknown] ([anon]+0x"), "{text}");
}

#[test]
fn functions_in_a_file_that_never_had_a_name_have_names() {
    let _turn = turn();
    let library = Fixture::NamesFirst.path().display().to_string();
    let arguments = ["memfd", &library];
    // Along frame pointers, which are there: by tables, its stacks are cut until memtrace knows of the file.
    let trace = || Trace { unwind: Unwind::FramePointers, ..trace(&arguments) };
    for traced in [trace().run(Unit::Bytes), trace().run_until_exit(Unit::Bytes)] {
        traced.assert_own_exact();
        traced.assert_no_losses();
    }
}

/// Two libraries of one layout, the second at the first one's place: an address may be of either. What must not be is the
/// name of one for a call of the other.
#[test]
fn addresses_that_two_libraries_had_are_ambiguous() {
    let _turn = turn();
    let [first, second] =
        [Fixture::NamesFirst, Fixture::NamesSecond].map(|fixture| fixture.path().display().to_string());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("leak.json");
    let mut target = Target::start(Fixture::Names, &["reuse", &first, &second]);
    let pid = target.pid().to_string();
    let memtrace = Memtrace::tracing(&["memstacks", "-p", &pid, "-o", &path.display().to_string()]);
    target.go();
    let truth = target.truth();
    memtrace.interrupt().success();
    target.finish();
    assert_eq!(truth.fact("same address"), 1);
    // Depending on how soon memtrace knew of each library, its stacks are whole or begin with it, and it was seen or not.
    let mut sum = 0;
    for (path, amount) in Report::parse(&read(&path)).paths {
        let text = path.join(";");
        assert!(!text.contains("in_first") && !text.contains("in_secnd;"), "{amount:?} by {text}");
        assert!(!path.contains(&"main".to_owned()) || path.contains(&"reuse".to_owned()), "{text}");
        sum += if path[path.len() - 2].starts_with("[ambiguous] (names_") { amount.bytes } else { 0 };
    }
    assert_eq!(sum, 71 + 73);
}

#[test]
fn long_names_are_short_in_the_table_and_whole_elsewhere() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("leak.folded");
    let whole = "Holder<std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >, ";
    for (options, short) in [(&[][..], true), (&["--full-names"], false)] {
        let mut target = Target::start::<&str>(Fixture::NamesCpp, &[]);
        let pid = target.pid().to_string();
        let mut arguments = vec!["memstacks", "-p", &pid, "-o", "-", "-o", path.to_str().unwrap()];
        arguments.extend(options);
        let memtrace = Memtrace::tracing(&arguments);
        target.go();
        target.truth();
        let ended = memtrace.interrupt().success();
        target.finish();
        assert_eq!(ended.stdout.contains("      Holder<…>::keep(…)  via malloc\n"), short, "{}", ended.stdout);
        assert_eq!(ended.stdout.contains(whole), !short, "{}", ended.stdout);
        assert!(read(&path).contains(whole), "{}", read(&path));
    }
}
