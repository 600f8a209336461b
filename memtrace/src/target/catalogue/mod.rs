//! The functions of the allocators that memtrace knows, one table for each [`Family`].
//!
//! Allocators that bring the C functions can be built so that these have a prefix (`_rjem_malloc`, `sn_calloc`); such names
//! are told apart by [`prefixed`], and only what else the module defines shows whether they are an allocator's.

mod c;
mod cxx;
mod mimalloc;
mod snmalloc;
mod tcmalloc;

use std::{collections::HashMap, sync::LazyLock};

use memtrace_common::site::{Answer, Arg};

use super::function::{Arguments, Role};

/// Functions that belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// The C library's, which every allocator can bring.
    C,
    /// jemalloc's own (`mallocx`, …).
    Jemalloc,
    /// C++'s `operator new` and `operator delete`.
    Cxx,
    /// The own names of gperftools' and of Google's tcmalloc.
    Tcmalloc,
    /// mimalloc's own (`mi_malloc`, …).
    Mimalloc,
    /// snmalloc's for Rust.
    Snmalloc,
}

/// A function of the catalogue.
#[derive(Debug, PartialEq, Eq)]
pub struct Known {
    /// Name of its symbol.
    pub name: &'static str,
    /// What it belongs to.
    pub family: Family,
    /// What it does.
    pub role: Role,
    /// Where its arguments are.
    pub arguments: Arguments,
    /// Its place in the catalogue: of several names for one address the first is the one shown.
    pub rank: u16,
}

type Entry = (&'static str, Role, Arguments);

const TABLES: [(Family, &[Entry]); 6] = [
    (Family::C, &c::C),
    (Family::Jemalloc, &c::JEMALLOC),
    (Family::Mimalloc, &mimalloc::MIMALLOC),
    (Family::Tcmalloc, &tcmalloc::TCMALLOC),
    (Family::Snmalloc, &snmalloc::SNMALLOC),
    (Family::Cxx, &cxx::CXX),
];

static KNOWN: LazyLock<Vec<Known>> = LazyLock::new(|| {
    let entries = TABLES.iter().flat_map(|(family, table)| table.iter().map(move |entry| (*family, *entry)));
    let known = |(rank, (family, (name, role, arguments)))| Known { name, family, role, arguments, rank };
    (0..).zip(entries).map(known).collect()
});

static BY_NAME: LazyLock<HashMap<&'static [u8], &'static Known>> =
    LazyLock::new(|| KNOWN.iter().map(|known| (known.name.as_bytes(), known)).collect());

/// The functions of a family, in their order.
pub fn family(family: Family) -> impl Iterator<Item = &'static Known> {
    KNOWN.iter().filter(move |known| known.family == family)
}

/// The function of that name.
pub fn known(name: &[u8]) -> Option<&'static Known> {
    BY_NAME.get(name).copied()
}

/// Longest prefix looked at; the ones seen have up to ten bytes.
const MAX_PREFIX: usize = 32;

/// The C or jemalloc function whose name is that of a symbol without a prefix, which is returned too: the longest such
/// name (`x_posix_memalign` is no `memalign`).
pub fn prefixed(name: &[u8]) -> Option<(&[u8], &'static Known)> {
    // Nearly all symbols fail here.
    const ENDS: [&[u8]; 7] = [b"alloc", b"free", b"allocx", b"align", b"array", b"allocf", b"sized"];
    if !ENDS.iter().any(|end| name.ends_with(end)) {
        return None;
    }
    let (longest, shortest) = (c::LONGEST, c::SHORTEST);
    let ends = name.len().saturating_sub(longest).max(1)..=name.len().saturating_sub(shortest).min(MAX_PREFIX);
    ends.map(|end| name.split_at(end)).find_map(|(prefix, rest)| {
        let known = known(rest).filter(|known| matches!(known.family, Family::C | Family::Jemalloc))?;
        Some((prefix, known))
    })
}

const fn sized(size: Arg) -> Arguments {
    Arguments { size, ..Arguments::NONE }
}

