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

    /// A page fault by the program's own code.
    pub const PAGE_FAULT_USER: &str = "page_fault_user";
    /// A page fault by the kernel on the program's behalf.
    pub const PAGE_FAULT_KERNEL: &str = "page_fault_kernel";
    /// Entry of a system call.
    pub const CALL_ENTRY: &str = "call_entry";
    /// Exit of a system call.
    pub const CALL_EXIT: &str = "call_exit";

    /// The resident set has changed.
    pub const RESIDENT_CHANGED: &str = "resident_changed";

    /// Hands walks over to the unwinder's test.
    pub const ORACLE_ENTRY: &str = "oracle_entry";

    /// Every program for uprobes.
    pub const UPROBES: [&str; 7] =
        [ALLOC_ENTRY, ALLOC_RETURN, FREE_ENTRY, LOADER_CHANGED, EMPTY_ENTRY, EMPTY_RETURN, ORACLE_ENTRY];
    /// Every program for tracepoints.
    pub const TRACEPOINTS: [&str; 1] = [RESIDENT_CHANGED];
    /// Every program for raw tracepoints.
    pub const RAW_TRACEPOINTS: [&str; 7] =
        [THREAD_EXIT, NEW_TASK, PROCESS_EXEC, PAGE_FAULT_USER, PAGE_FAULT_KERNEL, CALL_ENTRY, CALL_EXIT];
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    #[test]
    #[allow(clippy::unwrap_used)]
    fn lists_are_complete() {
        use super::program::{RAW_TRACEPOINTS, TRACEPOINTS, UPROBES};
        let object = aya_obj::Object::parse(super::OBJECT).unwrap();
        let there: BTreeSet<&str> = object.programs.keys().map(String::as_str).collect();
        assert_eq!(UPROBES.into_iter().chain(RAW_TRACEPOINTS).chain(TRACEPOINTS).collect::<BTreeSet<_>>(), there);
    }
}
