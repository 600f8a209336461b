//! The emulated machine's file system.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::{cpio::Archive, guest};
use crate::run;

/// The program that is traced, with frame pointers and without.
const FIXTURE: &str = include_str!("fixture.c");
const FLAVOURS: [(&str, &str); 2] =
    [(guest::WITH_FRAME_POINTERS, "-fno-omit-frame-pointer"), (guest::WITHOUT_FRAME_POINTERS, "-fomit-frame-pointer")];

/// Writes the file system to a file in `directory` and returns its path.
pub fn write(directory: &Path, memtrace: &Path) -> Result<PathBuf> {
    fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    let own = env::current_exe().context("this program's own path")?;
    let mut archive = Archive::default();
    for mount_point in ["proc", "sys", "dev", "tmp"] {
        archive.directory(mount_point);
    }
    // What the kernel opens for the first process, before anything is mounted.
    archive.device("dev/console", 5, 1);
    let mut libraries = BTreeSet::new();
    for (program, place) in [(own.as_path(), guest::INIT), (memtrace, guest::MEMTRACE)] {
        libraries.extend(needed(program)?);
        let stripped = directory.join("stripped");
        // Their debug information would take most of the machine's memory.
        run::output(Command::new("strip").arg("-o").arg(&stripped).arg(program))?;
        add(&mut archive, place, &stripped)?;
    }
    for (place, frame_pointers) in FLAVOURS {
        let program = compile(directory, frame_pointers)?;
        libraries.extend(needed(&program)?);
        add(&mut archive, place, &program)?;
    }
    for library in libraries {
        let place = library.clone();
        add(&mut archive, &place, Path::new(&library))?;
    }
    let path = directory.join("initramfs.cpio");
    fs::write(&path, archive.finish()).with_context(|| path.display().to_string())?;
    Ok(path)
}

fn add(archive: &mut Archive, place: &str, file: &Path) -> Result<()> {
    let contents = fs::read(file).with_context(|| file.display().to_string())?;
    archive.executable(place.trim_start_matches('/'), &contents);
    Ok(())
}

fn compile(directory: &Path, frame_pointers: &str) -> Result<PathBuf> {
    let source = directory.join("fixture.c");
    fs::write(&source, FIXTURE).with_context(|| source.display().to_string())?;
    let program = directory.join("fixture");
    run::output(
        Command::new("cc")
            .args(["-O2", "-Wall", "-Wextra", "-Werror", "-pthread", frame_pointers])
            // Every call stays a call with a frame of its own, and every allocation stays.
            .args(["-fno-optimize-sibling-calls", "-fno-builtin", "-o"])
            .args([&program, &source]),
    )?;
    Ok(program)
}

/// The shared libraries that a program is started with, and its dynamic loader.
fn needed(program: &Path) -> Result<Vec<String>> {
    let mut command = run::plain("ldd");
    let text = run::output(command.arg(program))?;
    Ok(libraries(&text))
}

/// The paths in what ldd prints: `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f…)`.
fn libraries(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| {
            let (path, _) = line.split_once("=>").map_or(line, |(_, path)| path).trim().rsplit_once(" (0x")?;
            path.starts_with('/').then(|| path.to_owned())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn libraries_and_the_loader() {
        let text = "\tlinux-vdso.so.1 (0x00007f2b5122b000)\n\
                    \tlibgcc_s.so.1 => /lib/x86_64-linux-gnu/libgcc_s.so.1 (0x00007f2b511cb000)\n\
                    \tlibnone.so => not found\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f2b5122d000)\n";
        assert_eq!(libraries(text), ["/lib/x86_64-linux-gnu/libgcc_s.so.1", "/lib64/ld-linux-x86-64.so.2"]);
        assert_eq!(libraries("\tstatically linked\n"), [""; 0]);
    }

    #[test]
    fn the_fixture_tells_a_truth() {
        let directory = crate::build::target_directory().unwrap().join("xtask-tests/vm");
        fs::create_dir_all(&directory).unwrap();
        let program = compile(&directory, FLAVOURS[1].1).unwrap();
        let mut fixture = crate::workload::Workload::start(&program, &["paths"]).unwrap();
        let truth = guest::truth(&fixture.ask("go").unwrap()).unwrap();
        assert!(truth.all.len() >= 10, "{truth:?}");
        assert!(truth.unfreed.len() < truth.all.len() && !truth.unfreed.is_empty(), "{truth:?}");
        for (path, bytes) in &truth.unfreed {
            assert!(truth.all[path] >= *bytes, "{path}");
        }
    }
}
