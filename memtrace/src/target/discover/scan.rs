//! What one module says about allocators: the functions of the [catalogue] in its symbol tables, and what decides which
//! definition the dynamic linker takes.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

use crate::target::{
    Module, ModuleProblem,
    catalogue::{self, Family, Known},
    debug_file,
    elf::{Source, Symbol, Symbols},
    function::Role,
    image::Image,
    rooted::Root,
};

/// Most symbols of one table that are looked at: about ten times those of the largest programs.
const MAX_SYMBOLS: usize = 32 << 20;
/// Most functions of one module that may be an allocator's. A large C program has some thousand names that end in `free`.
const MAX_HITS: usize = 1 << 17;
/// Most libraries that a module may ask for.
const MAX_NEEDED: usize = 4096;
/// Most bytes searched for the text of an allocator.
const MAX_TEXT: usize = 1 << 30;

/// A function of the catalogue that a module defines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hit {
    pub known: &'static Known,
    /// What is before the known name.
    pub prefix: Vec<u8>,
    /// Virtual address.
    pub address: u64,
    /// Bytes; 0 if not known.
    pub size: u64,
    /// Whether the address is that of a resolver.
    pub indirect: bool,
    /// Whether only its own object file could refer to it.
    pub local: bool,
    /// Whether other modules can refer to it.
    pub exported: bool,
}

impl Hit {
    /// The symbol's name.
    pub fn name(&self) -> Vec<u8> {
        [&self.prefix, self.known.name.as_bytes()].concat()
    }
}

/// What a module says.
#[derive(Debug, Default)]
pub struct Scan {
    pub hits: Vec<Hit>,
    pub soname: Vec<u8>,
    /// The libraries that it asks for.
    pub needed: Vec<Vec<u8>>,
    /// Whether its own symbols come first for itself.
    pub symbolic: bool,
    /// Whether it is glibc's libc.
    pub glibc: bool,
    /// Whether it is that of another C library or glibc's.
    pub c_library: bool,
    /// Whether it is a dynamic loader and nothing else: what it exports is for itself.
    pub loader: bool,
    /// Address of the loader's debugger hook, and of the description of what it has loaded (`_dl_debug_state`, `_r_debug`
    /// of elf/dl-debug.c in glibc; musl has the former).
    pub hook: Option<u64>,
    pub debug: Option<u64>,
    /// Functions by the address of the word that the dynamic loader puts their address into.
    pub slots: HashMap<u64, Vec<u8>>,
    /// Whether there is a symbol table for debuggers, here or in a debug file.
    pub has_symbols: bool,
    /// An allocator whose messages are in it, though no function of it was found.
    pub text: Option<&'static str>,
    /// Whether it is a program that asks for no dynamic loader: it has the parts of its C library that it uses.
    pub static_program: bool,
    /// What could not be read, though the rest could.
    pub problem: Option<ModuleProblem>,
    /// Symbols that were looked at.
    pub visited: usize,
}

impl Scan {
    /// Reads a module. `path` is its path in the target's mount namespace, `root` the target's root directory, where its
    /// debug file may be. `program`: whether it is the program itself.
    ///
    /// # Errors
    /// Its dynamic symbols cannot be read.
    pub fn of(module: &Module, path: &Path, root: Option<&Root>, program: bool) -> Result<Self, ModuleProblem> {
        let mut names = Names::default();
        let mut scan = Self::dynamic(module, &mut names)?;
        scan.static_program = program && !module.has_interpreter();
        if !scan.loader && !scan.glibc {
            scan.problem = scan.read_symbols(module, path, root, program, &mut names).err();
        }
        Ok(scan)
    }

