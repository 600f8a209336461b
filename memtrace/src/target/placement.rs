//! The probe of a function of a module.

use super::{
    Module,
    function::{Arguments, Role},
    prologue::{self, Code, Placement},
};

/// Longest function that is decoded as a whole; glibc's longest allocator function has about 3 KiB.
const MAX_FUNCTION: usize = 64 * 1024;
/// Bytes read of a function whose symbol has no size.
const UNSIZED_FUNCTION: usize = 256;

/// A function as its symbols describe it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extent {
    /// Virtual address of its first instruction.
    pub address: u64,
    /// Bytes; 0 if not known.
    pub size: u64,
    /// Whether the address is that of a resolver which returns the function's address (`STT_GNU_IFUNC`).
    pub indirect: bool,
}

/// File offset of the function and the placement of its probe, or why there is none.
pub fn place(module: &Module, function: Extent, role: Role, arguments: Arguments) -> Result<(u64, Placement), String> {
    if function.indirect {
        return Err("its address is chosen when the library is loaded, which memtrace does not support yet".into());
    }
    let size = usize::try_from(function.size).unwrap_or(usize::MAX);
    let wanted = if size == 0 { UNSIZED_FUNCTION } else { size.min(MAX_FUNCTION) };
    let (offset, bytes) = module
        .code(function.address, wanted)
        .map_err(|error| format!("its code could not be read ({error})"))?
        .ok_or("there is no code at its address")?;
    let complete = size != 0 && bytes.len() == size;
    let code = Code { bytes: &bytes, address: function.address, complete };
    let placement = prologue::place(code, role, arguments).map_err(|error| error.to_string())?;
    Ok((offset, placement))
}
