//! Tables to bytes.
//!
//! - [`Format`]: the formats, chosen by file extension or by name, each writing one view of a profile;
//! - [`plan`]: which views in which format go where, from the command line's words;
//! - [`Destination`] and [`Outputs`]: files that are opened before the trace and appear whole or not at all;
//! - [`text`], [`folded`], [`svg`], [`json`]: one module per format.
//!
//! Names in a profile come from the target and may be hostile; every format neutralises them in its own way ([`escape`]).

pub mod escape;
pub mod file;
pub mod folded;
mod group_table;
mod header;
pub mod json;
mod json_coverage;
mod json_memory;
mod json_processes;
mod memory;
pub mod plan;
mod probed;
mod processes;
pub mod svg;
pub mod text;
mod units;

use std::{
    fmt,
    io::{self, Write},
    path::{Path, PathBuf},
};

use crate::{
    profile::NamedProfile,
    view::{Unit, Which},
};

pub use file::{Destination, FileError, Outputs, Written};
pub use plan::{PlanError, Planned, Target, plan};

/// What to show, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViewOptions {
    /// Which allocations.
    pub which: Which,
    /// What is counted, and what the order is by.
    pub unit: Unit,
    /// Most rows of the text table. The other formats hold every call path.
    pub top: usize,
    /// Whether the text table may use terminal colours.
    pub colour: bool,
    /// Whether long names are whole in the text table too. In the other formats they always are.
    pub full_names: bool,
}

impl Default for ViewOptions {
    fn default() -> Self {
        Self { which: Which::default(), unit: Unit::default(), top: 20, colour: false, full_names: false }
    }
}

/// An output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// The table for people.
    Text,
    /// Folded stacks, for flame graph tools.
    Folded,
    /// A flame graph.
    Svg,
    /// Everything, for other programs.
    Json,
}

/// A format that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// A file name that tells no format.
    #[error(
        "{}: no output format has this file extension; use one of {extensions}, or name the format with --format",
        escape::text(&path.to_string_lossy()),
        extensions = list(|format| format!(".{}", format.extension()))
    )]
    Extension {
        /// The file name.
        path: PathBuf,
    },
    /// A name that is none.
    #[error(
        "there is no output format {:?}; use one of {names}",
        name,
        names = list(|format| format.name().to_owned())
    )]
    Name {
        /// The name.
        name: String,
    },
}

fn list(part: impl Fn(Format) -> String) -> String {
    let parts: Vec<String> = Format::ALL.into_iter().map(part).collect();
    parts.join(" ")
}

impl Format {
    /// Every format.
    pub const ALL: [Self; 4] = [Self::Text, Self::Folded, Self::Svg, Self::Json];

    /// The name used with `--format`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Folded => "folded",
            Self::Svg => "svg",
            Self::Json => "json",
        }
    }

    /// The extension of its files, without the dot.
    pub const fn extension(self) -> &'static str {
        match self {
            Self::Text => "txt",
            Self::Folded => "folded",
            Self::Svg => "svg",
            Self::Json => "json",
        }
    }

    /// The format that a file's extension tells, in upper or lower case.
    ///
    /// # Errors
    /// There is no such format.
    pub fn from_path(path: &Path) -> Result<Self, FormatError> {
        let extension = path.extension().unwrap_or_default();
        Self::ALL
            .into_iter()
            .find(|format| extension.eq_ignore_ascii_case(format.extension()))
            .ok_or_else(|| FormatError::Extension { path: path.into() })
    }

    /// The format of a name. File extensions count as names, so that `--format txt` works.
    ///
    /// # Errors
    /// There is no such format.
    pub fn from_name(name: &str) -> Result<Self, FormatError> {
        Self::ALL
            .into_iter()
            .find(|format| format.name() == name || format.extension() == name)
            .ok_or_else(|| FormatError::Name { name: name.into() })
    }

    /// Writes the view of `profile` that `options` ask for.
    ///
    /// # Errors
    /// What the writer returns; and for SVG, values whose sum needs more than 64 bits.
    pub fn write(self, profile: &NamedProfile, options: &ViewOptions, out: &mut dyn Write) -> io::Result<()> {
        match self {
            Self::Text => text::write(profile, options, out),
            Self::Folded => folded::write(profile, options, out),
            Self::Svg => svg::write(profile, options, out),
            Self::Json => json::write(profile, options, out),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

#[cfg(test)]
mod tests;
