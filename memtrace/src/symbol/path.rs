//! One recorded stack to one named call path.

use std::borrow::Cow;

use memtrace_common::stack::StackEnd;

use crate::profile::{Function, Leaf, OTHERS, Process, Stack, UNATTRIBUTED, UNKNOWN_CALL_PATH};

use super::{
    Names,
    place::{self, Places},
};

/// Number of a name in [`Names`].
pub type NameId = usize;

/// One function of a call path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    pub name: NameId,
    /// Its source file and line, if known and asked for.
    pub line: Option<(NameId, u32)>,
}

impl Frame {
    /// One without a line.
    pub fn named(name: NameId) -> Self {
        Self { name, line: None }
    }
}

/// What a lookup found in one place of a file.
#[derive(Clone, Default)]
pub struct Located {
    /// The functions there, each inlined into the one before it; empty if unknown.
    pub frames: Vec<Frame>,
}

/// What is shown of a stack, and its identity when stacks are merged.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct NamedPath {
    /// Root first.
    pub frames: Vec<Frame>,
    pub truncated: Option<StackEnd>,
}

/// Functions of the C library and the loader that run before a program's or a thread's own code: nothing calls them but
/// each other. Their callers are not missed, and the frame pointer they leave behind means nothing.
fn starts_a_thread(function: &str) -> bool {
    // A symbol table may add a version: `__libc_start_main@@GLIBC_2.34`.
    let function = function.split('@').next().unwrap_or(function);
    const EXACT: [&str; 8] = [
        "_start",
        "_dl_start_user",
        "_dl_start",
        "__libc_start_call_main",
        "start_thread",
        "clone",
        "clone3",
        "thread_start",
    ];
    EXACT.contains(&function) || function.starts_with("__libc_start_main") || function.starts_with("__clone")
}

/// What is known of the addresses of a process.
pub struct Known<'a> {
    pub functions: &'a [Function],
    pub process: &'a Process,
    pub places: &'a Places,
    /// Parallel to the places: which of [`Self::located`] is there.
    pub code: &'a [usize],
    pub located: &'a [Located],
}

/// Names a stack, and behind it the path that touched its memory, if the profile has that.
pub fn name(known: &Known<'_>, stack: &Stack, names: &mut Names) -> NamedPath {
    let mut path = name_frames(known, stack, names);
    if let Some(touch) = &stack.touch {
        path.frames.push(Frame::named(names.id("[touched by]")));
        if touch.known {
            let toucher =
                Stack { leaf: Leaf::Frame, frames: touch.frames.clone(), end: touch.end, touch: None, ..stack.clone() };
            path.frames.extend(name_frames(known, &toucher, names).frames);
            if let Some(call) = touch.call {
                path.frames.push(Frame::named(names.id(call.name())));
            }
        } else {
            path.frames.push(Frame::named(names.id(UNATTRIBUTED)));
        }
    }
    path
}

fn name_frames(known: &Known<'_>, stack: &Stack, names: &mut Names) -> NamedPath {
    let placeholder = match stack.leaf {
        Leaf::Unknown => Some(UNKNOWN_CALL_PATH),
        Leaf::Unattributed => Some(UNATTRIBUTED),
        Leaf::Others => Some(OTHERS),
        Leaf::Function(_) | Leaf::Frame => None,
    };
    if let Some(placeholder) = placeholder {
        return NamedPath { frames: vec![Frame::named(names.id(placeholder))], truncated: None };
    }
    let (frames, end) = cut(stack, known.places);
    let truncated = known.truncation(frames, end, names);
    let mut path = Vec::with_capacity(frames.len() + 2);
    if let Some(end) = truncated {
        path.push(Frame::named(names.id(&format!("[truncated: {}]", end.reason()))));
    }
    for address in frames.iter().rev() {
        match known.frames(*address) {
            Some(frames) => path.extend(frames),
            None => path.push(Frame::named(names.id(&known.unknown(*address)))),
        }
    }
    if let Leaf::Function(function) = stack.leaf {
        path.push(Frame::named(match known.functions.get(function) {
            Some(function) => names.id(&function.name),
            None => names.id("[unknown allocator function]"),
        }));
    }
    NamedPath { frames: path, truncated }
}

