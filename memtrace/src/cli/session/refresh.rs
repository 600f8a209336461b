//! Code that appears while a trace runs: its tables, and allocators in it.

use std::rc::Rc;

use super::{AttachedLate, Probes, REFRESH_PAUSE, Session, Traced, attach::bare, monotonic_now, traced::add_custom};
use crate::{
    kernel::source::uprobe::Reach,
    target::{self, custom, mappings},
};
use memtrace_common::settings::Unwind;
use std::time::{Duration, Instant};

impl Traced {
    /// The memory map is to be read again, because of a message that was sent at `since`.
    pub(super) fn want_refresh(&mut self, since: u64) {
        self.refresh_wanted = true;
        self.late.want(since);
    }
}

impl Session {
    /// Reads the memory map again now, while the process named first is held: what it has mapped does not count as late.
    pub fn refresh_modules(&mut self) {
        if let Err(error) = self.refresh_one(self.first, false) {
            tracing::warn!("stacks through code mapped just now will be cut: {error}");
        }
    }

    /// Checks that the functions that the user described are there, now that the command's libraries are.
    ///
    /// # Errors
    /// One is not.
    pub fn check_custom(&self) -> anyhow::Result<()> {
        let Some(traced) = self.traced.get(&self.first) else { return Ok(()) };
        let (specs, modules) = (&self.options.custom, &traced.discovery.modules);
        if !specs.is_empty() && self.probes == Probes::Recording {
            let found = custom::resolve(&traced.process, specs, modules, 0)?;
            custom::check(&traced.process, specs, &found, modules)?;
        }
        Ok(())
    }

    /// Reads the memory maps that are to be read again.
    pub(super) fn refresh(&mut self) -> anyhow::Result<()> {
        let due: Vec<u32> = self
            .traced
            .values()
            .filter(|traced| traced.refresh_wanted && traced.runs() && traced.last_refresh.elapsed() >= REFRESH_PAUSE)
            .map(|traced| traced.number)
            .collect();
        for number in due {
            if let Err(error) = self.refresh_one(number, true) {
                tracing::warn!("stacks through code mapped just now will be cut: {error}");
            }
            if let Some(traced) = self.traced.get_mut(&number) {
                traced.refresh_wanted = false;
                traced.last_refresh = Instant::now();
            }
        }
        Ok(())
    }

    fn refresh_one(&mut self, number: u32, late: bool) -> anyhow::Result<()> {
        let events = self.tracer.loader_events(number);
        let Some(pid) = self.traced.get(&number).map(|traced| traced.process.pid()) else { return Ok(()) };
        if !self.is_image_of(number, pid) {
            // What is mapped by now is another program's.
            return Ok(());
        }
        let Some(traced) = self.traced.get_mut(&number) else { return Ok(()) };
        let since = traced.late.look(monotonic_now());
        let before = traced.modules.mappings().len();
        // A process that has just exited has no map any more: what was seen before stays.
        let Ok(changed) = traced.modules.refresh(&traced.process) else { return Ok(()) };
        if !self.is_image_of(number, pid) {
            if let Some(traced) = self.traced.get_mut(&number) {
                traced.modules.forget_since(before);
            }
            return Ok(());
        }
        let Some(traced) = self.traced.get_mut(&number) else { return Ok(()) };
        traced.note_loader(&self.tracer, events, self.tracer.loader_events(number));
        if changed {
            if self.options.unwind != Unwind::FramePointers {
                self.unwinding.prepare(&traced.process, &traced.modules);
            }
            self.unwinding.hand_over(&mut self.tracer, number, &traced.modules)?;
            if late {
                traced.late.in_force(&traced.modules, before, since, monotonic_now());
            }
        }
        self.tracer.set_loader_seen(number, events);
        if changed && traced.has_new_files() {
            self.search_allocators(number, late)?;
        }
        Ok(())
    }

    /// Looks for allocators in files that a process has mapped since, and attaches to them.
    fn search_allocators(&mut self, number: u32, late: bool) -> anyhow::Result<()> {
        let Some(traced) = self.traced.get_mut(&number) else { return Ok(()) };
        if !matches!(self.probes, Probes::Recording) {
            return Ok(());
        }
        let Ok(mappings) = mappings::read(&traced.process) else { return Ok(()) };
        traced.note_searched(&mappings);
        let specs = &self.options.custom;
        let from = match Rc::get_mut(&mut traced.discovery) {
            Some(discovery) => {
                let (sites, modules) = (discovery.sites.len(), discovery.modules.len());
                target::discover::look_again(&traced.process, discovery, &mappings)
                    .map_err(anyhow::Error::from)
                    .and_then(|_| Ok(add_custom(&traced.process, discovery, specs, modules, false)?))
                    .map(|()| sites)
            }
            // It is shared with forked processes, which do not have what is new.
            None => target::discover_in(&traced.process, &mappings).map_err(anyhow::Error::from).and_then(
                |mut discovery| {
                    add_custom(&traced.process, &mut discovery, specs, 0, false)?;
                    // The paths of its probes lead to what it holds open.
                    traced.held.push(std::mem::replace(&mut traced.discovery, Rc::new(discovery)));
                    Ok(0)
                },
            ),
        };
        let from = match from {
            Ok(from) => from,
            Err(error) => {
                tracing::info!("process {}: {error}", traced.process.pid());
                return Ok(());
            }
        };
        let discovery = Rc::clone(&traced.discovery);
        let new = traced.new_points(&mut self.sites, &discovery, from);
        if new.is_empty() {
            return Ok(());
        }
        let attached = if self.options.unfiltered {
            let new: Vec<_> = new.iter().filter(|(place, _)| self.everywhere.insert(*place)).cloned().collect();
            self.tracer.attach_allocator(&bare(new), Reach::EVERYWHERE)
        } else {
            self.tracer.attach_allocator(&bare(new.clone()), Reach { pid: traced.pid(), image: number })
        };
        if let Err(error) = attached {
            tracing::warn!("an allocator that was loaded during the trace is not seen: {error}");
            return Ok(());
        }
        if late && let Some((started, _)) = self.started {
            let since = started.elapsed();
            let mut modules: Vec<&str> = discovery
                .sites
                .iter()
                .skip(from)
                .filter_map(|site| Some(discovery.modules.get(site.module)?.name()))
                .collect();
            modules.dedup();
            for module in modules {
                let functions =
                    new.iter().filter(|(_, point)| point.name.ends_with(&format!("{module:?}"))).count() as u64;
                if functions > 0 {
                    note_late(traced, module, functions, since);
                    self.attached_late.push(AttachedLate { number, module: module.to_owned(), functions, since });
                }
            }
        }
        self.renew_sweep(number)
    }
}

/// Tests and scripts wait for this line: what a newly loaded allocator does is recorded.
fn note_late(traced: &Traced, module: &str, functions: u64, since: Duration) {
    let (comm, pid) = (traced.process.comm(), traced.process.pid());
    eprintln!(
        "memtrace: {comm:?} (pid {pid}) has loaded {module:?}: {functions} functions probed from {:.3} s on",
        since.as_secs_f64()
    );
}
