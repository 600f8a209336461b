//! Call frame information to the rows of each function.

use std::{collections::HashMap, ops::Range};

use gimli::{
    BaseAddresses, CommonInformationEntry, EhFrameHdr, EndianSlice, FrameDescriptionEntry, LittleEndian, Register,
    RegisterRule, UnwindContext, UnwindContextStorage, UnwindOffset, UnwindSection, UnwindTableRow, X86_64,
};
use memtrace_common::unwind::Row;

use super::{
    Section, Skipped, UnwindError,
    plt::{self, ENTRY},
    rule::{Converter, Reader, Reason},
    sections::Code,
};

/// Most rows (and functions) of a module. The largest module seen, Rust's compiler library with 150 MB, has about
/// 1.5 million.
pub(super) const MAX_ROWS: usize = 4_000_000;
/// Bytes of call frame information that may be interpreted, in multiples of the section's size: every function repeats
/// the instructions of its CIE, which a hostile file can make long. Compilers' output takes less than 3.
const MAX_EFFORT: usize = 6;
/// The same as a number of bytes: seconds, even for the slowest instructions. Rows run out before a compiler's output
/// takes as much.
const MAX_BYTES: usize = 96 << 20;
/// Most CIEs kept. A module has a few, or one per object file in `.debug_frame`.
const MAX_CIES: usize = 1024;

/// Storage of a row and of the stack of `DW_CFA_remember_state`.
struct Storage;

impl UnwindContextStorage<usize> for Storage {
    // The 17 general registers with the return address, the 16 vector registers that functions of Windows' calling
    // convention save, and some more.
    type Rules = [(Register, RegisterRule<usize>); 40];
    type Stack = Box<[UnwindTableRow<usize, Self>; 16]>;
}

/// One function, or one part of a split function.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    /// First pc.
    pub start: u32,
    /// The pc after its last.
    pub end: u32,
    first: u32,
    count: u32,
}

/// The functions of a module and their rows.
pub(super) struct Functions<'c> {
    code: &'c Code,
    /// In the order of the sections.
    spans: Vec<Span>,
    /// Packed.
    rows: Vec<u64>,
    pub skipped: Skipped,
}

impl<'c> Functions<'c> {
    pub fn new(code: &'c Code) -> Self {
        Self { code, spans: Vec::new(), rows: Vec::new(), skipped: Skipped::default() }
    }

    /// The rows of a function, packed.
    pub fn rows(&self, span: Span) -> &[u64] {
        &self.rows[span.first as usize..][..span.count as usize]
    }

    /// The functions by address; those that start at one address in the order of the sections.
    pub fn sorted(&self) -> Vec<Span> {
        let mut spans = self.spans.clone();
        spans.sort_by_key(|span| span.start);
        spans
    }

    /// Adds the functions of `.eh_frame`. Where the section's end is not known, `header` (`.eh_frame_hdr`) says where
    /// its entries are.
    pub fn add_eh_frame(&mut self, section: &Section, header: Option<&Section>) -> Result<(), UnwindError> {
        let mut bases = BaseAddresses::default().set_eh_frame(section.address);
        let mut frames = gimli::EhFrame::new(&section.data, LittleEndian);
        frames.set_address_size(8);
        let Some(header) = header else {
            let entries = Entries { data: &section.data, offset: 0, eh: true, one_terminator: false };
            return self.add(&frames, &bases, &section.data, entries, &[]);
        };
        bases = bases.set_eh_frame_hdr(header.address);
        let parsed = EhFrameHdr::new(&header.data, LittleEndian).parse(&bases, 8);
        match parsed.as_ref().ok().and_then(|parsed| parsed.table()) {
            Some(table) => {
                let mut pointers = Some(table.iter(&bases));
                let entries = std::iter::from_fn(|| match pointers.as_mut()?.next() {
                    Ok(pointer) => pointer.map(|(_, entry)| {
                        let offset = entry.pointer().checked_sub(section.address).ok_or(Damaged)?;
                        usize::try_from(offset).map_err(|_| Damaged)
                    }),
                    Err(_) => {
                        pointers = None;
                        Some(Err(Damaged))
                    }
                });
                self.add(&frames, &bases, &section.data, entries, &[])
            }
            None => {
                let entries = Entries { data: &section.data, offset: 0, eh: true, one_terminator: true };
                self.add(&frames, &bases, &section.data, entries, &[])
            }
        }
    }

    /// Adds the functions of `.debug_frame` that overlap none that is already there.
    pub fn add_debug_frame(&mut self, section: &Section) -> Result<(), UnwindError> {
        let taken = self.taken();
        let mut frames = gimli::DebugFrame::new(&section.data, LittleEndian);
        frames.set_address_size(8);
        let entries = Entries { data: &section.data, offset: 0, eh: false, one_terminator: false };
        self.add(&frames, &BaseAddresses::default(), &section.data, entries, &taken)
    }

