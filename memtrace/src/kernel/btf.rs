//! Where members of the kernel's structures are, by its type information (Documentation/bpf/btf.rst).

use std::{collections::HashMap, fs, io};

use memtrace_common::settings::ReturnInstances;

/// The running kernel's type information.
const KERNEL: &str = "/sys/kernel/btf/vmlinux";
const MAGIC: u16 = 0xeb9f;
/// Bytes of a type's fixed part: name, kind and count, size.
const FIXED: usize = 12;
/// Bytes of a structure's member: name, type, offset.
const MEMBER: usize = 12;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
/// Structures without a name that may lie within each other.
const NESTED: u32 = 8;

/// Where the kernel keeps the return addresses that it has replaced; `None` if it does not say.
pub fn return_instances() -> Option<ReturnInstances> {
    let types = Types::read().ok()??;
    Some(ReturnInstances {
        task: types.offset("task_struct", "utask")?,
        list: types.offset("uprobe_task", "return_instances")?,
        stack: types.offset("return_instance", "stack")?,
        address: types.offset("return_instance", "orig_ret_vaddr")?,
        next: types.offset("return_instance", "next")?,
    })
}

/// Where a task's count of reasons to handle no page faults is (`pagefault_disabled` in include/linux/sched.h); `None` if
/// the kernel does not say.
pub fn faults_disabled() -> Option<u32> {
    Types::read().ok()??.offset("task_struct", "pagefault_disabled")
}

/// Where a task's thread group is; `None` if the kernel does not say.
pub fn task_tgid() -> Option<u32> {
    Types::read().ok()??.offset("task_struct", "tgid")
}

struct Types {
    data: Vec<u8>,
    /// Where each type's fixed part is, by its number minus 1.
    positions: Vec<usize>,
    strings: usize,
}

impl Types {
    /// `None` if the format is another.
    fn read() -> io::Result<Option<Self>> {
        Ok(Self::parse(fs::read(KERNEL)?))
    }

    fn parse(data: Vec<u8>) -> Option<Self> {
        if u16::from_le_bytes(*data.first_chunk()?) != MAGIC {
            return None;
        }
        let header = word(&data, 4)? as usize;
        let section = |at: usize| Some((header.checked_add(word(&data, at)? as usize)?, word(&data, at + 4)? as usize));
        let ((types, length), (strings, _)) = (section(8)?, section(16)?);
        let mut positions = Vec::new();
        let mut position = types;
        while position < types.checked_add(length)? {
            positions.push(position);
            position = position.checked_add(FIXED + rest(word(&data, position + 4)?)?)?;
        }
        Some(Self { data, positions, strings })
    }

    /// Bytes from the start of a structure to a member.
    fn offset(&self, structure: &str, member: &str) -> Option<u32> {
        let named = self.positions.iter().filter(|position| {
            self.word(**position + 4).is_some_and(|info| kind(info) == STRUCT && count(info) > 0)
                && self.name(**position) == Some(structure.as_bytes())
        });
        named.into_iter().find_map(|position| self.member(*position, member, NESTED))
    }

    fn member(&self, structure: usize, name: &str, nested: u32) -> Option<u32> {
        let info = self.word(structure + 4)?;
        if !matches!(kind(info), STRUCT | UNION) {
            return None;
        }
        (0..count(info)).find_map(|number| {
            let at = structure + FIXED + MEMBER * number;
            // With the flag the upper bits are the size of a bit field.
            let mask = if info >> 31 == 1 { 0xff_ffff } else { u32::MAX };
            let offset = (self.word(at + 8)? & mask) / 8;
            if self.name(at) == Some(name.as_bytes()) {
                return Some(offset);
            }
            if self.word(at) != Some(0) || nested == 0 {
                return None;
            }
            let inner = *self.positions.get((self.word(at + 4)? as usize).checked_sub(1)?)?;
            Some(offset + self.member(inner, name, nested - 1)?)
        })
    }

    fn word(&self, at: usize) -> Option<u32> {
        word(&self.data, at)
    }

    /// The name whose offset is at `at`.
    fn name(&self, at: usize) -> Option<&[u8]> {
        let text = self.data.get(self.strings.checked_add(self.word(at)? as usize)?..)?;
        text.split(|byte| *byte == 0).next()
    }
}

fn word(data: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*data.get(at..)?.first_chunk()?))
}

fn kind(info: u32) -> u32 {
    info >> 24 & 31
}

fn count(info: u32) -> usize {
    (info & 0xffff) as usize
}

/// Bytes that follow a type's fixed part; `None` for kinds that are not known.
fn rest(info: u32) -> Option<usize> {
    let count = count(info);
    Some(match kind(info) {
        // Integers, variables, tags of declarations.
        1 | 14 | 17 => 4,
        // Pointers, forward declarations, typedefs, qualifiers, functions, floats, tags of types.
        2 | 7..=12 | 16 | 18 => 0,
        // Arrays.
        3 => 12,
        // Structures and unions, sections, 64-bit enumerations.
        STRUCT | UNION | 15 | 19 => 12 * count,
        // Enumerations, prototypes.
        6 | 13 => 8 * count,
        _ => return None,
    })
}

/// Names of the constants of the kernel side, and their values.
pub fn constants(layout: &ReturnInstances) -> HashMap<&'static str, u32> {
    use memtrace_common::settings::globals;
    HashMap::from([
        (globals::RETURN_TASK, layout.task),
        (globals::RETURN_LIST, layout.list),
        (globals::RETURN_STACK, layout.stack),
        (globals::RETURN_ADDRESS, layout.address),
        (globals::RETURN_NEXT, layout.next),
    ])
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn types(parts: &[&[u32]], strings: &str) -> Vec<u8> {
        let types: Vec<u8> = parts.concat().into_iter().flat_map(u32::to_le_bytes).collect();
        let mut data = vec![0x9f, 0xeb, 1, 0];
        let header = [24, 0, types.len() as u32, types.len() as u32, strings.len() as u32];
        data.extend(header.into_iter().flat_map(u32::to_le_bytes));
        data.extend(types);
        data.extend(strings.as_bytes());
        data
    }

    #[test]
    fn members_of_nameless_unions_are_found() {
        // struct s { int a; union { int b; struct { int c; int d; }; }; };
        let strings = "\0int\0s\0a\0b\0c\0d\0";
        let data = types(
            &[
                &[1, 1 << 24, 4, 32],
                &[0, STRUCT << 24 | 2, 8, 11, 1, 0, 13, 1, 32],
                &[0, UNION << 24 | 2, 8, 9, 1, 0, 0, 2, 0],
                &[5, STRUCT << 24 | 2, 12, 7, 1, 0, 0, 3, 32],
            ],
            strings,
        );
        let types = Types::parse(data.clone()).unwrap();
        assert_eq!(types.offset("s", "a"), Some(0));
        assert_eq!(types.offset("s", "b"), Some(4));
        assert_eq!(types.offset("s", "d"), Some(8));
        assert_eq!(types.offset("s", "e"), None);
        assert_eq!(types.offset("t", "a"), None);
        for length in 0..data.len() {
            let _ = Types::parse(data[..length].to_vec()).map(|types| types.offset("s", "d"));
        }
    }

    #[test]
    fn this_kernel_says_where_replaced_return_addresses_are() {
        if std::path::Path::new(KERNEL).exists() {
            let layout = return_instances().unwrap();
            assert!(faults_disabled().unwrap() > 0);
            assert!(layout.task > 0 && layout.stack != layout.address && layout.address != layout.next);
        }
    }
}
