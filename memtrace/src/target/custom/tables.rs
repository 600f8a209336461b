//! The symbol tables of a module: its own, the small one of a stripped module, that of its debug file.

use std::{collections::HashMap, path::PathBuf};

use super::super::{
    Module, ModuleProblem, Process, TargetError, debug_file,
    elf::{Source, Symbol, Symbols},
    image::{Image, ImageError},
    mappings::{self, FileKey},
    rooted::Root,
};

/// Most symbols of one module that are looked at: about ten times those of the largest programs.
const MAX_SYMBOLS: usize = 32 << 20;

/// Where the files of a process are, so that their debug files can be found.
pub struct Files {
    root: Option<Root>,
    paths: HashMap<FileKey, PathBuf>,
    exe: (u64, u64),
}

impl Files {
    /// Reads the memory map of a process.
    ///
    /// # Errors
    /// [`TargetError::Exited`], and what [`mappings::read`] returns.
    pub fn of(process: &Process) -> Result<Self, TargetError> {
        use std::os::unix::fs::MetadataExt as _;
        let exe = process.exe_file()?.metadata().map_err(|error| process.unreadable("exe", error))?;
        let mappings = mappings::read(process)?;
        let path = |mapping: &mappings::Mapping| Some((mapping.file, mapping.path()?.to_owned()));
        Ok(Self {
            root: Root::of(process).ok(),
            paths: mappings.iter().filter(|mapping| mapping.has_file()).filter_map(path).collect(),
            exe: (exe.dev(), exe.ino()),
        })
    }

    /// Whether a module is the program itself.
    pub fn is_program(&self, module: &Module) -> bool {
        (module.identity().device, module.identity().inode) == self.exe
    }
}

/// Files with symbol tables.
pub struct Tables(Vec<Image>);

impl Tables {
    /// Opens those of a module.
    ///
    /// # Errors
    /// Its tables cannot be read at all.
    pub fn of(module: &Module, files: &Files) -> Result<Self, ModuleProblem> {
        let image = Image::of(module.file()).map_err(problem)?;
        let mut others = Vec::new();
        if !image.has(".symtab") {
            // Damaged ones are as good as none: what is not found there is said not to be found.
            others.extend(image.mini_debug_info().ok().flatten());
            if let (Some(root), Some(path)) = (&files.root, files.paths.get(&module.key())) {
                others.extend(debug_file::find(root, &image, path));
            }
        }
        others.insert(0, image);
        Ok(Self(others))
    }

    /// Visits the functions of all tables; one that is in two of them twice.
    ///
    /// # Errors
    /// There are too many, or the file got shorter: then those that were visited may be garbage.
    pub fn functions(&self, visit: &mut dyn FnMut(Symbol<'_>)) -> Result<(), ModuleProblem> {
        let mut left = MAX_SYMBOLS;
        for image in &self.0 {
            for table in image.symbol_tables() {
                let symbols = Symbols::new(table.symbols, table.strings);
                left = left.checked_sub(symbols.len()).ok_or(ModuleProblem::TooLarge("symbols"))?;
                symbols.functions().for_each(&mut *visit);
            }
            if image.was_truncated() {
                return Err(ModuleProblem::Malformed("it became shorter".into()));
            }
        }
        Ok(())
    }
}

fn problem(error: ImageError) -> ModuleProblem {
    ModuleProblem::Malformed(error.to_string())
}

/// Its `DT_SONAME`.
pub fn soname(module: &Module) -> Option<String> {
    let source = Source::new(module.file());
    let dynamic = source.dynamic().ok()??;
    Some(std::str::from_utf8(dynamic.soname?).ok()?.to_owned())
}