    /// Adds the entries of a procedure linkage table that are recognized and that no function there covers.
    pub fn add_linkage_table(&mut self, section: &Section) -> Result<(), UnwindError> {
        // Only then does a rule that looks at the pc's last four bits hold.
        if !section.address.is_multiple_of(ENTRY as u64) {
            return Ok(());
        }
        let taken = self.taken();
        let (entries, _) = section.data.as_chunks::<ENTRY>();
        for (number, entry) in entries.iter().enumerate() {
            let address = section.address.checked_add((number * ENTRY) as u64);
            let Some(range) = address.and_then(|address| self.code.clamp(address, ENTRY as u64)) else { continue };
            if overlaps(&taken, &range) {
                continue;
            }
            if let Some((row, second)) = plt::rows(entry, range.start) {
                let first = self.rows.len();
                self.push(first, row)?;
                if let Some(second) = second {
                    self.push(first, second)?;
                }
                self.finish(first, range);
            }
        }
        Ok(())
    }

    /// Where there are functions, by address, disjoint.
    fn taken(&self) -> Vec<Range<u32>> {
        let mut taken: Vec<Range<u32>> = Vec::new();
        for span in self.sorted() {
            match taken.last_mut() {
                Some(last) if span.start <= last.end => last.end = last.end.max(span.end),
                _ => taken.push(span.start..span.end),
            }
        }
        taken
    }

    fn add<'d, S: UnwindSection<Reader<'d>>>(
        &mut self,
        section: &S,
        bases: &BaseAddresses,
        data: &'d [u8],
        entries: impl Iterator<Item = Result<usize, Damaged>>,
        taken: &[Range<u32>],
    ) -> Result<(), UnwindError> {
        let mut context = UnwindContext::<usize, Storage>::new_in();
        let mut cies = Cies {
            data,
            kept: HashMap::new(),
            budget: data.len().saturating_mul(MAX_EFFORT).clamp(1 << 16, MAX_BYTES),
        };
        for entry in entries {
            let parsed = match entry {
                Ok(offset) => section.fde_from_offset(bases, offset.into(), |section, bases, offset| {
                    cies.get(section, bases, UnwindOffset::into(offset))
                }),
                Err(Damaged) => Err(gimli::Error::OffsetOutOfBounds(0)),
            };
            let Ok(function) = parsed else {
                if cies.budget == 0 {
                    return Err(UnwindError::TooComplex);
                }
                self.skipped.damaged += 1;
                continue;
            };
            cies.spend(function.entry_len().saturating_add(function.cie().entry_len()))?;
            let Some(range) = self.code.clamp(function.initial_address(), function.len()) else {
                self.skipped.outside += 1;
                continue;
            };
            if overlaps(taken, &range) {
                self.skipped.overlapping += 1;
                continue;
            }
            self.decode(section, bases, &mut context, &function, range)?;
        }
        Ok(())
    }

    /// Adds the rows of one function. From damage on, to its end, they are [`Reason::Damaged`].
    fn decode<'d, S: UnwindSection<Reader<'d>>>(
        &mut self,
        section: &S,
        bases: &BaseAddresses,
        context: &mut UnwindContext<usize, Storage>,
        function: &FrameDescriptionEntry<Reader<'d>>,
        range: Range<u32>,
    ) -> Result<(), UnwindError> {
        let first = self.rows.len();
        let cie = function.cie();
        let damaged_from = if cie.address_size() != 8 {
            Some(range.start)
        } else if cie.return_address_register() != X86_64::RA {
            self.push(first, Reason::ReturnAddress.row(range.start))?;
            None
        } else {
            let converter = Converter { section, encoding: cie.encoding(), signal: function.is_signal_trampoline() };
            let address = function.initial_address();
            let mut pc = range.start;
            let mut damaged = true;
            if let Ok(mut table) = function.rows(section, bases, context) {
                while let Ok(row) = table.next_row() {
                    let Some(row) = row.filter(|_| pc < range.end) else {
                        damaged = false;
                        break;
                    };
                    // Positions only rise: gimli refuses others.
                    let next = row.end_address().saturating_sub(address).min((range.end - range.start).into()) as u32;
                    if range.start + next > pc {
                        self.push(first, converter.convert(pc, row))?;
                        pc = range.start + next;
                    }
                }
            }
            Some(pc).filter(|pc| damaged && *pc < range.end)
        };
        if let Some(pc) = damaged_from {
            self.push(first, Reason::Damaged.row(pc))?;
            self.skipped.damaged += 1;
        }
        self.finish(first, range);
        Ok(())
    }

