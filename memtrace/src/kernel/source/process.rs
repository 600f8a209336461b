//! The life of the traced processes: raw tracepoints for the end of threads, for `fork` and for `execve`.

use std::os::fd::AsFd as _;

use super::uprobe::Reach;
use crate::kernel::{
    multi,
    object::program,
    tracer::{AttachedLink, KernelError, Tracer},
};

impl Tracer {
    /// Attaches the programs that watch threads end, and processes fork and execute other programs.
    ///
    /// # Errors
    /// The kernel refuses raw tracepoints.
    pub fn attach_process_events(&mut self) -> Result<(), KernelError> {
        self.attach_raw_tracepoint(program::THREAD_EXIT, "sched_process_exit")?;
        self.attach_raw_tracepoint(program::PROCESS_EXEC, "sched_process_exec")?;
        self.attach_raw_tracepoint(program::NEW_TASK, "task_newtask")
    }

    /// Attaches the raw tracepoint program `name`.
    pub(super) fn attach_raw_tracepoint(&mut self, name: &'static str, tracepoint: &str) -> Result<(), KernelError> {
        if self.multi.is_some() {
            let program = self.multi_program(name)?;
            let link = multi::attach_raw_tracepoint(program.as_fd(), tracepoint)
                .map_err(|source| KernelError::AttachMulti { what: format!("tracepoint {tracepoint}"), source })?;
            self.links.push((Reach::EVERYWHERE, AttachedLink::Multi(link)));
            return Ok(());
        }
        let program = self.raw_tracepoint(name)?;
        let link = program
            .attach(tracepoint)
            .and_then(|id| program.take_link(id))
            .map_err(|source| KernelError::Attach { what: format!("tracepoint {tracepoint}"), source })?;
        self.links.push((Reach::EVERYWHERE, AttachedLink::RawTracePoint(link)));
        Ok(())
    }
}
