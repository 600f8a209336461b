//! Where this machine gets Debian's packages from: asked of apt itself, which knows both forms of its source lists.

use std::process::Command;

use anyhow::{Context, Result};

use crate::run;

/// Names a mirror on a machine whose own sources have no Debian.
pub const VARIABLE: &str = "MEMTRACE_DEBIAN_MIRROR";

/// URIs of archives that may have Debian's suites, the likeliest first.
pub fn candidates() -> Result<Vec<String>> {
    if let Ok(mirror) = std::env::var(VARIABLE)
        && !mirror.is_empty()
    {
        return Ok(vec![mirror]);
    }
    let targets = run::output(Command::new("apt-get").args([
        "indextargets",
        // Without it, sources whose lists were not fetched yet are left out.
        "--no-release-info",
        "--format",
        "$(CREATED_BY)\t$(RELEASE)\t$(COMPONENT)\t$(REPO_URI)",
    ]))
    .context("this machine's package sources")?;
    Ok(parse(&targets))
}

/// Archives with a component `main` of a suite proper: not one of updates, security updates or backports, whose
/// archives may be others. Which of them are Debian's turns out when its signature is checked.
fn parse(targets: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for line in targets.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let &["Packages", release, "main", uri] = fields.as_slice() else { continue };
        let proper = !release.is_empty() && release.chars().all(|c| c.is_ascii_lowercase());
        // One word in the source list, without options of its own.
        let usable = !uri.starts_with("cdrom:") && !uri.chars().any(|c| c.is_whitespace() || c == '[');
        if proper && usable && !found.iter().any(|known| known == uri) {
            found.push(uri.to_owned());
        }
    }
    // The archive of the distribution itself mostly has its name.
    found.sort_by_key(|uri| !uri.trim_end_matches('/').ends_with("debian"));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_of_suites_proper() {
        let targets = "Packages\tnodistro\tmain\thttps://deb.example.org/node/\n\
                       Packages\tbookworm\tmain\thttp://mirror.example.org/debian/\n\
                       DEP-11\tbookworm\tmain\thttp://mirror.example.org/debian/\n\
                       Packages\tbookworm\tcontrib\thttp://contrib.example.org/debian/\n\
                       Packages\tbookworm-updates\tmain\thttp://updates.example.org/debian/\n\
                       Packages\tbookworm/updates\tmain\thttp://old.example.org/debian/\n\
                       Packages\tbookworm-security\tmain\thttp://security.example.org/debian-security/\n\
                       Packages\ttrixie\tmain\thttp://mirror.example.org/debian/\n\
                       Packages\ttrixie\tmain\tcdrom:[Debian 13]/\n";
        assert_eq!(parse(targets), ["http://mirror.example.org/debian/", "https://deb.example.org/node/"]);
    }

    #[test]
    fn lists_of_mirrors_and_nothing() {
        let targets = "Packages\tsid\tmain\tmirror+file:/etc/apt/mirrors/debian.list/\n";
        assert_eq!(parse(targets), ["mirror+file:/etc/apt/mirrors/debian.list/"]);
        assert_eq!(parse(""), [""; 0]);
        assert_eq!(parse("Packages\tsid\tmain\n\n"), [""; 0]);
    }
}
