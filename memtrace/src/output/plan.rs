//! Which views in which format go where, from the command line's words.
//!
//! - With one view asked for, every `-o` gets that view.
//! - With both (`--all --unfreed`), every `-o FILE` becomes two files with the view's name before the extension:
//!   `leak.svg` gives `leak.unfreed.svg` and `leak.all.svg` (for other kinds of traces see [`words`]). Standard output gets both text tables, one after the
//!   other; any other format there is an error, since two documents in one stream are none.
//! - A file's extension tells its format. `--format` tells that of standard output and of files whose extension tells
//!   nothing; without it, standard output gets text.
//! - Without any `-o`, the result goes to standard output.

use std::{
    collections::HashSet,
    ffi::OsString,
    path::{Path, PathBuf},
};

use crate::{
    profile::Subject,
    view::{Which, words},
};

use super::{Format, FormatError, escape};

/// Where an output goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Standard output, `-o -`.
    Stdout,
    /// A file.
    File(PathBuf),
}

/// One output to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Where it goes.
    pub target: Target,
    /// Its format.
    pub format: Format,
    /// The views in it; more than one only for text on standard output.
    pub views: Vec<Which>,
}

/// Options that contradict each other or lead nowhere.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No format is known.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Two views, one stream.
    #[error(
        "two views in format {format} cannot both go to standard output; ask for one of them, or give a file \
         with -o FILE.{extension}, which gets each in a file of its own",
        extension = format.extension()
    )]
    TwoViewsOnStdout {
        /// The format.
        format: Format,
    },
    /// One file, twice.
    #[error(
        "{} would be written twice; give every -o another name",
        escape::text(&path.to_string_lossy())
    )]
    SameFile {
        /// Its path.
        path: PathBuf,
    },
    /// Standard output, twice.
    #[error("-o - is given twice; standard output can hold one result")]
    StdoutTwice,
    /// A `--format` that nothing needs.
    #[error(
        "--format {format} has no effect: every -o names a file whose extension tells another format; leave out one of \
         the two"
    )]
    UnusedFormat {
        /// The format.
        format: Format,
    },
}

/// Plans the outputs. `outputs` are the values of `-o`, `format` that of `--format`, `views` what was asked for; no views
/// mean the default one. Touches no file.
///
/// # Errors
/// Unknown formats and contradictory options.
pub fn plan(
    outputs: &[PathBuf],
    format: Option<Format>,
    views: &[Which],
    subject: Subject,
) -> Result<Vec<Planned>, PlanError> {
    let mut wanted: Vec<Which> = views.to_vec();
    if wanted.is_empty() {
        wanted.push(Which::default());
    }
    wanted.sort_unstable();
    wanted.dedup();
    let stdout = [PathBuf::from("-")];
    let outputs = if outputs.is_empty() { &stdout } else { outputs };
    let mut planned = Vec::new();
    let mut format_used = false;
    for output in outputs {
        if output.as_os_str() == "-" {
            format_used = true;
            let format = format.unwrap_or(Format::Text);
            if wanted.len() > 1 && format != Format::Text {
                return Err(PlanError::TwoViewsOnStdout { format });
            }
            planned.push(Planned { target: Target::Stdout, format, views: wanted.clone() });
            continue;
        }
        let format = match (Format::from_path(output), format) {
            (Ok(told), asked) => {
                format_used |= asked == Some(told);
                told
            }
            (Err(_), Some(asked)) => {
                format_used = true;
                asked
            }
            (Err(error), None) => return Err(error.into()),
        };
        for which in &wanted {
            planned.push(Planned {
                target: Target::File(match wanted.len() {
                    1 => output.clone(),
                    _ => view_path(output, words(subject, *which).view),
                }),
                format,
                views: vec![*which],
            });
        }
    }
    if let Some(format) = format
        && !format_used
    {
        return Err(PlanError::UnusedFormat { format });
    }
    check_distinct(&planned)?;
    Ok(planned)
}

