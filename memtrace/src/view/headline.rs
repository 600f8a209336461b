//! The frame that says most about a call path.

use std::sync::Arc;

/// Where the standard libraries of C++ and Rust keep their code. A call path's bytes belong to whoever called them.
const LIBRARIES: [&str; 9] =
    ["std::", "__gnu_cxx::", "operator new", "alloc::", "core::", "hashbrown::", "__rust_", "__rdl_", "__rustc"];

/// The C library's functions that fill or map memory: who called them made it resident, or holds it.
const PLUMBING: [&str; 23] = [
    "memset",
    "memcpy",
    "memmove",
    "memchr",
    "strlen",
    "strcpy",
    "mmap",
    "munmap",
    "mremap",
    "brk",
    "sbrk",
    "madvise",
    "shmat",
    "mlock",
    "read",
    "pread",
    "readv",
    "preadv",
    "recv",
    "recvfrom",
    "recvmsg",
    "syscall",
    "sysmalloc",
];

/// Position in `frames` (root first) of the innermost frame that is neither the allocator function or system call, which
/// is the last if `leaf` says so, nor glue of a language's standard library, such as `operator new` or `alloc::raw_vec`. When every frame is
/// glue, the innermost one below the allocator function; `None` when there is none.
pub fn headline(frames: &[Arc<str>], leaf: bool) -> Option<usize> {
    let callers = frames.len().checked_sub(usize::from(leaf))?;
    let innermost = callers.checked_sub(1)?;
    let useful = frames[..callers]
        .iter()
        .rposition(|frame| !is_glue(frame) && !is_plumbing(frame) && !frame.starts_with("[truncated: "));
    useful.or((!frames[innermost].starts_with("[truncated: ")).then_some(innermost))
}

/// Whether a function only fills or maps memory: `memset`, `__memset_avx2_unaligned_erms`, `__GI___mmap64`.
fn is_plumbing(frame: &str) -> bool {
    let mut name = frame.split('@').next().unwrap_or(frame);
    for prefix in ["__GI_", "__", "libc_"] {
        name = name.strip_prefix(prefix).unwrap_or(name);
    }
    let name = name.strip_suffix("64").unwrap_or(name);
    PLUMBING.iter().any(|known| name == *known || name.strip_prefix(known).is_some_and(|rest| rest.starts_with('_')))
}

fn is_glue(frame: &str) -> bool {
    let name = without_return_type(frame);
    if let Some(implementation) = name.strip_prefix('<') {
        // `<alloc::vec::Vec<T> as core::clone::Clone>::clone`, `<T as alloc::slice::ToVec>::to_vec`: whose code it is
        // is told by the type, or where that is a parameter, by the trait.
        let (of, r#as) = implementation.split_once(" as ").unwrap_or((implementation, ""));
        let parameter = of.len() == 1;
        return in_library(if parameter { r#as } else { of });
    }
    in_library(name)
}

fn in_library(name: &str) -> bool {
    LIBRARIES.iter().any(|library| name.starts_with(library))
}

/// C++ templates are demangled with their return type: `void std::vector<int>::push_back(int)`. The name follows the
/// last space outside of all brackets before the argument list.
fn without_return_type(frame: &str) -> &str {
    let mut depth = 0u32;
    let mut start = 0;
    for (position, character) in frame.char_indices() {
        match character {
            '(' if depth == 0 => break,
            '<' | '(' | '[' | '{' => depth += 1,
            '>' | ')' | ']' | '}' => depth = depth.saturating_sub(1),
            ' ' if depth == 0 && !frame[..position].ends_with("operator") => start = position + 1,
            _ => {}
        }
    }
    &frame[start..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<'a>(frames: &'a [&'a str]) -> Option<&'a str> {
        let shared: Vec<Arc<str>> = frames.iter().map(|frame| (*frame).into()).collect();
        headline(&shared, true).map(|position| frames[position])
    }

    #[test]
    fn plain_callers() {
        assert_eq!(of(&["main", "load", "malloc"]), Some("load"));
        assert_eq!(of(&["[unknown call path]"]), None);
        assert_eq!(of(&["[truncated: no frame pointer]", "malloc"]), None);
        assert_eq!(of(&["main", "[unknown] (libx.so+0x10)", "malloc"]), Some("[unknown] (libx.so+0x10)"));
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn glue_is_skipped() {
        assert_eq!(
            of(&[
                "main",
                "load(int)",
                "void std::vector<int, std::allocator<int> >::_M_realloc_insert<int>(int&&)",
                "std::__new_allocator<int>::allocate(unsigned long, void const*)",
                "operator new(unsigned long)",
                "malloc",
            ]),
            Some("load(int)")
        );
        assert_eq!(
            of(&[
                "app::read",
                "<alloc::vec::Vec<T> as core::clone::Clone>::clone",
                "<T as alloc::slice::hack::ConvertVec>::to_vec",
                "alloc::raw_vec::RawVec<T>::grow_one",
                "__rust_alloc",
                "malloc",
            ]),
            Some("app::read")
        );
    }

    #[test]
    fn plumbing_is_skipped() {
        assert_eq!(of(&["main", "map_page", "__GI___mmap64", "mmap"]), Some("map_page"));
        assert_eq!(of(&["main", "fill", "__memset_avx2_unaligned_erms", "page"]), Some("fill"));
        assert_eq!(of(&["main", "load", "__GI___libc_read", "page"]), Some("load"));
        assert_eq!(of(&["main", "memsettle", "page"]), Some("memsettle"));
    }

    #[test]
    fn user_code_that_looks_like_glue() {
        let user = [
            "<app::Item as core::clone::Clone>::clone",
            "std_alloc",
            "bool app::has<std::string>(std::string const&)",
            "Pool::operator new(unsigned long)",
            "app::operator<<(std::ostream&, app::Item const&)",
        ];
        for name in user {
            assert_eq!(of(&["main", name, "operator new(unsigned long)", "malloc"]), Some(name));
        }
    }

    #[test]
    fn nothing_but_glue() {
        assert_eq!(
            of(&["std::thread::run()", "operator new(unsigned long)", "malloc"]),
            Some("operator new(unsigned long)")
        );
    }
}
