//! Searching the unwind tables.

use core::arch::asm;
use memtrace_common::unwind::{BLOCK_SHIFT, CfaRule, CodeMapping, MAX_MAPPINGS, MappingList, SEARCH_STEPS};

use crate::maps;

/// Makes `code` the mapping that contains `pc`; false if there is none.
#[inline(always)]
pub fn find_code(code: &mut CodeMapping, mappings: u64, pc: u64) -> bool {
    if pc >= code.start && pc < code.end {
        return true;
    }
    let list = MappingList::unpack(mappings);
    let first = list.first;
    // Steps of a binary search over MAX_MAPPINGS entries.
    const STEPS: u32 = MAX_MAPPINGS.ilog2() + 1;
    let (mut low, mut high) = (0u32, list.count);
    for _ in 0..STEPS {
        if low >= high {
            break;
        }
        let middle = (low + high) / 2;
        let Some(mapping) = maps::mapping(first + middle) else { return false };
        // SAFETY: a map value; a list in force is not written.
        let mapping = unsafe { &*mapping };
        if pc < mapping.start {
            high = middle;
        } else if pc >= mapping.end {
            low = middle + 1;
        } else {
            code.start = mapping.start;
            code.end = mapping.end;
            code.base = mapping.base;
            code.first_row = mapping.first_row;
            code.rows = mapping.rows;
            code.first_block = mapping.first_block;
            code.blocks = mapping.blocks;
            return true;
        }
    }
    false
}

/// The packed row in force at `pc` (0, which is a row without information, if there is none), and the number of the one
/// that comes next.
#[inline(always)]
pub fn find_row(code: &CodeMapping, pc: u64) -> (u64, u32) {
    let relative = pc.wrapping_sub(code.base);
    let block = relative >> BLOCK_SHIFT;
    if block + 1 >= u64::from(code.index_entries()) {
        return (0, u32::MAX);
    }
    let entry = code.first_block + block as u32;
    let (Some(mut low), Some(mut high)) = (maps::row_index(entry), maps::row_index(entry + 1)) else {
        return (0, u32::MAX);
    };
    let mut row = 0;
    // The row in force may have begun in an earlier block.
    if low > 0 {
        row = maps::row(code.first_row + low - 1).unwrap_or(0);
    }
    for _ in 0..SEARCH_STEPS {
        if low >= high {
            break;
        }
        let middle = (low + high) / 2;
        let Some(found) = maps::row(code.first_row + middle) else { return (0, u32::MAX) };
        // Not by a branch: the compiler would make one for each of the three, and the verifier of Linux 7.2 walks all
        // combinations over all steps, which took a third of the instructions that it looks at before it gives up.
        let beyond = is_beyond(found, relative);
        row = row & beyond | found & !beyond;
        low = low & beyond as u32 | (middle + 1) & !beyond as u32;
        high = high & !beyond as u32 | middle & beyond as u32;
    }
    (row, low)
}

/// All ones if the row `found` begins after `relative`, else 0. Both count with their lower 32 bits.
#[inline(always)]
fn is_beyond(found: u64, relative: u64) -> u64 {
    let mut difference = u64::from(relative as u32).wrapping_sub(u64::from(found as u32));
    // SAFETY: arithmetic on a register. Of the same in Rust the compiler makes a branch again.
    unsafe { asm!("{0} s>>= 63", inout(reg) difference, options(pure, nomem, nostack)) }
    difference
}

/// Whether row `number` of the module says something and begins at `pc`.
#[inline(always)]
pub fn begins(code: &CodeMapping, number: u32, pc: u64) -> bool {
    let row = maps::row(code.first_row + number).unwrap_or(0);
    number < code.rows && row as u32 == pc.wrapping_sub(code.base) as u32 && row >> 48 & 15 != CfaRule::NoInfo as u64
}
