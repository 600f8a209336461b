//! Separate debug files: where a module's debug information is when it is not in the module.
//!
//! They are looked for below the target's own root directory first (a container has its own debug files), then below
//! memtrace's, in the places that gdb looks at (its manual, "Separate Debug Files"): by build ID, and by the name and
//! checksum of a debug link. What a file of the target says of paths never leads out of the root it is looked up in.

use std::{
    ffi::OsStr,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    rc::Rc,
};

use super::debuginfod::Debuginfod;
use crate::target::{
    debug_file::{by_build_id, by_link, hex},
    image::{AltLink, Image},
    rooted::Root,
};

/// Where debug files are looked for.
pub struct Places {
    roots: Vec<Root>,
    server: Option<Rc<Debuginfod>>,
}

/// The files that a module's debug information is in, beside the module.
#[derive(Default)]
pub struct Separate {
    /// The debug file. `None`: the module has debug information itself, or there is no debug file.
    pub debug: Option<Image>,
    /// Where its or the module's debug information continues (dwz).
    pub continued: Option<Image>,
    /// What could not be used, and why.
    pub problems: Vec<String>,
}

impl Places {
    /// Below `target`, if there is such a root directory, then below memtrace's own, then at servers.
    pub fn new(target: Option<&Path>, server: Option<Rc<Debuginfod>>) -> Self {
        let roots = target.into_iter().chain([Path::new("/")]).filter_map(|path| Root::at(path).ok()).collect();
        Self { roots, server }
    }

    /// Finds the files for `module`, which has the path `path` in the target's mount namespace.
    pub fn find(&self, module: &Image, path: &Path) -> Separate {
        let mut found = Separate::default();
        // Where the file is that has the link to the next, if it is not the module.
        let mut place = None;
        if !has_debug_information(module) {
            match self.debug_file(module, path, &mut found.problems) {
                Some((image, path)) => {
                    found.debug = Some(image);
                    place = Some(path);
                }
                None => return found,
            }
        }
        let last = found.debug.as_ref().unwrap_or(module);
        if let Some(link) = last.alt_link() {
            match self.continuation(&link, place.as_deref(), path) {
                Some(image) => found.continued = Some(image),
                None => found.problems.push(format!(
                    "some names are missing: the file that debug information continues in ({}, build ID {}) was not found",
                    String::from_utf8_lossy(&link.path),
                    hex(&link.build_id)
                )),
            }
        } else if last.has(".debug_sup") {
            found.problems.push("some names are missing: .debug_sup is not supported".into());
        }
        found
    }

    /// A debug file that belongs to `module`, and where it is.
    fn debug_file(&self, module: &Image, path: &Path, problems: &mut Vec<String>) -> Option<(Image, PathBuf)> {
        let build_id = module.build_id();
        if let Some(id) = build_id
            && let Some(found) = self.first(|_| vec![by_build_id(id)], |image| image.build_id() == Some(id))
        {
            return Some(found);
        }
        if let Some(link) = module.debug_link() {
            let fits = |image: &Image| {
                // Of a file without build ID, the checksum decides alone.
                build_id.zip(image.build_id()).is_none_or(|(own, other)| own == other) && image.crc() == link.crc
            };
            if by_link(&link, path).is_none() {
                problems.push("its debug link is not used: it is no plain file name".into());
            }
            let paths = |root: &Root| by_link(&link, root.inside(path)).unwrap_or_default();
            if let Some(found) = self.first(paths, fits) {
                return Some(found);
            }
        }
        self.ask_server(build_id?, problems).map(|image| (image, PathBuf::from("/")))
    }

    /// The file that a link in the module at `module`, or in the debug file at `debug`, leads to.
    fn continuation(&self, link: &AltLink, debug: Option<&Path>, module: &Path) -> Option<Image> {
        let paths = |root: &Root| {
            // A relative path is one from the directory of the file that has the link.
            let directory = debug.unwrap_or(root.inside(module)).parent().unwrap_or(Path::new("/"));
            vec![by_build_id(&link.build_id), directory.join(OsStr::from_bytes(&link.path))]
        };
        let fits = |image: &Image| image.build_id() == Some(&link.build_id);
        self.first(paths, fits).map(|(image, _)| image).or_else(|| self.ask_server(&link.build_id, &mut Vec::new()))
    }

    fn ask_server(&self, build_id: &[u8], problems: &mut Vec<String>) -> Option<Image> {
        match self.server.as_ref()?.debug_file(&hex(build_id)) {
            Ok(Some(file)) => Image::of(&file).ok().filter(|image| image.build_id() == Some(build_id)),
            Ok(None) => None,
            Err(error) => {
                problems.push(format!("no debug file from the servers: {error}"));
                None
            }
        }
    }

    /// The first of the files that exists, can be used and fits, and where it is: all paths below one root, then below the
    /// next.
    fn first(&self, paths: impl Fn(&Root) -> Vec<PathBuf>, fits: impl Fn(&Image) -> bool) -> Option<(Image, PathBuf)> {
        self.roots.iter().flat_map(|root| paths(root).into_iter().map(move |path| (root, path))).find_map(
            |(root, path)| {
                let image = Image::of(&root.open(&path).ok()?).ok()?;
                (useful(&image) && fits(&image)).then_some((image, path))
            },
        )
    }
}

/// Whether a file has the functions' names and lines.
pub fn has_debug_information(image: &Image) -> bool {
    image.has(".debug_info") || image.has(".zdebug_info")
}

/// Whether a file tells more than a stripped program.
fn useful(image: &Image) -> bool {
    has_debug_information(image) || image.has(".symtab")
}

#[cfg(test)]
#[path = "separate_tests.rs"]
mod tests;
