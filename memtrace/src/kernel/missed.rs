//! Runs of programs that the kernel skipped (`recursion_misses` of `struct bpf_prog_info`, Linux 5.12).

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
};

/// `BPF_OBJ_GET_INFO_BY_FD` of `enum bpf_cmd` in include/uapi/linux/bpf.h.
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;

/// The `info` member of `union bpf_attr`.
#[repr(C)]
struct InfoAttr {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// How often a program was not run because it was running already on the same CPU.
///
/// # Errors
/// The kernel does not say.
pub fn count(program: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: integers only, for which zero is a value.
    let mut info = unsafe { std::mem::zeroed::<aya_obj::generated::bpf_prog_info>() };
    let mut attr = InfoAttr {
        bpf_fd: program.as_raw_fd() as u32,
        info_len: size_of_val(&info) as u32,
        info: (&raw mut info) as u64,
    };
    // SAFETY: the attribute block is as the kernel defines it, and names a structure of the length given.
    let result = unsafe { libc::syscall(libc::SYS_bpf, BPF_OBJ_GET_INFO_BY_FD, &raw mut attr, size_of::<InfoAttr>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(info.recursion_misses) }
}
