//! Runs a program instruction by instruction and keeps the true call stack beside it: what tests of unwinding compare
//! with.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    os::unix::{fs::FileExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    rc::Rc,
};

use iced_x86::{Decoder, DecoderOptions, FlowControl};
use memtrace_common::unwind::{CfaRule, RbpRule, RbxRule, Row, ucontext};

use super::{Reason, Table, fixture::table};

/// A return address and where it lies; or, for a frame that a signal interrupted, where its context lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    Called { slot: u64, address: u64 },
    Interrupted { context: u64, address: u64 },
}

/// How far a true stack is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// To the program's very start.
    Start,
    /// To where stepping began.
    Later,
    /// To a return address that the program has replaced, to leave several frames at once (for an exception).
    Replaced,
}

/// Why a walk ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    Outermost,
    /// No row or an unsupported one, in a file at an address of that file.
    NoRule((PathBuf, u64), Option<Reason>),
    /// What a row says cannot be read.
    Unreadable,
}

struct Module {
    start: u64,
    end: u64,
    /// Where address 0 of the file is.
    bias: u64,
    path: PathBuf,
    table: Rc<Table>,
}

/// A program stopped between two instructions.
pub struct Stepped {
    child: Child,
    memory: File,
    modules: Vec<Module>,
    tables: HashMap<PathBuf, Rc<Table>>,
    registers: libc::user_regs_struct,
    /// Called frames with the address up to which they are on the stack; innermost last.
    truth: Vec<(u64, Frame)>,
    known: Known,
    /// Signal to deliver with the next step.
    signal: i32,
    /// A page of the stack as it is now.
    page: (u64, Vec<u8>),
    pub steps: u64,
}

