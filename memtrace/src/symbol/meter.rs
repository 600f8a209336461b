//! Reading debug information with a meter.
//!
//! The crates that decode DWARF trust what it says of itself in ways that a file of the target can use: ranges, line programs and
//! strings that very many entries share are read, and kept, for each of them again; attributes that take no bytes are decoded for
//! entries of one byte; and functions inlined into each other are followed on the stack. So all reads go through [`Metered`], which refuses
//! to go on when more is asked for than any compiler's output makes necessary.

use std::{borrow::Cow, cell::Cell, fmt, rc::Rc};

use addr2line::gimli;
use gimli::{EndianSlice, Error, LittleEndian, Reader, ReaderOffsetId, Result, SectionId};

/// Most attributes of an entry. Compilers write about 20.
const MAX_ATTRIBUTES: u32 = 256;
/// Most bytes of the stack that decoding may take. A few hundred functions can be inlined into each other in them.
const MAX_STACK: usize = 1 << 20;
/// Most bytes of strings that are read beside [`TEXT_FACTOR`] times the section. The paths of a large program's source files
/// are put together anew for each of its units.
const TEXT: u64 = 512 << 20;
const TEXT_FACTOR: u64 = 16;

/// What is special about a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Information,
    Abbreviations,
    Other,
}

/// What the sections of a file have in common.
#[derive(Debug)]
pub struct Bounds {
    exhausted: Cell<bool>,
    /// Where the stack was when decoding began.
    stack: Cell<usize>,
}

impl Bounds {
    pub fn new() -> Rc<Self> {
        Rc::new(Self { exhausted: Cell::new(false), stack: Cell::new(here()) })
    }

    /// To be called where decoding begins.
    pub fn begin(&self) {
        self.stack.set(here());
    }

    /// Whether more was to be read than any compiler's output makes necessary: then what was found is not everything.
    pub fn are_exhausted(&self) -> bool {
        self.exhausted.get()
    }
}

/// How much of a section may still be read.
#[derive(Debug)]
struct Meter {
    kind: Kind,
    /// Bytes of numbers and entries.
    left: Cell<u64>,
    /// Bytes of strings.
    text: Cell<u64>,
    bounds: Rc<Bounds>,
    /// Halves of the attributes of an abbreviation that were read.
    attributes: Cell<u32>,
}

/// A section and how much of it may still be read.
#[derive(Debug)]
pub struct Section<'a> {
    data: Cow<'a, [u8]>,
    meter: Meter,
}

impl<'a> Section<'a> {
    pub fn new(id: SectionId, data: Cow<'a, [u8]>, bounds: &Rc<Bounds>) -> Self {
        // What is read again costs only time, but for what is kept of ranges and lines.
        let (kind, factor, more) = match id {
            SectionId::DebugInfo => (Kind::Information, 16, 16 << 20),
            SectionId::DebugAbbrev => (Kind::Abbreviations, 4, 4 << 20),
            SectionId::DebugLine => (Kind::Other, 8, 16 << 20),
            SectionId::DebugRanges | SectionId::DebugRngLists | SectionId::DebugAranges => (Kind::Other, 8, 4 << 20),
            _ => (Kind::Other, 16, 64 << 20),
        };
        let size = data.len() as u64;
        let meter = Meter {
            kind,
            left: Cell::new(size.saturating_mul(factor).saturating_add(more)),
            text: Cell::new(size.saturating_mul(TEXT_FACTOR).saturating_add(TEXT)),
            bounds: Rc::clone(bounds),
            attributes: Cell::new(0),
        };
        Self { data, meter }
    }

    /// Its content.
    pub fn reader(&self) -> Metered<'_> {
        Metered { slice: EndianSlice::new(&self.data, LittleEndian), meter: &self.meter }
    }
}

/// About where the stack is.
#[inline(always)]
fn here() -> usize {
    let here = 0u8;
    std::hint::black_box(&raw const here).addr()
}

