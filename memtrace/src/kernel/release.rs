//! The running kernel's version.

use std::{fmt, fs};

/// `major.minor.patch` of a kernel release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// Patch level; 0 where the text has none.
    pub patch: u32,
}

impl Release {
    /// Release `major.minor`.
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor, patch: 0 }
    }

    /// Reads the text of `/proc/sys/kernel/osrelease`, such as `6.18.44-cloud-amd64`.
    pub fn parse(text: &str) -> Option<Self> {
        let numbers = text.trim().split(|c: char| !c.is_ascii_digit() && c != '.').next()?;
        let mut parts = numbers.split('.');
        Some(Self {
            major: parts.next()?.parse().ok()?,
            minor: parts.next()?.parse().ok()?,
            patch: parts.next().and_then(|part| part.parse().ok()).unwrap_or(0),
        })
    }

    /// The running kernel's; `None` if `/proc` does not tell.
    pub fn running() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/sys/kernel/osrelease").ok()?)
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_what_distributions_write() {
        let release = |major, minor, patch| Some(Release { major, minor, patch });
        assert_eq!(Release::parse("6.18.44-cloud-amd64\n"), release(6, 18, 44));
        assert_eq!(Release::parse("6.1.0-13-amd64"), release(6, 1, 0));
        assert_eq!(Release::parse("7.2-rc3"), release(7, 2, 0));
        assert_eq!(Release::parse("5.15.0+"), release(5, 15, 0));
        assert_eq!(Release::parse(""), None);
        assert_eq!(Release::parse("linux"), None);
    }

    #[test]
    fn orders_by_number() {
        assert!(Release::new(6, 9) < Release::new(6, 11));
    }
}
