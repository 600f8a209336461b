//! Packages of any Debian suite, without touching this machine's package lists: apt with a state of its own.
//!
//! The machine's configuration of how to download (proxies, certificates, credentials) stays in force.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::mirror;
use crate::{run, setup};

/// Debian's keys, from its package `debian-archive-keyring`.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// The package that depends on the newest kernel made for virtual machines.
const KERNEL: &str = "linux-image-cloud-amd64";

/// The suites opened so far.
pub struct Archives {
    directory: PathBuf,
    mirrors: Option<Vec<String>>,
}

impl Archives {
    /// Nothing is fetched yet. `directory` holds what is.
    pub fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), mirrors: None }
    }

    /// Reads the package lists of `suite`.
    pub fn open(&mut self, suite: &str) -> Result<Archive> {
        for program in ["apt-get", "dpkg-deb"] {
            if !run::on_path(program) {
                bail!("{program} is missing: kernels to test on are got with Debian's package tools");
            }
        }
        setup::packages(&[(Path::new(KEYRING), "debian-archive-keyring")])?;
        let mirrors = match &self.mirrors {
            Some(mirrors) => mirrors,
            None => self.mirrors.insert(mirror::candidates()?),
        };
        let archive = Archive::prepare(&self.directory.join("apt").join(suite), suite)?;
        let mut errors = Vec::new();
        for uri in mirrors {
            match archive.update(uri, suite) {
                Ok(()) => {
                    // The one that has it comes first from now on.
                    let uri = uri.clone();
                    self.mirrors = Some(vec![uri]);
                    return Ok(archive);
                }
                Err(error) => errors.push(format!("{error:#}")),
            }
        }
        if errors.iter().any(|error| error.contains("NO_PUBKEY")) {
            bail!(
                "the signature of Debian's {suite} can't be checked, since its key is not in {KEYRING}: install a newer \
                 debian-archive-keyring\n{}",
                errors.join("\n")
            );
        }
        let words = if errors.is_empty() { "it has none".to_owned() } else { errors.join("\n") };
        bail!(
            "no package source of this machine has Debian's {suite}: set {} to a mirror's URI\n{words}",
            mirror::VARIABLE
        )
    }
}

/// One suite.
pub struct Archive {
    directory: PathBuf,
}

impl Archive {
    fn prepare(directory: &Path, suite: &str) -> Result<Self> {
        for part in ["lists/partial", "cache/archives/partial"] {
            let path = directory.join(part);
            fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        }
        let archive = Self { directory: directory.to_owned() };
        archive.write("status", "")?;
        let text = configuration(directory.to_str().with_context(|| format!("not UTF-8: {suite}'s directory"))?);
        archive.write("apt.conf", &text)?;
        Ok(archive)
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.directory.join(name);
        fs::write(&path, text).with_context(|| path.display().to_string())
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .arg("-c")
            .arg(self.directory.join("apt.conf"))
            .env("LC_ALL", "C")
            .env("DEBIAN_FRONTEND", "noninteractive");
        command
    }

    /// Fetches the package lists, whose signature is checked.
    fn update(&self, uri: &str, suite: &str) -> Result<()> {
        self.write("sources.list", &format!("deb [arch=amd64 signed-by={KEYRING}] {uri} {suite} main\n"))?;
        run::output(self.apt("apt-get").args(["-q", "update", "-o", "APT::Update::Error-Mode=any"]))?;
        // An archive without the suite's packages is none.
        self.kernel_release().map(drop)
    }

    /// Version of the newest kernel, as `uname -r` prints it.
    pub fn kernel_release(&self) -> Result<String> {
        let text = run::output(self.apt("apt-cache").args(["depends", KERNEL]))?;
        kernel_release(&text).with_context(|| format!("{KERNEL} depends on no kernel:\n{text}"))
    }

    /// Puts the kernel's compressed image into the file `to`.
    pub fn kernel_image(&self, release: &str, to: &Path) -> Result<()> {
        // Newer releases have the image in a package of its own.
        let candidates = [format!("linux-binary-{release}"), format!("linux-image-{release}")];
        let known = run::output(self.apt("apt-cache").arg("pkgnames").arg("linux-"))?;
        let package = candidates
            .iter()
            .find(|package| known.lines().any(|line| line == package.as_str()))
            .with_context(|| format!("no package has the kernel {release}"))?;
        let root = self.directory.join("root");
        self.fetch(package, &["download"], &root)?;
        let places = [format!("boot/vmlinuz-{release}"), format!("usr/lib/modules/{release}/vmlinuz")];
        let image = places
            .iter()
            .map(|place| root.join(place))
            .find(|path| path.is_file())
            .with_context(|| format!("{package} has no image of the kernel"))?;
        if let Some(directory) = to.parent() {
            fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        }
        fs::copy(&image, to).with_context(|| format!("{} to {}", image.display(), to.display()))?;
        fs::remove_dir_all(&root).with_context(|| root.display().to_string())
    }