impl Meter {
    #[inline]
    fn spend(&self, from: &Cell<u64>, bytes: usize) -> Result<()> {
        match from.get().checked_sub(bytes as u64) {
            Some(left) => {
                from.set(left);
                Ok(())
            }
            None => {
                from.set(0);
                self.bounds.exhausted.set(true);
                Err(Error::Io)
            }
        }
    }
}

/// A part of a [`Section`].
#[derive(Clone, Copy)]
pub struct Metered<'a> {
    slice: EndianSlice<'a, LittleEndian>,
    meter: &'a Meter,
}

impl<'a> Metered<'a> {
    /// Its bytes.
    pub fn slice(self) -> &'a [u8] {
        self.slice.slice()
    }

    #[inline]
    fn spend(&self, bytes: usize) -> Result<()> {
        self.meter.spend(&self.meter.left, bytes)
    }

    #[inline]
    fn spend_text(&self, bytes: usize) -> Result<()> {
        self.meter.spend(&self.meter.text, bytes)
    }

    /// Subtracts what has been read since the rest had `before` bytes.
    #[inline]
    fn read_since(&self, before: usize) -> Result<()> {
        self.spend(before - self.slice.len())
    }
}

impl fmt::Debug for Metered<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.slice.fmt(formatter)
    }
}

