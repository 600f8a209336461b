//! glibc's code outside `main`, a thread's function, a constructor or a destructor: which functions, in which order.

use super::truth::Path;

/// How memtrace is told to walk stacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unwind {
    /// The default: by unwind tables, so that every stack is whole.
    Auto,
    /// By frame pointers, which glibc's own code lacks: a stack ends somewhere in it.
    FramePointers,
}

impl Unwind {
    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::FramePointers => "fp",
        }
    }
}

/// Why frames are missing at the root end, as memtrace says it.
pub const TRUNCATED: &str = "[truncated: ";

/// A function: its names, and the beginning of what is reported where no symbols of it are installed.
struct Link {
    names: &'static [&'static str],
    unnamed: Option<&'static str>,
}

const fn of_program(names: &'static [&'static str]) -> Link {
    Link { names, unnamed: None }
}

const fn of_libc(names: &'static [&'static str]) -> Link {
    Link { names, unnamed: Some("[unknown] (libc.so.6+0x") }
}

const fn of_loader(names: &'static [&'static str]) -> Link {
    Link { names, unnamed: Some("[unknown] (ld-linux-x86-64.so.2+0x") }
}

const START: Link = of_program(&["_start"]);
const START_MAIN: Link = of_libc(&["__libc_start_main_impl", "__libc_start_main", "__libc_start_main@@GLIBC_2.34"]);
const CALL_MAIN: Link = of_libc(&["__libc_start_call_main"]);

const MAIN: &[Link] = &[START, START_MAIN, CALL_MAIN];

/// What is outside the other functions that glibc calls.
const OTHERS: [&[Link]; 6] = [
    // A thread's.
    &[of_libc(&["clone3", "__clone3", "clone", "__clone"]), of_libc(&["start_thread"])],
    // The program's constructors.
    &[START, START_MAIN, of_libc(&["call_init"])],
    // Destructors.
    &[
        START,
        START_MAIN,
        CALL_MAIN,
        of_libc(&["exit", "__GI_exit"]),
        of_libc(&["__run_exit_handlers"]),
        of_loader(&["_dl_fini"]),
        of_loader(&["_dl_call_fini"]),
    ],
    // Before glibc 2.37 distributions, where `_dl_fini` calls them itself.
    &[
        START,
        START_MAIN,
        CALL_MAIN,
        of_libc(&["exit", "__GI_exit"]),
        of_libc(&["__run_exit_handlers"]),
        of_loader(&["_dl_fini"]),
    ],
    // In static programs, and where no debug information of glibc tells what is inlined, constructors and destructors.
    &[START, START_MAIN],
    &[
        START,
        START_MAIN,
        CALL_MAIN,
        of_libc(&["exit", "__GI_exit"]),
        of_libc(&["__run_exit_handlers"]),
        of_libc(&["call_fini"]),
    ],
];

impl Link {
    fn is(&self, frame: &str) -> bool {
        self.names.contains(&frame) || self.unnamed.is_some_and(|start| frame.starts_with(start))
    }
}

fn all_are(links: &[Link], frames: &[String]) -> bool {
    links.len() == frames.len() && links.iter().zip(frames).all(|(link, frame)| link.is(frame))
}

/// Panics unless `path[..root]` is what glibc has outside the function `path[root]`: all of it, or if stacks are walked
/// by frame pointers, its inner part.
pub fn assert_start(path: &Path, root: usize, unwind: Unwind) {
    let outside = &path[..root];
    let chains = if path[root] == "main" { &[MAIN][..] } else { &OTHERS[..] };
    let right = match unwind {
        Unwind::Auto => chains.iter().any(|links| all_are(links, outside)),
        Unwind::FramePointers => {
            let truncated = outside.first().is_some_and(|frame| frame.starts_with(TRUNCATED));
            let outside = &outside[usize::from(truncated)..];
            let ends_so = |links: &[Link]| {
                links.len().checked_sub(outside.len()).is_some_and(|left_out| all_are(&links[left_out..], outside))
            };
            chains.iter().any(|links| ends_so(links))
        }
    };
    assert!(right, "what is outside `{}` is not glibc's start code: {}", path[root], path.join(";"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_main_at(path: &str, root: usize, unwind: Unwind) {
        assert_start(&path.split(';').map(str::to_owned).collect(), root, unwind);
    }

    #[test]
    fn whole_chains_and_inner_parts() {
        assert_main_at("_start;__libc_start_main_impl;__libc_start_call_main;main;f", 3, Unwind::Auto);
        assert_main_at("_start;[unknown] (libc.so.6+0x27305);[unknown] (libc.so.6+0x1);main;f", 3, Unwind::Auto);
        assert_main_at("clone3;start_thread;worker;f", 2, Unwind::Auto);
        assert_main_at("[truncated: no frame pointer];__libc_start_call_main;main", 2, Unwind::FramePointers);
        assert_main_at("start_thread;worker", 1, Unwind::FramePointers);
        assert_main_at("main", 0, Unwind::FramePointers);
    }

    #[test]
    #[should_panic(expected = "not glibc's start code")]
    fn a_frame_too_few() {
        assert_main_at("__libc_start_main_impl;__libc_start_call_main;main;f", 2, Unwind::Auto);
    }

    #[test]
    #[should_panic(expected = "not glibc's start code")]
    fn a_frame_too_many() {
        assert_main_at("start_thread;_start;__libc_start_main;__libc_start_call_main;main", 4, Unwind::Auto);
    }

    #[test]
    #[should_panic(expected = "not glibc's start code")]
    fn an_unknown_frame_of_another_module() {
        assert_main_at("_start;[unknown] (libz.so.1+0x27305);__libc_start_call_main;main", 3, Unwind::Auto);
    }

    #[test]
    #[should_panic(expected = "not glibc's start code")]
    fn start_code_of_another_root() {
        assert_main_at("clone3;start_thread;main", 2, Unwind::Auto);
    }

    #[test]
    #[should_panic(expected = "not glibc's start code")]
    fn a_truncated_stack_where_it_must_be_whole() {
        assert_main_at("[truncated: no frame pointer];main", 1, Unwind::Auto);
    }

    #[test]
    #[should_panic(expected = "not glibc's start code")]
    fn another_function_on_the_way_by_frame_pointers() {
        assert_main_at("exit;main", 1, Unwind::FramePointers);
    }
}
