//! The emulated machine's file system. Files are at the same places as on this machine.

use std::{
    env, fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::{cpio::Archive, guest, plan, programs, suites::Built};
use crate::run;

/// The program that is traced, with frame pointers and without.
const FIXTURE: &str = include_str!("fixture.c");
const FLAVOURS: [(&str, &str); 2] =
    [(guest::WITH_FRAME_POINTERS, "-fno-omit-frame-pointer"), (guest::WITHOUT_FRAME_POINTERS, "-fomit-frame-pointer")];

/// Sources that the tests' programs read, in the tests' package.
const SCRIPT: &str = "tests/fixtures/oracle.py";

/// Writes the file system to a file in `directory` and returns its path.
pub fn write(directory: &Path, built: &Built) -> Result<PathBuf> {
    fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    let mut image = Image { archive: Archive::default(), stripped: directory.join("stripped") };
    image.skeleton()?;
    image.own_programs(directory, built)?;
    image.tests(built)?;
    image.real_programs()?;
    let path = directory.join("initramfs.cpio");
    fs::write(&path, image.archive.finish()).with_context(|| path.display().to_string())?;
    Ok(path)
}

struct Image {
    archive: Archive,
    /// Room for one file.
    stripped: PathBuf,
}

impl Image {
    fn skeleton(&mut self) -> Result<()> {
        // Directories of old that are links into /usr, as on this machine.
        for name in ["bin", "sbin", "lib", "lib32", "lib64"] {
            if let Ok(to) = fs::read_link(Path::new("/").join(name)) {
                self.archive.link(name, to.to_str().with_context(|| format!("not UTF-8: where /{name} leads"))?);
            }
        }
        for mount_point in ["proc", "sys", "dev"] {
            self.archive.directory(mount_point);
        }
        self.archive.open_directory("tmp");
        // What the kernel opens for the first process, before anything is mounted.
        self.archive.device("dev/console", 5, 1);
        Ok(())
    }

    fn own_programs(&mut self, directory: &Path, built: &Built) -> Result<()> {
        let own = env::current_exe().context("this program's own path")?;
        self.stripped(&own, Path::new(guest::INIT))?;
        self.stripped(&built.memtrace, &built.memtrace)?;
        self.link(Path::new(guest::MEMTRACE), &built.memtrace)?;
        for (place, frame_pointers) in FLAVOURS {
            let program = compile(directory, frame_pointers)?;
            self.libraries(&program)?;
            self.put(&program, Path::new(place))?;
        }
        Ok(())
    }

    fn tests(&mut self, built: &Built) -> Result<()> {
        let text = serde_json::to_string(&built.plan).context("the plan")?;
        self.archive.executable(plan::FILE.trim_start_matches('/'), 0, text.as_bytes());
        for suite in &built.plan.suites {
            self.stripped(Path::new(&suite.program), Path::new(&suite.program))?;
            self.archive.directory(suite.directory.trim_start_matches('/'));
        }
        for entry in fs::read_dir(&built.fixtures).with_context(|| built.fixtures.display().to_string())? {
            self.bring(&entry?.path())?;
        }
        Ok(())
    }

    fn real_programs(&mut self) -> Result<()> {
        for name in programs::PLAIN {
            self.bring(&programs::find(name)?)?;
        }
        let script = run::root()?.join("memtrace").join(SCRIPT);
        let python = programs::python(&script)?;
        for file in &python.files {
            self.bring(file)?;
        }
        self.bring(&script)?;
        self.bring(&python.interpreter)?;
        self.link(Path::new("/usr/bin/python3"), &python.interpreter)
    }

    /// A file at its own place, with the libraries that it is loaded with.
    fn bring(&mut self, file: &Path) -> Result<()> {
        self.libraries(file)?;
        self.put(file, file)
    }

    /// A program without its debug information, which would take most of the machine's memory.
    fn stripped(&mut self, program: &Path, place: &Path) -> Result<()> {
        run::output(Command::new("strip").arg("-o").arg(&self.stripped).arg(program))?;
        self.libraries(program)?;
        let stripped = self.stripped.clone();
        self.put(&stripped, place)
    }

    fn libraries(&mut self, file: &Path) -> Result<()> {
        let mut head = [0; 4];
        let mut opened = fs::File::open(file).with_context(|| file.display().to_string())?;
        if std::io::Read::read_exact(&mut opened, &mut head).is_err() || head != *b"\x7fELF" {
            return Ok(());
        }
        for library in programs::needed(file)? {
            self.put(Path::new(&library), Path::new(&library))?;
        }
        Ok(())
    }

    fn put(&mut self, file: &Path, place: &Path) -> Result<()> {
        let words = || file.display().to_string();
        let time = fs::metadata(file).with_context(words)?.mtime();
        let contents = fs::read(file).with_context(words)?;
        // Python looks at the time to see whether what it has compiled is up to date.
        self.archive.executable(&inside(place)?, u32::try_from(time).unwrap_or(0), &contents);
        Ok(())
    }

    fn link(&mut self, place: &Path, to: &Path) -> Result<()> {
        let to = to.to_str().with_context(|| format!("not UTF-8: {}", to.display()))?;
        self.archive.link(&inside(place)?, to);
        Ok(())
    }
}

/// The place in the archive: links on the way to it, which are there as links if at all, are followed.
fn inside(place: &Path) -> Result<String> {
    let name = place.file_name().with_context(|| format!("no file name: {}", place.display()))?;
    let parent = place.parent().unwrap_or(Path::new("/"));
    let parent = parent.canonicalize().with_context(|| parent.display().to_string())?;
    let path = parent.join(name);
    let text = path.to_str().with_context(|| format!("not UTF-8: {}", path.display()))?;
    Ok(text.trim_start_matches('/').to_owned())
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn places_without_links_on_the_way() {
        assert_eq!(inside(Path::new("/init")).unwrap(), "init");
        // One of two processes' own directories, which is a link.
        let here = fs::canonicalize("/proc/self").unwrap();
        assert_eq!(inside(Path::new("/proc/self/maps")).unwrap(), format!("{}/maps", here.display())[1..]);
        assert!(inside(Path::new("/nonexistent/file")).is_err());
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
