//! Loads the programs, holds the maps and the links.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    io, mem,
    num::NonZeroU32,
    os::fd::{AsFd as _, AsRawFd, OwnedFd, RawFd},
    time::Duration,
};

use aya::{
    Btf, Ebpf, EbpfError, EbpfLoader,
    maps::{Array, Map, MapData, MapError, PerCpuArray, RingBuf},
    programs::{Program, ProgramError, RawTracePoint, UProbe, raw_trace_point::RawTracePointLink, uprobe::UProbeLink},
};
use memtrace_common::{
    block::{Block, BlockKey, ThreadState},
    event::{Counter, Event},
    fault::{Chunk, ChunkKey},
    loss::{Loss, LossCount},
    maps,
    process::{FEW_IMAGES, MANY_IMAGES},
    settings::{Control, Run, Unwind, globals},
    stack::{FIRST_STACK, StackRecord, Totals},
};

use super::{
    btf,
    budget::Budget,
    closer::{self, Closer},
    code::CodeTables,
    missed,
    multi::{self, MultiLoader},
    object::{OBJECT, program},
    preempt::PreemptGuard,
    processes::Processes,
    release::Release,
    shared::Shared,
    source::uprobe::Reach,
    table,
};

/// Room for code mappings, for each image that there is room for: an image's list is about 20 times as long as this, but few of
/// them are in use at a time.
const MAPPINGS_PER_IMAGE: u32 = 4;
/// Smallest ring buffer, bytes.
const PAGE: u32 = 4096;

/// Why the kernel side could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Loading the object file: maps or BTF.
    #[error("the kernel refused memtrace's tables or type information: {0} (`memtrace doctor` tells what is missing)")]
    Load(#[source] EbpfError),
    /// The verifier or the kernel refused a program.
    #[error("the kernel refused the program {name}: {source} (`memtrace doctor` tells what is missing)")]
    Program {
        /// Name in the object file.
        name: &'static str,
        /// The kernel's words.
        source: ProgramError,
    },
    /// A probe could not be attached.
    #[error("{what} can't be probed: {source} (`memtrace doctor` tells what is missing)")]
    Attach {
        /// What was to be probed.
        what: String,
        /// The kernel's words.
        source: ProgramError,
    },
    /// As [`Self::Program`], for a program on links over many sites.
    #[error("the kernel refused the program {name}: {source} (`memtrace doctor` tells what is missing)")]
    LoadMulti {
        /// Name in the object file.
        name: &'static str,
        /// The kernel's words.
        source: io::Error,
    },
    /// As [`Self::Attach`], for a link over many sites.
    #[error("{what} can't be probed: {source} (`memtrace doctor` tells what is missing)")]
    AttachMulti {
        /// What was to be probed.
        what: String,
        /// The kernel's words.
        source: io::Error,
    },
    /// A map could not be read or written.
    #[error("table {name} can't be used: {source}")]
    Map {
        /// Name in the object file.
        name: &'static str,
        /// The kernel's words.
        source: MapError,
    },
    /// A table could not be read.
    #[error("table {name} can't be read: {source}")]
    Table {
        /// Name in the object file.
        name: &'static str,
        /// The kernel's words.
        source: io::Error,
    },
    /// Preemption can't be turned off where that is necessary.
    #[error(
        "on Linux 6.13 and newer, programs on probes can overwrite each other's stacks, which would crash the kernel, \
         and what memtrace prevents that with is not in /sys/kernel/btf/vmlinux: boot a kernel built with \
         CONFIG_DEBUG_INFO_BTF"
    )]
    NoPreemptGuard,
    /// The object file lacks something that this program expects: they were built from different sources.
    #[error("the embedded eBPF object has no {0}: build memtrace again from a clean tree")]
    Missing(&'static str),
}

/// Which processes can be traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Whichever the probes reach, as if they were one: their numbers are not known. Nothing that the kernel itself reports can
    /// be traced.
    Any,
    /// This thread group, as the initial pid namespace numbers it.
    One(NonZeroU32),
    /// Several, each of which is added by itself.
    Several,
}

