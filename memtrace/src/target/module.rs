//! A file that a process maps as code.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io,
    os::{
        fd::AsRawFd as _,
        unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
};

pub use super::elf::Segment;
use super::{
    ModuleProblem, Process,
    elf::{Headers, Source},
    mappings::{FileKey, Mapping},
};

/// What tells one file from another.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Device number (`st_dev`).
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// GNU build ID, 1 to 64 bytes, if the file has one.
    pub build_id: Option<Vec<u8>>,
}

/// An x86-64 ELF file that a process maps, held open: it stays readable after the process has ended, and when the
/// file is deleted or replaced.
///
/// Processes that map one file share it: however many there are, it is opened and read once.
#[derive(Clone, Debug)]
pub struct Module {
    shared: Arc<Shared>,
    key: FileKey,
    name: String,
}

/// What is the same for all processes that map the file.
#[derive(Debug)]
struct Shared {
    file: File,
    place: Place,
    identity: Identity,
    headers: Headers,
}

/// Device and inode number of a file, which are no other's while it is held open; and its size and the time of its last change
/// (seconds and nanoseconds), which tell whether something else was written into it.
type Place = (u64, u64, u64, (i64, i64));

/// The files that are held open.
static POOL: Mutex<BTreeMap<Place, Weak<Shared>>> = Mutex::new(BTreeMap::new());

impl Shared {
    /// The file, if it is held open already; else it is read.
    fn of(file: File) -> Result<Arc<Self>, ModuleProblem> {
        let metadata = file.metadata()?;
        let changed = (metadata.ctime(), metadata.ctime_nsec());
        let place = (metadata.dev(), metadata.ino(), metadata.size(), changed);
        // Nothing can panic while it is locked that would leave it half changed.
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shared) = pool.get(&place).and_then(Weak::upgrade) {
            return Ok(shared);
        }
        let headers = Source::new(&file).headers()?;
        let identity = Identity { device: place.0, inode: place.1, build_id: headers.build_id.clone() };
        let shared = Arc::new(Self { file, place, identity, headers });
        pool.insert(place, Arc::downgrade(&shared));
        Ok(shared)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        // Another may have taken its place meanwhile.
        if pool.get(&self.place).is_some_and(|shared| shared.strong_count() == 0) {
            pool.remove(&self.place);
        }
    }
}

