//! The eBPF object file, compiled by the build script and embedded here.

/// The object file's bytes, aligned as the ELF reader wants them.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/memtrace.bpf.o"));

/// Names of the programs in it.
pub mod program {
    /// Entry of an allocating function.
    pub const ALLOC_ENTRY: &str = "alloc_entry";
    /// Return of an allocating function.
    pub const ALLOC_RETURN: &str = "alloc_return";
    /// Entry of a freeing function.
    pub const FREE_ENTRY: &str = "free_entry";
    /// The dynamic loader's hook for debuggers.
    pub const LOADER_CHANGED: &str = "loader_changed";
    /// An entry probe that does nothing.
    pub const EMPTY_ENTRY: &str = "empty_entry";
    /// A return probe that does nothing.
    pub const EMPTY_RETURN: &str = "empty_return";
    /// End of a thread.
    pub const THREAD_EXIT: &str = "thread_exit";
    /// A new thread or process.
    pub const NEW_TASK: &str = "new_task";
    /// Another program is executed.
    pub const PROCESS_EXEC: &str = "process_exec";
}
