//! Starting a command that is traced from its first allocation, and waiting for its end.

use std::{
    ffi::OsString,
    process::{ExitCode, ExitStatus},
};

use anyhow::{Context as _, bail};

use super::{
    session::{Options, Probes, Session},
    signals::Interrupt,
};
use crate::target::{
    Process,
    launch::{Launched, Reached, wait},
    mappings,
};

/// A command that was started.
pub struct Command {
    pid: u32,
    /// Its status, if it has ended and was waited for already.
    status: Option<ExitStatus>,
}

/// Starts `argv`, attaches once its C library is mapped, begins to record, and lets it go at its entry point.
///
/// # Errors
/// It can't be started, or can't be traced; then it has been ended, before its own code ran.
pub fn start(argv: &[OsString], options: &Options) -> anyhow::Result<(Session, Command)> {
    let mut launched = Launched::spawn(argv)?;
    match attach(&mut launched, options) {
        Ok((session, Some(status))) => Ok((session, Command { pid: launched.pid(), status: Some(status) })),
        Ok((session, None)) => {
            let pid = launched.pid();
            launched.release()?;
            Ok((session, Command { pid, status: None }))
        }
        Err(error) => {
            launched.kill();
            Err(error)
        }
    }
}

fn attach(launched: &mut Launched, options: &Options) -> anyhow::Result<(Session, Option<ExitStatus>)> {
    let process = Process::open(launched.pid())?;
    let maps_libc = || mappings::read(&process).is_ok_and(|mappings| mappings::maps_libc(&mappings));
    let reached = launched.run_until(maps_libc)?;
    if let Reached::Ended(status) = reached {
        bail!("the command ended before its C library was mapped ({status})");
    }
    // At the entry point without glibc the program is static, or this says what is there instead.
    let mut session = Session::attach(process, None, options, Probes::Recording)?;
    session.start()?;
    if let Reached::Condition = reached
        && let Reached::Ended(status) = launched.run_to_entry()?
    {
        return Ok((session, Some(status)));
    }
    session.refresh_modules();
    Ok((session, None))
}

impl Command {
    /// Waits for the end of the command: its exit status, 128 + N if signal N ended it. An interrupt ends the wait.
    ///
    /// # Errors
    /// It can't be waited for.
    pub async fn wait(self, interrupt: &mut Interrupt) -> anyhow::Result<ExitCode> {
        use std::os::unix::process::ExitStatusExt as _;
        let status = match self.status {
            Some(status) => status,
            None => {
                let pid = libc::pid_t::try_from(self.pid).context("pid")?;
                let waited = tokio::task::spawn_blocking(move || wait(pid));
                tokio::select! {
                    waited = waited => ExitStatus::from_raw(waited.context("waiting for the command")??),
                    () = interrupt.wait() => return Ok(ExitCode::from(130)),
                }
            }
        };
        let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
        Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
    }
}