/// What is decided before loading.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Which processes can be traced.
    pub scope: Scope,
    /// Table sizes.
    pub budget: Budget,
    /// How stacks are walked.
    pub unwind: Unwind,
    /// Room for unwind rows, over all modules.
    pub rows: u32,
    /// Room for index entries of unwind tables, over all modules.
    pub blocks: u32,
    /// Bits of the stack hash to clear: 0, except in tests of collisions.
    pub hash_ignore: u64,
    /// Whether the processes that traced ones fork are traced. Needs [`Scope::Several`].
    pub follow: bool,
    /// Whether processes that are not traced are reported when they appear. Needs [`Scope::Several`].
    pub announce: bool,
    /// Whether the probes are to reach every process that maps the probed files.
    pub unfiltered: bool,
    /// Whether the stacks of threads are told apart.
    pub by_thread: bool,
    /// Bytes of the ring buffer for system calls, a power of two; 0 if they are not traced.
    pub calls: u32,
    /// Whether every stack is walked from its innermost frame, without the thread's last one: for measurements.
    pub plain_walks: bool,
    /// Bytes of the ring buffer for [`super::source::oracle`], a power of two; 0, except in the unwinder's test.
    pub oracle: u32,
}

impl Settings {
    /// For every process that the probes reach, with stacks by frame pointers.
    pub fn plain(budget: Budget) -> Self {
        Self {
            scope: Scope::Any,
            budget,
            unwind: Unwind::FramePointers,
            rows: 0,
            blocks: 0,
            hash_ignore: 0,
            follow: false,
            announce: false,
            unfiltered: false,
            by_thread: false,
            calls: 0,
            plain_walks: false,
            oracle: 0,
        }
    }
}

/// The loaded programs with their maps and links. Dropping it detaches everything.
pub struct Tracer {
    ebpf: Ebpf,
    budget: Budget,
    /// With the number of the process's image that each belongs to, 0 for what belongs to all.
    pub(super) links: Vec<(Reach, AttachedLink)>,
    /// Loads programs for links over many sites; `None` where the kernel has no such links.
    pub(super) multi: Option<MultiLoader>,
    multi_programs: HashMap<&'static str, OwnedFd>,
    pub(super) code: CodeTables,
    pub(super) processes: Processes,
    closer: Closer<(Reach, AttachedLink)>,
}

/// A link held apart from its program, so that all of them can be closed at a time.
#[expect(dead_code, reason = "held for its Drop, which detaches")]
pub(super) enum AttachedLink {
    Uprobe(UProbeLink),
    RawTracePoint(RawTracePointLink),
    Multi(OwnedFd),
    Perf(OwnedFd),
}

impl Drop for Tracer {
    fn drop(&mut self) {
        self.close_links();
    }
}

