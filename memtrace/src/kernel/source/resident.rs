//! Changes of the target's resident set as the kernel counts them: tracepoint `kmem:rss_stat`.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd},
};

use aya::{
    maps::{Array, MapData},
    programs::TracePoint,
};
use memtrace_common::{
    maps,
    resident::{Member, UNKNOWN, entry, field},
};

use super::uprobe::Reach;
use crate::kernel::{
    object::program,
    tracefs::{self, Tracefs},
    tracer::{AttachedLink, KernelError, Tracer},
};

const WHAT: &str = "the tracepoint kmem:rss_stat";

/// What one counter of the resident set did during the trace, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemberChange {
    /// The first size that was seen, and the last; `None` if it never changed.
    pub sizes: Option<(u64, u64)>,
    /// Added by others than the target's threads.
    pub others_added: u64,
    /// Taken away by them.
    pub others_removed: u64,
}

impl Tracer {
    /// Attaches the program that records changes of the resident set.
    ///
    /// # Errors
    /// The kernel has no such tracepoint, or one with other fields; or it refuses the program.
    pub fn attach_resident(&mut self) -> Result<(), KernelError> {
        let failed = |source| KernelError::AttachMulti { what: WHAT.into(), source };
        let id = find().map_err(failed)?;
        let name = maps::RESIDENT;
        Array::try_from(self.map_mut(name)?)
            .and_then(|mut array: Array<&mut MapData, u64>| {
                Member::ALL.into_iter().try_for_each(|member| {
                    array.set(entry::LAST + member as u32, UNKNOWN, 0)?;
                    array.set(entry::FIRST + member as u32, UNKNOWN, 0)
                })
            })
            .map_err(|source| KernelError::Map { name, source })?;
        let name = program::RESIDENT_CHANGED;
        let descriptor = if self.multi.is_some() {
            self.multi_program(name)?.as_raw_fd()
        } else {
            let program = self.tracepoint(name)?;
            program.fd().map_err(|source| KernelError::Program { name, source })?.as_fd().as_raw_fd()
        };
        let link = attach(id, descriptor).map_err(failed)?;
        self.links.push((Reach::EVERYWHERE, AttachedLink::Perf(link)));
        Ok(())
    }

    /// Says what the sizes of the resident set were when recording had begun, in bytes and in the order of [`Member::ALL`]: a
    /// counter that has not changed by now has this size.
    ///
    /// # Errors
    /// The table can't be read or written.
    pub fn set_resident(&mut self, sizes: [u64; Member::ALL.len()]) -> Result<(), KernelError> {
        let name = maps::RESIDENT;
        let map = |source| KernelError::Map { name, source };
        let mut array: Array<&mut MapData, u64> = Array::try_from(self.map_mut(name)?).map_err(map)?;
        for (member, size) in Member::ALL.into_iter().zip(sizes) {
            if array.get(&(entry::LAST + member as u32), 0).map_err(map)? == UNKNOWN {
                array.set(entry::FIRST + member as u32, size, 0).map_err(map)?;
                array.set(entry::LAST + member as u32, size, 0).map_err(map)?;
            }
        }
        Ok(())
    }

    /// The tracepoint program `name`, loaded.
    pub(in crate::kernel) fn tracepoint(&mut self, name: &'static str) -> Result<&mut TracePoint, KernelError> {
        let program = self.program_mut(name)?;
        let program: &mut TracePoint = program.try_into().map_err(|source| KernelError::Program { name, source })?;
        if program.fd().is_err() {
            program.load().map_err(|source| KernelError::Program { name, source })?;
        }
        Ok(program)
    }

    /// What each counter did, in the order of [`Member::ALL`].
    ///
    /// # Errors
    /// The table can't be read.
    pub fn resident_changes(&self) -> Result<[MemberChange; Member::ALL.len()], KernelError> {
        let name = maps::RESIDENT;
        let array: Array<&MapData, u64> =
            Array::try_from(self.map(name)?).map_err(|source| KernelError::Map { name, source })?;
        let get = |entry: u32| array.get(&entry, 0).map_err(|source| KernelError::Map { name, source });
        let mut changes = [MemberChange::default(); Member::ALL.len()];
        for (change, member) in changes.iter_mut().zip(Member::ALL.map(|member| member as u32)) {
            let (first, last) = (get(entry::FIRST + member)?, get(entry::LAST + member)?);
            change.sizes = (first != UNKNOWN && last != UNKNOWN).then_some((first, last));
            change.others_added = get(entry::OTHERS_ADDED + member)?;
            change.others_removed = get(entry::OTHERS_REMOVED + member)?;
        }
        Ok(changes)
    }
}

/// The tracepoint's number, if its fields are where the kernel side reads them.
fn find() -> io::Result<u64> {
    let tracefs = Tracefs::open()?;
    let format = tracefs.read("kmem", "rss_stat", "format")?;
    for (name, offset, size) in [
        ("mm_id", field::SPACE, 4),
        ("curr", field::CURRENT, 4),
        ("member", field::MEMBER, 4),
        ("size", field::SIZE, 8),
    ] {
        if tracefs::field(&format, name) != Some((offset, size)) {
            return Err(io::Error::other(format!("its field {name} is not where memtrace knows it")));
        }
    }
    tracefs.id("kmem", "rss_stat")
}

/// Attaches a program to a tracepoint by a perf event, which is returned; closing it detaches.
fn attach(id: u64, program: i32) -> io::Result<OwnedFd> {
    const PERF_TYPE_TRACEPOINT: u32 = 2;
    /// `PERF_ATTR_SIZE_VER0` (include/uapi/linux/perf_event.h).
    const SIZE: usize = 64;
    const PERF_EVENT_IOC_ENABLE: libc::c_ulong = 0x2400;
    const PERF_EVENT_IOC_SET_BPF: libc::c_ulong = 0x4004_2408;
    const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 8;
    let mut attributes = [0u64; SIZE / 8];
    attributes[0] = u64::from(PERF_TYPE_TRACEPOINT) | (SIZE as u64) << 32;
    attributes[1] = id;
    // The program runs for all processes on all CPUs, whatever CPU and process the event is opened for.
    // SAFETY: the attributes are as large as they say; the result is checked.
    let event =
        unsafe { libc::syscall(libc::SYS_perf_event_open, attributes.as_ptr(), -1, 0, -1, PERF_FLAG_FD_CLOEXEC) };
    if event < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that the kernel has just made, and nobody else owns.
    let event = unsafe { OwnedFd::from_raw_fd(event as i32) };
    // SAFETY: the requests take a descriptor and nothing.
    let done = unsafe {
        libc::ioctl(event.as_raw_fd(), PERF_EVENT_IOC_SET_BPF, program) >= 0
            && libc::ioctl(event.as_raw_fd(), PERF_EVENT_IOC_ENABLE, 0) >= 0
    };
    if done { Ok(event) } else { Err(io::Error::last_os_error()) }
}
