//! Modules to look at in tests.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    collections::HashMap,
    fs::File,
    path::{Path, PathBuf},
    process::Command,
};

use memtrace_common::unwind::{BLOCK, CfaRule, RbpRule, RbxRule, Row};
use object::{Object as _, ObjectSymbol as _};
use tempfile::TempDir;

use super::{Section, Sections, Table};

/// A compiled module; removed at the end.
pub struct Fixture {
    _directory: TempDir,
    pub path: PathBuf,
}

impl Fixture {
    /// Compiles source in a language that the name's extension tells (`.c`, `.cc`, `.s`).
    pub fn compile(name: &str, source: &str, flags: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(name);
        let path = directory.path().join("output");
        std::fs::write(&file, source).unwrap();
        let compiler = if name.ends_with(".cc") { "c++" } else { "cc" };
        let done = Command::new(compiler)
            .arg(&file)
            .arg("-o")
            .arg(&path)
            .args(flags)
            .output()
            .expect("a compiler is installed");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Self { _directory: directory, path }
    }

    /// A library from assembly.
    pub fn assemble(source: &str) -> Self {
        Self::compile("fixture.s", &format!("{source}\n.section .note.GNU-stack,\"\"\n"), &["-shared", "-nostdlib"])
    }

    pub fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.path).unwrap()
    }

    pub fn table(&self) -> Table {
        table(&self.path)
    }

    pub fn symbols(&self) -> HashMap<String, u64> {
        let bytes = self.bytes();
        let file = object::File::parse(&*bytes).unwrap();
        file.symbols().map(|symbol| (symbol.name().unwrap().to_owned(), symbol.address())).collect()
    }
}

pub fn table(path: &Path) -> Table {
    Table::read(&File::open(path).unwrap()).unwrap()
}

/// A rule without its pc: CFA rule and offset in words, rbp rule and offset in words.
pub type Rule = (CfaRule, i32, RbpRule, i8);

pub fn rule(row: Row) -> Rule {
    (row.cfa, row.cfa_offset, row.rbp, row.rbp_offset)
}

/// The rule of the caller's rbx at an address of the file.
pub fn rbx_at(table: &Table, address: u64) -> RbxRule {
    table.lookup(address - table.base()).unwrap().rbx
}

/// The rule at an address of the file; gaps and what lies outside of the table are the same.
pub fn rule_at(table: &Table, address: u64) -> Rule {
    let none = (CfaRule::NoInfo, 0, RbpRule::Same, 0);
    address.checked_sub(table.base()).and_then(|pc| table.lookup(pc)).map_or(none, rule)
}

/// A library or program of this machine that tests look at, by the file name's beginning.
pub fn mapped(name: &str) -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).map(Path::new);
    path.into_iter()
        .find(|path| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(name)))
        .unwrap()
        .into()
}

/// A library that the compiler links with.
pub fn from_compiler(name: &str) -> PathBuf {
    let done = Command::new("cc").arg(format!("-print-file-name={name}")).output().expect("a compiler is installed");
    Path::new(String::from_utf8(done.stdout).unwrap().trim()).canonicalize().unwrap()
}

/// The vDSO of this process.
pub fn vdso() -> Vec<u8> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.ends_with("[vdso]")).unwrap();
    let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
    let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16).unwrap());
    let mut bytes = vec![0; (end - start) as usize];
    std::os::unix::fs::FileExt::read_exact_at(&File::open("/proc/self/mem").unwrap(), &mut bytes, start).unwrap();
    bytes
}

/// Call frame information made by hand.
#[derive(Clone)]
pub struct Frames {
    pub data: Vec<u8>,
    /// Whether it is `.eh_frame`.
    eh: bool,
}

impl Frames {
    pub fn new(eh: bool) -> Self {
        Self { data: Vec::new(), eh }
    }

    /// Adds a CIE with these initial instructions; returns its offset.
    pub fn cie(&mut self, instructions: &[u8]) -> usize {
        // Version 1, no augmentation, alignment factors 1 and -8, return address in column 16.
        let id = if self.eh { [0; 4] } else { [0xff; 4] };
        self.entry(&[&id, &[1, 0, 1, 0x78, 16][..], instructions].concat())
    }

    /// Adds the usual CIE: CFA = rsp + 8, return address at CFA - 8.
    pub fn usual_cie(&mut self) -> usize {
        self.cie(&[0x0c, 7, 8, 0x90, 1])
    }

    /// Adds a function.
    pub fn function(&mut self, cie: usize, start: u64, length: u64, instructions: &[u8]) -> usize {
        let pointer = if self.eh { self.data.len() + 4 - cie } else { cie } as u32;
        self.entry(&[&pointer.to_le_bytes(), &start.to_le_bytes()[..], &length.to_le_bytes(), instructions].concat())
    }

    fn entry(&mut self, body: &[u8]) -> usize {
        let offset = self.data.len();
        self.data.extend((body.len() as u32).to_le_bytes());
        self.data.extend(body);
        offset
    }

    /// In a module whose code is 0x1000 to 0x9000.
    pub fn sections(self) -> Sections {
        let section = Some(Section { address: 0x10_0000, data: self.data });
        let sections = Sections { base: 0, code: std::iter::once(0x1000..0x9000).collect(), ..Sections::default() };
        if self.eh { Sections { eh_frame: section, ..sections } } else { Sections { debug_frame: section, ..sections } }
    }
}

/// What must hold of every table.
pub fn check_invariants(table: &Table) {
    let rows: Vec<Row> = table.rows().iter().map(|row| Row::unpack(*row).unwrap()).collect();
    for pair in rows.windows(2) {
        assert!(pair[0].pc < pair[1].pc, "{pair:?}");
        assert_ne!((rule(pair[0]), pair[0].rbx), (rule(pair[1]), pair[1].rbx));
    }
    assert!(rows.iter().all(|row| row.fits()));
    assert!(rows.last().is_none_or(|row| row.cfa == CfaRule::NoInfo));
    assert!(rows.first().is_none_or(|row| row.cfa != CfaRule::NoInfo));
    for (number, first) in table.index().iter().enumerate().take(table.index().len().saturating_sub(1)) {
        let before = rows.iter().take(*first as usize).next_back();
        assert!(before.is_none_or(|row| u64::from(row.pc) < number as u64 * BLOCK));
        assert!(u64::from(rows[*first as usize..].first().unwrap().pc) >= number as u64 * BLOCK);
    }
    assert_eq!(table.index().last().map(|last| *last as usize), rows.last().map(|_| rows.len()));
}

/// Random numbers that are the same in every run (xorshift64*).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}
