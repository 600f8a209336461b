//! Custom allocator functions: pools, arenas and the like, which the user describes on the command line.
//!
//! [`parse`] reads the description ([`Spec`]), [`resolve()`] finds the functions in the modules of a process and places their
//! probes as discovery does. Everything that comes from modules is taken for hostile.

mod error;
mod names;
mod resolve;
mod spec;
mod tables;

pub use error::{CustomError, ParseError};
pub use resolve::{CustomSite, Resolved, check, overrule, resolve};
pub use spec::{MAX_CONSTANT, Spec, parse};
