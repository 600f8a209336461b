//! What limits a trace.

use std::{borrow::Cow, fmt};

/// Something that limits what a trace will see, or tells what it sees. Printed as one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// There is an allocator that cannot be probed.
    OtherAllocator {
        /// File name of the module.
        module: String,
        /// Whether it is the program itself.
        executable: bool,
        /// What is known of it.
        allocator: Cow<'static, str>,
    },
    /// The dynamic linker chose other definitions than those of a C library, which are not probed then.
    Shadowed {
        /// File name of the C library.
        module: String,
        /// File name of the module whose functions are used.
        by: String,
        /// Their names.
        functions: Vec<Cow<'static, str>>,
    },
    /// Functions that this libc does not have.
    Missing {
        /// File name of the libc.
        module: String,
        /// Their names.
        functions: Vec<Cow<'static, str>>,
    },
    /// A function that cannot be probed.
    Unprobed {
        /// File name of the module.
        module: String,
        /// Its name.
        function: Cow<'static, str>,
        /// Why.
        reason: String,
    },
    /// A module that could not be looked into.
    Unreadable {
        /// Its file name.
        module: String,
        /// Why.
        reason: String,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherAllocator { module, executable, allocator } => write!(
                f,
                "{}{module:?} has an allocator of its own ({}), which cannot be probed: what it allocates is not seen; \
                 trace a build of it that has not been stripped",
                if *executable { "the program " } else { "" },
                allocator.escape_debug()
            ),
            Self::Shadowed { module, by, functions } => write!(
                f,
                "{} of {module:?} {} not probed: the dynamic linker chose those of {by:?}",
                list(functions),
                if functions.len() == 1 { "is" } else { "are" }
            ),
            Self::Missing { module, functions } => write!(f, "{module:?} has no {}", list(functions)),
            Self::Unprobed { module, function, reason } => {
                write!(f, "calls of {} in {module:?} are not seen: {reason}", function.escape_debug())
            }
            Self::Unreadable { module, reason } => {
                write!(f, "{module:?} could not be searched for an allocator: {reason}")
            }
        }
    }
}

fn list(names: &[Cow<'static, str>]) -> String {
    names.iter().map(|name| name.escape_debug().to_string()).collect::<Vec<_>>().join(", ")
}
