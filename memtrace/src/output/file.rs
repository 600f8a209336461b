//! Output files that are opened before the trace and appear whole or not at all.
//!
//! A result is written to a temporary file in the directory of its destination, which then takes the destination's name.
//! Whoever reads the destination sees the old content or the whole new one. Devices, FIFOs and the names of open
//! descriptors (`/dev/stdout`) cannot be replaced that way and are written to directly.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, BufWriter, Write},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use tempfile::NamedTempFile;

use crate::profile::NamedProfile;

use super::{Format, Planned, Target, ViewOptions, escape, text};

/// An output that cannot be written. The text names the file and the next step.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Found before the trace.
    #[error("cannot write {}: {reason}", shown(path))]
    Prepare {
        /// The destination.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// Found when the result was written.
    #[error(
        "cannot write {}: {source}; the result is not there, an earlier file of that name is unchanged",
        shown(path)
    )]
    Write {
        /// The destination.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Standard output.
    #[error("cannot write to standard output: {source}")]
    Stdout {
        /// The reason.
        source: io::Error,
    },
}

fn shown(path: &Path) -> String {
    escape::text(&path.to_string_lossy()).into_owned()
}

/// Where one result goes. Dropping it without [`Self::commit`] removes the temporary file.
#[derive(Debug)]
pub struct Destination {
    path: PathBuf,
    sink: Sink,
}

#[derive(Debug)]
enum Sink {
    Stdout,
    /// Written to directly.
    Direct(File),
    /// Written, then renamed to the path given here.
    Temporary(NamedTempFile, PathBuf),
}

impl Destination {
    /// Gets everything ready that can fail, so that a long trace is not lost for a mistyped path. `-` is standard output.
    ///
    /// # Errors
    /// The path cannot be written; the text says why.
    pub fn prepare(path: &Path) -> Result<Self, FileError> {
        if path.as_os_str() == "-" {
            return Ok(Self::stdout());
        }
        let sink = prepare(path).map_err(|reason| FileError::Prepare { path: path.into(), reason })?;
        Ok(Self { path: path.into(), sink })
    }

    /// Standard output.
    pub fn stdout() -> Self {
        Self { path: "-".into(), sink: Sink::Stdout }
    }

    /// The path as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the result with `write` and gives it its name.
    ///
    /// A reader of standard output that has gone away (`| head`) is no error.
    ///
    /// # Errors
    /// Writing or renaming failed; the destination is as it was, unless it is written to directly.
    pub fn commit(self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), FileError> {
        let failed = |source| FileError::Write { path: self.path.clone(), source };
        match self.sink {
            Sink::Stdout => match buffered(io::stdout().lock(), write) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
                result => result.map_err(|source| FileError::Stdout { source }),
            },
            Sink::Direct(file) => buffered(file, write).map_err(failed),
            Sink::Temporary(mut file, target) => {
                buffered(file.as_file_mut(), write).map_err(failed)?;
                file.persist(target).map_err(|error| failed(error.error))?;
                Ok(())
            }
        }
    }
}

fn buffered(out: impl Write, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut out = BufWriter::new(out);
    write(&mut out)?;
    out.flush()
}

/// The reason of a failure is a sentence for the user.
fn prepare(path: &Path) -> Result<Sink, String> {
    if path.file_name().is_none() || path.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return Err("it names a directory; add a file name".into());
    }
    if is_descriptor(path) {
        return direct(path);
    }
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err("it is a directory; add a file name".into()),
        Ok(metadata) if metadata.is_file() => {
            // Through a symbolic link, what it leads to is replaced, not the link.
            let target = path.canonicalize().map_err(|error| error.to_string())?;
            temporary(&target, metadata.permissions())
        }
        Ok(_) => direct(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // What the process's umask leaves of it.
            temporary(path, Permissions::from_mode(0o666))
        }
        Err(error) => Err(explained(&error, path.parent())),
    }
}

