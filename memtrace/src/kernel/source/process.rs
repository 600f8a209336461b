//! The life of the target: raw tracepoints for the end of threads, for `fork` and for `execve`.

use crate::kernel::{
    object::program,
    tracer::{AttachedLink, KernelError, Tracer},
};

impl Tracer {
    /// Attaches the programs that watch the target's threads end, the target fork and the target execute another
    /// program.
    ///
    /// # Errors
    /// The kernel refuses raw tracepoints.
    pub fn attach_process_events(&mut self) -> Result<(), KernelError> {
        for (name, tracepoint) in [
            (program::THREAD_EXIT, "sched_process_exit"),
            (program::PROCESS_EXEC, "sched_process_exec"),
            (program::NEW_TASK, "task_newtask"),
        ] {
            let program = self.raw_tracepoint(name)?;
            let link = program
                .attach(tracepoint)
                .and_then(|id| program.take_link(id))
                .map_err(|source| KernelError::Attach { what: format!("tracepoint {tracepoint}"), source })?;
            self.links.push(AttachedLink::RawTracePoint(link));
        }
        Ok(())
    }
}