impl Tracer {
    /// Loads the object file and creates the tables. Programs are verified when they are first attached.
    ///
    /// # Errors
    /// [`KernelError::Load`], with the kernel's reason.
    pub fn load(settings: &Settings) -> Result<Self, KernelError> {
        let budget = settings.budget;
        let tgid = match settings.scope {
            Scope::One(tgid) => tgid.get(),
            Scope::Any | Scope::Several => 0,
        };
        let images = if settings.unfiltered { MANY_IMAGES } else { FEW_IMAGES };
        let lists = images * MAPPINGS_PER_IMAGE;
        let log_level: u8 = if tracing::enabled!(tracing::Level::DEBUG) { 4 } else { 0 };
        let release = Release::running();
        let guard = PreemptGuard::find(release, || Btf::from_sys_fs().ok())?;
        let faults_disabled = btf::faults_disabled().unwrap_or_default();
        let constants = btf::constants(&btf::return_instances().unwrap_or_default());
        let mut loader = EbpfLoader::new();
        for (name, value) in &constants {
            loader.override_global(name, value, true);
        }
        let mut ebpf = loader
            .override_global(globals::TARGET_TGID, &tgid, true)
            .override_global(globals::ANY_PROCESS, &u32::from(settings.scope == Scope::Any), true)
            .override_global(globals::BY_THREAD, &u32::from(settings.by_thread), true)
            .override_global(globals::ANNOUNCE, &u32::from(settings.announce), true)
            .override_global(globals::UNFILTERED, &u32::from(settings.unfiltered), true)
            .override_global(globals::MAX_IMAGES, &images, true)
            .override_global(globals::HASH_IGNORE, &settings.hash_ignore, true)
            .override_global(globals::MAX_STACKS, &budget.stacks, true)
            .override_global(globals::RECORDS_PAGES, &u32::from(budget.chunks > 1), true)
            .override_global(globals::TASK_TGID, &btf::task_tgid().unwrap_or_default(), true)
            .override_global(globals::FOLLOW, &u32::from(settings.follow), true)
            .override_global(globals::FAULTS_DISABLED, &faults_disabled, true)
            .override_global(globals::PLAIN_WALKS, &u32::from(settings.plain_walks), true)
            .override_global(globals::PREEMPT_GUARD, &u32::from(guard.is_some()), true)
            .override_global(aya_log::LEVEL, &log_level, false)
            .map_max_entries(maps::BLOCKS, budget.blocks)
            .map_max_entries(maps::THREADS, budget.threads)
            .map_max_entries(maps::STACK_IDS, budget.stacks)
            .map_max_entries(maps::STACKS, budget.stacks)
            .map_max_entries(maps::TOTALS, budget.stacks)
            .map_max_entries(maps::PAGES, budget.chunks.max(1))
            .map_max_entries(maps::CALLS, settings.calls.max(PAGE))
            .map_max_entries(maps::PROCESSES, images)
            .map_max_entries(maps::IMAGES, images)
            .map_max_entries(maps::MAPPINGS, lists)
            .map_max_entries(maps::THREAD_NAMES, if settings.by_thread { budget.threads } else { 1 })
            .map_max_entries(maps::ROWS, settings.rows.max(1))
            .map_max_entries(maps::ROW_INDEX, settings.blocks.max(1))
            .map_max_entries(maps::ORACLE, settings.oracle.max(PAGE))
            .load(OBJECT)
            .map_err(KernelError::Load)?;
        let multi = if multi::supported(release) {
            Some(MultiLoader::new(&ebpf, guard).map_err(|source| KernelError::Table { name: "BTF", source })?)
        } else {
            None
        };
        // Takes a map out of `ebpf`, which the loader above must have seen.
        if log_level > 0 {
            forward_log(&mut ebpf);
        }
        let (memory, length) = share(&ebpf, maps::IMAGES)?;
        let mut tracer = Self {
            ebpf,
            budget,
            processes: Processes::new(memory, length, lists),
            closer: Closer::default(),
            links: Vec::new(),
            multi,
            multi_programs: HashMap::new(),
            code: CodeTables::default(),
        };
        tracer.write_control(Control::Run, Run::Stopped as u64)?;
        tracer.write_control(Control::Unwind, settings.unwind as u64)?;
        tracer.write_control(Control::NextStack, u64::from(FIRST_STACK))?;
        Ok(tracer)
    }

    /// Loads every program, in the way in which it would be attached: how many there are.
    ///
    /// # Errors
    /// The first program that the kernel refuses.
    pub fn load_all_programs(&mut self) -> Result<usize, KernelError> {
        let all = program::UPROBES.into_iter().chain(program::RAW_TRACEPOINTS).chain(program::TRACEPOINTS);
        let mut count = 0;
        for name in all {
            if self.multi.is_some() {
                self.multi_program(name)?;
            } else if program::UPROBES.contains(&name) {
                self.uprobe(name)?;
            } else if program::RAW_TRACEPOINTS.contains(&name) {
                self.raw_tracepoint(name)?;
            } else {
                self.tracepoint(name)?;
            }
            count += 1;
        }
        Ok(count)
    }

