//! What to trace: a process, the modules it maps, the allocator functions in them, and where their probes go.
//!
//! [`process`] opens the process and refuses what cannot be traced; [`mappings`] reads its memory map; [`module`] opens
//! the files behind it, through the process's own namespaces; [`discover`](mod@discover) finds the allocator there and
//! lists the probe sites, each placed by [`placement`] and [`prologue`]. [`catalogue`] has the [`function`]s looked for,
//! [`custom`] those that the user describes. [`image`] is an ELF file with its symbol tables, [`debug_file`] finds the one
//! that has a module's. [`pages`] reads which pages of the process are resident. [`rooted`] opens files below the process's
//! root directory, [`generated`] what names its code that is in no file. [`select`] finds the processes that the command
//! line asks for.
//!
//! Nothing here needs more than read access to `/proc`, and nothing touches the target. Everything read (ELF files,
//! `/proc` contents, names of symbols and processes) is taken for hostile: parsers are bounded and return errors, and
//! names are kept as they are, to be escaped by whoever prints them.

mod catalogue;
pub mod custom;
pub mod debug_file;
pub mod discover;
mod elf;
mod error;
pub mod function;
pub mod generated;
pub mod image;
pub mod launch;
pub mod mappings;
pub mod module;
mod near;
pub mod pages;
mod placement;
pub mod process;
mod procfs;
pub mod prologue;
pub mod rooted;
pub mod select;
mod sigbus;
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
