//! Where a module's separate debug file may be: the places that gdb looks at (its manual, "Separate Debug Files"), by build
//! ID, and by the name and checksum of a debug link.

use std::{
    ffi::OsStr,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use super::{
    image::{DebugLink, Image},
    rooted::Root,
};

/// Where distributions put debug files.
const DEBUG_DIRECTORY: &str = "usr/lib/debug";

/// The debug file below `root` that has the symbols of `module`, a file of that path in the root's mount namespace; `None`
/// if there is none that belongs to it.
pub fn find(root: &Root, module: &Image, path: &Path) -> Option<Image> {
    let build_id = module.build_id();
    let open = |path: &Path| Image::of(&root.open(path).ok()?).ok().filter(|image| image.has(".symtab"));
    if let Some(id) = build_id
        && let Some(found) = open(&by_build_id(id)).filter(|image| image.build_id() == Some(id))
    {
        return Some(found);
    }
    let link = module.debug_link()?;
    // A checksum takes reading the whole file, so the build ID is asked first.
    let fits = |image: &Image| match build_id {
        Some(id) => image.build_id() == Some(id),
        None => image.crc() == link.crc,
    };
    by_link(&link, root.inside(path))?.iter().find_map(|path| open(path).filter(&fits))
}

/// `usr/lib/debug/.build-id/ab/cdef….debug`.
pub fn by_build_id(id: &[u8]) -> PathBuf {
    let text = hex(id);
    let (first, rest) = text.split_at(2.min(text.len()));
    Path::new(DEBUG_DIRECTORY).join(".build-id").join(first).join(format!("{rest}.debug"))
}

/// Where a debug link may lead; `None` if it is no plain file name.
pub fn by_link(link: &DebugLink, module: &Path) -> Option<Vec<PathBuf>> {
    let name = OsStr::from_bytes(&link.name);
    if link.name.is_empty() || link.name.contains(&b'/') || name == "." || name == ".." {
        return None;
    }
    let directory = module.parent()?;
    let global = |directory: &Path| {
        let inside = directory.strip_prefix("/").unwrap_or(directory);
        Path::new(DEBUG_DIRECTORY).join(inside).join(name)
    };
    let mut paths = vec![directory.join(name), directory.join(".debug").join(name), global(directory)];
    // Where /lib is a link to /usr/lib, debug files may be in either place.
    if let Ok(merged) = directory.strip_prefix("/").unwrap_or(directory).strip_prefix("usr") {
        paths.push(global(merged));
    }
    paths.retain(|path| path != module);
    Some(paths)
}

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
