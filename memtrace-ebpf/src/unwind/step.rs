//! One step of a walk: from a frame to its caller's.

use core::ffi::c_void;
use memtrace_common::{
    block::ThreadState,
    settings::Unwind,
    stack::{MAX_FRAMES, StackEnd},
    unwind::{CFA_BITS, CfaRule, FAR_RSP, FAR_SAVED, Level, RbpRule, RbxRule, Row, Walk, ucontext},
};

use super::{
    USER_END, USER_START, bounded, copy_level, hijack, rbx, read_pair, read_word, return_trampoline, table, thread,
};

/// Continue or end the loop, as `bpf_loop` wants it.
const GO_ON: i64 = 0;
const STOP: i64 = 1;

/// Where a step leads.
struct Next {
    pc: u64,
    sp: u64,
    fp: u64,
    fp_slot: i16,
    cfa_slot: i16,
    rbx: RbxRule,
}

/// Callback: notes the frame that the walk is at, and goes on to the next outer one.
pub extern "C" fn step(_index: u32, context: *mut c_void) -> i64 {
    // SAFETY: the context passed by `walk`.
    let state = unsafe { thread(context) };
    let whole: *const ThreadState = state;
    if state.chain.walk.kept != 0 && join(state) {
        return STOP;
    }
    let chain = &mut state.chain;
    let walk = &mut chain.walk;
    if walk.found >= MAX_FRAMES as u32 {
        return STOP;
    }
    let number = bounded(walk.found);
    // SAFETY: the index is bounded.
    let level = unsafe {
        *chain.scratch.get_unchecked_mut(number) = walk.pc;
        chain.scratch_levels.get_unchecked_mut(number)
    };
    level.sp = walk.sp;
    level.fp = walk.fp;
    walk.found += 1;
    match next(walk, whole) {
        Ok(next) => {
            level.slots = Level::pack_slots(next.fp_slot, next.cfa_slot, next.rbx);
            walk.pc = next.pc;
            walk.sp = next.sp;
            walk.fp = next.fp;
            GO_ON
        }
        Err(StackEnd::Hijacked) => {
            // Our own, of the call that is pending: whether the walk comes to it is what the caller wants to know.
            let own = walk.unclear != 0 && walk.sp == state.sp.wrapping_add(8);
            let original = if own { None } else { hijack::original(walk.sp.wrapping_sub(8)) };
            match original {
                Some(address) => {
                    // The same frame once more.
                    walk.pc = address;
                    walk.found -= 1;
                    GO_ON
                }
                None => {
                    level.slots = Level::pack_slots(Level::OPAQUE, 0, RbxRule::LOST);
                    let known = return_trampoline(walk.pc) == Some(true);
                    walk.end = if known { StackEnd::Hijacked } else { StackEnd::UnknownCode } as u32;
                    STOP
                }
            }
        }
        Err(end) => {
            level.slots = Level::pack_slots(Level::OPAQUE, 0, RbxRule::LOST);
            walk.end = end as u32;
            STOP
        }
    }
}

