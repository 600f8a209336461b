//! Reading whole tables out of the kernel in batches (`bpf(2)`, `BPF_MAP_LOOKUP_BATCH`, Linux 5.6), which aya lacks.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsRawFd as _, BorrowedFd},
};

/// `enum bpf_cmd` in include/uapi/linux/bpf.h.
const BPF_MAP_LOOKUP_BATCH: libc::c_long = 24;

/// The `batch` member of `union bpf_attr`.
#[repr(C)]
struct BatchAttr {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// Most bytes asked for at a time.
const BATCH: usize = 1 << 20;

/// Calls `each` with every entry of a hash or array map. `K` and `V` are the map's key and value types, plain data.
///
/// Entries that change meanwhile may be seen twice or not at all: stop the probes first for an exact result.
///
/// # Errors
/// The kernel's error, or `InvalidInput` if the map's key or value has another size than the type.
pub fn for_each<K: aya::Pod, V: aya::Pod>(
    map: BorrowedFd<'_>,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    mut each: impl FnMut(&K, &V),
) -> io::Result<()> {
    if key_size as usize != size_of::<K>() || value_size as usize != size_of::<V>() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "a table holds keys of {key_size} and values of {value_size} bytes, {} and {} were expected",
                size_of::<K>(),
                size_of::<V>()
            ),
        ));
    }
    // The kernel's cursor: a bucket number for hash maps, a key for array maps; 4 bytes in both cases.
    let mut cursor = 0u32;
    let mut next = 0u32;
    let mut first = true;
    let mut capacity = (BATCH / (size_of::<K>() + size_of::<V>()).max(1)).clamp(1, max_entries.max(1) as usize);
    let mut keys: Vec<MaybeUninit<K>> = Vec::new();
    let mut values: Vec<MaybeUninit<V>> = Vec::new();
    loop {
        keys.resize_with(capacity, MaybeUninit::uninit);
        values.resize_with(capacity, MaybeUninit::uninit);
        let mut attr = BatchAttr {
            in_batch: if first { 0 } else { (&raw const cursor) as u64 },
            out_batch: (&raw mut next) as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count: capacity as u32,
            map_fd: map.as_raw_fd() as u32,
            elem_flags: 0,
            flags: 0,
        };
        // SAFETY: the attribute block is as the kernel defines it; the buffers hold `count` entries of the sizes
        // checked above, and the cursors outlive the call.
        let result =
            unsafe { libc::syscall(libc::SYS_bpf, BPF_MAP_LOOKUP_BATCH, &raw mut attr, size_of::<BatchAttr>()) };
        let error = (result < 0).then(io::Error::last_os_error);
        let done = match error.as_ref().and_then(io::Error::raw_os_error) {
            None => false,
            Some(libc::ENOENT) => true,
            Some(libc::EINTR) => continue,
            // A bucket with more entries than the buffers hold: nothing was copied of it.
            Some(libc::ENOSPC) if capacity < max_entries as usize => {
                capacity = (capacity * 2).min(max_entries as usize);
                continue;
            }
            Some(code) => return Err(io::Error::from_raw_os_error(code)),
        };
        let filled = (attr.count as usize).min(capacity);
        for (key, value) in keys.iter().zip(&values).take(filled) {
            // SAFETY: the kernel filled the first `count` entries, and any bit pattern is a value of a Pod type.
            unsafe { each(key.assume_init_ref(), value.assume_init_ref()) };
        }
        if done {
            return Ok(());
        }
        cursor = next;
        first = false;
    }
}