    /// Table sizes in force.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// Detaches the probes that belong to an image; 0: none. Calls in progress may be recorded for a little longer.
    pub fn detach_image(&mut self, number: u32) {
        self.detach_those(|reach| number != 0 && reach.image == number);
    }

    /// The same for those that were attached with this reach.
    pub fn detach_reach(&mut self, reach: Reach) {
        self.detach_those(|other| reach.image != 0 && other == reach);
    }

    fn detach_those(&mut self, is_it: impl Fn(Reach) -> bool) {
        let (gone, kept) = mem::take(&mut self.links).into_iter().partition(|(reach, _)| is_it(*reach));
        self.links = kept;
        // It takes a grace period, which nobody has to wait for.
        self.closer.close(gone);
    }

    fn close_links(&mut self) {
        closer::close(self.links.drain(..));
        self.closer.finish();
    }

    /// Starts recording, for all probes at once.
    ///
    /// # Errors
    /// The control map can't be written.
    pub fn start(&mut self) -> Result<(), KernelError> {
        self.set_run(Run::Running)
    }

    /// Stops recording, for all probes at once. Calls in progress are not recorded.
    ///
    /// # Errors
    /// The control map can't be written.
    pub fn stop(&mut self) -> Result<(), KernelError> {
        self.set_run(Run::Stopped)
    }

    /// Detaches every probe. When it returns, no program of this tracer is running any more.
    ///
    /// # Errors
    /// The control map can't be written.
    pub fn detach(&mut self) -> Result<(), KernelError> {
        self.stop()?;
        self.close_links();
        Ok(())
    }

    fn set_run(&mut self, run: Run) -> Result<(), KernelError> {
        self.write_control(Control::Run, run as u64)
    }

    pub(super) fn write_control(&mut self, entry: Control, value: u64) -> Result<(), KernelError> {
        let name = maps::CONTROL;
        let map = self.map_mut(name)?;
        Array::try_from(map)
            .and_then(|mut array: Array<&mut MapData, u64>| array.set(entry as u32, value, 0))
            .map_err(|source| KernelError::Map { name, source })
    }

    fn control(&self, entry: Control) -> Result<u64, KernelError> {
        let name = maps::CONTROL;
        let map = self.map(name)?;
        Array::try_from(map)
            .and_then(|array: Array<&MapData, u64>| array.get(&(entry as u32), 0))
            .map_err(|source| KernelError::Map { name, source })
    }

    pub(super) fn program_mut(&mut self, name: &'static str) -> Result<&mut Program, KernelError> {
        self.ebpf.program_mut(name).ok_or(KernelError::Missing(name))
    }

    pub(super) fn map(&self, name: &'static str) -> Result<&Map, KernelError> {
        self.ebpf.map(name).ok_or(KernelError::Missing(name))
    }

    pub(super) fn map_mut(&mut self, name: &'static str) -> Result<&mut Map, KernelError> {
        self.ebpf.map_mut(name).ok_or(KernelError::Missing(name))
    }

    /// How many stack numbers are in use, number 0 included.
    ///
    /// # Errors
    /// The control map can't be read.
    pub fn stack_count(&self) -> Result<u32, KernelError> {
        let next = self.control(Control::NextStack)?.min(u64::from(self.budget.stacks));
        Ok(u32::try_from(next).unwrap_or(u32::MAX))
    }

    /// Calls `each` with every live block.
    ///
    /// # Errors
    /// The table can't be read.
    pub fn for_each_block(&self, each: impl FnMut(&BlockKey, &Block)) -> Result<(), KernelError> {
        self.for_each(maps::BLOCKS, each)
    }

