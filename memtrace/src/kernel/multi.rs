//! Uprobe links over many sites at once (`BPF_TRACE_UPROBE_MULTI`), which aya 0.14 lacks: the programs are loaded here
//! with that attach type, on the maps that aya created, and attached through `bpf(2)`.
//!
//! One such link attaches all sites of a program in one call and detaches them with one grace period, where single
//! probes take one each, one after the other.
//!
//! Programs on tracepoints are loaded here too, since those that turn preemption off call functions of the kernel, which aya 0.14
//! can't.

use std::{
    collections::HashSet,
    ffi::CString,
    io,
    num::NonZeroU32,
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use aya::Ebpf;
use aya_obj::{
    Object, ProgramSection,
    generated::{BPF_F_UPROBE_MULTI_RETURN, bpf_attach_type, bpf_attr, bpf_cmd, bpf_prog_type},
};

use super::{object::OBJECT, preempt::PreemptGuard, release::Release};

/// The first release whose pid filter of these links covers all threads of the process ("bpf: Fix multi-uprobe PID
/// filtering logic"); before it only the thread with the number asked for was traced.
const FIRST_RELEASE: Release = Release::new(6, 10);

/// Whether this kernel has such links with a pid filter that works.
pub fn supported(release: Option<Release>) -> bool {
    release.is_some_and(|release| release >= FIRST_RELEASE)
}

/// Where an entry or return program fires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Before the instruction.
    Entry,
    /// At the return of the function that the instruction belongs to.
    Return,
}

/// What the verifier logs (`BPF_LOG_*` in include/linux/bpf_verifier.h).
#[derive(Clone, Copy)]
enum Log {
    Decisions = 1,
    Statistics = 4,
}

/// The object file, relocated against the maps of a loaded [`Ebpf`], ready to load programs from.
pub struct MultiLoader {
    object: Object,
    btf: Option<OwnedFd>,
}

impl MultiLoader {
    /// Relocates the object file against the maps of `ebpf`, which were made for the same `guard`.
    ///
    /// # Errors
    /// `InvalidData` if the object file and the maps do not fit together.
    pub fn new(ebpf: &Ebpf, guard: Option<PreemptGuard>) -> io::Result<Self> {
        let mut object = Object::parse(OBJECT).map_err(invalid)?;
        let mut btf = None;
        if let Some(features) = aya::features().btf()
            && let Some(types) = object.fixup_and_sanitize_btf(features).map_err(invalid)?
        {
            btf = Some(load_btf(&types.to_bytes())?);
        }
        let mut fds: Vec<(String, RawFd)> = Vec::new();
        for (name, map) in ebpf.maps() {
            if let Some(fd) = map_fd(map) {
                fds.push((name.to_owned(), fd));
            }
        }
        let maps = object.maps.clone();
        let text: HashSet<usize> = object.functions.keys().map(|(section, _)| *section).collect();
        let known = fds.iter().filter_map(|(name, fd)| maps.get(name).map(|map| (name.as_str(), *fd, map)));
        object.relocate_maps(known, &text).map_err(invalid)?;
        object.relocate_calls(&text).map_err(invalid)?;
        object.sanitize_functions(aya::features());
        if let Some(guard) = guard {
            guard.put_into(&mut object);
        }
        Ok(Self { object, btf })
    }

    /// Loads the program `name`: for use with such links if it is one for uprobes.
    ///
    /// # Errors
    /// The kernel's error, with the end of the verifier's log.
    pub fn load(&self, name: &str) -> io::Result<OwnedFd> {
        let program = self.object.programs.get(name).ok_or_else(|| invalid(format!("no program {name}")))?;
        let function = self
            .object
            .functions
            .get(&program.function_key())
            .ok_or_else(|| invalid(format!("program {name} has no code")))?;
        let mut log = vec![0u8; 1 << 16];
        let result = self.load_function(name, program, function, Log::Statistics, &mut log);
        let error = match result {
            Ok(fd) => {
                let text = String::from_utf8_lossy(&log);
                tracing::debug!("program {name}: {}", text.trim_end_matches('\0').replace('\n', "; "));
                return Ok(fd);
            }
            Err(error) => error,
        };
        // Only a failure is worth the verifier's log.
        self.load_function(name, program, function, Log::Decisions, &mut log).map_err(|_| {
            let text = String::from_utf8_lossy(&log);
            let text = text.trim_end_matches('\0').trim_end();
            let tail: Vec<&str> = text.lines().rev().take(8).collect();
            let tail: Vec<&str> = tail.into_iter().rev().collect();
            io::Error::new(error.kind(), format!("{error}; the verifier says: {}", tail.join(" | ")))
        })
    }