    /// Adds the function whose rows begin at `first`.
    fn finish(&mut self, first: usize, range: Range<u32>) {
        let count = (self.rows.len() - first) as u32;
        self.spans.push(Span { start: range.start, end: range.end, first: first as u32, count });
    }

    /// Adds a row of the function whose rows begin at `first`, unless it says the same as the one before.
    fn push(&mut self, first: usize, row: Row) -> Result<(), UnwindError> {
        let packed = row.pack();
        if self.rows[first..].last().is_some_and(|last| same_rule(*last, packed)) {
            return Ok(());
        }
        if self.rows.len() == MAX_ROWS {
            return Err(UnwindError::TooManyRows { limit: MAX_ROWS });
        }
        self.rows.push(packed);
        Ok(())
    }
}

/// Whether two packed rows say the same.
pub(super) fn same_rule(one: u64, other: u64) -> bool {
    one >> 32 == other >> 32
}

/// Whether a range overlaps one of those given by address, disjoint.
fn overlaps(ranges: &[Range<u32>], range: &Range<u32>) -> bool {
    let next = ranges.partition_point(|other| other.end <= range.start);
    ranges.get(next).is_some_and(|other| other.start < range.end)
}

/// An entry cannot be read.
#[derive(Clone, Copy, Debug)]
struct Damaged;

/// The offsets of the FDEs of a section.
struct Entries<'d> {
    data: &'d [u8],
    offset: usize,
    /// Whether the section is `.eh_frame`.
    eh: bool,
    /// Whether the first terminator is the end: what follows may be another section.
    one_terminator: bool,
}

impl Iterator for Entries<'_> {
    type Item = Result<usize, Damaged>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let offset = self.offset;
            let rest = self.data.get(offset..)?;
            if rest.is_empty() {
                return None;
            }
            let Some((header, length)) = initial_length(rest) else {
                self.offset = self.data.len();
                return Some(Err(Damaged));
            };
            self.offset = offset + header + length;
            // A terminator: there can be several, when object files with one of their own were linked.
            if length == 0 {
                if self.one_terminator {
                    return None;
                }
                continue;
            }
            let body = &rest[header..][..length];
            let is_cie = match (self.eh, header) {
                (true, _) => body.get(..4).map(|id| id == [0; 4]),
                (false, 4) => body.get(..4).map(|id| id == [0xff; 4]),
                (false, _) => body.get(..8).map(|id| id == [0xff; 8]),
            };
            match is_cie {
                Some(true) => {}
                Some(false) => return Some(Ok(offset)),
                None => return Some(Err(Damaged)),
            }
        }
    }
}

/// Bytes of an entry's length field, and the length; `None` if the entry would end after the data.
fn initial_length(data: &[u8]) -> Option<(usize, usize)> {
    let short = u32::from_le_bytes(*data.first_chunk()?);
    let (header, length) = match short {
        u32::MAX => (12, usize::try_from(u64::from_le_bytes(*data[4..].first_chunk()?)).ok()?),
        _ => (4, short as usize),
    };
    (length <= data.len() - header).then_some((header, length))
}

/// The CIEs of a section, each parsed once.
struct Cies<'d> {
    data: &'d [u8],
    kept: HashMap<usize, CommonInformationEntry<Reader<'d>>>,
    /// Bytes that may still be interpreted.
    budget: usize,
}

impl<'d> Cies<'d> {
    fn spend(&mut self, bytes: usize) -> Result<(), UnwindError> {
        self.budget = self.budget.saturating_sub(bytes);
        if self.budget == 0 { Err(UnwindError::TooComplex) } else { Ok(()) }
    }

    fn get<S: UnwindSection<EndianSlice<'d, LittleEndian>>>(
        &mut self,
        section: &S,
        bases: &BaseAddresses,
        offset: usize,
    ) -> gimli::Result<CommonInformationEntry<Reader<'d>>> {
        if let Some(cie) = self.kept.get(&offset) {
            return Ok(cie.clone());
        }
        // Spent even if it turns out not to be a CIE: that may be found out only at its end.
        let length = self.data.get(offset..).and_then(initial_length).map_or(0, |(header, length)| header + length);
        self.spend(length).map_err(|_| gimli::Error::OffsetOutOfBounds(0))?;
        let cie = section.cie_from_offset(bases, offset.into())?;
        if self.kept.len() == MAX_CIES {
            self.kept.clear();
        }
        self.kept.insert(offset, cie.clone());
        Ok(cie)
    }
}

#[cfg(test)]
#[path = "cfi_tests.rs"]
mod tests;