    /// As [`Self::of`], but reads the dynamic symbols only.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn of_dynamic(module: &Module) -> Result<Self, ModuleProblem> {
        Self::dynamic(module, &mut Names::default())
    }

    fn dynamic(module: &Module, names: &mut Names) -> Result<Self, ModuleProblem> {
        let mut scan = Self::default();
        let source = Source::new(module.file());
        let Some(dynamic) = source.dynamic()? else { return Ok(scan) };
        scan.soname = dynamic.soname.unwrap_or_default().to_vec();
        scan.needed = dynamic.needed.iter().take(MAX_NEEDED).map(|name| name.to_vec()).collect();
        scan.symbolic = dynamic.symbolic;
        scan.loader = scan.soname.starts_with(b"ld-linux");
        scan.glibc = scan.soname == b"libc.so.6"
            && dynamic.versions.iter().any(|version| version.starts_with(b"GLIBC_2."))
            && dynamic.symbols.function("malloc").is_some();
        scan.c_library =
            scan.glibc || [scan.soname.as_slice(), module.name().as_bytes()].into_iter().any(is_other_c_library);
        if scan.loader || scan.c_library {
            scan.hook = dynamic.symbols.function("_dl_debug_state").map(|function| function.address);
            scan.debug = dynamic.symbols.variable("_r_debug");
        }
        scan.visited += names.read(&mut scan.hits, dynamic.symbols, true)?;
        if !scan.hits.is_empty() {
            // Without them, more is probed than need be.
            scan.slots = source.function_slots(dynamic.symbols).unwrap_or_default();
        }
        Ok(scan)
    }

    /// Reads the symbol tables for debuggers: the module's, the small one of a stripped module (`.gnu_debugdata`), or that of
    /// its debug file.
    fn read_symbols(
        &mut self,
        module: &Module,
        path: &Path,
        root: Option<&Root>,
        program: bool,
        names: &mut Names,
    ) -> Result<(), ModuleProblem> {
        let image = Image::of(module.file()).map_err(|error| ModuleProblem::Malformed(error.to_string()))?;
        let mut read = |image: &Image| -> Result<(), ModuleProblem> {
            for table in image.symbol_tables().filter(|table| !table.dynamic) {
                self.has_symbols = true;
                self.visited += names.read(&mut self.hits, Symbols::new(table.symbols, table.strings), false)?;
            }
            if image.was_truncated() { Err(ModuleProblem::Malformed("it became shorter".into())) } else { Ok(()) }
        };
        read(&image)?;
        if !image.has(".symtab") {
            let mini = image.mini_debug_info();
            if let Ok(Some(mini)) = &mini {
                read(mini)?;
            }
            if let Some(debug) = root.and_then(|root| debug_file::find(root, &image, path)) {
                read(&debug)?;
            }
            if let Err(error) = mini {
                return Err(ModuleProblem::Malformed(error.to_string()));
            }
        }
        if program && !self.has_symbols && self.hits.is_empty() {
            self.text = text_of_an_allocator(image.data());
        }
        Ok(())
    }

    /// The hits that are an allocator's, if the module is one: others only have the names. C++'s functions are left out
    /// where there is nothing else.
    pub fn allocators(&self) -> Vec<&Hit> {
        let defined: HashSet<(&[u8], &str)> =
            self.hits.iter().map(|hit| (hit.prefix.as_slice(), hit.known.name)).collect();
        let mut roles: HashSet<(Family, Role)> = HashSet::new();
        for hit in self.hits.iter().filter(|hit| hit.prefix.is_empty()) {
            roles.insert((hit.known.family, hit.known.role));
        }
        let both = |family| roles.contains(&(family, Role::Allocate)) && roles.contains(&(family, Role::Free));
        let prefixes: HashSet<&[u8]> = self.hits.iter().map(|hit| hit.prefix.as_slice()).collect();
        let whole: HashSet<&[u8]> = prefixes.into_iter().filter(|prefix| self.is_allocator(&defined, prefix)).collect();
        let whole = |hit: &Hit| whole.contains(hit.prefix.as_slice());
        let belongs = |hit: &Hit| match hit.known.family {
            // Nothing else can have these names where object files refer to each other by them.
            Family::C if hit.prefix.is_empty() => hit.exported || whole(hit),
            // Google's tcmalloc has some of jemalloc's.
            Family::C | Family::Jemalloc => whole(hit),
            family => family == Family::Cxx || both(family),
        };
        let found: Vec<_> = self.hits.iter().filter(|hit| belongs(hit)).collect();
        let one = |hit: &&Hit| hit.known.family != Family::Cxx && (hit.known.family != Family::C || whole(hit));
        if found.iter().any(one) {
            found
        } else {
            found.into_iter().filter(|hit| hit.known.family != Family::Cxx).collect()
        }
    }

    /// Whether functions with a prefix (or with none) are those of an allocator. The four that everything can be written
    /// with are enough of names that the C library or jemalloc is built with; programs have wrappers under such names
    /// (`zmalloc`, …) but those hardly ever align. `__libc_` is glibc's and musl's, before names of the same functions.
    /// A static program has of its C library what it uses.
    fn is_allocator(&self, defined: &HashSet<(&[u8], &str)>, prefix: &[u8]) -> bool {
        const USUAL: [&[u8]; 4] = [b"", b"je_", b"_rjem_", b"jemalloc_"];
        let has = |name| defined.contains(&(prefix, name));
        let extended = (has("mallocx") || has("rallocx")) && (has("dallocx") || has("sdallocx"));
        let basic = has("malloc") && has("free") && has("calloc") && has("realloc");
        let aligns = has("posix_memalign") || has("aligned_alloc") || has("memalign");
        let usual = USUAL.contains(&prefix);
        prefix != b"__libc_"
            && (extended || (basic && (aligns || usual)) || (has("malloc") && prefix.is_empty() && self.static_program))
    }
}