fn request(request: libc::c_uint, pid: u32, address: u64, data: u64) {
    // SAFETY: requests without pointers but for PTRACE_GETREGS and PTRACE_SETREGS, for which `data` points at a struct
    // of the kernel's layout.
    let done = unsafe { libc::ptrace(request, pid as libc::pid_t, address, data) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

impl Stepped {
    /// Starts a program, stopped at its very first instruction. It binds all its calls at its start if asked to, and
    /// else as it was linked to.
    pub fn start(path: &Path, bind_now: bool) -> Self {
        let mut command = Command::new(path);
        command.stdout(Stdio::null()).env("LD_BIND_NOW", if bind_now { "1" } else { "" }).env_remove("LD_PRELOAD");
        // SAFETY: a system call without pointers.
        unsafe {
            command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let child = command.spawn().unwrap();
        let memory = File::options().read(true).write(true).open(format!("/proc/{}/mem", child.id())).unwrap();
        // SAFETY: all-zero integers are a value.
        let registers = unsafe { std::mem::zeroed() };
        let mut stepped = Self {
            child,
            memory,
            modules: Vec::new(),
            tables: HashMap::new(),
            registers,
            truth: Vec::new(),
            known: Known::Start,
            signal: 0,
            page: (1, vec![0; 4096]),
            steps: 0,
        };
        assert!(stepped.wait());
        stepped
    }

    /// Runs to a function, given by its address in the program's file. The true stack is known from there on.
    pub fn run_to(&mut self, address: u64) {
        self.module(self.registers.rip);
        let program = std::fs::read_link(format!("/proc/{}/exe", self.child.id())).unwrap();
        let bias = self.modules.iter().find(|module| module.path == program).unwrap().bias;
        let at = address.wrapping_add(bias);
        let mut kept = [0];
        self.memory.read_exact_at(&mut kept, at).unwrap();
        self.memory.write_all_at(&[0xcc], at).unwrap();
        request(libc::PTRACE_CONT, self.child.id(), 0, 0);
        assert!(self.wait());
        assert_eq!(self.registers.rip, at + 1);
        self.memory.write_all_at(&kept, at).unwrap();
        self.registers.rip = at;
        request(libc::PTRACE_SETREGS, self.child.id(), 0, &raw const self.registers as u64);
        let (slot, address) = (self.registers.rsp, self.word(self.registers.rsp).unwrap());
        self.known = Known::Later;
        self.truth = vec![(slot, Frame::Called { slot, address })];
    }

    /// Executes one instruction, or enters a signal handler; false once the program has ended.
    pub fn step(&mut self) -> bool {
        let before = self.registers;
        let mut code = [0; 15];
        let got = self.memory.read_at(&mut code, before.rip).unwrap();
        let instruction = Decoder::with_ip(64, &code[..got], before.rip, DecoderOptions::NONE).decode();
        let delivered = std::mem::take(&mut self.signal);
        request(libc::PTRACE_SINGLESTEP, self.child.id(), 0, delivered as u64);
        if !self.wait() {
            return false;
        }
        self.steps += 1;
        if self.signal != 0 {
            // Nothing was executed: the signal comes first.
            assert_eq!(self.registers.rip, before.rip);
            return true;
        }
        let sp = self.registers.rsp;
        let calls = matches!(instruction.flow_control(), FlowControl::Call | FlowControl::IndirectCall);
        if delivered != 0 {
            // The kernel has pushed siginfo, ucontext and the address of the return trampoline.
            let context = sp + 8;
            assert_eq!(self.word(context + ucontext::RIP), Some(before.rip));
            assert_eq!(self.word(context + ucontext::RSP), Some(before.rsp));
            self.truth.push((before.rsp - 1, Frame::Interrupted { context, address: before.rip }));
        }
        if delivered != 0 || (calls && sp == before.rsp.wrapping_sub(8)) {
            let address = self.word(sp).unwrap();
            self.truth.push((sp, Frame::Called { slot: sp, address }));
        } else {
            while self.truth.last().is_some_and(|(slot, _)| *slot < sp) {
                self.truth.pop();
            }
        }
        true
    }

    /// Waits for the next stop; false if the program has ended.
    fn wait(&mut self) -> bool {
        let mut status = 0;
        // SAFETY: `status` is a valid integer.
        let pid = unsafe { libc::waitpid(self.child.id() as libc::pid_t, &raw mut status, libc::__WALL) };
        assert_eq!(pid, self.child.id() as libc::pid_t);
        if libc::WIFEXITED(status) {
            assert_eq!(libc::WEXITSTATUS(status), 0, "the program failed");
            return false;
        }
        assert!(libc::WIFSTOPPED(status), "{status:x}");
        let signal = libc::WSTOPSIG(status);
        self.signal = if signal == libc::SIGTRAP { 0 } else { signal };
        request(libc::PTRACE_GETREGS, self.child.id(), 0, &raw mut self.registers as u64);
        self.page.0 = 1;
        true
    }

    /// The true stack, innermost first, and how far it is known. What a handler has changed in a signal's context counts.
    pub fn truth(&mut self) -> (Vec<Frame>, Known) {
        let mut frames = Vec::new();
        for number in (0..self.truth.len()).rev() {
            let frame = self.truth[number].1;
            match frame {
                Frame::Called { slot, address } if self.word(slot) != Some(address) => {
                    return (frames, Known::Replaced);
                }
                called @ Frame::Called { .. } => frames.push(called),
                Frame::Interrupted { context, .. } => {
                    let address = self.word(context + ucontext::RIP).unwrap();
                    frames.push(Frame::Interrupted { context, address });
                }
            }
        }
        (frames, self.known)
    }

    /// Unwinds by tables alone, as the kernel side is to do it.
    pub fn unwind(&mut self) -> (Vec<Frame>, End) {
        let mut frames = Vec::new();
        let (mut pc, mut sp, mut fp) = (self.registers.rip, self.registers.rsp, self.registers.rbp);
        let mut bx = Some(self.registers.rbx);
        // Whether `pc` is that of an instruction to be executed next, not one after a call.
        let mut exact = true;
        loop {
            let Some(module) = self.module(pc) else { return (frames, End::NoRule((PathBuf::new(), pc), None)) };
            let base = module.bias.wrapping_add(module.table.base());
            let row = module.table.lookup(pc.wrapping_sub(base) - u64::from(!exact));
            let place = (module.path.clone(), pc.wrapping_sub(module.bias));
            let no_rule = |reason| End::NoRule(place.clone(), reason);
            let Some(row) = row else { return (frames, no_rule(None)) };
            let offset = i64::from(row.cfa_offset) * 8;
            let cfa = match row.cfa {
                CfaRule::NoInfo => return (frames, no_rule(None)),
                CfaRule::Unsupported => return (frames, no_rule(Reason::of(row))),
                CfaRule::End => return (frames, End::Outermost),
                CfaRule::Rsp => Some(sp.wrapping_add_signed(offset)),
                CfaRule::Rbp => Some(fp.wrapping_add_signed(offset)),
                CfaRule::Rbx => bx.map(|bx| bx.wrapping_add_signed(offset)),
                CfaRule::Plt => Some(sp + 8 + 8 * u64::from((pc & 15) as i32 >= row.cfa_offset)),
                CfaRule::DerefRbp => self.word(fp.wrapping_add_signed(offset)),
                CfaRule::DerefRsp => self.word(sp.wrapping_add_signed(offset)),
                CfaRule::DerefRspPlus8 => self.word(sp.wrapping_add_signed(offset)).map(|word| word + 8),
                CfaRule::DerefRbpPlus8 => self.word(fp.wrapping_add_signed(offset)).map(|word| word + 8),
                CfaRule::Signal => {
                    let context = sp;
                    let [rip, rsp, rbp] =
                        [ucontext::RIP, ucontext::RSP, ucontext::RBP].map(|offset| self.word(context + offset));
                    let (Some(rip), Some(rsp), Some(rbp)) = (rip, rsp, rbp) else { return (frames, End::Unreadable) };
                    (pc, sp, fp, exact) = (rip, rsp, rbp, true);
                    bx = self.word(context + ucontext::RBX);
                    frames.push(Frame::Interrupted { context, address: pc });
                    continue;
                }
            };
            let Some((cfa, address)) = cfa.and_then(|cfa| Some((cfa, self.word(cfa.wrapping_sub(8))?))) else {
                return (frames, End::Unreadable);
            };
            let Some(caller_fp) = self.caller_fp(row, cfa, fp) else { return (frames, End::Unreadable) };
            bx = match row.rbx.below_cfa() {
                Some(words) => self.word(cfa - 8 * words),
                None => bx.filter(|_| row.rbx == RbxRule::SAME),
            };
            frames.push(Frame::Called { slot: cfa - 8, address });
            (pc, sp, fp, exact) = (address, cfa, caller_fp, false);
        }
    }

    /// The file that the program is in, and the address there.
    pub fn place(&mut self) -> (PathBuf, u64) {
        let pc = self.registers.rip;
        let module = self.module(pc).unwrap();
        (module.path.clone(), pc.wrapping_sub(module.bias))
    }

    fn caller_fp(&mut self, row: Row, cfa: u64, fp: u64) -> Option<u64> {
        let offset = i64::from(row.rbp_offset) * 8;
        match row.rbp {
            RbpRule::Same => Some(fp),
            RbpRule::Cfa => self.word(cfa.wrapping_add_signed(offset)),
            RbpRule::Rbp => self.word(fp.wrapping_add_signed(offset)),
            RbpRule::Undefined => Some(0),
        }
    }

    fn word(&mut self, address: u64) -> Option<u64> {
        let (page, inside) = (address & !4095, (address & 4095) as usize);
        if inside > 4088 {
            let mut word = [0; 8];
            self.memory.read_exact_at(&mut word, address).ok()?;
            return Some(u64::from_le_bytes(word));
        }
        if self.page.0 != page {
            self.page.0 = 1;
            self.memory.read_exact_at(&mut self.page.1, page).ok()?;
            self.page.0 = page;
        }
        self.page.1[inside..].first_chunk().map(|word| u64::from_le_bytes(*word))
    }

    fn module(&mut self, address: u64) -> Option<&Module> {
        let known =
            |modules: &[Module]| modules.iter().position(|module| (module.start..module.end).contains(&address));
        if known(&self.modules).is_none() {
            self.read_modules();
        }
        known(&self.modules).map(|number| &self.modules[number])
    }

    fn read_modules(&mut self) {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.child.id())).unwrap();
        self.modules.clear();
        let mut biases: BTreeMap<&str, u64> = BTreeMap::new();
        for line in maps.lines() {
            let mut words = line.split_whitespace();
            let (range, rights) = (words.next().unwrap(), words.next().unwrap());
            let (offset, name) = (words.next().unwrap(), words.nth(2).unwrap_or(""));
            let (start, end) = range.split_once('-').unwrap();
            let [start, end, offset] = [start, end, offset].map(|number| u64::from_str_radix(number, 16).unwrap());
            if offset == 0 {
                biases.entry(name).or_insert(start);
            }
            if !rights.contains('x') || !(name.starts_with('/') || name == "[vdso]") {
                continue;
            }
            let path = PathBuf::from(name);
            let table = match self.tables.get(&path) {
                Some(table) => table.clone(),
                None if name == "[vdso]" => {
                    let mut bytes = vec![0; (end - start) as usize];
                    self.memory.read_exact_at(&mut bytes, start).unwrap();
                    Rc::new(Table::read(&bytes[..]).unwrap())
                }
                None => Rc::new(table(&path)),
            };
            self.tables.insert(path.clone(), table.clone());
            // The files in these tests have their lowest address at offset 0.
            let bias = biases[name].wrapping_sub(table.base());
            self.modules.push(Module { start, end, bias, path, table });
        }
    }
}

impl Drop for Stepped {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