    fn load_function(
        &self,
        name: &str,
        program: &aya_obj::Program,
        function: &aya_obj::Function,
        level: Log,
        log: &mut [u8],
    ) -> io::Result<OwnedFd> {
        let func_info = function.func_info.func_info_bytes();
        let line_info = function.line_info.line_info_bytes();
        // SAFETY: a block of integers, for which zero is a value.
        let mut attr = unsafe { std::mem::zeroed::<bpf_attr>() };
        // SAFETY: the member for BPF_PROG_LOAD; every member is plain integers.
        let load = unsafe { &mut attr.__bindgen_anon_3 };
        for (to, from) in load.prog_name.iter_mut().take(15).zip(name.as_bytes()) {
            *to = *from as libc::c_char;
        }
        load.prog_type = match program.section {
            ProgramSection::RawTracePoint => bpf_prog_type::BPF_PROG_TYPE_RAW_TRACEPOINT,
            ProgramSection::TracePoint => bpf_prog_type::BPF_PROG_TYPE_TRACEPOINT,
            _ => bpf_prog_type::BPF_PROG_TYPE_KPROBE,
        } as u32;
        if load.prog_type == bpf_prog_type::BPF_PROG_TYPE_KPROBE as u32 {
            load.expected_attach_type = bpf_attach_type::BPF_TRACE_UPROBE_MULTI as u32;
        }
        load.insns = function.instructions.as_ptr() as u64;
        load.insn_cnt = count(function.instructions.len())?;
        load.license = program.license.as_ptr() as u64;
        if let Some(btf) = &self.btf {
            load.prog_btf_fd = btf.as_raw_fd() as u32;
            if function.func_info_rec_size > 0 {
                load.func_info = func_info.as_ptr() as u64;
                load.func_info_cnt = count(function.func_info.len())?;
                load.func_info_rec_size = count(function.func_info_rec_size)?;
            }
            if function.line_info_rec_size > 0 {
                load.line_info = line_info.as_ptr() as u64;
                load.line_info_cnt = count(function.line_info.len())?;
                load.line_info_rec_size = count(function.line_info_rec_size)?;
            }
        }
        load.log_level = level as u32;
        load.log_buf = log.as_mut_ptr() as u64;
        load.log_size = count(log.len())?;
        bpf(bpf_cmd::BPF_PROG_LOAD, &raw mut attr as *mut u8, size_of::<bpf_attr>())
    }
}