    /// Takes the live blocks of processes out of the table: stack and size of each.
    ///
    /// # Errors
    /// The table can't be read or written.
    pub fn remove_blocks(&mut self, processes: &HashSet<u32>) -> Result<Vec<(u32, u64)>, KernelError> {
        let mut found = Vec::new();
        self.for_each_block(|key, block| {
            if processes.contains(&key.process) {
                found.push((*key, *block));
            }
        })?;
        let keys = found.iter().map(|(key, _)| *key);
        self.remove_all::<BlockKey, Block>(maps::BLOCKS, keys)?;
        Ok(found.into_iter().map(|(_, block)| (block.stack, block.size)).collect())
    }

    /// Takes the records of pages of processes out of the table.
    ///
    /// # Errors
    /// The table can't be read or written.
    pub fn remove_pages(&mut self, processes: &HashSet<u32>) -> Result<(), KernelError> {
        let mut keys = Vec::new();
        self.for_each(maps::PAGES, |key: &ChunkKey, _: &Chunk| {
            if processes.contains(&key.process) {
                keys.push(*key);
            }
        })?;
        self.remove_all::<ChunkKey, Chunk>(maps::PAGES, keys.into_iter())
    }

    /// Removes entries of a hash table.
    fn remove_all<K: aya::Pod, V: aya::Pod>(
        &mut self,
        name: &'static str,
        keys: impl Iterator<Item = K>,
    ) -> Result<(), KernelError> {
        let map = self.map_mut(name)?;
        let mut map: aya::maps::HashMap<&mut MapData, K, V> =
            aya::maps::HashMap::try_from(map).map_err(|source| KernelError::Map { name, source })?;
        for key in keys {
            match map.remove(&key) {
                Ok(()) | Err(MapError::KeyNotFound) => {}
                Err(source) => return Err(KernelError::Map { name, source }),
            }
        }
        Ok(())
    }

    /// The names that threads had at their ends, by the numbers of image and thread.
    ///
    /// # Errors
    /// The table can't be read.
    pub fn thread_names(&self) -> Result<HashMap<(u32, u32), String>, KernelError> {
        let mut names = HashMap::new();
        self.for_each(maps::THREAD_NAMES, |key: &u64, name: &[u8; 16]| {
            let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
            names.insert(((key >> 32) as u32, *key as u32), String::from_utf8_lossy(name).into_owned());
        })?;
        Ok(names)
    }

    /// Calls `each` with the number and record of every stack.
    ///
    /// # Errors
    /// The table can't be read.
    pub fn for_each_stack(&self, mut each: impl FnMut(u32, &StackRecord)) -> Result<(), KernelError> {
        // The index tells which numbers were published; a number may have been taken without being used.
        let mut numbers = Vec::new();
        self.for_each(maps::STACK_IDS, |_: &u64, number: &u32| numbers.push(*number))?;
        numbers.sort_unstable();
        let name = maps::STACKS;
        let map = self.map(name)?;
        let array: Array<&MapData, StackRecord> =
            Array::try_from(map).map_err(|source| KernelError::Map { name, source })?;
        for number in numbers {
            let record = array.get(&number, 0).map_err(|source| KernelError::Map { name, source })?;
            each(number, &record);
        }
        Ok(())
    }

    /// One stack's record.
    ///
    /// # Errors
    /// The table can't be read.
    pub fn stack(&self, number: u32) -> Result<StackRecord, KernelError> {
        let name = maps::STACKS;
        let map = self.map(name)?;
        Array::try_from(map)
            .and_then(|array: Array<&MapData, StackRecord>| array.get(&number, 0))
            .map_err(|source| KernelError::Map { name, source })
    }

    /// Totals of the stacks numbered below `count`.
    ///
    /// # Errors
    /// The table can't be read.
    pub fn totals(&self, count: u32) -> Result<Vec<Totals>, KernelError> {
        let name = maps::TOTALS;
        let map = self.map(name)?;
        let array: Array<&MapData, Totals> =
            Array::try_from(map).map_err(|source| KernelError::Map { name, source })?;
        (0..count).map(|number| array.get(&number, 0).map_err(|source| KernelError::Map { name, source })).collect()
    }