impl Reader for Metered<'_> {
    type Endian = LittleEndian;
    type Offset = usize;

    fn endian(&self) -> LittleEndian {
        LittleEndian
    }

    #[inline]
    fn len(&self) -> usize {
        self.slice.len()
    }

    fn empty(&mut self) {
        self.slice.empty();
    }

    #[inline]
    fn truncate(&mut self, len: usize) -> Result<()> {
        self.slice.truncate(len)
    }

    #[inline]
    fn offset_from(&self, base: &Self) -> usize {
        Reader::offset_from(&self.slice, &base.slice)
    }

    #[inline]
    fn offset_id(&self) -> ReaderOffsetId {
        Reader::offset_id(&self.slice)
    }

    fn lookup_offset_id(&self, id: ReaderOffsetId) -> Option<usize> {
        self.slice.lookup_offset_id(id)
    }

    fn find(&self, byte: u8) -> Result<usize> {
        let found = Reader::find(&self.slice, byte);
        self.spend_text(found.as_ref().map_or(self.slice.len(), |found| *found))?;
        found
    }

    #[inline]
    fn skip(&mut self, len: usize) -> Result<()> {
        self.spend(1)?;
        self.slice.skip(len)
    }

    #[inline]
    fn split(&mut self, len: usize) -> Result<Self> {
        self.spend(1)?;
        Ok(Self { slice: self.slice.split(len)?, meter: self.meter })
    }

    fn to_slice(&self) -> Result<Cow<'_, [u8]>> {
        self.slice.to_slice()
    }

    fn to_string(&self) -> Result<Cow<'_, str>> {
        self.spend_text(self.slice.len())?;
        Reader::to_string(&self.slice)
    }

    fn to_string_lossy(&self) -> Result<Cow<'_, str>> {
        self.spend_text(self.slice.len())?;
        Reader::to_string_lossy(&self.slice)
    }

    #[inline]
    fn read_slice(&mut self, buffer: &mut [u8]) -> Result<()> {
        self.spend(buffer.len())?;
        Reader::read_slice(&mut self.slice, buffer)
    }

    /// In abbreviations, the number before the attributes of an entry.
    #[inline]
    fn read_u8(&mut self) -> Result<u8> {
        self.spend(1)?;
        if self.meter.kind == Kind::Abbreviations {
            self.meter.attributes.set(0);
        }
        self.slice.read_u8()
    }

    /// In information, what every entry begins with.
    #[inline]
    fn read_uleb128(&mut self) -> Result<u64> {
        if self.meter.kind == Kind::Information && self.meter.bounds.stack.get().abs_diff(here()) > MAX_STACK {
            return Err(Error::Io);
        }
        let before = self.slice.len();
        let value = self.slice.read_uleb128();
        self.read_since(before)?;
        value
    }

    fn read_sleb128(&mut self) -> Result<i64> {
        let before = self.slice.len();
        let value = self.slice.read_sleb128();
        self.read_since(before)?;
        value
    }

    /// In abbreviations, the name or the form of an attribute.
    fn read_uleb128_u16(&mut self) -> Result<u16> {
        let before = self.slice.len();
        let value = self.slice.read_uleb128_u16()?;
        self.read_since(before)?;
        if self.meter.kind == Kind::Abbreviations {
            let attributes = self.meter.attributes.get() + 1;
            self.meter.attributes.set(attributes);
            // The last is a pair of zeros.
            if attributes > 2 * (MAX_ATTRIBUTES + 1) {
                return Err(Error::Io);
            }
        }
        Ok(value)
    }

    fn skip_leb128(&mut self) -> Result<()> {
        let before = self.slice.len();
        let skipped = self.slice.skip_leb128();
        self.read_since(before)?;
        skipped
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn section(id: SectionId, data: Vec<u8>) -> (Section<'static>, Rc<Bounds>) {
        let bounds = Bounds::new();
        (Section::new(id, Cow::Owned(data), &bounds), bounds)
    }

    #[test]
    fn reading_again_and_again_has_an_end() {
        let (section, bounds) = section(SectionId::DebugRngLists, vec![1; 1 << 20]);
        let passes = (0..100).take_while(|_| {
            let mut reader = section.reader();
            std::iter::from_fn(|| reader.read_u64().ok()).count() == (1 << 17)
        });
        assert_eq!(passes.count(), 11);
        assert!(bounds.are_exhausted());
    }

    #[test]
    fn long_strings_that_are_read_again_and_again() {
        let (section, bounds) = section(SectionId::DebugLineStr, vec![b'a'; 1 << 10]);
        section.meter.text.set(32 << 10);
        let reader = section.reader();
        assert!(reader.to_string().is_ok() && reader.find(0).is_err() && !bounds.are_exhausted());
        let times = (0..100).take_while(|_| reader.find(b'b').is_err() && !bounds.are_exhausted()).count();
        assert_eq!(times, 30);
        assert_eq!(reader.to_string_lossy(), Err(Error::Io));
    }

    #[test]
    fn abbreviations_with_many_attributes() {
        let attributes = |count: usize| {
            let (section, _) = section(SectionId::DebugAbbrev, [&[1][..], &[5; 600]].concat());
            let mut reader = section.reader();
            reader.read_u8().unwrap();
            (0..2 * count).try_for_each(|_| reader.read_uleb128_u16().map(drop))
        };
        assert_eq!(attributes(257), Ok(()));
        assert_eq!(attributes(258), Err(Error::Io));
    }

    #[test]
    fn other_reads_are_those_of_slices() {
        let data: Vec<u8> = (0..200).map(|byte| byte | 0x40).collect();
        let (section, _) = section(SectionId::DebugStr, data.clone());
        let (mut metered, mut plain) = (section.reader(), EndianSlice::new(&data, LittleEndian));
        assert_eq!(metered.read_uleb128(), plain.read_uleb128());
        assert_eq!(metered.read_sleb128(), plain.read_sleb128());
        assert_eq!(metered.skip_leb128(), plain.skip_leb128());
        assert_eq!(metered.read_u32(), plain.read_u32());
        assert_eq!(metered.split(7).unwrap().slice(), plain.split(7).unwrap().slice());
        assert_eq!(metered.skip(3), plain.skip(3));
        assert_eq!(metered.slice(), plain.slice());
        assert_eq!(metered.offset_from(&section.reader()), data.len() - plain.slice().len());
        assert!(metered.truncate(4).is_ok() && metered.truncate(5).is_err() && metered.read_u64().is_err());
    }
}