/// The frames up to where the walk went astray. A return address in no executable mapping was none: a function had used
/// the frame pointer for something else. The first one is believed always, since it was where the call put it.
fn cut<'a>(stack: &'a Stack, places: &Places) -> (&'a [u64], StackEnd) {
    let mapped = |address: &u64| !places.find(*address).is_empty();
    let astray = stack.frames.iter().skip(1).position(|address| !mapped(address));
    match astray {
        // The walk itself went no further and says why.
        Some(position)
            if position + 2 == stack.frames.len()
                && matches!(stack.end, StackEnd::Hijacked | StackEnd::UnknownCode) =>
        {
            (&stack.frames[..=position], stack.end)
        }
        Some(position) => (&stack.frames[..=position], StackEnd::BrokenChain),
        None => (&stack.frames, stack.end),
    }
}

impl Known<'_> {
    /// The frames at a return address. `None` if nothing is known, if what is known is not the same for all the files
    /// that were there during the trace, or if not all of them are known.
    fn frames(&self, address: u64) -> Option<&[Frame]> {
        if self.is_doubtful(address) {
            return None;
        }
        let mut found = self.places.find(address).map(|position| self.located[self.code[position]].frames.as_slice());
        let first = found.next().filter(|frames| !frames.is_empty())?;
        found.all(|other| other == first).then_some(first)
    }

    /// Whether a library that memtrace never saw may have been at an address.
    fn is_doubtful(&self, address: u64) -> bool {
        let doubtful = &self.process.names.doubtful;
        self.places.find(address).any(|position| doubtful.binary_search(&self.places.get(position).mapping).is_ok())
    }

    /// Why frames are missing at the root end, if they are.
    fn truncation(&self, frames: &[u64], end: StackEnd, names: &Names) -> Option<StackEnd> {
        if matches!(end, StackEnd::Complete) {
            return None;
        }
        if matches!(end, StackEnd::Depth) {
            return Some(end);
        }
        let symbol = |address: &u64| Some(names.get(self.frames(*address)?.first()?.name).as_ref());
        let Some((outermost, inner)) = frames.split_last() else {
            return Some(end);
        };
        let whole = match symbol(outermost) {
            Some(function) => starts_a_thread(function),
            // The C library's start code is a local function, which a stripped library does not name.
            None => inner.last().and_then(symbol) == Some("main") && self.in_c_library(*outermost),
        };
        (!whole).then_some(end)
    }

    fn in_c_library(&self, address: u64) -> bool {
        let mut places = self.places.find(address).map(|position| self.module(position));
        // `libc.so.6`, before glibc 2.34 `libc-2.31.so`; musl's is the loader.
        let is_libc = |module: &str| ["libc.so", "libc-", "ld-musl"].iter().any(|name| module.starts_with(name));
        !self.places.find(address).is_empty() && places.all(|module| is_libc(&module))
    }

    fn module(&self, position: usize) -> Cow<'_, str> {
        place::module_name(&self.process.mappings[self.places.get(position).mapping])
    }

    /// What stands for a function without a name: where it is, or where it may be.
    fn unknown(&self, address: u64) -> String {
        let place = |position: usize| {
            // The place is that of the byte before.
            format!("{}+{:#x}", self.module(position), self.places.get(position).offset.saturating_add(1))
        };
        let mut places: Vec<String> = self.places.find(address).map(place).collect();
        if self.is_doubtful(address) {
            places.push("a library that is gone".to_owned());
        }
        match places.as_slice() {
            [] => format!("[unknown] ({address:#x})"),
            [place] => format!("[unknown] ({place})"),
            places => format!("[ambiguous] ({})", places.join(" or ")),
        }
    }
}