    /// Losses so far, those that are zero left out.
    ///
    /// # Errors
    /// The table can't be read.
    pub fn losses(&self) -> Result<Vec<(Loss, LossCount)>, KernelError> {
        let name = maps::LOSSES;
        let map = self.map(name)?;
        let array: Array<&MapData, LossCount> =
            Array::try_from(map).map_err(|source| KernelError::Map { name, source })?;
        let mut losses = Vec::new();
        let missed = self.missed()?;
        if missed > 0 {
            losses.push((Loss::Missed, LossCount { count: missed, bytes: 0 }));
        }
        for loss in Loss::ALL {
            let count = array.get(&(loss as u32), 0).map_err(|source| KernelError::Map { name, source })?;
            if count.count > 0 {
                losses.push((loss, count));
            }
        }
        Ok(losses)
    }

    /// How often a program of tracepoints was not run.
    ///
    /// That for the kernel's page faults is left out: the faults that it causes itself, which it is not to see, are all
    /// that come while it runs.
    fn missed(&self) -> Result<u64, KernelError> {
        let mut missed = 0;
        for name in [program::PAGE_FAULT_USER, program::CALL_ENTRY, program::CALL_EXIT, program::RESIDENT_CHANGED] {
            let program = self.ebpf.program(name).ok_or(KernelError::Missing(name))?;
            let loaded = self.multi_programs.get(name).map(OwnedFd::as_fd);
            if let Some(descriptor) = loaded.or(program.fd().ok().map(|descriptor| descriptor.as_fd())) {
                let count = missed::count(descriptor);
                missed += count.map_err(|source| KernelError::Table { name, source })?;
            }
        }
        Ok(missed)
    }

    /// Calls of threads inside another call at this moment that may not be inside it: the other may never return, which
    /// frame pointers can't tell. Counted when it is known ([`Loss::Hidden`]), and not yet for these.
    ///
    /// # Errors
    /// The table can't be read.
    pub fn hidden_calls(&self) -> Result<LossCount, KernelError> {
        let mut hidden = LossCount::default();
        self.for_each(maps::THREADS, |_: &u64, thread: &ThreadState| {
            if thread.sp != 0 {
                hidden.count = hidden.count.saturating_add(thread.hidden_count);
                hidden.bytes = hidden.bytes.saturating_add(thread.hidden_bytes);
            }
        })?;
        Ok(hidden)
    }

    /// One counter, summed over the CPUs.
    ///
    /// # Errors
    /// The table can't be read.
    pub fn counter(&self, counter: Counter) -> Result<u64, KernelError> {
        let name = maps::COUNTERS;
        let map = self.map(name)?;
        let array: PerCpuArray<&MapData, u64> =
            PerCpuArray::try_from(map).map_err(|source| KernelError::Map { name, source })?;
        let values = array.get(&(counter as u32), 0).map_err(|source| KernelError::Map { name, source })?;
        Ok(values.iter().sum())
    }

    pub(super) fn take_map(&mut self, name: &'static str) -> Option<Map> {
        self.ebpf.take_map(name)
    }

    pub(super) fn share_map(&self, name: &'static str) -> Result<(Shared, u32), KernelError> {
        share(&self.ebpf, name)
    }

    /// Takes the stream of messages; `None` if it was taken before.
    ///
    /// # Errors
    /// The ring buffer can't be mapped.
    pub fn take_events(&mut self) -> Result<Option<EventStream>, KernelError> {
        let name = maps::EVENTS;
        let Some(map) = self.ebpf.take_map(name) else { return Ok(None) };
        let ring = RingBuf::try_from(map).map_err(|source| KernelError::Map { name, source })?;
        Ok(Some(EventStream { ring }))
    }

