//! A module's rows, sorted and indexed.

use memtrace_common::unwind::{BLOCK_SHIFT, CfaRule, Row, SEARCH_STEPS};

use super::{
    ReadAt, Reason, Sections, UnwindError,
    cfi::{Functions, MAX_ROWS, Span, same_rule},
    rule::bare,
    sections::Code,
};

/// What was left out of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Entries that could not be read; their functions have no rows, or rows with [`Reason::Damaged`].
    pub damaged: u32,
    /// Entries for addresses where the module has no code (functions that the linker removed), or for none.
    pub outside: u32,
    /// Entries that start where another does, and those of `.debug_frame` for functions that `.eh_frame` has.
    pub overlapping: u32,
    /// Whether there is a `.debug_frame` that could not be read.
    pub debug_frame: bool,
}

/// How many rows have a property, and how much code they cover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Rows.
    pub rows: u32,
    /// Bytes of code.
    pub bytes: u64,
}

/// What a table's rows say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Rows by which a frame can be unwound (or found to be the outermost one).
    pub usable: Share,
    /// Gaps between functions.
    pub gaps: Share,
    /// Rows that the format cannot express, by reason; only those that occur.
    pub unsupported: Vec<(Reason, Share)>,
}

/// A module's unwind table, in the form that the kernel side searches (see [`memtrace_common::unwind`]).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    base: u64,
    rows: Vec<u64>,
    index: Vec<u32>,
    skipped: Skipped,
}

impl Table {
    /// Converts a module's unwind information. Without any, the table is empty.
    ///
    /// Where functions overlap, each pc belongs to the last function that starts at or before it, even if that one has
    /// ended and another has not: this is what searching the table of `.eh_frame_hdr` yields, by which exceptions are
    /// unwound. Of functions with the same start, the first in the section counts. `.debug_frame` adds functions that
    /// overlap none of `.eh_frame`, and entries of procedure linkage tables that nothing describes get the rows that
    /// their code calls for.
    ///
    /// # Errors
    /// [`UnwindError::TooFar`], [`UnwindError::TooManyRows`] and [`UnwindError::TooComplex`], and
    /// [`UnwindError::Malformed`] for code below the base.
    pub fn build(sections: &Sections) -> Result<Self, UnwindError> {
        let code = Code::new(sections)?;
        let mut functions = Functions::new(&code);
        if let Some(section) = &sections.eh_frame {
            functions.add_eh_frame(section, sections.eh_frame_hdr.as_ref())?;
        }
        if let Some(section) = &sections.debug_frame {
            functions.add_debug_frame(section)?;
        }
        for section in &sections.linkage_tables {
            functions.add_linkage_table(section)?;
        }
        let mut spans = functions.sorted();
        let all = spans.len();
        spans.dedup_by_key(|span| span.start);
        let mut skipped = Skipped { debug_frame: sections.debug_frame_unread, ..functions.skipped };
        skipped.overlapping += (all - spans.len()) as u32;
        let rows = join(&functions, &spans);
        if rows.len() > MAX_ROWS {
            return Err(UnwindError::TooManyRows { limit: MAX_ROWS });
        }
        Ok(Self { base: sections.base, index: index(&rows), rows, skipped })
    }

    /// Reads a file and converts its unwind information.
    ///
    /// # Errors
    /// All of [`UnwindError`].
    pub fn read(file: &(impl ReadAt + ?Sized)) -> Result<Self, UnwindError> {
        Self::build(&Sections::read(file)?)
    }

    /// The lowest `PT_LOAD` virtual address of the module, which the rows' pcs are relative to.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// The rows, packed, by rising pc. The last one ends the last function.
    pub fn rows(&self) -> &[u64] {
        &self.rows
    }

    /// For every block of code the number of the first row at or after its start, and the number of rows at the end.
    /// Covers the blocks from pc 0 to the last row's.
    pub fn index(&self) -> &[u32] {
        &self.index
    }

    /// Bytes of rows and index.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.rows) + size_of_val(&*self.index)
    }

    /// What was left out.
    pub fn skipped(&self) -> Skipped {
        self.skipped
    }

    /// The row in force at `pc`, by the search that the kernel side does. `None` before the first row and after the
    /// last row's block.
    pub fn lookup(&self, pc: u64) -> Option<Row> {
        let block = usize::try_from(pc >> BLOCK_SHIFT).ok()?;
        let first = *self.index.get(block)? as usize;
        let mut right = *self.index.get(block + 1)? as usize;
        // The row in force may begin in an earlier block.
        let mut left = first.saturating_sub(1);
        for _ in 0..SEARCH_STEPS {
            if right - left <= 1 {
                break;
            }
            let middle = left.midpoint(right);
            if u64::from(self.rows[middle] as u32) <= pc {
                left = middle;
            } else {
                right = middle;
            }
        }
        let row = Row::unpack(*self.rows.get(left)?)?;
        (u64::from(row.pc) <= pc).then_some(row)
    }

    /// Sums up what the rows say.
    pub fn summary(&self) -> Summary {
        let mut summary = Summary::default();
        let mut unsupported = Reason::ALL.map(|reason| (reason, Share::default()));
        let ends = self.rows.iter().skip(1).chain(self.rows.last());
        for (row, end) in self.rows.iter().zip(ends) {
            let Some(row) = Row::unpack(*row) else { continue };
            let share = match Reason::of(row) {
                Some(reason) => &mut unsupported[reason as usize].1,
                None if row.cfa == CfaRule::NoInfo => &mut summary.gaps,
                None => &mut summary.usable,
            };
            share.rows += 1;
            share.bytes += u64::from(*end as u32 - row.pc);
        }
        summary.unsupported = unsupported.into_iter().filter(|(_, share)| share.rows > 0).collect();
        summary
    }
}

/// The rows of all functions, given by rising start, each cut off at the next one's; gaps get rows of their own.
fn join(functions: &Functions<'_>, spans: &[Span]) -> Vec<u64> {
    let mut rows: Vec<u64> = Vec::new();
    let mut push = |row: u64| {
        if rows.last().is_none_or(|last| !same_rule(*last, row)) {
            rows.push(row);
        }
    };
    for (number, span) in spans.iter().enumerate() {
        let next = spans.get(number + 1).map(|next| next.start);
        let end = next.map_or(span.end, |next| next.min(span.end));
        functions.rows(*span).iter().take_while(|row| (**row as u32) < end).for_each(|row| push(*row));
        if next != Some(end) {
            push(bare(end, CfaRule::NoInfo).pack());
        }
    }
    rows
}

/// The block index of rows.
fn index(rows: &[u64]) -> Vec<u32> {
    let Some(last) = rows.last() else { return Vec::new() };
    let mut index = Vec::with_capacity((*last as u32 >> BLOCK_SHIFT) as usize + 2);
    for (number, row) in rows.iter().enumerate() {
        let block = (*row as u32 >> BLOCK_SHIFT) as usize;
        if index.len() <= block {
            index.resize(block + 1, number as u32);
        }
    }
    index.push(rows.len() as u32);
    index
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