/// Takes a size.
const fn allocate(name: &'static str, size: Arg) -> Entry {
    (name, Role::Allocate, sized(size))
}

/// Takes a number and the size of each.
const fn array(name: &'static str, count: Arg, size: Arg) -> Entry {
    (name, Role::Allocate, Arguments { count, ..sized(size) })
}

/// Resizes a block.
const fn resize(name: &'static str, pointer: Arg, size: Arg) -> Entry {
    (name, Role::Allocate, Arguments { pointer, ..sized(size) })
}

/// Resizes a block to a number of elements of a size.
const fn resize_array(name: &'static str, pointer: Arg, count: Arg, size: Arg) -> Entry {
    (name, Role::Allocate, Arguments { pointer, count, ..sized(size) })
}

/// Stores the block's address and returns 0 for success.
const fn stored(name: &'static str, out: Arg, size: Arg) -> Entry {
    (name, Role::Allocate, Arguments { out, answer: Answer::Stored, ..sized(size) })
}

/// Frees its first argument.
const fn free(name: &'static str) -> Entry {
    (name, Role::Free, Arguments { pointer: Arg::A0, ..Arguments::NONE })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_function_has_what_its_role_needs() {
        let mut names = HashSet::new();
        for known in KNOWN.iter() {
            assert!(names.insert(known.name), "{} is there twice", known.name);
            let arguments = known.arguments;
            match known.role {
                Role::Allocate => assert_ne!(arguments.size, Arg::None, "{}", known.name),
                Role::Free => assert_eq!(arguments.used().collect::<Vec<_>>(), [Arg::A0], "{}", known.name),
            }
            let used: HashSet<_> = arguments.used().collect();
            assert_eq!(used.len(), arguments.used().count(), "{}: an argument has one meaning", known.name);
            assert_eq!(arguments.out != Arg::None, matches!(arguments.answer, Answer::Stored), "{}", known.name);
        }
        let lengths = || KNOWN.iter().filter(|known| matches!(known.family, Family::C | Family::Jemalloc));
        assert_eq!(lengths().map(|known| known.name.len()).max(), Some(c::LONGEST));
        assert_eq!(lengths().map(|known| known.name.len()).min(), Some(c::SHORTEST));
        for known in lengths() {
            let name = format!("p_{}", known.name);
            let found = prefixed(name.as_bytes()).map(|(prefix, base)| (prefix, base.name));
            assert_eq!(found, Some((&b"p_"[..], known.name)));
        }
    }

    #[test]
    fn names_with_a_prefix() {
        let split = |name: &'static str| prefixed(name.as_bytes()).map(|(prefix, known)| (prefix, known.name));
        assert_eq!(split("_rjem_malloc"), Some((&b"_rjem_"[..], "malloc")));
        assert_eq!(split("je_posix_memalign"), Some((&b"je_"[..], "posix_memalign")));
        assert_eq!(split("jemalloc_sdallocx"), Some((&b"jemalloc_"[..], "sdallocx")));
        assert_eq!(split("rpfree"), Some((&b"rp"[..], "free")));
        for other in ["malloc_stats", "freed", "main", "", "c", "_ZN3foo6mallocEm"] {
            assert_eq!(split(other), None, "{other}");
        }
        assert_eq!(prefixed(&[b"x".repeat(100), b"free".to_vec()].concat()), None);
    }

    #[test]
    fn functions_of_all_families() {
        for (name, family) in [
            ("malloc", Family::C),
            ("free_aligned_sized", Family::C),
            ("xallocx", Family::Jemalloc),
            ("_ZnwmSt11align_val_tRKSt9nothrow_t", Family::Cxx),
            ("tc_newarray_nothrow", Family::Tcmalloc),
            ("TCMallocInternalNew", Family::Tcmalloc),
            ("mi_heap_recalloc_aligned_at", Family::Mimalloc),
            ("sn_rust_realloc", Family::Snmalloc),
        ] {
            assert_eq!(known(name.as_bytes()).map(|known| known.family), Some(family), "{name}");
        }
        assert!(known(b"mi_heap_new").is_none());
    }
}
