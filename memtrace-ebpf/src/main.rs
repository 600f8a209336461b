//! memtrace's eBPF programs.
//!
//! [`probe`] holds one module per event source: it says where the arguments are and calls the handlers in [`alloc`] and
//! [`growth`], which do not know what called them. [`unwind`] walks call stacks, [`stack`] stores them, [`maps`] declares every map.
#![no_std]
#![no_main]
// Atomic additions are written in assembly, which Rust does not call stable for this target.
#![feature(asm_experimental_arch)]

mod alloc;
mod growth;
mod maps;
mod pages;
mod preempt;
mod probe;
mod stack;
mod unwind;

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}

// The kernel gives some of the helpers used (bpf_probe_read_user, bpf_get_attach_cookie) to programs under a
// GPL-compatible licence only; this is the form in which it knows "MIT OR Apache-2.0 OR GPL-2.0".
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
