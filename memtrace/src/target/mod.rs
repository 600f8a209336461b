//! What to trace: a process, the modules it maps, the allocator functions in them, and where their probes go.
//!
//! [`process`] opens the process and refuses what cannot be traced; [`mappings`] reads its memory map; [`module`] opens
//! the files behind it, through the process's own namespaces; [`discover`](mod@discover) finds the allocator there and
//! lists the probe sites, each placed by [`prologue`]. [`function`] is the table of functions looked for. [`pages`] reads
//! which pages of the process are resident. [`rooted`] opens files below the process's root directory, [`generated`] what
//! names its code that is in no file. [`select`] finds the processes that the command line asks for.
//!
//! Nothing here needs more than read access to `/proc`, and nothing touches the target. Everything read (ELF files,
//! `/proc` contents, names of symbols and processes) is taken for hostile: parsers are bounded and return errors, and
//! names are kept as they are, to be escaped by whoever prints them.

pub mod discover;
mod elf;
mod error;
pub mod function;
pub mod generated;
pub mod launch;
pub mod mappings;
pub mod module;
mod near;
pub mod pages;
pub mod process;
mod procfs;
pub mod prologue;
pub mod rooted;
pub mod select;
pub mod site;

pub use discover::{Discovery, LoaderHook, Note, discover, discover_in};
pub use error::{ModuleProblem, TargetError};
pub use mappings::Mapping;
pub use module::Module;
pub use pages::{PageKind, PageRange, Scan};
pub use process::Process;
pub use select::{PidNamespace, Selection};
pub use site::{ProbeRow, ProbeSite};

#[cfg(test)]
pub(crate) mod fuzz;
#[cfg(test)]
pub(crate) mod test_program;