/// Attaches a program loaded by [`MultiLoader::load`] to file offsets of `path`, each with its cookie, in process
/// `pid` (all its threads) or in every process.
///
/// # Errors
/// The kernel's error: one refused offset refuses all.
pub fn attach(
    program: BorrowedFd<'_>,
    path: &Path,
    sites: &[(u64, u64)],
    place: Place,
    pid: Option<NonZeroU32>,
) -> io::Result<OwnedFd> {
    /// The members of `union bpf_attr` for BPF_LINK_CREATE with this attach type (include/uapi/linux/bpf.h).
    #[repr(C)]
    struct LinkCreate {
        prog_fd: u32,
        target_fd: u32,
        attach_type: u32,
        link_flags: u32,
        path: u64,
        offsets: u64,
        ref_ctr_offsets: u64,
        cookies: u64,
        count: u32,
        flags: u32,
        pid: u32,
        zero: u32,
    }
    let path = CString::new(path.as_os_str().as_bytes()).map_err(invalid)?;
    let offsets: Vec<u64> = sites.iter().map(|site| site.0).collect();
    let cookies: Vec<u64> = sites.iter().map(|site| site.1).collect();
    let mut attr = LinkCreate {
        prog_fd: program.as_raw_fd() as u32,
        target_fd: 0,
        attach_type: bpf_attach_type::BPF_TRACE_UPROBE_MULTI as u32,
        link_flags: 0,
        path: path.as_ptr() as u64,
        offsets: offsets.as_ptr() as u64,
        ref_ctr_offsets: 0,
        cookies: cookies.as_ptr() as u64,
        count: count(sites.len())?,
        flags: if place == Place::Return { BPF_F_UPROBE_MULTI_RETURN } else { 0 },
        pid: pid.map_or(0, NonZeroU32::get),
        zero: 0,
    };
    bpf(bpf_cmd::BPF_LINK_CREATE, &raw mut attr as *mut u8, size_of::<LinkCreate>())
}

/// Attaches a program loaded by [`MultiLoader::load`] to a raw tracepoint.
///
/// # Errors
/// The kernel's error: there is no such tracepoint, for example.
pub fn attach_raw_tracepoint(program: BorrowedFd<'_>, tracepoint: &str) -> io::Result<OwnedFd> {
    let name = CString::new(tracepoint).map_err(invalid)?;
    // SAFETY: a block of integers, for which zero is a value.
    let mut attr = unsafe { std::mem::zeroed::<bpf_attr>() };
    attr.raw_tracepoint.name = name.as_ptr() as u64;
    attr.raw_tracepoint.prog_fd = program.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_RAW_TRACEPOINT_OPEN, &raw mut attr as *mut u8, size_of::<bpf_attr>())
}

fn load_btf(types: &[u8]) -> io::Result<OwnedFd> {
    // SAFETY: a block of integers, for which zero is a value.
    let mut attr = unsafe { std::mem::zeroed::<bpf_attr>() };
    // SAFETY: the member for BPF_BTF_LOAD; every member is plain integers.
    let load = unsafe { &mut attr.__bindgen_anon_7 };
    load.btf = types.as_ptr() as u64;
    load.btf_size = count(types.len())?;
    bpf(bpf_cmd::BPF_BTF_LOAD, &raw mut attr as *mut u8, size_of::<bpf_attr>())
}

/// Calls `bpf(2)` for a command that returns a file descriptor.
fn bpf(command: bpf_cmd, attr: *mut u8, size: usize) -> io::Result<OwnedFd> {
    loop {
        // SAFETY: `attr` is the command's attribute block of that size, whose pointers outlive the call.
        let fd = unsafe { libc::syscall(libc::SYS_bpf, command as libc::c_long, attr, size) };
        if fd >= 0 {
            let fd = RawFd::try_from(fd).map_err(invalid)?;
            // SAFETY: a new descriptor that nothing else owns.
            return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        let error = io::Error::last_os_error();
        // The verifier gives up with EAGAIN when a signal is pending (kernel/bpf/verifier.c).
        if error.raw_os_error() != Some(libc::EAGAIN) && error.raw_os_error() != Some(libc::EINTR) {
            return Err(error);
        }
    }
}

fn map_fd(map: &aya::maps::Map) -> Option<RawFd> {
    use aya::maps::Map;
    match map {
        Map::Array(data) | Map::HashMap(data) | Map::PerCpuArray(data) | Map::RingBuf(data) => {
            Some(data.fd().as_fd().as_raw_fd())
        }
        _ => None,
    }
}

fn count(n: usize) -> io::Result<u32> {
    u32::try_from(n).map_err(invalid)
}

fn invalid(error: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_releases_whose_filter_covers_threads() {
        assert!(supported(Some(Release::new(6, 18))));
        assert!(supported(Some(Release::new(6, 10))));
        assert!(!supported(Some(Release::new(6, 6))));
        assert!(!supported(None));
    }
}
