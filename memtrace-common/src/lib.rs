//! The interface between memtrace's eBPF programs and its user side.
//!
//! Everything here is `no_std`, plain data with a fixed layout (`repr(C)`, sizes asserted below), one module per
//! topic:
//!
//! - [`block`]: the live blocks, and the per-thread state of a call in progress;
//! - [`call`]: system calls that change an address space;
//! - [`event`]: what the kernel side tells the user side while a trace runs;
//! - [`fault`]: which call path made a page resident;
//! - [`loss`]: why something was not recorded, one counter and one sentence per reason;
//! - [`oracle`]: walks as the unwinder's test sees them;
//! - [`process`]: the processes that are traced;
//! - [`resident`]: changes of the resident set;
//! - [`settings`]: what the user side sets before the programs are loaded, and the run switch;
//! - [`site`]: what a probed instruction means, packed into the 64-bit cookie of its probe;
//! - [`stack`]: call stacks and the totals kept per stack.
//! - [`unwind`]: unwind tables.
#![no_std]

pub mod block;
pub mod call;
pub mod event;
pub mod fault;
pub mod loss;
pub mod oracle;
pub mod process;
pub mod resident;
pub mod settings;
pub mod site;
pub mod stack;
pub mod unwind;

/// Names of the maps, as the user side looks them up in the object file.
pub mod maps {
    /// Array of u64, numbered by [`crate::settings::Control`].
    pub const CONTROL: &str = "CONTROL";
    /// Hash of [`crate::block::BlockKey`] to [`crate::block::Block`].
    pub const BLOCKS: &str = "BLOCKS";
    /// Hash of thread (`pid_tgid`, u64) to [`crate::block::ThreadState`]. Under the same number with
    /// [`crate::block::TRACEPOINT_STATE`] is the state for events that the kernel itself reports: they happen inside
    /// allocating calls too.
    pub const THREADS: &str = "THREADS";
    /// Hash of stack hash (u64) to stack number (u32).
    pub const STACK_IDS: &str = "STACK_IDS";
    /// Array of stack number to [`crate::stack::StackRecord`].
    pub const STACKS: &str = "STACKS";
    /// Array of stack number to [`crate::stack::Totals`].
    pub const TOTALS: &str = "TOTALS";
    /// Array of [`crate::loss::Loss`] to [`crate::loss::LossCount`].
    pub const LOSSES: &str = "LOSSES";
    /// Per-CPU array of [`crate::event::Counter`] to u64.
    pub const COUNTERS: &str = "COUNTERS";
    /// Array of packed [`crate::unwind::Row`]s of all modules.
    pub const ROWS: &str = "ROWS";
    /// Array of row numbers (u32): the block indexes of all modules.
    pub const ROW_INDEX: &str = "ROW_INDEX";
    /// Array of [`crate::unwind::CodeMapping`]: the lists of all processes.
    pub const MAPPINGS: &str = "MAPPINGS";
    /// Ring buffer of [`crate::oracle::OracleSample`].
    pub const ORACLE: &str = "ORACLE";
    /// Array of u64, numbered by [`crate::oracle::OracleControl`].
    pub const ORACLE_CONTROL: &str = "ORACLE_CONTROL";
    /// Hash of [`crate::fault::ChunkKey`] to [`crate::fault::Chunk`].
    pub const PAGES: &str = "PAGES";
    /// Hash of thread group (u32, as the initial pid namespace numbers it, or [`crate::process::ANY`]) to
    /// the number of its image (u32).
    pub const PROCESSES: &str = "PROCESSES";
    /// Array of [`crate::process::ProcessState`]. Its length is a power of two.
    pub const IMAGES: &str = "IMAGES";
    /// Hash of a process's number (upper half of a u64) and thread to the name that it had at its end, 16 bytes ending in NUL;
    /// empty unless threads are told apart.
    pub const THREAD_NAMES: &str = "THREAD_NAMES";
    /// Array of u64, numbered by [`crate::resident::entry`].
    pub const RESIDENT: &str = "RESIDENT";
    /// Ring buffer of [`crate::call::CallEvent`].
    pub const CALLS: &str = "CALLS";
    /// Ring buffer of [`crate::event::Event`].
    pub const EVENTS: &str = "EVENTS";
}