/// Looks for a kept frame with the same state as the walk's; if there is one, `joined` becomes its number plus 1.
#[inline(always)]
fn join(state: &mut ThreadState) -> bool {
    let walk = &mut state.chain.walk;
    // Kept frames are in the order of falling stack pointers: find the last whose stack pointer is at least this one.
    let (mut low, mut high) = (0u32, walk.kept);
    for _ in 0..8 {
        if low >= high {
            break;
        }
        let middle = forgotten(&mut walk.forget, (low + high) / 2);
        // SAFETY: the index is bounded.
        if unsafe { state.chain.levels.get_unchecked(bounded(middle)) }.sp >= walk.sp {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if low == 0 {
        return false;
    }
    let number = bounded(low - 1);
    if number >= MAX_FRAMES {
        return false;
    }
    // SAFETY: the index is bounded.
    let (level, pc) = unsafe { (state.chain.levels.get_unchecked(number), *state.record.frames.get_unchecked(number)) };
    if level.sp != walk.sp || level.fp != walk.fp || pc != walk.pc {
        return false;
    }
    state.chain.walk.joined = low;
    true
}

/// The same number, of which the verifier knows nothing any more.
///
/// An index into a map's value makes it look at every path by which it knows something else of the index: in a binary
/// search, twice as many with every step.
#[inline(always)]
fn forgotten(place: &mut u32, number: u32) -> u32 {
    // SAFETY: a reference is valid; volatile so that the number goes by way of the memory.
    unsafe {
        core::ptr::write_volatile(place, number);
        core::ptr::read_volatile(place)
    }
}

/// Callback: takes kept frame `joined - 1 - index` as found, down to, but without, frame `adopted`.
pub extern "C" fn adopt(index: u32, context: *mut c_void) -> i64 {
    // SAFETY: the context passed by `walk`.
    let state = unsafe { thread(context) };
    let chain = &mut state.chain;
    let walk = &mut chain.walk;
    let number = walk.joined.wrapping_sub(1).wrapping_sub(index);
    if number <= walk.adopted || number >= walk.joined || walk.found >= MAX_FRAMES as u32 {
        return STOP;
    }
    let from = bounded(number);
    let to = bounded(walk.found);
    if from >= MAX_FRAMES {
        return STOP;
    }
    // SAFETY: both indexes are bounded.
    unsafe {
        *chain.scratch.get_unchecked_mut(to) = *state.record.frames.get_unchecked(from);
        copy_level(chain.levels.get_unchecked(from), chain.scratch_levels.get_unchecked_mut(to));
    }
    walk.found += 1;
    GO_ON
}

/// Puts the walk at kept frame `adopted`, from where only frames further out may be joined again.
#[inline(always)]
pub fn resume(state: *mut ThreadState) {
    // SAFETY: the map value of this thread.
    let state = unsafe { &mut *state };
    let chain = &mut state.chain;
    let walk = &mut chain.walk;
    let number = bounded(walk.adopted);
    if number >= MAX_FRAMES {
        return;
    }
    // SAFETY: the index is bounded.
    unsafe {
        let level = chain.levels.get_unchecked(number);
        walk.pc = *state.record.frames.get_unchecked(number);
        walk.sp = level.sp;
        walk.fp = level.fp;
    }
    walk.kept = walk.adopted;
    walk.joined = 0;
}

/// The caller's frame, or why there is none. Sets `keep` where an end follows from the state alone. `state`: the thread's,
/// which the walk belongs to.
#[inline(always)]
fn next(walk: &mut Walk, state: *const ThreadState) -> Result<Next, StackEnd> {
    walk.keep = 0;
    if walk.mode == Unwind::FramePointers as u32 {
        return by_frame_pointer(walk, state);
    }
    // A byte of the call instruction: the return address may belong to the next function already.
    let pc = walk.pc.wrapping_sub(1);
    if !table::find_code(&mut walk.code, walk.mappings, pc) {
        // Not readable: maybe the trampoline, before any thread has returned through it.
        if return_trampoline(walk.pc) != Some(false) {
            return Err(StackEnd::Hijacked);
        }
        // Code that appeared just now. Most of it has rows, which are on their way, and no frame pointers: rbp would lead
        // past frames, and nothing would show it.
        return Err(StackEnd::UnknownCode);
    }
    if walk.stale != 0 && walk.code.is_removable() {
        return Err(StackEnd::UnknownCode);
    }
    if walk.code.is_cut() {
        walk.keep = 1;
        return Err(StackEnd::NoTable);
    }
    let (row, after) = if walk.code.rows == 0 { (0, u32::MAX) } else { table::find_row(&walk.code, pc) };
    let rule = (row >> 48) as u32 & 15;
    if rule == CfaRule::NoInfo as u32 {
        if table::begins(&walk.code, after, walk.pc) && !follows_call(walk.pc) {
            // Nobody called: makecontext puts the address of a function here to which a coroutine returns at its end.
            walk.keep = 1;
            return Err(StackEnd::Complete);
        }
        return if walk.mode == Unwind::Auto as u32 {
            by_frame_pointer(walk, state)
        } else {
            Err(StackEnd::UnknownCode)
        };
    }
    by_row(walk, state, row, rule)
}

#[inline(always)]
fn by_row(walk: &mut Walk, state: *const ThreadState, row: u64, rule: u32) -> Result<Next, StackEnd> {
    let offset = Row::packed_offset(row);
    let mut cfa_slot = 0i16;
    // Whether the step reads words that a level can't note.
    let mut opaque = false;
    let mut rbp_rule = (row >> 52) as u32 & 15;
    let mut rbp_offset = i64::from((row >> 56) as u8 as i8);
    let cfa = if rule == CfaRule::Rsp as u32 {
        walk.sp.wrapping_add_signed(offset * 8)
    } else if rule == CfaRule::Rbp as u32 {
        walk.fp.wrapping_add_signed(offset * 8)
    } else if rule == CfaRule::End as u32 {
        walk.keep = 1;
        return Err(StackEnd::Complete);
    } else if rule == CfaRule::DerefRbp as u32 {
        if offset == 0 {
            return Err(StackEnd::BadRow);
        }
        cfa_slot = offset as i16;
        read_word(walk.fp.wrapping_add_signed(offset * 8)).ok_or(StackEnd::Unreadable)?
    } else if rule == FAR_RSP as u32 {
        let far = rbp_offset << CFA_BITS | (row >> 32 & ((1 << CFA_BITS) - 1)) as i64;
        if i64::from(rbp_rule) >= FAR_SAVED {
            rbp_offset = FAR_SAVED - 2 - i64::from(rbp_rule);
            rbp_rule = RbpRule::Cfa as u32;
        }
        walk.sp.wrapping_add_signed(far * 8)
    } else if rule == CfaRule::DerefRbpPlus8 as u32 {
        opaque = true;
        read_word(walk.fp.wrapping_add_signed(offset * 8)).ok_or(StackEnd::Unreadable)?.wrapping_add(8)
    } else if rule == CfaRule::DerefRspPlus8 as u32 {
        opaque = true;
        read_word(walk.sp.wrapping_add_signed(offset * 8)).ok_or(StackEnd::Unreadable)?.wrapping_add(8)
    } else if rule == CfaRule::DerefRsp as u32 {
        opaque = true;
        read_word(walk.sp.wrapping_add_signed(offset * 8)).ok_or(StackEnd::Unreadable)?
    } else if rule == CfaRule::Rbx as u32 {
        opaque = true;
        rbx::find(state, walk.found, walk.bx).ok_or(StackEnd::BadRow)?.wrapping_add_signed(offset * 8)
    } else if rule == CfaRule::Signal as u32 {
        return by_ucontext(walk);
    } else if rule == CfaRule::Plt as u32 {
        // A return address in the procedure linkage table: the call pushed nothing yet or one word more.
        let late = (walk.pc.wrapping_sub(1) & 15) as i64 >= offset;
        walk.sp + if late { 16 } else { 8 }
    } else {
        walk.keep = 1;
        return Err(StackEnd::BadRow);
    };
    // A caller's frame lies above its callee's.
    if cfa <= walk.sp || cfa & 7 != 0 || cfa >= USER_END {
        return Err(StackEnd::BadRow);
    }
    let (address, fp, fp_slot) = if rbp_rule == RbpRule::Cfa as u32 && rbp_offset == -2 {
        let [fp, address] = read_pair(cfa - 16).ok_or(StackEnd::Unreadable)?;
        (address, fp, -2)
    } else {
        let address = read_word(cfa - 8).ok_or(StackEnd::Unreadable)?;
        if rbp_rule == RbpRule::Cfa as u32 {
            let fp = read_word(cfa.wrapping_add_signed(rbp_offset * 8)).ok_or(StackEnd::Unreadable)?;
            (address, fp, if rbp_offset == 0 { Level::OPAQUE } else { rbp_offset as i16 })
        } else if rbp_rule == RbpRule::Rbp as u32 {
            let slot = walk.fp.wrapping_add_signed(rbp_offset * 8);
            let fp = read_word(slot).ok_or(StackEnd::Unreadable)?;
            (address, fp, slot_from(cfa, slot))
        } else if rbp_rule == RbpRule::Same as u32 {
            (address, walk.fp, 0)
        } else {
            // Lost: a frame that needs it has no valid frame pointer then.
            (address, 0, Level::OPAQUE)
        }
    };
    let fp_slot = if opaque { Level::OPAQUE } else { fp_slot };
    arrive(Next { pc: address, sp: cfa, fp, fp_slot, cfa_slot, rbx: Row::packed_rbx(row) })
}

/// A slot's distance from the caller's stack pointer in words, if it can be noted.
#[inline(always)]
fn slot_from(cfa: u64, slot: u64) -> i16 {
    let distance = slot.wrapping_sub(cfa) as i64;
    let words = distance >> 3;
    if distance & 7 == 0 && words > -30_000 && words < 30_000 && words != 0 { words as i16 } else { Level::OPAQUE }
}

/// The registers at the moment when a signal was delivered.
#[inline(always)]
fn by_ucontext(walk: &mut Walk) -> Result<Next, StackEnd> {
    let fp = read_word(walk.sp + ucontext::RBP).ok_or(StackEnd::Unreadable)?;
    let [sp, pc] = read_pair(walk.sp + ucontext::RSP).ok_or(StackEnd::Unreadable)?;
    // The interrupted instruction itself, not one after a call: 1 more makes up for the byte that is taken off
    // return addresses.
    arrive(Next { pc: pc.wrapping_add(1), sp, fp, fp_slot: Level::OPAQUE, cfa_slot: 0, rbx: RbxRule::SIGNAL })
}

#[inline(always)]
fn by_frame_pointer(walk: &mut Walk, state: *const ThreadState) -> Result<Next, StackEnd> {
    let fp = walk.fp;
    // Code with frame pointers ends its chain with 0 (AMD64 ABI 3.4.1); code without may hold any value there.
    if fp < walk.sp || fp & 7 != 0 || fp >= USER_END {
        walk.keep = 1;
        return Err(StackEnd::BrokenChain);
    }
    let [next, address] = read_pair(fp).ok_or(StackEnd::Unreadable)?;
    // Whether the code has frame pointers at all is a guess, so what is found must look like one.
    if walk.mode != Unwind::FramePointers as u32
        && address != 0
        && !follows_call(address)
        && return_trampoline(address) != Some(true)
    {
        return Err(StackEnd::BrokenChain);
    }
    // SAFETY: the map value of this thread.
    let pending = unsafe { (*state).sp };
    if walk.unclear != 0 && walk.sp <= pending && pending < fp + 8 {
        walk.unclear = Walk::PASSED_OVER;
    }
    arrive(Next { pc: address, sp: fp + 16, fp: next, fp_slot: -2, cfa_slot: 0, rbx: RbxRule::LOST })
}

/// Whether the instruction before `address` can be a call: `call rel32`, or a call through a register or memory in its
/// lengths without prefixes that come before the opcode anyway (Intel SDM volume 2, CALL).
#[inline(always)]
fn follows_call(address: u64) -> bool {
    let Some(code) = read_word(address.wrapping_sub(8)) else { return false };
    // 1 for a difference of 0: comparisons would be branches, and each doubles what the verifier has to look at.
    let is_zero = |difference: u64| difference.wrapping_sub(1) >> 63;
    let indirect = |length: u32| is_zero((code >> (64 - 8 * length) & 0x38ff) ^ 0x10ff);
    let direct = is_zero((code >> 24 & 0xff) ^ 0xe8);
    direct | indirect(2) | indirect(3) | indirect(4) | indirect(6) | indirect(7) != 0
}

#[inline(always)]
fn arrive(next: Next) -> Result<Next, StackEnd> {
    if next.pc == 0 {
        return Err(StackEnd::Complete);
    }
    if next.pc < USER_START || next.pc >= USER_END {
        return Err(StackEnd::BrokenChain);
    }
    Ok(next)
}
