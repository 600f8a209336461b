//! Parsers of option values.

use std::time::Duration;

use memtrace_common::settings::Unwind;

use crate::{
    kernel::budget::{MAX_MIB, MIN_MIB},
    output::Format,
    profile::By,
    target::pages::PageKind,
    view::Unit,
};

/// Longest trace: about three years, far from every overflow.
const MAX_SECONDS: f64 = 1e8;

/// A positive number of seconds, fractions allowed.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    if number > 0.0 && number <= MAX_SECONDS {
        Ok(Duration::from_secs_f64(number))
    } else {
        Err(format!("must be more than 0 and at most {MAX_SECONDS:.0}"))
    }
}

/// `bytes`, `count` or `pages`.
pub fn unit(text: &str) -> Result<Unit, String> {
    Unit::ALL
        .into_iter()
        .find(|unit| unit.name() == text)
        .ok_or_else(|| format!("must be {}", Unit::ALL.map(Unit::name).join(" or ")))
}

/// `thread`, `process` or `cgroup`.
pub fn by(text: &str) -> Result<By, String> {
    By::ALL
        .into_iter()
        .find(|by| *by != By::None && by.name() == text)
        .ok_or_else(|| "must be thread, process or cgroup".to_owned())
}

/// `anon`, `file` or `shmem`.
pub fn kind(text: &str) -> Result<PageKind, String> {
    match text {
        "anon" => Ok(PageKind::Anon),
        "file" => Ok(PageKind::File),
        "shmem" => Ok(PageKind::Shmem),
        _ => Err("must be anon, file or shmem".to_owned()),
    }
}

/// `auto`, `dwarf` or `fp`.
pub fn unwind(text: &str) -> Result<Unwind, String> {
    match text {
        "auto" => Ok(Unwind::Auto),
        "dwarf" => Ok(Unwind::Dwarf),
        "fp" => Ok(Unwind::FramePointers),
        _ => Err("must be auto, dwarf or fp".to_owned()),
    }
}

/// Name of an output format.
pub fn format(text: &str) -> Result<Format, String> {
    Format::from_name(text).map_err(|error| error.to_string())
}

/// Size of the kernel side's tables, MiB.
pub fn budget(text: &str) -> Result<u32, String> {
    text.parse()
        .ok()
        .filter(|mebibytes| (MIN_MIB..=MAX_MIB).contains(mebibytes))
        .ok_or_else(|| format!("must be a whole number from {MIN_MIB} to {MAX_MIB}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_positive_and_bounded() {
        assert_eq!(seconds("1.5").unwrap(), Duration::from_millis(1500));
        for text in ["0", "-1", "nan", "inf", "1e9", "", "5s"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn splits_have_names() {
        assert_eq!(
            ["thread", "process", "cgroup"].map(|text| by(text).unwrap()),
            [By::Thread, By::Process, By::Cgroup]
        );
        for text in ["none", "", "Thread", "pid"] {
            assert!(by(text).is_err(), "{text}");
        }
    }

    #[test]
    fn budget_is_bounded() {
        assert_eq!(budget("64").unwrap(), 64);
        for text in ["0", "65537", "-1", "64M", ""] {
            assert!(budget(text).is_err(), "{text}");
        }
    }
}
