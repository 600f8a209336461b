//! Which distribution this is: os-release(5).

use std::{collections::BTreeMap, fs, io};

use anyhow::{Context, Result};

/// The fields of `/etc/os-release`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Release(BTreeMap<String, String>);

impl Release {
    /// Reads this system's, at either place that os-release(5) names; empty where there is neither.
    pub fn read() -> Result<Self> {
        for path in ["/etc/os-release", "/usr/lib/os-release"] {
            match fs::read_to_string(path) {
                Ok(text) => return Ok(Self::parse(&text)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).context(path),
            }
        }
        Ok(Self::default())
    }

    /// Lines `NAME=value`, the value plain or in quotes; comments and anything else are passed over.
    pub fn parse(text: &str) -> Self {
        let fields = text.lines().filter_map(|line| {
            let line = line.trim();
            let (name, value) = line.split_once('=')?;
            (!line.starts_with('#')).then(|| (name.to_owned(), unquoted(value)))
        });
        Self(fields.collect())
    }

    /// Debian, Ubuntu, and what says of itself that it is like them.
    pub fn is_debian_like(&self) -> bool {
        let ids = [self.field("ID"), self.field("ID_LIKE")];
        ids.iter().flat_map(|ids| ids.split_whitespace()).any(|id| id == "debian" || id == "ubuntu")
    }

    /// What people call it.
    pub fn name(&self) -> &str {
        [self.field("PRETTY_NAME"), self.field("NAME")]
            .into_iter()
            .find(|name| !name.is_empty())
            .unwrap_or("this system")
    }

    fn field(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }
}

fn unquoted(value: &str) -> String {
    for quote in ['"', '\''] {
        if let Some(inner) = value.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote)) {
            // Inside quotes a backslash keeps the next character as it is.
            let mut escaped = false;
            return inner
                .chars()
                .filter(|&character| {
                    escaped = character == '\\' && !escaped;
                    !escaped
                })
                .collect();
        }
    }
    value.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_comments_and_escapes() {
        let release =
            Release::parse("# comment=1\nPRETTY_NAME=\"Some \\\"Linux\\\" 12\"\nID=debian\nnothing\nVERSION_ID='12'\n");
        assert_eq!(release.name(), "Some \"Linux\" 12");
        assert_eq!(release.field("VERSION_ID"), "12");
        assert!(release.is_debian_like());
    }

    #[test]
    fn relatives_of_debian() {
        assert!(Release::parse("ID=ubuntu\nID_LIKE=debian").is_debian_like());
        assert!(Release::parse("ID=linuxmint\nID_LIKE=\"ubuntu debian\"").is_debian_like());
        assert!(!Release::parse("ID=fedora\nID_LIKE=\"rhel\"").is_debian_like());
        assert!(!Release::parse("ID=debianish").is_debian_like());
        assert!(!Release::parse("").is_debian_like());
        assert_eq!(Release::parse("").name(), "this system");
    }
}
