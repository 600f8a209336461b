//! Functions by address, out of symbol tables.

use object::{LittleEndian, elf};

use super::demangle::MAX_NAME;
use crate::target::image::{Image, SymbolTable};

/// One function.
#[derive(Clone, Copy, Debug)]
struct Function {
    start: u64,
    /// Address after the last; for one without a size, where the next begins or its section ends.
    end: u64,
    sized: bool,
    /// Which table, and where in its strings.
    table: u32,
    name: u32,
    /// The lower, the better its name among those of one function.
    rank: u8,
}

/// The functions of a module.
#[derive(Debug, Default)]
pub struct Symbols<'a> {
    functions: Vec<Function>,
    /// For every function, the greatest end of it and all before it.
    reach: Vec<u64>,
    strings: Vec<&'a [u8]>,
}

impl<'a> Symbols<'a> {
    /// Collects the functions of all tables of `images`, which are parts of one module.
    pub fn of(images: &[&'a Image]) -> Self {
        let mut symbols = Self::default();
        for image in images {
            for table in image.symbol_tables() {
                let number = symbols.strings.len() as u32;
                symbols.strings.push(table.strings);
                symbols.functions.extend(table.symbols.iter().filter_map(|symbol| function(symbol, &table, number)));
            }
        }
        symbols.arrange();
        symbols
    }

    /// Sorts, and ends those without a size where the next function begins.
    fn arrange(&mut self) {
        let strings = &self.strings;
        // Names that differ only later are equally good, and comparing them could take for ever.
        let name = |function: &Function| {
            let name = string(strings[function.table as usize], function.name, 256);
            (name.iter().take_while(|byte| **byte == b'_').count(), name)
        };
        self.functions.sort_by(|a, b| {
            (a.start, !a.sized, a.end, a.rank)
                .cmp(&(b.start, !b.sized, b.end, b.rank))
                // Fewer leading underscores first, then in alphabetical order.
                .then_with(|| name(a).cmp(&name(b)))
        });
        let mut next = u64::MAX;
        for index in (0..self.functions.len()).rev() {
            let function = &mut self.functions[index];
            if !function.sized {
                function.end = function.end.min(next);
            }
            let start = function.start;
            if index == 0 || self.functions[index - 1].start != start {
                next = start;
            }
        }
        let mut reach = 0;
        self.reach = self
            .functions
            .iter()
            .map(|function| {
                reach = reach.max(function.end);
                reach
            })
            .collect();
    }

    /// Name of the function that an address lies in: of several, the one that begins last, then the smallest, then
    /// the one with the best name. Any bytes can be in there.
    pub fn find(&self, address: u64) -> Option<&'a [u8]> {
        let mut index = self.functions.partition_point(|function| function.start <= address);
        let mut found: Option<&Function> = None;
        // Hostile tables can nest functions without end.
        for _ in 0..64 {
            index = index.checked_sub(1)?;
            if self.reach[index] <= address {
                break;
            }
            let function = &self.functions[index];
            match found {
                Some(found) if found.start != function.start => break,
                _ if address < function.end => found = Some(function),
                _ => {}
            }
            if index == 0 {
                break;
            }
        }
        let found = found?;
        Some(string(self.strings[found.table as usize], found.name, 2 * MAX_NAME)).filter(|name| !name.is_empty())
    }
}

fn function(symbol: &elf::Sym64<LittleEndian>, table: &SymbolTable<'_>, number: u32) -> Option<Function> {
    let kind = symbol.st_info & 0xf;
    let section = symbol.st_shndx.get(LittleEndian);
    let (start, size) = (symbol.st_value.get(LittleEndian), symbol.st_size.get(LittleEndian));
    let named = symbol.st_name.get(LittleEndian) != 0;
    // Hand-written assembly often leaves the type away.
    let code = matches!(kind, elf::STT_FUNC | elf::STT_GNU_IFUNC) || (kind == elf::STT_NOTYPE && size != 0);
    if !code || !named || section == elf::SHN_UNDEF || section == elf::SHN_ABS || start == 0 {
        return None;
    }
    let end = match size {
        // Between the few functions of a dynamic table, most belong to none of them.
        0 if table.dynamic => start.checked_add(1)?,
        0 => table.section_end(section)?,
        size => start.checked_add(size)?,
    };
    let rank = match (kind, symbol.st_info >> 4) {
        (elf::STT_NOTYPE, _) => 3,
        (_, elf::STB_GLOBAL) => 0,
        (_, elf::STB_WEAK) => 1,
        _ => 2,
    };
    Some(Function {
        start,
        end: end.max(start),
        sized: size != 0,
        table: number,
        name: symbol.st_name.get(LittleEndian),
        rank,
    })
}

/// The string at an offset, of at most `limit` bytes.
fn string(strings: &[u8], offset: u32, limit: usize) -> &[u8] {
    let rest = strings.get(offset as usize..).unwrap_or_default();
    rest[..rest.len().min(limit)].split(|byte| *byte == 0).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(start: u64, size: u64, name: u32, rank: u8) -> Function {
        let end = if size == 0 { 0x1000 } else { start + size };
        Function { start, end, sized: size != 0, table: 0, name, rank }
    }

    fn names(functions: Vec<Function>, addresses: &[u64]) -> Vec<Option<String>> {
        let mut symbols = Symbols { functions, reach: Vec::new(), strings: vec![b"\0a\0_a\0b\0c\0"] };
        symbols.arrange();
        let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        addresses.iter().map(|address| symbols.find(*address).map(text)).collect()
    }

    const A: u32 = 1;
    const UNDERSCORE_A: u32 = 3;
    const B: u32 = 6;
    const C: u32 = 8;

    #[test]
    fn sizes_count() {
        let some = |name: &str| Some(name.to_owned());
        let functions = vec![function(0x100, 0x10, A, 0), function(0x120, 0, B, 0), function(0x140, 8, C, 2)];
        let addresses = [0xff, 0x100, 0x10f, 0x110, 0x120, 0x13f, 0x140, 0x147, 0x148];
        let expected = [None, some("a"), some("a"), None, some("b"), some("b"), some("c"), some("c"), None];
        assert_eq!(names(functions, &addresses), expected);
        assert_eq!(names(vec![function(0x120, 0, B, 0)], &[0xfff, 0x1000]), [some("b"), None]);
        assert_eq!(names(Vec::new(), &[5]), [None]);
    }

    #[test]
    fn inner_functions_and_better_names_win() {
        let some = |name: &str| Some(name.to_owned());
        // A large one around two small ones.
        let nested = vec![function(0x100, 0x100, A, 0), function(0x110, 8, B, 2), function(0x120, 8, C, 2)];
        assert_eq!(names(nested, &[0x110, 0x11f, 0x127, 0x1ff]), [some("b"), some("a"), some("c"), some("a")]);
        for order in [[UNDERSCORE_A, A], [A, UNDERSCORE_A]] {
            let aliases = order.iter().map(|name| function(0x100, 8, *name, 1)).collect();
            assert_eq!(names(aliases, &[0x104]), [some("a")]);
        }
        let ranks = vec![function(0x100, 8, A, 2), function(0x100, 8, UNDERSCORE_A, 0)];
        assert_eq!(names(ranks, &[0x104]), [some("_a")]);
    }
}