    pub(super) fn for_each<K: aya::Pod, V: aya::Pod>(
        &self,
        name: &'static str,
        each: impl FnMut(&K, &V),
    ) -> Result<(), KernelError> {
        let data = match self.map(name)? {
            Map::HashMap(data) | Map::Array(data) => data,
            _ => return Err(KernelError::Missing(name)),
        };
        let info = data.info().map_err(|source| KernelError::Map { name, source })?;
        table::for_each(data.fd().as_fd(), info.key_size(), info.value_size(), info.max_entries(), each)
            .map_err(|source| KernelError::Table { name, source })
    }

    /// The uprobe program `name`, loaded for links over many sites.
    pub(super) fn multi_program(&mut self, name: &'static str) -> Result<&OwnedFd, KernelError> {
        match self.multi_programs.entry(name) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let loader = self.multi.as_ref().ok_or(KernelError::Missing(name))?;
                let program = loader.load(name).map_err(|source| KernelError::LoadMulti { name, source })?;
                Ok(entry.insert(program))
            }
        }
    }

    /// The uprobe program `name`, loaded for single probes.
    pub(super) fn uprobe(&mut self, name: &'static str) -> Result<&mut UProbe, KernelError> {
        let program = self.ebpf.program_mut(name).ok_or(KernelError::Missing(name))?;
        let program: &mut UProbe = program.try_into().map_err(|source| KernelError::Program { name, source })?;
        if program.fd().is_err() {
            program.load().map_err(|source| KernelError::Program { name, source })?;
        }
        Ok(program)
    }

    /// The raw tracepoint program `name`, loaded.
    pub(super) fn raw_tracepoint(&mut self, name: &'static str) -> Result<&mut RawTracePoint, KernelError> {
        let program = self.ebpf.program_mut(name).ok_or(KernelError::Missing(name))?;
        let program: &mut RawTracePoint = program.try_into().map_err(|source| KernelError::Program { name, source })?;
        if program.fd().is_err() {
            program.load().map_err(|source| KernelError::Program { name, source })?;
        }
        Ok(program)
    }
}

/// Maps an array's memory into this process: it, and the number of the array's entries.
fn share(ebpf: &Ebpf, name: &'static str) -> Result<(Shared, u32), KernelError> {
    let data = match ebpf.map(name) {
        Some(Map::Array(data)) => data,
        _ => return Err(KernelError::Missing(name)),
    };
    let info = data.info().map_err(|source| KernelError::Map { name, source })?;
    let stride = (info.value_size() as usize).next_multiple_of(8);
    let shared = Shared::map(data.fd().as_fd(), stride * info.max_entries() as usize)
        .map_err(|source| KernelError::Table { name, source })?;
    Ok((shared, info.max_entries()))
}

/// Messages from the kernel side. Readable when there are any.
pub struct EventStream {
    ring: RingBuf<MapData>,
}

impl EventStream {
    /// The next message, if there is one.
    pub fn next_event(&mut self) -> Option<Event> {
        loop {
            let item = self.ring.next()?;
            // Anything of another size is not from this object file; there is no such thing, but bytes are bytes.
            let Ok(bytes) = <&[u8; size_of::<Event>()]>::try_from(&*item) else { continue };
            let half = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
            let word = |at: usize| u64::from(half(at)) | u64::from(half(at + 4)) << 32;
            return Some(Event { kind: half(0), tgid: half(4), value: word(8), time: word(16) });
        }
    }
}

impl AsRawFd for EventStream {
    fn as_raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}

/// Brings the eBPF side's debug messages into the ordinary log, from a task of their own.
fn forward_log(ebpf: &mut Ebpf) {
    match aya_log::EbpfLogger::init(ebpf) {
        Ok(mut logger) => {
            tokio::spawn(async move {
                let mut tick = tokio::time::interval(Duration::from_millis(50));
                loop {
                    tick.tick().await;
                    logger.flush();
                }
            });
        }
        Err(error) => tracing::warn!("the eBPF side's log can't be read: {error}"),
    }
}
