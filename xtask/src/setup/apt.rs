//! Debian's and Ubuntu's packages.

use std::{
    io::{self, IsTerminal},
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Result, bail};

use super::NIGHTLY;
use crate::{ebpf, run};

/// Compilers with the source of their library, the newest first: `rustc-web` is what Debian's stable releases use
/// to build web browsers.
const RUST_PACKAGES: [[&str; 2]; 2] = [["rustc-web", "rust-web-src"], ["rustc", "rust-src"]];

/// apt-get, which reads the package lists anew at most once.
#[derive(Default)]
pub struct Apt {
    updated: bool,
}

impl Apt {
    /// Installs those of `packages` that are missing.
    pub fn install(&mut self, packages: &[String]) -> Result<()> {
        let missing = missing(packages)?;
        if missing.is_empty() {
            return Ok(());
        }
        self.update()?;
        let quiet = StartsNothing::until_dropped()?;
        let installed = run::run(
            apt_get(&missing)?
                // An installation that would take another package away is for the user to decide.
                .args(["install", "--yes", "--no-remove", "--no-install-recommends"])
                .args(&missing),
        );
        drop(quiet);
        installed
    }

    /// The packages of a compiler that can build the eBPF programs.
    pub fn rust_packages(&mut self) -> Result<Vec<String>> {
        self.update()?;
        for pair in RUST_PACKAGES {
            let policy = policy(&pair)?;
            let new_enough = pair.iter().all(|package| {
                candidate(&policy, package).and_then(|version| ebpf::version(&version)).is_some_and(ebpf::new_enough)
            });
            if new_enough {
                return Ok(pair.map(str::to_owned).to_vec());
            }
        }
        bail!(
            "no package source of this system has a Rust compiler that is new enough with its library's source ({}); \
             Debian has it in its security updates. Add them, or install one with rustup, and run `cargo xtask \
             setup` again: {NIGHTLY}",
            RUST_PACKAGES.map(|pair| pair.join(" and ")).join(", ")
        )
    }

    /// The first of `packages` that can be installed.
    pub fn first_available(&mut self, packages: &[String]) -> Result<Option<String>> {
        if let Some(installed) =
            packages.iter().find(|package| missing(std::slice::from_ref(package)).is_ok_and(|list| list.is_empty()))
        {
            return Ok(Some(installed.clone()));
        }
        self.update()?;
        let names: Vec<&str> = packages.iter().map(String::as_str).collect();
        let policy = policy(&names)?;
        Ok(packages.iter().find(|package| candidate(&policy, package).is_some()).cloned())
    }

    fn update(&mut self) -> Result<()> {
        if self.updated {
            return Ok(());
        }
        self.updated = true;
        // One source out of order does not stop apt-get from installing from the others.
        if let Err(error) = run::run(apt_get(&[])?.arg("update")) {
            eprintln!("setup: warning: {error:#}");
        }
        Ok(())
    }
}

/// Forbids packages to start their services, which the tests start by themselves: invoke-rc.d(8) asks this file. One
/// that is there already is left as it is.
struct StartsNothing {
    made: bool,
}

impl StartsNothing {
    const FILE: &'static str = "/usr/sbin/policy-rc.d";

    fn until_dropped() -> Result<Self> {
        let Some(mut command) = as_root("sh").filter(|_| !Path::new(Self::FILE).exists()) else {
            return Ok(Self { made: false });
        };
        let script = format!("printf '#!/bin/sh\\nexit 101\\n' > {0} && chmod 755 {0}", Self::FILE);
        run::run(command.arg("-c").arg(script))?;
        Ok(Self { made: true })
    }
}

impl Drop for StartsNothing {
    fn drop(&mut self) {
        let Some(mut command) = as_root("rm").filter(|_| self.made) else {
            return;
        };
        if let Err(error) = run::run(command.arg(Self::FILE)) {
            eprintln!("setup: warning: {} is still there, and no package can start a service: {error:#}", Self::FILE);
        }
    }
}

/// A command that is run as root, if that can be had.
fn as_root(program: &str) -> Option<Command> {
    if run::is_root() {
        return Some(Command::new(program));
    }
    run::on_path("sudo").then(|| {
        let mut sudo = Command::new("sudo");
        if !io::stdin().is_terminal() {
            sudo.arg("--non-interactive");
        }
        sudo.arg(program);
        sudo
    })
}

/// apt-get as root, for `packages` as far as they are known.
fn apt_get(packages: &[String]) -> Result<Command> {
    let Some(mut command) = as_root("env") else {
        let packages = match packages {
            [] => "the packages it needs".to_owned(),
            packages => packages.join(" "),
        };
        bail!("installing {packages} needs root, and there is no sudo: run `cargo xtask setup` as root");
    };
    command
        .args(["DEBIAN_FRONTEND=noninteractive", "apt-get"])
        // Another installation may be under way, as on a machine that has just been started.
        .args(["-o", "DPkg::Lock::Timeout=300"]);
    Ok(command)
}

/// Those of `packages` that dpkg does not list as installed.
fn missing(packages: &[String]) -> Result<Vec<String>> {
    // dpkg-query fails if it does not know one of them, and lists the others all the same.
    let output = Command::new("dpkg-query")
        .args(["--show", "--showformat=${Package} ${db:Status-Status}\n"])
        .args(packages)
        .stderr(Stdio::null())
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(packages
        .iter()
        .filter(|package| !text.lines().any(|line| line == format!("{package} installed")))
        .cloned()
        .collect())
}

fn policy(packages: &[&str]) -> Result<String> {
    run::output(Command::new("apt-cache").arg("policy").args(packages).env("LC_ALL", "C"))
}

/// Version of `package` that apt-get would install, from what `apt-cache policy` prints.
fn candidate(policy: &str, package: &str) -> Option<String> {
    let heading = format!("{package}:");
    policy
        .lines()
        .skip_while(|line| *line != heading)
        .skip(1)
        .take_while(|line| line.starts_with(' '))
        .find_map(|line| line.trim().strip_prefix("Candidate: "))
        .filter(|version| *version != "(none)")
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str = "\
rustc-web:
  Installed: (none)
  Candidate: 1.96.0+dfsg1-1~deb12u2
  Version table:
     1.96.0+dfsg1-1~deb12u2 500
rust-web-src:
  Installed: (none)
  Candidate: (none)
  Version table:
";

    #[test]
    fn candidates_of_a_policy() {
        assert_eq!(candidate(POLICY, "rustc-web").as_deref(), Some("1.96.0+dfsg1-1~deb12u2"));
        assert_eq!(candidate(POLICY, "rust-web-src"), None);
        assert_eq!(candidate(POLICY, "rustc"), None);
    }
}
