//! The functions of glibc's C interface for memory, and where their arguments are.

use std::borrow::Cow;

use memtrace_common::site::{Answer, Arg};

/// What a function does with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// It returns a block (and may take one, as realloc does): traced at entry and at return.
    Allocate,
    /// It only gives a block back: traced at entry.
    Free,
}

/// Positions of the arguments that matter; [`Arg::None`] where the function has no such argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arguments {
    /// Bytes asked for.
    pub size: Arg,
    /// Factor of `size`.
    pub count: Arg,
    /// Block to free or resize.
    pub pointer: Arg,
    /// Where the block's address is stored, if it is not returned.
    pub out: Arg,
    /// How it tells where the new block is.
    pub answer: Answer,
}

impl Arguments {
    /// A function without arguments, which returns a block.
    pub const NONE: Self =
        Self { size: Arg::None, count: Arg::None, pointer: Arg::None, out: Arg::None, answer: Answer::Pointer };

    /// The arguments that the function has.
    pub fn used(self) -> impl Iterator<Item = Arg> {
        [self.size, self.count, self.pointer, self.out].into_iter().filter(|argument| *argument != Arg::None)
    }
}

/// A function to trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Name of its symbol.
    pub name: Cow<'static, str>,
    /// What it does.
    pub role: Role,
    /// Where its arguments are.
    pub arguments: Arguments,
}

const fn allocate(name: &'static str, arguments: Arguments) -> Function {
    Function { name: Cow::Borrowed(name), role: Role::Allocate, arguments }
}

const fn free(name: &'static str) -> Function {
    Function {
        name: Cow::Borrowed(name),
        role: Role::Free,
        arguments: Arguments { pointer: Arg::A0, ..Arguments::NONE },
    }
}

const fn sized(size: Arg) -> Arguments {
    Arguments { size, ..Arguments::NONE }
}

/// glibc's functions, as malloc(3), posix_memalign(3) and cfree(3) declare them. Of several names for one address the
/// first in this order is the one shown.
pub static GLIBC: [Function; 11] = [
    // void *malloc(size_t size)
    allocate("malloc", sized(Arg::A0)),
    // void *calloc(size_t nmemb, size_t size)
    allocate("calloc", Arguments { count: Arg::A0, ..sized(Arg::A1) }),
    // void *realloc(void *ptr, size_t size)
    allocate("realloc", Arguments { pointer: Arg::A0, ..sized(Arg::A1) }),
    // void *reallocarray(void *ptr, size_t nmemb, size_t size)
    allocate("reallocarray", Arguments { pointer: Arg::A0, count: Arg::A1, ..sized(Arg::A2) }),
    // void *memalign(size_t alignment, size_t size)
    allocate("memalign", sized(Arg::A1)),
    // void *aligned_alloc(size_t alignment, size_t size)
    allocate("aligned_alloc", sized(Arg::A1)),
    // int posix_memalign(void **memptr, size_t alignment, size_t size)
    allocate("posix_memalign", Arguments { out: Arg::A0, answer: Answer::Stored, ..sized(Arg::A2) }),
    // void *valloc(size_t size)
    allocate("valloc", sized(Arg::A0)),
    // void *pvalloc(size_t size)
    allocate("pvalloc", sized(Arg::A0)),
    // void free(void *ptr)
    free("free"),
    // void cfree(void *ptr): gone from glibc's headers since 2.26, kept as a symbol for old programs
    free("cfree"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_has_what_its_role_needs() {
        for function in &GLIBC {
            let arguments = function.arguments;
            match function.role {
                Role::Allocate => assert_ne!(arguments.size, Arg::None, "{}", function.name),
                Role::Free => assert_eq!(arguments.used().collect::<Vec<_>>(), [Arg::A0]),
            }
            let mut used: Vec<_> = arguments.used().collect();
            used.dedup();
            assert_eq!(used.len(), arguments.used().count(), "{}: an argument has one meaning", function.name);
        }
        let mut names: Vec<_> = GLIBC.iter().map(|function| &*function.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), GLIBC.len());
    }
}
