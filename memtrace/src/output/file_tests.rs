//! Tests of the output files.

#![allow(clippy::unwrap_used)]

use std::{ffi::OsString, os::unix::fs::symlink};

use super::*;
use crate::{
    output::plan,
    profile::Subject,
    view::{Which, sample},
};

fn names(directory: &Path) -> Vec<OsString> {
    let mut names: Vec<OsString> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}

fn refusal(path: &Path) -> String {
    let error = Destination::prepare(path).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, FileError::Prepare { .. }));
    assert!(text.contains(&shown(path)), "{text}");
    text
}

#[test]
fn the_file_appears_at_commit() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.txt");
    let destination = Destination::prepare(&path).unwrap();
    assert!(!path.exists());
    assert_eq!(names(directory.path()).len(), 1);
    destination.commit(|out| out.write_all(b"result")).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"result");
    assert_eq!(names(directory.path()), ["out.txt"]);
    // As any program would create it, not only for its owner.
    let plain = directory.path().join("plain");
    File::create(&plain).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions(), fs::metadata(&plain).unwrap().permissions());
}

#[test]
fn dropped_destinations_leave_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.txt");
    fs::write(&path, "old").unwrap();
    drop(Destination::prepare(&path).unwrap());
    assert_eq!(names(directory.path()), ["out.txt"]);
    assert_eq!(fs::read(&path).unwrap(), b"old");
}

#[test]
fn a_failed_write_keeps_the_old_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.txt");
    fs::write(&path, "old").unwrap();
    let destination = Destination::prepare(&path).unwrap();
    let error = destination
        .commit(|out| {
            out.write_all(b"half")?;
            Err(io::ErrorKind::StorageFull.into())
        })
        .unwrap_err();
    assert!(error.to_string().contains("out.txt"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(names(directory.path()), ["out.txt"]);
}

#[test]
fn links_are_followed() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("real")).unwrap();
    let file = directory.path().join("real/out.txt");
    fs::write(&file, "old").unwrap();
    let link = directory.path().join("link.txt");
    symlink(&file, &link).unwrap();
    let destination = Destination::prepare(&link).unwrap();
    destination.commit(|out| out.write_all(b"new")).unwrap();
    assert!(link.is_symlink());
    assert_eq!(fs::read(&file).unwrap(), b"new");
}

#[test]
fn unusable_paths_are_refused_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing/out.svg");
    assert!(refusal(&missing).contains("does not exist; create it"));
    fs::write(directory.path().join("file"), "").unwrap();
    let text = refusal(&directory.path().join("file/out.svg"));
    assert!(text.contains("not a directory"), "{text}");
    assert!(refusal(directory.path()).contains("is a directory"));
    refusal(&directory.path().join("new/"));
    refusal(&directory.path().join("x".repeat(300)));
    refusal(Path::new("/proc/out.svg"));
    let hostile = directory.path().join("missing\u{1b}[31m/out.svg");
    let text = Destination::prepare(&hostile).unwrap_err().to_string();
    assert!(!text.contains('\u{1b}'), "{text}");
}

#[test]
fn devices_are_written_to_and_not_replaced() {
    let destination = Destination::prepare(Path::new("/dev/null")).unwrap();
    destination.commit(|out| out.write_all(b"x")).unwrap();
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
}

#[test]
fn a_full_disk_stops_only_its_own_output() {
    let directory = tempfile::tempdir().unwrap();
    let good = directory.path().join("good.folded");
    let planned = [Path::new("/dev/full"), &good].map(|path| Planned {
        target: Target::File(path.into()),
        format: Format::Folded,
        views: vec![Which::Unfreed],
    });
    let outputs = Outputs::prepare(&planned).unwrap();
    let written = outputs.write(&sample::plain(), &ViewOptions::default());
    let error = written[0].result.as_ref().unwrap_err().to_string();
    assert!(error.contains("/dev/full"), "{error}");
    assert!(written[1].result.is_ok());
    assert!(fs::read_to_string(good).unwrap().starts_with("server;_start;"));
}

#[test]
fn every_planned_view_gets_its_file() {
    let directory = tempfile::tempdir().unwrap();
    let outputs = ["leak.svg", "leak.folded", "leak.json", "leak.txt"].map(|name| directory.path().join(name));
    let planned = plan(&outputs, None, &Which::ALL, Subject::Heap).unwrap();
    let outputs = Outputs::prepare(&planned).unwrap();
    let options = ViewOptions { colour: true, ..ViewOptions::default() };
    for written in outputs.write(&sample::plain(), &options) {
        written.result.unwrap();
    }
    assert_eq!(
        names(directory.path()),
        [
            "leak.all.folded",
            "leak.all.json",
            "leak.all.svg",
            "leak.all.txt",
            "leak.unfreed.folded",
            "leak.unfreed.json",
            "leak.unfreed.svg",
            "leak.unfreed.txt"
        ]
    );
    let read = |name: &str| fs::read_to_string(directory.path().join(name)).unwrap();
    assert!(read("leak.all.json").contains(r#""view":"all""#));
    assert!(read("leak.unfreed.json").contains(r#""view":"unfreed""#));
    assert!(read("leak.all.folded").contains("parse(Request const&)"));
    assert!(!read("leak.unfreed.folded").contains("parse(Request const&)"));
    assert!(!read("leak.unfreed.txt").contains('\u{1b}'));
}

#[test]
fn one_unusable_output_removes_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let outputs = ["good.svg", "missing/bad.svg"].map(|name| directory.path().join(name));
    let planned = plan(&outputs, None, &[], Subject::Heap).unwrap();
    Outputs::prepare(&planned).unwrap_err();
    assert_eq!(names(directory.path()), Vec::<OsString>::new());
}