impl Module {
    /// Opens the file behind a mapping of `process`, in whatever mount namespace and whether deleted or not.
    ///
    /// # Errors
    /// [`ModuleProblem`]; [`ModuleProblem::NotElf`] and [`ModuleProblem::OtherMachine`] are nothing unusual, since
    /// programs map other files executable too.
    pub fn open(process: &Process, mapping: &Mapping) -> Result<Self, ModuleProblem> {
        let file = match open_mapped(process, mapping) {
            Ok(file) => file,
            // map_files takes CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN (proc_pid_map_files(5)), and has one entry for
            // each mapping as it is now: this one may have been split since the map was read.
            Err(ModuleProblem::Io(error))
                if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES | libc::ENOENT)) =>
            {
                open_by_path(process, mapping)?
            }
            Err(problem) => return Err(problem),
        };
        Self::from_file(file, mapping)
    }

    fn from_file(file: File, mapping: &Mapping) -> Result<Self, ModuleProblem> {
        Ok(Self { shared: Shared::of(file)?, key: mapping.file, name: mapping.file_name() })
    }

    /// File name for display, without directories. Escape before printing.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.shared.file
    }

    /// A path by which this process can open the file as long as the module lives, whatever happens to the target.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.shared.file.as_raw_fd()))
    }

    /// What tells the file from others.
    pub fn identity(&self) -> &Identity {
        &self.shared.identity
    }

    /// The file as the memory map identifies it ([`Mapping::file`]).
    pub fn key(&self) -> FileKey {
        self.key
    }

    /// Its loadable segments.
    pub fn segments(&self) -> &[Segment] {
        &self.shared.headers.segments
    }

    /// Whether it asks for a dynamic loader, as dynamically linked programs do.
    pub fn has_interpreter(&self) -> bool {
        self.shared.headers.interpreter
    }

    /// Virtual address of its dynamic section, if it has one.
    pub(super) fn dynamic_section(&self) -> Option<u64> {
        self.shared.headers.dynamic
    }

    /// File offset of a virtual address, as the file's symbols number it; `None` if it does not come from the file.
    pub fn file_offset(&self, address: u64) -> Option<u64> {
        self.segments().iter().find_map(|segment| segment.file_offset(address))
    }

    /// Virtual address of a file offset; `None` if it is not loaded.
    pub fn address_of(&self, offset: u64) -> Option<u64> {
        self.segments().iter().find_map(|segment| segment.address_of(offset))
    }

    /// Virtual address of the first byte of a mapping of code, as the file's symbols number it.
    ///
    /// A mapping begins at a page of the file, the segment that it was made for often further into that page; the bytes
    /// before are another segment's, which is mapped elsewhere.
    pub fn code_address(&self, mapping: &Mapping) -> Option<u64> {
        let length = mapping.end - mapping.start;
        let segment = self.segments().iter().filter(|segment| segment.executable).find(|segment| {
            segment.offset < mapping.offset.saturating_add(length)
                && mapping.offset < segment.offset.saturating_add(segment.size)
        })?;
        Some(segment.address.wrapping_add(mapping.offset.wrapping_sub(segment.offset)))
    }

    /// The code at a virtual address: its file offset, and at most `size` bytes, fewer if the segment ends before.
    /// `None` if no code is there.
    ///
    /// # Errors
    /// If the file cannot be read or has been truncated.
    pub(super) fn code(&self, address: u64, size: usize) -> io::Result<Option<(u64, Vec<u8>)>> {
        let found = self.segments().iter().filter(|segment| segment.executable).find_map(|segment| {
            let rest = segment.size - (address.checked_sub(segment.address)?).min(segment.size);
            Some((segment.file_offset(address)?, usize::try_from(rest).unwrap_or(usize::MAX).min(size)))
        });
        let Some((offset, size)) = found else { return Ok(None) };
        let mut bytes = vec![0; size];
        self.shared.file.read_exact_at(&mut bytes, offset)?;
        Ok(Some((offset, bytes)))
    }
}

/// Opens the very file that is mapped.
fn open_mapped(process: &Process, mapping: &Mapping) -> Result<File, ModuleProblem> {
    let path = process.path(&format!("map_files/{:x}-{:x}", mapping.start, mapping.end));
    let (file, _) = open_regular(&path)?;
    Ok(file)
}

/// Opens the file of that name as the process sees it, if it is still the one that is mapped.
fn open_by_path(process: &Process, mapping: &Mapping) -> Result<File, ModuleProblem> {
    let path = mapping.path().ok_or(ModuleProblem::Replaced)?;
    let inside = path.strip_prefix("/").unwrap_or(path);
    let (file, found) = match open_regular(&process.path("root").join(inside)) {
        Err(ModuleProblem::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
            return Err(ModuleProblem::Replaced);
        }
        opened => opened?,
    };
    if found == mapping.file { Ok(file) } else { Err(ModuleProblem::Replaced) }
}

/// Opens a file for reading if it is a regular one, which is checked before: opening a device can have effects.
fn open_regular(path: &Path) -> Result<(File, FileKey), ModuleProblem> {
    let handle = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path)?;
    let metadata = handle.metadata()?;
    if !metadata.is_file() {
        return Err(ModuleProblem::NotRegular);
    }
    let device = metadata.dev();
    let key = FileKey { device: (libc::major(device), libc::minor(device)), inode: metadata.ino() };
    let file = File::open(format!("/proc/self/fd/{}", handle.as_raw_fd()))?;
    Ok((file, key))
}

#[cfg(test)]
#[path = "module_tests.rs"]
mod tests;
