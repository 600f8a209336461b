//! What the user side decides.

/// Names and meaning of the constants set before loading (`override_global`); all are 0 in the object file.
pub mod globals {
    /// u32: only this thread group is recorded (numbered by the initial pid namespace); 0: no check, the probe's own
    /// filter is relied upon.
    pub const TARGET_TGID: &str = "TARGET_TGID";
    /// u64: bits of the stack hash to clear. Only tests set any, to make different stacks collide.
    pub const HASH_IGNORE: &str = "HASH_IGNORE";
    /// u32: number of entries of the stack table.
    pub const MAX_STACKS: &str = "MAX_STACKS";
}

/// State of the run switch.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Probes return at once.
    Stopped = 0,
    /// Probes record.
    Running = 1,
}

/// The one entry of the `CONTROL` map.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// A [`Run`]. All probes read it first, so that a trace starts and ends at one moment for all of them.
    pub run: u32,
    /// Always 0.
    pub zero: u32,
    /// The next free stack number. Starts at 1: number 0 is [`crate::stack::OVERFLOW_STACK`].
    pub next_stack: u64,
}

const _: () = assert!(size_of::<Control>() == 16);

#[cfg(feature = "user")]
mod pod {
    // SAFETY: repr(C), only integers, no padding (size asserted above): any bit pattern is a value.
    unsafe impl aya::Pod for super::Control {}
}
