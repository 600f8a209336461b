//! One recorded stack to one named call path.

use memtrace_common::stack::StackEnd;

use crate::profile::{Leaf, OTHERS, Profile, Stack, UNATTRIBUTED, UNKNOWN_CALL_PATH};

use super::{
    Names,
    place::{self, Places},
};

/// Number of a name in [`Names`].
pub type NameId = usize;

/// What a lookup found at one address.
#[derive(Clone, Default)]
pub struct Located {
    /// The functions there, each inlined into the one before it; empty if unknown.
    pub functions: Vec<NameId>,
}

/// What is shown of a stack, and its identity when stacks are merged.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct NamedPath {
    /// Root first.
    pub frames: Vec<NameId>,
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

/// Names a stack, and behind it the path that touched its memory, if the profile has that.
pub fn name(profile: &Profile, stack: &Stack, places: &Places, located: &[Located], names: &mut Names) -> NamedPath {
    let mut path = name_frames(profile, stack, places, located, names);
    if let Some(touch) = &stack.touch {
        path.frames.push(names.id("[touched by]"));
        if touch.known {
            let toucher =
                Stack { leaf: Leaf::Frame, frames: touch.frames.clone(), end: touch.end, touch: None, ..stack.clone() };
            path.frames.extend(name_frames(profile, &toucher, places, located, names).frames);
            if let Some(call) = touch.call {
                path.frames.push(names.id(call.name()));
            }
        } else {
            path.frames.push(names.id(UNATTRIBUTED));
        }
    }
    path
}

fn name_frames(profile: &Profile, stack: &Stack, places: &Places, located: &[Located], names: &mut Names) -> NamedPath {
    let placeholder = match stack.leaf {
        Leaf::Unknown => Some(UNKNOWN_CALL_PATH),
        Leaf::Unattributed => Some(UNATTRIBUTED),
        Leaf::Others => Some(OTHERS),
        Leaf::Function(_) | Leaf::Frame => None,
    };
    if let Some(placeholder) = placeholder {
        return NamedPath { frames: vec![names.id(placeholder)], truncated: None };
    }
    let (frames, end) = cut(stack, places);
    let truncated = truncation(profile, frames, end, places, located, names);
    let mut path = Vec::with_capacity(frames.len() + 2);
    if let Some(end) = truncated {
        path.push(names.id(&format!("[truncated: {}]", end.reason())));
    }
    for address in frames.iter().rev() {
        match places.find(*address) {
            Some((position, _)) if !located[position].functions.is_empty() => {
                path.extend(&located[position].functions);
            }
            _ => {
                let unknown = unknown(profile, places, *address);
                path.push(names.id(&unknown));
            }
        }
    }
    if let Leaf::Function(function) = stack.leaf {
        path.push(match profile.functions.get(function) {
            Some(function) => names.id(&function.name),
            None => names.id("[unknown allocator function]"),
        });
    }
    NamedPath { frames: path, truncated }
}

/// The frames up to where the walk went astray. A return address in no executable mapping was none: a function had used
/// the frame pointer for something else. The first one is believed always, since it was where the call put it.
fn cut<'a>(stack: &'a Stack, places: &Places) -> (&'a [u64], StackEnd) {
    let mapped = |address: &u64| places.find(*address).is_some_and(|(_, place)| place.mapping.is_some());
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

/// Why frames are missing at the root end, if they are.
fn truncation(
    profile: &Profile,
    frames: &[u64],
    end: StackEnd,
    places: &Places,
    located: &[Located],
    names: &Names,
) -> Option<StackEnd> {
    if matches!(end, StackEnd::Complete) {
        return None;
    }
    if matches!(end, StackEnd::Depth) {
        return Some(end);
    }
    let symbol = |address: &u64| {
        let (position, _) = places.find(*address)?;
        let outermost = located[position].functions.first()?;
        Some(names.get(*outermost).as_ref())
    };
    let Some((outermost, inner)) = frames.split_last() else {
        return Some(end);
    };
    let whole = match symbol(outermost) {
        Some(function) => starts_a_thread(function),
        // The C library's start code is a local function, which a stripped library does not name.
        None => inner.last().and_then(symbol) == Some("main") && in_c_library(profile, places, *outermost),
    };
    (!whole).then_some(end)
}

fn in_c_library(profile: &Profile, places: &Places, address: u64) -> bool {
    let Some((_, place)) = places.find(address) else {
        return false;
    };
    let Some(mapping) = place.mapping else {
        return false;
    };
    let module = place::module_name(&profile.mappings[mapping]);
    // `libc.so.6`, before glibc 2.34 `libc-2.31.so`; musl's is the loader.
    ["libc.so", "libc-", "ld-musl"].iter().any(|name| module.starts_with(name))
}

fn unknown(profile: &Profile, places: &Places, address: u64) -> String {
    match places.find(address) {
        Some((_, place::Place { mapping: Some(mapping), offset })) => {
            let module = place::module_name(&profile.mappings[mapping]);
            // The place is that of the byte before.
            format!("[unknown] ({module}+{:#x})", offset.saturating_add(1))
        }
        _ => format!("[unknown] ({address:#x})"),
    }
}
