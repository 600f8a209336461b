//! Functions and lines by address, out of debug information (DWARF).

use std::{borrow::Cow, rc::Rc};

use addr2line::{Context, gimli};
use gimli::{AbbreviationsCacheStrategy, DwarfSections, SectionId};

use super::meter::{Bounds, Metered, Section};
use crate::target::image::{Budget, Image, ImageError};

/// Most functions inlined into each other at one address.
const MAX_INLINED: usize = 256;

/// The sections that debug information is in, of a file and of the one that it continues in.
pub struct Sections<'a> {
    own: DwarfSections<Section<'a>>,
    continued: Option<DwarfSections<Section<'a>>>,
    bounds: Rc<Bounds>,
}

impl<'a> Sections<'a> {
    /// Reads the sections of `image`, and those of `continued`, where `.gnu_debugaltlink` leads to.
    ///
    /// # Errors
    /// One of them is damaged, or too large when it is decompressed.
    pub fn read(image: &'a Image, continued: Option<&'a Image>) -> Result<Self, ImageError> {
        let mut budget = Budget::default();
        let bounds = Bounds::new();
        let mut load = |image: &'a Image| {
            // Locations of variables are large and not needed.
            DwarfSections::load(|id: SectionId| {
                let data = match id {
                    SectionId::DebugLoc | SectionId::DebugLocLists | SectionId::DebugTypes => Cow::Borrowed(&[][..]),
                    id => image.content(id.name(), &mut budget)?,
                };
                Ok::<_, ImageError>(Section::new(id, data, &bounds))
            })
        };
        Ok(Self { own: load(image)?, continued: continued.map(load).transpose()?, bounds })
    }

    /// Indexes the compilation units.
    ///
    /// # Errors
    /// They are damaged.
    pub fn index(&self) -> Result<DebugInformation<'_>, gimli::Error> {
        self.bounds.begin();
        let mut dwarf = self.own.borrow_with_sup(self.continued.as_ref(), Section::reader);
        // Units that were optimized together share one table, which would be read for each of them.
        dwarf.populate_abbreviations_cache(AbbreviationsCacheStrategy::Duplicates);
        Ok(DebugInformation { context: Context::from_dwarf(dwarf)?, bounds: &self.bounds })
    }

    /// Whether more was to be read than any compiler's output makes necessary: then what was found is not everything.
    pub fn are_exhausted(&self) -> bool {
        self.bounds.are_exhausted()
    }
}

/// What is at one address, as debug information has it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found<'a> {
    /// The function called and those inlined into it, each into the one before it, mangled where a mangled name is
    /// known; `None` for one without a name. Any bytes can be in there.
    pub functions: Vec<Option<&'a [u8]>>,
    /// File and line of each.
    pub lines: Vec<Option<(&'a str, u32)>>,
}

/// Indexed debug information.
pub struct DebugInformation<'a> {
    context: Context<Metered<'a>>,
    bounds: &'a Bounds,
}

impl<'a> DebugInformation<'a> {
    /// What is at `address`. Empty if debug information covers nothing there.
    ///
    /// # Errors
    /// It is damaged where the address is described.
    pub fn find(&self, address: u64) -> Result<Found<'_>, gimli::Error> {
        self.bounds.begin();
        // Split DWARF (`.dwo`) is not read: only what the program itself says of the unit is used.
        let mut frames = self.context.find_frames(address).skip_all_loads()?;
        let mut found = Found::default();
        while let Some(frame) = frames.next()? {
            if found.functions.len() == MAX_INLINED {
                break;
            }
            // Of a location without a function, the function is found elsewhere.
            let name = frame.function.map(|function| function.name.slice());
            found.functions.push(name.filter(|name| !name.is_empty()));
            let line =
                frame.location.and_then(|location| Some((location.file?, location.line.filter(|line| *line != 0)?)));
            found.lines.push(line);
        }
        found.functions.reverse();
        found.lines.reverse();
        Ok(found)
    }
}
