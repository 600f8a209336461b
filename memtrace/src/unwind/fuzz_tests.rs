//! Unwind tables of damaged files.

#![allow(clippy::unwrap_used)]

use std::{cell::Cell, io};

use super::{ReadAt, Table, fixture::check_invariants};
use crate::target::fuzz::{
    SAMPLES, cuts,
    memory::{Taken, taken},
    mutant, structures,
};

/// Most that may be taken for one of the samples, which have some 20 KiB.
const MOST: Taken = Taken { bytes: 256 << 10, calls: 1000 };

/// A file that counts what is read of it.
struct Counted<'b> {
    bytes: &'b [u8],
    read: Cell<usize>,
}

impl ReadAt for Counted<'_> {
    fn size(&self) -> io::Result<u64> {
        self.bytes.size()
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read.set(self.read.get() + buffer.len());
        self.bytes.read_exact_at(buffer, offset)
    }
}

#[test]
fn damaged_files() {
    let mut most = Taken::default();
    let mut tables = 0;
    for sample in SAMPLES.iter() {
        let parts = structures(&sample.bytes);
        let mut look = |bytes: &[u8], what: &dyn std::fmt::Debug| {
            let file = Counted { bytes, read: Cell::new(0) };
            let (table, taken) = taken(|| Table::read(&file));
            assert!(taken.max(MOST) == MOST, "{} with {what:?}: {taken:?}", sample.name);
            // Every section at most once, though sections can overlap.
            assert!(file.read.get() <= 10 * bytes.len() + 4096, "{} with {what:?}", sample.name);
            most = most.max(taken);
            if let Ok(table) = table {
                check_invariants(&table);
                tables += 1;
            }
        };
        for end in cuts(&sample.bytes, &parts) {
            look(&sample.bytes[..end], &end);
        }
        for seed in 0..1000 {
            look(&mutant(&sample.bytes, &parts, seed), &seed);
        }
    }
    println!("{tables} tables, at most {most:?}");
    assert!(tables > 500, "most files are refused: {tables}");
}
