//! Takes the C++ library's frames out of call paths.

use std::{collections::BTreeMap, ops::AddAssign};

use super::truth::Path;

/// What a program's call path becomes without the frames of the C++ library: which of its templates have a frame is the
/// compiler's choice.
///
/// Panics if a template or a function of the library leads to the allocator by anything but an operator `new`.
pub fn without_cpp_library<V: Copy + Default + AddAssign>(reported: &BTreeMap<Path, V>) -> BTreeMap<Path, V> {
    let mut projected: BTreeMap<Path, V> = BTreeMap::new();
    for (path, value) in reported {
        if let Some(caller) = path.iter().rev().nth(1)
            && is_template(caller)
        {
            panic!("the C++ library called the allocator without its operator: {}", path.join(";"));
        }
        let own: Path = path.iter().filter(|frame| !is_of_library(frame)).cloned().collect();
        *projected.entry(own).or_default() += *value;
    }
    projected
}

fn is_of_library(frame: &str) -> bool {
    // The routine that std::thread starts is a local function, which a stripped library does not name.
    is_template(frame)
        || is_operator_new(frame)
        || frame == "execute_native_thread_routine"
        || frame.starts_with("[unknown] (libstdc++.so.6")
}

fn is_operator_new(frame: &str) -> bool {
    const OPERATORS: [&str; 3] = [
        "operator new(unsigned long)",
        "operator new[](unsigned long)",
        "operator new(unsigned long, std::align_val_t)",
    ];
    OPERATORS.contains(&frame)
}

/// `std::…`, with the result type of a template before it.
fn is_template(frame: &str) -> bool {
    !is_operator_new(frame) && frame.split(' ').any(|word| word.starts_with("std::") || word.starts_with("__gnu_cxx::"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(paths: &[(&str, u64)]) -> BTreeMap<Path, u64> {
        paths.iter().map(|(path, value)| (path.split(';').map(str::to_owned).collect(), *value)).collect()
    }

    #[test]
    fn library_frames_go_and_paths_are_added() {
        let reported = paths(&[
            ("main;f;operator new(unsigned long);malloc", 1),
            (
                "main;f;void std::vector<long, std::allocator<long> >::_M_realloc_insert<long>(long&&);operator new(unsigned long);malloc",
                2,
            ),
            ("main;f;__cxa_allocate_exception;malloc", 4),
        ]);
        let expected = paths(&[("main;f;malloc", 3), ("main;f;__cxa_allocate_exception;malloc", 4)]);
        assert_eq!(without_cpp_library(&reported), expected);
    }

    #[test]
    #[should_panic(expected = "without its operator")]
    fn a_frame_is_missing() {
        without_cpp_library(&paths(&[("main;std::string::_M_create(unsigned long&, unsigned long);malloc", 1)]));
    }
}