/// Collects the functions of one module from several tables.
#[derive(Default)]
struct Names {
    seen: HashSet<(u64, &'static str, Vec<u8>)>,
}

impl Names {
    /// Goes through a table once: how many symbols it has. `exported`: whether it is the one for other modules.
    fn read(&mut self, hits: &mut Vec<Hit>, symbols: Symbols<'_>, exported: bool) -> Result<usize, ModuleProblem> {
        if symbols.len() > MAX_SYMBOLS {
            return Err(ModuleProblem::TooLarge("symbols"));
        }
        let mut found: HashMap<(&'static str, &[u8]), Vec<Symbol<'_>>> = HashMap::new();
        let mut count = 0;
        for symbol in symbols.functions() {
            let (prefix, known) = match catalogue::known(symbol.name) {
                Some(known) => (&b""[..], known),
                None => match catalogue::prefixed(symbol.name) {
                    Some(found) => found,
                    None => continue,
                },
            };
            count += 1;
            if count > MAX_HITS {
                return Err(ModuleProblem::TooLarge("functions named like an allocator's"));
            }
            found.entry((known.name, prefix)).or_default().push(symbol);
        }
        for ((name, prefix), symbols) in found {
            let Some(known) = catalogue::known(name.as_bytes()) else { continue };
            for symbol in definitions(symbols) {
                if self.seen.insert((symbol.address, known.name, prefix.to_vec())) {
                    hits.push(Hit {
                        known,
                        prefix: prefix.to_vec(),
                        address: symbol.address,
                        size: symbol.size,
                        indirect: symbol.indirect,
                        local: symbol.local,
                        exported: exported && !symbol.local,
                    });
                }
            }
        }
        hits.sort_by(|a, b| (a.known.rank, &a.prefix, a.address).cmp(&(b.known.rank, &b.prefix, b.address)));
        Ok(symbols.len())
    }
}

/// Of the symbols of one name the definitions of a function: those for other object files, or the only other one.
fn definitions(mut found: Vec<Symbol<'_>>) -> Vec<Symbol<'_>> {
    if found.iter().any(|symbol| !symbol.local) {
        found.retain(|symbol| !symbol.local);
    } else if found.iter().any(|symbol| symbol.address != found[0].address) {
        // Functions of other kinds, by that name.
        found.clear();
    }
    found
}

/// Names of musl, which is one file: the C library and its loader.
pub fn is_musl(name: &[u8]) -> bool {
    [&b"ld-musl-"[..], b"libc.musl-"].iter().any(|start| name.starts_with(start))
}

/// Names of C libraries and their loaders that are not glibc: musl, uClibc, dietlibc.
pub fn is_other_c_library(name: &[u8]) -> bool {
    const STARTS: [&[u8]; 3] = [b"ld-uClibc", b"libuClibc", b"libc.so"];
    is_musl(name) || (name != b"libc.so.6" && STARTS.iter().any(|start| name.starts_with(start)))
}

/// The allocator whose messages are in a stripped program.
fn text_of_an_allocator(data: &[u8]) -> Option<&'static str> {
    const TEXTS: [(&[u8], &str); 4] = [
        (b"<jemalloc>: ", "jemalloc"),
        (b"mimalloc: ", "mimalloc"),
        (b"TCMALLOC_SAMPLE_PARAMETER", "tcmalloc"),
        (b"tcmalloc.per_cpu_caches_active", "tcmalloc"),
    ];
    let data = &data[..data.len().min(MAX_TEXT)];
    TEXTS.iter().find(|(text, _)| memchr::memmem::find(data, text).is_some()).map(|(_, name)| *name)
}

#[cfg(test)]
#[path = "scan_tests.rs"]
mod tests;
