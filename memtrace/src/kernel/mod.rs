//! Can this kernel do it; load; attach. The only place that names aya.
//!
//! - `missed`: runs of programs that the kernel skipped;
//! - `multi`: links over many sites at once;
//! - `object`: the embedded eBPF object file;
//! - `btf`: where members of the kernel's structures are;
//! - `preempt`: keeps threads off the stacks of programs that are preempted;
//! - `closer`: closes links;
//! - [`budget`]: memory budget to table sizes;
//! - [`code`]: unwind tables;
//! - `processes`: the traced processes and their code mappings, for which `segments` keeps what is free;
//! - `shared`: tables in memory that both sides have;
//! - [`tracer`]: loads the programs, holds the maps and the links;
//! - [`source`]: event sources, one module each;
//! - `tracefs`: the kernel's list of tracepoints;
//! - `table`: reads whole tables out of the kernel;
//! - [`hazard`]: known kernel defects that would harm a target;
//! - [`feature`]: checks of all that memtrace needs of the kernel, for `memtrace doctor`;
//! - [`release`]: the running kernel's version.

mod btf;
pub mod budget;
mod closer;
pub mod code;
pub mod feature;
pub mod hazard;
mod missed;
mod multi;
mod object;
mod preempt;
mod processes;
pub mod release;
mod segments;
mod shared;
pub mod source;
mod table;
mod tracefs;
pub mod tracer;

pub use tracer::{KernelError, Scope, Settings, Tracer};

/// Whether this process is in the initial pid namespace, whose numbers the kernel side sees. Its inode number is fixed
/// (`PROC_PID_INIT_INO` in include/linux/proc_ns.h).
pub fn in_initial_pid_namespace() -> bool {
    std::fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link.as_os_str() == "pid:[4026531836]")
}