/// `leak.svg` with the view's name before its extension: `leak.unfreed.svg`.
fn view_path(path: &Path, view: &str) -> PathBuf {
    let mut name = OsString::from(path.file_stem().unwrap_or_default());
    name.push(".");
    name.push(view);
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

fn check_distinct(planned: &[Planned]) -> Result<(), PlanError> {
    let mut seen = HashSet::new();
    for planned in planned {
        // Collecting the components drops doubled slashes and `.`.
        let target = match &planned.target {
            Target::Stdout => Target::Stdout,
            Target::File(path) => {
                Target::File(path.components().filter(|part| *part != std::path::Component::CurDir).collect())
            }
        };
        if !seen.insert(target) {
            return Err(match &planned.target {
                Target::Stdout => PlanError::StdoutTwice,
                Target::File(path) => PlanError::SameFile { path: path.clone() },
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const BOTH: [Which; 2] = [Which::All, Which::Unfreed];

    fn paths(outputs: &[&str]) -> Vec<PathBuf> {
        outputs.iter().map(PathBuf::from).collect()
    }

    fn summary(planned: &[Planned]) -> Vec<String> {
        planned
            .iter()
            .map(|planned| {
                let target = match &planned.target {
                    Target::Stdout => "-".into(),
                    Target::File(path) => path.display().to_string(),
                };
                let views: Vec<&str> = planned.views.iter().map(|which| words(Subject::Heap, *which).view).collect();
                format!("{target} {} {}", planned.format, views.join("+"))
            })
            .collect()
    }

    fn plan_of(outputs: &[&str], format: Option<Format>, views: &[Which]) -> Vec<String> {
        summary(&plan(&paths(outputs), format, views, Subject::Heap).unwrap())
    }

    fn error_of(outputs: &[&str], format: Option<Format>, views: &[Which]) -> PlanError {
        plan(&paths(outputs), format, views, Subject::Heap).unwrap_err()
    }

    #[test]
    fn one_view() {
        assert_eq!(plan_of(&[], None, &[]), ["- text unfreed"]);
        assert_eq!(plan_of(&[], Some(Format::Json), &[Which::All]), ["- json all"]);
        assert_eq!(
            plan_of(&["leak.svg", "-", "a/b.FOLDED"], None, &[Which::Unfreed]),
            ["leak.svg svg unfreed", "- text unfreed", "a/b.FOLDED folded unfreed"]
        );
    }

    #[test]
    fn both_views() {
        assert_eq!(plan_of(&[], None, &BOTH), ["- text unfreed+all"]);
        assert_eq!(
            plan_of(&["leak.svg", "-", "x.y.txt"], None, &BOTH),
            [
                "leak.unfreed.svg svg unfreed",
                "leak.all.svg svg all",
                "- text unfreed+all",
                "x.y.unfreed.txt text unfreed",
                "x.y.all.txt text all"
            ]
        );
        assert_eq!(
            plan_of(&["d.svg/leak"], Some(Format::Folded), &BOTH),
            ["d.svg/leak.unfreed folded unfreed", "d.svg/leak.all folded all"]
        );
        assert_eq!(
            error_of(&["-"], Some(Format::Folded), &BOTH),
            PlanError::TwoViewsOnStdout { format: Format::Folded }
        );
    }

    #[test]
    fn formats() {
        assert_eq!(
            plan_of(&["out.dat", "x.svg"], Some(Format::Json), &[]),
            ["out.dat json unfreed", "x.svg svg unfreed"]
        );
        assert_eq!(plan_of(&["x.svg"], Some(Format::Svg), &[]), ["x.svg svg unfreed"]);
        assert_eq!(error_of(&["x.svg"], Some(Format::Json), &[]), PlanError::UnusedFormat { format: Format::Json });
        for name in ["out", "out.dat", ".svg", "out.svg.gz"] {
            assert!(matches!(error_of(&[name], None, &[]), PlanError::Format(FormatError::Extension { .. })));
        }
    }

    #[test]
    fn the_same_place_twice() {
        assert_eq!(error_of(&["-", "-"], None, &[]), PlanError::StdoutTwice);
        assert!(matches!(error_of(&["a/x.svg", "./a//x.svg"], None, &[]), PlanError::SameFile { .. }));
        assert!(matches!(error_of(&["x.svg", "x.all.svg", "x.svg"], None, &BOTH), PlanError::SameFile { .. }));
    }

    #[cfg(unix)]
    #[test]
    fn names_that_are_no_text() {
        use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

        let path = PathBuf::from(OsString::from_vec(b"d/\xff.svg".to_vec()));
        let planned = plan(&[path], None, &BOTH, Subject::Heap).unwrap();
        let Target::File(path) = &planned[0].target else {
            panic!("not a file");
        };
        assert_eq!(path.as_os_str().as_bytes(), b"d/\xff.unfreed.svg");
    }
}
