//! Which of several files a return address can be of.
//!
//! Where one library took the place of another during the trace, an address alone does not tell which of them it is of.
//! But a return address follows a call instruction: a file that has none there was not the one.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    os::unix::fs::FileExt as _,
    path::PathBuf,
};

use crate::profile::{Mapping, Stack};

use super::place::{Place, Places};

/// Takes away places that an address can't be of. An address keeps all of them if none fits, and where it may be no return
/// address but that of an instruction that a signal interrupted.
pub fn settle(mappings: &[Mapping], stacks: &[&Stack], places: &mut Places) {
    let unclear: HashSet<u64> = places.ambiguous().collect();
    if unclear.is_empty() {
        return;
    }
    let mut code = Code { mappings, files: HashMap::new() };
    let mut interrupted: HashSet<u64> = HashSet::new();
    for stack in stacks {
        for pair in stack.frames.windows(2) {
            let [inner, outer] = pair else { continue };
            // A signal handler returns to code that no one called; what is outside that was interrupted.
            if unclear.contains(outer) && !places.find(*inner).any(|position| code.follows_call(places.get(position))) {
                interrupted.insert(*outer);
            }
        }
    }
    places.retain(|address, place| {
        !unclear.contains(&address) || interrupted.contains(&address) || code.follows_call(place)
    });
}

struct Code<'a> {
    mappings: &'a [Mapping],
    files: HashMap<&'a PathBuf, Option<File>>,
}

impl Code<'_> {
    /// Whether the instruction before a return address can be a call. True where there is no file to look into.
    fn follows_call(&mut self, place: Place) -> bool {
        let Some(path) = &self.mappings[place.mapping].open else { return true };
        let file = self.files.entry(path).or_insert_with(|| File::open(path).ok());
        let mut before = [0; 8];
        // The place is that of the last byte before the return address.
        let read = |file: &File| file.read_exact_at(&mut before, place.offset.checked_sub(7)?).ok();
        match file.as_ref().and_then(read) {
            Some(()) => ends_with_call(before),
            None => true,
        }
    }
}

/// Whether bytes can end with a call: `call rel32`, or a call through a register or memory in its lengths without the
/// prefixes, which come before the opcode (Intel SDM volume 2, CALL).
fn ends_with_call(code: [u8; 8]) -> bool {
    let indirect = |length: usize| code[8 - length] == 0xff && code[9 - length] & 0x38 == 0x10;
    code[3] == 0xe8 || [2, 3, 4, 6, 7].into_iter().any(indirect)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls() {
        let ends = |bytes: &[u8]| {
            let mut code = [0x90; 8];
            code[8 - bytes.len()..].copy_from_slice(bytes);
            ends_with_call(code)
        };
        let calls: [&[u8]; 9] = [
            &[0xe8, 1, 2, 3, 4],
            &[0xff, 0xd0],                         // call *%rax
            &[0x41, 0xff, 0xd4],                   // call *%r12
            &[0xff, 0x53, 0x10],                   // call *0x10(%rbx)
            &[0xff, 0x14, 0xc8],                   // call *(%rax,%rcx,8)
            &[0xff, 0x54, 0x24, 0x08],             // call *8(%rsp)
            &[0xff, 0x15, 1, 2, 3, 4],             // call *d(%rip)
            &[0xff, 0x94, 0x24, 1, 2, 3, 4],       // call *d(%rsp)
            &[0x41, 0xff, 0x94, 0x24, 1, 2, 3, 4], // call *d(%r12)
        ];
        for call in calls {
            assert!(ends(call), "{call:x?}");
        }
        // ret, nops, jmp *%rax, push (%rax), a constant in a mov.
        let others: [&[u8]; 5] = [&[0xc3], &[0x66, 0x90], &[0xff, 0xe0], &[0xff, 0x30], &[0xb8, 1, 2, 3, 4]];
        for other in others {
            assert!(!ends(other), "{other:x?}");
        }
    }
}
