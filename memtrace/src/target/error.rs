//! Why something cannot be traced. Every message is one sentence with the next step.

use std::{io, path::PathBuf};

/// Why a process cannot be traced.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// No process or thread has this number.
    #[error("no process has pid {pid}: look it up with `ps -e` (the pid as seen from memtrace's own pid namespace)")]
    NoSuchProcess {
        /// What was asked for.
        pid: u32,
    },
    /// The number is that of a thread.
    #[error("{pid} is a thread of process {process}, not a process: use `-p {process}`")]
    Thread {
        /// What was asked for.
        pid: u32,
        /// The process that the thread belongs to.
        process: u32,
    },
    /// A thread of the kernel.
    #[error("process {pid} ({comm:?}) is a kernel thread, which has no user memory: choose a user process")]
    KernelThread {
        /// The process.
        pid: u32,
        /// Its name.
        comm: String,
    },
    /// The process has ended, its parent has not collected it.
    #[error(
        "process {pid} ({comm:?}) has already ended and waits to be reaped by its parent: start it again and attach sooner"
    )]
    Zombie {
        /// The process.
        pid: u32,
        /// Its name.
        comm: String,
    },
    /// The main thread has ended while others run on: `/proc/PID/maps` and `/proc/PID/exe` are those of the main
    /// thread, and gone.
    #[error(
        "the main thread of process {pid} ({comm:?}) has ended while other threads run on, which memtrace does not \
         support yet: trace a run of the program in which the main thread stays"
    )]
    MainThreadEnded {
        /// The process.
        pid: u32,
        /// Its name.
        comm: String,
    },
    /// The process may not be looked into.
    #[error(
        "no permission to inspect process {pid}{}: run memtrace as root, or with the capabilities CAP_BPF, \
         CAP_PERFMON and CAP_SYS_PTRACE",
        match owner { Some(uid) => format!(" of user {uid}"), None => String::new() }
    )]
    PermissionDenied {
        /// The process.
        pid: u32,
        /// Its user, if even that can be seen.
        owner: Option<u32>,
    },
    /// A 32-bit program.
    #[error("process {pid} runs a 32-bit program, which memtrace does not support yet: trace a 64-bit build of it")]
    ThirtyTwoBit {
        /// The process.
        pid: u32,
    },
    /// A program for another processor, or not an ELF file.
    #[error(
        "process {pid} does not run an x86-64 ELF program, and memtrace supports no other yet: trace an x86-64 build of it"
    )]
    OtherMachine {
        /// The process.
        pid: u32,
    },
    /// The process disappeared after it was found.
    #[error("process {pid} ended while memtrace was attaching to it: start it again, or let memtrace start it")]
    Exited {
        /// The process.
        pid: u32,
    },
    /// The kernel has no `pidfd_open`.
    #[error("this kernel has no pidfd_open: Linux 5.3 or later is needed")]
    NoPidfd,
    /// No dynamic loader, and no allocator that the program's symbols show.
    #[error(
        "process {pid} runs a statically linked program ({exe:?}) {}: trace a build of it that has not been stripped, or a \
         dynamically linked one; `memtrace pgfaultstacks` and `memtrace mmapstacks` work with this one",
        match allocator {
            Some(name) => format!("whose allocator seems to be {name}, and its symbols were removed"),
            None => "whose symbols show no allocator that memtrace knows (malloc, free, calloc and realloc, for example)".into(),
        }
    )]
    StaticProgram {
        /// The process.
        pid: u32,
        /// Its program.
        exe: PathBuf,
        /// An allocator whose messages are in the program.
        allocator: Option<&'static str>,
    },
    /// No allocator in any module.
    #[error(
        "process {pid} {}, and in none of its modules there is an allocator that memtrace knows: name its functions with \
         `--alloc` and `--free`, or use `memtrace pgfaultstacks` or `memtrace mmapstacks`",
        match found { Some(name) => format!("uses the C library {name:?}"), None => "maps no C library".into() }
    )]
    NoAllocator {
        /// The process.
        pid: u32,
        /// File name of the C library it maps.
        found: Option<String>,
    },
    /// The file that has to be read is not readable.
    #[error("{name:?}, which process {pid} maps, cannot be used: {problem}")]
    Module {
        /// The process.
        pid: u32,
        /// File name of the module.
        name: String,
        /// What is wrong with it.
        problem: ModuleProblem,
    },
    /// The memory map cannot be read.
    #[error("the memory map of process {pid} cannot be read: {reason}; please report this as a bug")]
    Mappings {
        /// The process.
        pid: u32,
        /// What is wrong with it.
        reason: String,
    },
    /// What the command line asks for is not there.
    #[error(transparent)]
    Select(#[from] super::select::SelectError),
    /// Something in `/proc` could not be read for a reason that has nothing to do with the process.
    #[error(
        "{path} cannot be read ({source}): check that /proc is mounted and that the limit of open files (`ulimit -n`) is not reached"
    )]
    Io {
        /// What was read.
        path: String,
        /// The system's error.
        source: io::Error,
    },
}

/// Why a module cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModuleProblem {
    /// It could not be opened or read.
    #[error("it could not be read ({0}): check the permissions of the file, and run memtrace as root")]
    Io(#[from] io::Error),
    /// The file of that name is not the one that is mapped.
    #[error(
        "the file at its path is not the one that is mapped (it was replaced or deleted, or its file system reports \
         other device numbers): give memtrace CAP_CHECKPOINT_RESTORE or run it as root, so that it can open the \
         mapped file itself"
    )]
    Replaced,
    /// A device, a pipe or the like: opening one can have effects.
    #[error("it is not a regular file: nothing can be probed in it")]
    NotRegular,
    /// Not an ELF file at all.
    #[error("it is not an ELF file: nothing can be probed in it")]
    NotElf,
    /// An ELF file for something else than x86-64.
    #[error("it is not an x86-64 ELF file: memtrace supports no other yet")]
    OtherMachine,
    /// Its headers or tables contradict themselves or the file's length.
    #[error("its ELF structures are damaged ({0}): reinstall the package it comes from, and restart the process")]
    Malformed(String),
    /// A table is larger than memtrace is willing to read.
    #[error("its ELF structures are too large ({0}): please report this as a bug")]
    TooLarge(&'static str),
    /// It is an allocator, but not one of its functions can be probed.
    #[error("none of its allocator functions can be probed ({0}): please report this as a bug")]
    NoSite(String),
}
