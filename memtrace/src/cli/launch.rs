//! Starting a command that is traced from its first allocation, and waiting for its end.

use std::{
    ffi::OsString,
    process::{ExitCode, ExitStatus},
};

use anyhow::{Context as _, bail};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{
    session::{Options, Probes, Session},
    signals::Interrupt,
};
use crate::target::{
    Process,
    launch::{Launched, Progress, Reached},
    mappings,
};

/// What stopped a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It is held at its end, or has ended.
    End,
    /// It has executed another program and is held before that one's first instruction.
    Exec,
}

/// A command that was started.
pub struct Command {
    /// Until it has ended and was waited for.
    launched: Option<Launched>,
    status: Option<ExitStatus>,
    /// Where it is held: the kernel tells it once.
    held: Option<Stop>,
    children: Signal,
}

/// Starts `argv`, attaches once its C library is mapped (at once, if allocations are not traced), begins to record, and
/// lets it go at its entry point.
///
/// # Errors
/// It can't be started, or can't be traced; then it has been ended, before its own code ran.
pub fn start(argv: &[OsString], options: &Options, probes: Probes) -> anyhow::Result<(Session, Command)> {
    let children = signal(SignalKind::child()).context("signals can't be taken over")?;
    let mut launched = Launched::spawn(argv)?;
    match attach(&mut launched, options, probes) {
        Ok((session, Some(status))) => {
            Ok((session, Command { launched: None, status: Some(status), held: None, children }))
        }
        Ok((session, None)) => {
            launched.release_until_end()?;
            Ok((session, Command { launched: Some(launched), status: None, held: None, children }))
        }
        Err(error) => {
            launched.kill();
            Err(error)
        }
    }
}

fn attach(launched: &mut Launched, options: &Options, probes: Probes) -> anyhow::Result<(Session, Option<ExitStatus>)> {
    let process = Process::open(launched.pid())?;
    let mut reached = Reached::Condition;
    if probes != Probes::None {
        let maps_libc = || mappings::read(&process).is_ok_and(|mappings| mappings::maps_libc(&mappings));
        reached = launched.run_until(maps_libc)?;
        if let Reached::Ended(status) = reached {
            bail!("the command ended before its C library was mapped ({status})");
        }
    }
    // At the entry point without glibc the program is static, or this says what is there instead.
    let mut session = Session::attach(vec![process], None, options, probes)?;
    session.start()?;
    if let Reached::Condition = reached
        && let Reached::Ended(status) = launched.run_to_entry()?
    {
        return Ok((session, Some(status)));
    }
    session.refresh_modules();
    session.check_custom()?;
    Ok((session, None))
}

impl Command {
    /// Ready when the command is about to end, or has executed another program; it is held there, with its memory intact,
    /// until [`Self::go_on`], and until then this is ready at once; so it is if the command has ended.
    ///
    /// # Errors
    /// It can't be waited for.
    pub async fn stops(&mut self) -> anyhow::Result<Stop> {
        while let (None, Some(launched)) = (self.held, &self.launched) {
            match launched.progress()? {
                Progress::Runs => drop(self.children.recv().await),
                Progress::Ending => self.held = Some(Stop::End),
                Progress::Executed => self.held = Some(Stop::Exec),
                Progress::Ended(status) => {
                    self.status = Some(status);
                    self.launched = None;
                }
            }
        }
        Ok(self.held.unwrap_or(Stop::End))
    }

    /// Attaches anew to a command that has executed another program ([`Stop::Exec`]), as [`start`] does.
    ///
    /// # Errors
    /// It can't be traced; it is left as it is.
    pub fn attach_again(&mut self, options: &Options, probes: Probes) -> anyhow::Result<Option<Session>> {
        let Some(mut launched) = self.launched.take() else { return Ok(None) };
        self.held = None;
        let attached =
            launched.hold_at_entry().map_err(Into::into).and_then(|()| attach(&mut launched, options, probes));
        match attached {
            Ok((session, Some(status))) => {
                self.status = Some(status);
                Ok(Some(session))
            }
            Ok((session, None)) => {
                launched.release_until_end()?;
                self.launched = Some(launched);
                Ok(Some(session))
            }
            Err(error) => {
                self.launched = Some(launched);
                Err(error)
            }
        }
    }

    /// Lets a command that has executed another program ([`Stop::Exec`]) go on to that one's entry point, where `session`
    /// attaches to it.
    ///
    /// # Errors
    /// It can't be traced; it is left as it is.
    pub fn go_on_in(&mut self, session: &mut Session) -> anyhow::Result<()> {
        let Some(mut launched) = self.launched.take() else { return Ok(()) };
        self.held = None;
        let held = launched.hold_at_entry().map_err(anyhow::Error::from).and_then(|()| {
            let process = Process::open(launched.pid())?;
            let maps_libc = || mappings::read(&process).is_ok_and(|mappings| mappings::maps_libc(&mappings));
            let reached = launched.run_until(maps_libc)?;
            session.attach_held()?;
            if let Reached::Condition = reached
                && let Reached::Ended(status) = launched.run_to_entry()?
            {
                return Ok(Some(status));
            }
            session.refresh_modules();
            Ok(None)
        });
        match held {
            Ok(Some(status)) => self.status = Some(status),
            Ok(None) => {
                launched.release_until_end()?;
                self.launched = Some(launched);
            }
            Err(error) => {
                self.launched = Some(launched);
                self.go_on();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Lets the command go on if it is held.
    pub fn go_on(&mut self) {
        self.held = None;
        if let Some(launched) = &self.launched {
            // One that was killed meanwhile is not held any more: its end will be seen.
            let _ = launched.resume();
        }
    }

    /// Waits for the end of the command: its exit status, 128 + N if signal N ended it. An interrupt ends the wait.
    ///
    /// # Errors
    /// It can't be waited for.
    pub async fn wait(mut self, interrupt: &mut Interrupt) -> anyhow::Result<ExitCode> {
        use std::os::unix::process::ExitStatusExt as _;
        loop {
            tokio::select! {
                stop = self.stops() => drop(stop?),
                () = interrupt.wait() => return Ok(ExitCode::from(130)),
            }
            if let Some(status) = self.status {
                let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
                return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
            }
            self.go_on();
        }
    }
}