    /// Extracts a package, with all that it depends on, into the directory `root`.
    pub fn extract_with_dependencies(&self, package: &str, root: &Path) -> Result<()> {
        self.fetch(package, &["install", "--yes", "--download-only", "--no-install-recommends"], root)
    }

    fn fetch(&self, package: &str, how: &[&str], root: &Path) -> Result<()> {
        let downloads = self.directory.join("cache/archives");
        remove_packages(&downloads)?;
        eprintln!("vm: fetching {package}");
        run::output(self.apt("apt-get").args(["-q"]).args(how).arg(package).current_dir(&downloads))?;
        if root.exists() {
            fs::remove_dir_all(root).with_context(|| root.display().to_string())?;
        }
        fs::create_dir_all(root).with_context(|| root.display().to_string())?;
        let files = packages(&downloads)?;
        if files.is_empty() {
            bail!("apt-get has left no package in {}", downloads.display());
        }
        for file in files {
            run::output(Command::new("dpkg-deb").arg("--extract").arg(&file).arg(root))?;
        }
        remove_packages(&downloads)
    }
}

fn packages(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            files.push(path);
        }
    }
    Ok(files)
}

fn remove_packages(directory: &Path) -> Result<()> {
    for file in packages(directory)? {
        fs::remove_file(&file).with_context(|| file.display().to_string())?;
    }
    Ok(())
}

/// What makes apt leave the machine's own state alone. Read after the machine's configuration.
fn configuration(directory: &str) -> String {
    let mut text = format!(
        "Dir::State \"{directory}\";\n\
         Dir::State::lists \"lists/\";\n\
         Dir::State::status \"{directory}/status\";\n\
         Dir::State::extended_states \"extended_states\";\n\
         Dir::Cache \"{directory}/cache\";\n\
         Dir::Cache::archives \"archives/\";\n\
         Dir::Log \"{directory}\";\n\
         Dir::Etc::sourcelist \"{directory}/sources.list\";\n\
         Dir::Etc::sourceparts \"/dev/null\";\n\
         Dir::Etc::preferences \"/dev/null\";\n\
         Dir::Etc::preferencesparts \"/dev/null\";\n\
         APT::Architecture \"amd64\";\n\
         #clear APT::Architectures;\n\
         APT::Architectures {{ \"amd64\"; }};\n\
         APT::Install-Recommends \"false\";\n\
         APT::Sandbox::User \"root\";\n\
         APT::Get::AllowUnauthenticated \"false\";\n\
         Acquire::AllowInsecureRepositories \"false\";\n\
         Acquire::Retries \"3\";\n\
         Acquire::http::Timeout \"30\";\n\
         Acquire::https::Timeout \"30\";\n"
    );
    // Hooks that are there for the machine's own lists and packages, and lists that nothing here reads.
    for name in [
        "APT::Update::Pre-Invoke",
        "APT::Update::Post-Invoke",
        "APT::Update::Post-Invoke-Success",
        "DPkg::Pre-Invoke",
        "DPkg::Post-Invoke",
        "DPkg::Pre-Install-Pkgs",
        "Acquire::IndexTargets::deb::DEP-11",
        "Acquire::IndexTargets::deb::DEP-11-icons",
        "Acquire::IndexTargets::deb::DEP-11-icons-small",
        "Acquire::IndexTargets::deb::DEP-11-icons-hidpi",
        "Acquire::IndexTargets::deb::Contents-deb",
    ] {
        text.push_str(&format!("#clear {name};\n"));
    }
    text
}

/// The kernel's version in what `apt-cache depends` prints.
fn kernel_release(depends: &str) -> Option<String> {
    depends
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: linux-image-"))
        .find(|release| release.starts_with(|c: char| c.is_ascii_digit()))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_that_is_depended_on() {
        let depends = "linux-image-cloud-amd64\n  Depends: linux-base-cloud-amd64\n  \
                       Depends: linux-image-7.2.13+deb14-cloud-amd64\n";
        assert_eq!(kernel_release(depends).as_deref(), Some("7.2.13+deb14-cloud-amd64"));
        assert_eq!(kernel_release("linux-image-cloud-amd64\n  Depends: linux-image-amd64\n"), None);
    }

    #[test]
    fn everything_that_apt_writes_is_private() {
        let text = configuration("/somewhere");
        for name in ["Dir::State ", "Dir::State::status", "Dir::Cache ", "Dir::Log", "Dir::Etc::sourcelist"] {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
            assert!(line.contains("\"/somewhere"), "{name}: {line}");
        }
        assert!(!text.to_lowercase().contains("proxy"), "the machine's proxies stay");
    }
}
