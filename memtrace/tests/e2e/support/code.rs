//! Compares the code that a process has in memory with the files it was mapped from: a probe shows as another byte.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
};

/// A byte of code that is not what the file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patch {
    pub file: String,
    pub offset: u64,
    pub in_file: u8,
    pub in_memory: u8,
}

/// A mapping of executable code from a file.
struct Code {
    start: u64,
    end: u64,
    offset: u64,
    path: String,
}

/// How many mappings of code a process has, without what the kernel adds for probes.
pub fn code_of(pid: u32) -> usize {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("the target's memory map");
    let is_code = |line: &&str| line.split(' ').nth(1).is_some_and(|rights| rights.contains('x'));
    maps.lines().filter(is_code).filter(|line| !line.ends_with("[uprobes]")).count()
}

/// Every changed byte in every file-backed mapping of executable code of `pid`.
pub fn patches(pid: u32) -> Vec<Patch> {
    let memory = File::open(format!("/proc/{pid}/mem")).expect("the target's memory can be read");
    let mut patches = Vec::new();
    for code in mappings(pid) {
        let size = usize::try_from(code.end - code.start).expect("a size");
        let (mut in_memory, mut in_file) = (vec![0; size], vec![0; size]);
        memory.read_exact_at(&mut in_memory, code.start).expect("code can be read from memory");
        let file = File::open(&code.path).unwrap_or_else(|error| panic!("{}: {error}", code.path));
        // The last page may reach beyond the end of the file, where memory is zero.
        let mut filled = 0;
        while filled < size {
            let offset = code.offset + u64::try_from(filled).expect("an offset");
            match file.read_at(&mut in_file[filled..], offset).expect("code can be read from its file") {
                0 => break,
                n => filled += n,
            }
        }
        // The usual case, quickly.
        if in_memory == in_file {
            continue;
        }
        for (offset, (memory, file)) in (code.offset..).zip(in_memory.iter().zip(&in_file)) {
            if memory != file {
                patches.push(Patch { file: code.path.clone(), offset, in_file: *file, in_memory: *memory });
            }
        }
    }
    patches
}

fn mappings(pid: u32) -> Vec<Code> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("the target's mappings can be read");
    let code: Vec<Code> = maps.lines().filter_map(mapping).collect();
    assert!(code.iter().any(|code| code.path.contains("libc.so")), "no C library in process {pid}:\n{maps}");
    code
}

/// Reads a line of `/proc/PID/maps` (proc_pid_maps(5)); `None` if it is not code from a file.
fn mapping(line: &str) -> Option<Code> {
    let mut fields = line.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?;
    let offset = fields.next()?;
    let path = fields.nth(2)?;
    if !permissions.contains('x') || !path.starts_with('/') {
        return None;
    }
    let number = |text: &str| u64::from_str_radix(text, 16).expect("a hexadecimal number");
    Some(Code { start: number(start), end: number(end), offset: number(offset), path: path.to_owned() })
}
