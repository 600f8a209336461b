//! Uprobes on allocator functions, filtered to one process each by the kernel: other processes take no trap.

use std::{
    collections::BTreeMap,
    io, iter,
    num::NonZeroU32,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use aya::programs::uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeScope};
use memtrace_common::site::Site;

use crate::kernel::{
    multi::{self, Place},
    object::program,
    tracer::{AttachedLink, KernelError, Tracer},
};

/// What is attached to a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Entry and return of an allocating function.
    Allocate,
    /// Entry of a freeing function.
    Free,
}

/// One instruction to probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachPoint {
    /// What the function does.
    pub role: Role,
    /// The module, by a path that this process can open.
    pub path: PathBuf,
    /// File offset of the instruction.
    pub offset: u64,
    /// [`memtrace_common::site::Site::cookie`].
    pub cookie: u64,
    /// Name for messages.
    pub name: String,
}

/// Which processes probes reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// The process; `None` for every one that maps the file.
    pub pid: Option<NonZeroU32>,
    /// Number of the image whose calls they record, and with which they go ([`Tracer::detach_image`]); 0 if they record those of
    /// every image, and stay until the end.
    pub image: u32,
}

impl Reach {
    /// Every process, until the end.
    pub const EVERYWHERE: Self = Self { pid: None, image: 0 };
}

impl Tracer {
    /// Attaches the recording programs to `points`.
    ///
    /// # Errors
    /// The first point that the kernel refuses; those before it stay attached until the tracer is dropped.
    pub fn attach_allocator(&mut self, points: &[AttachPoint], reach: Reach) -> Result<(), KernelError> {
        self.attach_points(points, reach, [program::FREE_ENTRY, program::ALLOC_ENTRY, program::ALLOC_RETURN])
    }

    /// Attaches programs that do nothing to `points`: what the probes cost by themselves.
    ///
    /// # Errors
    /// As [`Self::attach_allocator`].
    pub fn attach_empty(&mut self, points: &[AttachPoint], reach: Reach) -> Result<(), KernelError> {
        self.attach_points(points, reach, [program::EMPTY_ENTRY, program::EMPTY_ENTRY, program::EMPTY_RETURN])
    }

    fn attach_points(
        &mut self,
        points: &[AttachPoint],
        reach: Reach,
        [free_entry, alloc_entry, alloc_return]: [&'static str; 3],
    ) -> Result<(), KernelError> {
        let own =
            |point: &AttachPoint| AttachPoint { cookie: Site::cookie_for(point.cookie, reach.image), ..point.clone() };
        let points: Vec<AttachPoint> = points.iter().map(own).collect();
        let of = |role: Role| points.iter().filter(move |point| point.role == role);
        self.attach_program(free_entry, of(Role::Free), Place::Entry, reach)?;
        // Consumers of one breakpoint all run before the return address is replaced, so the order of these two does
        // not matter.
        self.attach_program(alloc_entry, of(Role::Allocate), Place::Entry, reach)?;
        self.attach_program(alloc_return, of(Role::Allocate), Place::Return, reach)
    }

    /// Attaches one program to `points`: with one link per file where the kernel has such links, else one by one.
    pub(super) fn attach_program<'a>(
        &mut self,
        name: &'static str,
        points: impl Iterator<Item = &'a AttachPoint>,
        place: Place,
        reach: Reach,
    ) -> Result<(), KernelError> {
        if self.multi.is_none() {
            for point in points {
                self.attach_single(name, point, reach)?;
            }
            return Ok(());
        }
        let mut files: BTreeMap<&Path, Vec<&AttachPoint>> = BTreeMap::new();
        for point in points {
            files.entry(&point.path).or_default().push(point);
        }
        for (path, points) in files {
            let sites: Vec<(u64, u64)> = points.iter().map(|point| (point.offset, point.cookie)).collect();
            let program = self.multi_program(name)?;
            let link = multi::attach(program.as_fd(), path, &sites, place, reach.pid).map_err(|source| {
                let names: Vec<&str> = points.iter().map(|point| point.name.as_str()).collect();
                KernelError::AttachMulti { what: names.join(", "), source }
            })?;
            self.links.push((reach, AttachedLink::Multi(link)));
        }
        Ok(())
    }

    /// Attaches the program that reports changes of the list of loaded libraries to the dynamic loader's hook, and returns
    /// where it is. `state`: address in the target of the word that says what is changing.
    ///
    /// # Errors
    /// The kernel refuses the probe.
    pub fn attach_loader_hook(
        &mut self,
        path: PathBuf,
        offset: u64,
        state: Option<u64>,
        reach: Reach,
    ) -> Result<AttachPoint, KernelError> {
        let cookie = state.unwrap_or(0);
        let point = AttachPoint { role: Role::Free, path, offset, cookie, name: "the dynamic loader's hook".into() };
        self.attach_program(program::LOADER_CHANGED, iter::once(&point), Place::Entry, reach)?;
        Ok(point)
    }

    /// A sweep of `points`, all the places where there is a probe, to be run after the target has forked; `None` where the kernel needs none.
    ///
    /// A forked child has a copy of the breakpoints. Single probes take them out of it at its first trap, links over
    /// many sites leave them in (kernel/trace/bpf_trace.c), so that each of its calls would trap until the end of the
    /// trace. When a probe is removed the kernel looks at every process again and takes out what no probe wants
    /// (register_for_each_vma in kernel/events/uprobes.c): so the sweep adds an empty probe to each site and removes it.
    ///
    /// # Errors
    /// The empty program can't be loaded.
    pub fn sweep(&mut self, points: &[AttachPoint], pid: NonZeroU32) -> Result<Option<Sweep>, KernelError> {
        if self.multi.is_none() {
            return Ok(None);
        }
        let name = program::EMPTY_ENTRY;
        let program =
            self.multi_program(name)?.try_clone().map_err(|source| KernelError::LoadMulti { name, source })?;
        let mut files: BTreeMap<PathBuf, Vec<(u64, u64)>> = BTreeMap::new();
        for point in points {
            files.entry(point.path.clone()).or_default().push((point.offset, 0));
        }
        Ok(Some(Sweep { program, files, pid }))
    }

    fn attach_single(&mut self, name: &'static str, point: &AttachPoint, reach: Reach) -> Result<(), KernelError> {
        let location = UProbeAttachPoint {
            location: UProbeAttachLocation::AbsoluteOffset(point.offset),
            cookie: Some(point.cookie),
        };
        let scope = reach.pid.map_or(UProbeScope::AllProcesses, UProbeScope::OneProcess);
        let program = self.uprobe(name)?;
        let link = program
            .attach(location, &point.path, scope)
            .and_then(|id| program.take_link(id))
            .map_err(|source| KernelError::Attach { what: point.name.clone(), source })?;
        self.links.push((reach, AttachedLink::Uprobe(link)));
        Ok(())
    }
}

/// Takes breakpoints out of processes that were forked off the target.
#[derive(Debug)]
pub struct Sweep {
    program: OwnedFd,
    files: BTreeMap<PathBuf, Vec<(u64, u64)>>,
    pid: NonZeroU32,
}

impl Sweep {
    /// Sweeps once. Takes a grace period of the kernel, about 0.1 s: run it on a thread that may block.
    ///
    /// # Errors
    /// The kernel refuses the empty probes.
    pub fn run(&self) -> io::Result<()> {
        for (path, sites) in &self.files {
            drop(multi::attach(self.program.as_fd(), path, sites, Place::Entry, Some(self.pid))?);
        }
        Ok(())
    }
}
