//! Containers, as the paths of their processes' cgroups name them.
//!
//! Every runtime puts the processes of a container into a cgroup named after it, and the kernel knows of containers nothing
//! else: `/docker/ID`, `docker-ID.scope`, `cri-containerd-ID.scope`, `libpod-ID.scope`, `crio-ID`, `/kubepods/…/ID`,
//! `/lxc/NAME`, `lxc.payload.NAME`. What all but LXC have in common is that ID is a long hexadecimal number, which no other
//! name in such paths is.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::{super::TargetError, SelectError, cgroup::memberships, procs::Procs};

/// Digits of an id: those of Docker, containerd's CRI plugin, Podman and CRI-O have 64, others fewer.
const ID_DIGITS: std::ops::RangeInclusive<usize> = 32..=64;
/// Digits that `docker ps` shows, and the fewest that are taken for the beginning of an id.
const SHORT_ID: usize = 12;
/// Most containers that an error lists.
const LISTED: usize = 8;

/// A container that was asked for.
#[derive(Clone, Debug)]
pub struct Container {
    text: String,
    /// What an id begins with.
    id: Option<String>,
    /// What an LXC container is called.
    name: String,
}

/// What a component of a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Name<'a> {
    Id(&'a str),
    Lxc(&'a str),
}

impl Container {
    /// `text` is an id, at least the first twelve digits of one, either also as Kubernetes writes it (`containerd://ID`), or
    /// the name of an LXC container.
    pub fn new(text: &str) -> Self {
        let bare = text.split_once("://").map_or(text, |(_, id)| id);
        let name = ["lxc/", "lxc.payload.", "lxc.payload/"].iter().find_map(|start| bare.strip_prefix(start));
        let id = (is_hexadecimal(bare) && (SHORT_ID..=*ID_DIGITS.end()).contains(&bare.len())).then(|| bare.to_owned());
        Self { text: text.to_owned(), id, name: name.unwrap_or(bare).to_owned() }
    }

    /// What was asked for.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether a process is in it.
    pub fn has(&self, procs: &Procs, pid: u32) -> bool {
        memberships(procs, pid).iter().any(|membership| names(&membership.path).any(|name| self.is(name)))
    }

    fn is(&self, name: Name<'_>) -> bool {
        match name {
            Name::Id(id) => self.id.as_ref().is_some_and(|start| id.starts_with(start.as_str())),
            Name::Lxc(name) => name == self.name,
        }
    }

    /// Its processes among these.
    ///
    /// # Errors
    /// [`SelectError::NoSuchContainer`] if there are none, [`SelectError::AmbiguousContainer`] if they are those of several.
    pub fn find(&self, procs: &Procs, pids: Vec<u32>) -> Result<Vec<u32>, TargetError> {
        let mut ids = BTreeSet::new();
        let mut known = BTreeMap::new();
        let mut found = Vec::new();
        for pid in pids {
            let mut inside = false;
            for membership in memberships(procs, pid) {
                for name in names(&membership.path) {
                    let (Name::Id(label) | Name::Lxc(label)) = name;
                    if self.is(name) {
                        inside = true;
                        ids.insert(label.to_owned());
                    }
                    if known.len() < LISTED && !known.contains_key(label) {
                        known.insert(label.to_owned(), pid);
                    }
                }
            }
            if inside {
                found.push(pid);
            }
        }
        if ids.len() > 1 {
            let candidates = ids.into_iter().take(LISTED).map(|id| format!("{id:?}")).collect();
            return Err(SelectError::AmbiguousContainer { id: self.text.clone(), candidates }.into());
        }
        if found.is_empty() {
            let label = |(id, pid): (&String, &u32)| {
                let short = if is_hexadecimal(id) { id.get(..SHORT_ID).unwrap_or(id) } else { id };
                let comm = procs.comm(*pid).unwrap_or_default();
                format!("{short:?} (of {:?}, pid {pid})", String::from_utf8_lossy(&comm))
            };
            let known = known.iter().map(label).collect();
            return Err(SelectError::NoSuchContainer { id: self.text.clone(), known }.into());
        }
        Ok(found)
    }
}

fn is_hexadecimal(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The containers that a cgroup's path names, the outermost first.
fn names(path: &Path) -> impl Iterator<Item = Name<'_>> {
    let mut below_lxc = false;
    path.iter().filter_map(|component| component.to_str()).filter_map(move |component| {
        let name = if below_lxc { Some(Name::Lxc(component)) } else { name(component) };
        below_lxc = matches!(component, "lxc" | "lxc.payload");
        name
    })
}

fn name(component: &str) -> Option<Name<'_>> {
    if let Some(name) = component.strip_prefix("lxc.payload.") {
        return Some(Name::Lxc(name));
    }
    let component = component.strip_suffix(".scope").unwrap_or(component);
    // A colon where containerd was told to use systemd's names, but cgroupfs: `kubepods-pod….slice:cri-containerd:ID`.
    let (runtime, id) = component.rsplit_once(['-', ':']).unwrap_or(("", component));
    // Of Podman and CRI-O, the process that watches the container: it is outside.
    let monitor = runtime.ends_with("conmon");
    (!monitor && ID_DIGITS.contains(&id.len()) && is_hexadecimal(id)).then_some(Name::Id(id))
}

#[cfg(test)]
#[path = "container_tests.rs"]
mod tests;