/// Names that stand for an open file of this process: renaming another file over them would miss it.
fn is_descriptor(path: &Path) -> bool {
    path.starts_with("/proc")
        || path.starts_with("/dev/fd")
        || ["/dev/stdin", "/dev/stdout", "/dev/stderr"].iter().any(|name| path == Path::new(name))
}

fn direct(path: &Path) -> Result<Sink, String> {
    OpenOptions::new().append(true).open(path).map(Sink::Direct).map_err(|error| explained(&error, path.parent()))
}

fn temporary(target: &Path, permissions: Permissions) -> Result<Sink, String> {
    let directory = match target.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    };
    tempfile::Builder::new()
        .prefix(".memtrace-")
        .suffix(".tmp")
        .permissions(permissions)
        .tempfile_in(directory)
        .map(|file| Sink::Temporary(file, target.into()))
        .map_err(|error| explained(&error, Some(directory)))
}

fn explained(error: &io::Error, directory: Option<&Path>) -> String {
    let directory = match directory {
        Some(directory) if !directory.as_os_str().is_empty() => shown(directory),
        _ => "the current directory".into(),
    };
    match error.kind() {
        io::ErrorKind::NotFound => {
            format!("{directory} does not exist; create it, or choose another path")
        }
        io::ErrorKind::NotADirectory => {
            format!("{directory} is not a directory; choose another path")
        }
        io::ErrorKind::PermissionDenied => {
            format!("no permission to create files in {directory}; choose another path")
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            format!("{directory} is on a read-only file system; choose another path")
        }
        io::ErrorKind::StorageFull => {
            format!("the file system of {directory} is full; make room, or choose another path")
        }
        // tempfile puts the path of its own file before the system's words.
        _ => match error.raw_os_error() {
            Some(code) => io::Error::from_raw_os_error(code).to_string(),
            None => escape::text(&error.to_string()).into_owned(),
        },
    }
}

/// Every output of a run, ready to be written.
#[derive(Debug)]
pub struct Outputs {
    outputs: Vec<(Planned, Destination)>,
}

/// What became of one output.
#[derive(Debug)]
pub struct Written {
    /// Where it went, `-` for standard output.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// Whether it is there.
    pub result: Result<(), FileError>,
}

impl Outputs {
    /// Opens every planned output.
    ///
    /// # Errors
    /// The first one that cannot be written; temporary files of the others are removed.
    pub fn prepare(planned: &[Planned]) -> Result<Self, FileError> {
        let outputs = planned
            .iter()
            .map(|planned| {
                let destination = match &planned.target {
                    Target::Stdout => Destination::stdout(),
                    Target::File(path) => Destination::prepare(path)?,
                };
                Ok((planned.clone(), destination))
            })
            .collect::<Result<_, FileError>>()?;
        Ok(Self { outputs })
    }

    /// Whether an output on standard output tells what was traced and lost: the text table does.
    pub fn shows_coverage(&self) -> bool {
        self.outputs.iter().any(|(planned, _)| planned.target == Target::Stdout && planned.format == Format::Text)
    }

    /// Writes every output, also after one has failed. [`ViewOptions::which`] is ignored: the plan tells the views.
    /// Colours are for standard output only.
    pub fn write(self, profile: &NamedProfile, options: &ViewOptions) -> Vec<Written> {
        self.outputs
            .into_iter()
            .map(|(planned, destination)| {
                let path = destination.path().to_path_buf();
                let format = planned.format;
                let colour = options.colour && planned.target == Target::Stdout;
                let result = destination.commit(|out| {
                    if format == Format::Text {
                        let options = ViewOptions { colour, ..*options };
                        return text::write_views(profile, &planned.views, &options, out);
                    }
                    planned.views.iter().try_for_each(|which| {
                        let which = *which;
                        format.write(profile, &ViewOptions { which, ..*options }, out)
                    })
                });
                Written { path, format, result }
            })
            .collect()
    }
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
