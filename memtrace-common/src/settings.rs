//! What the user side decides.

/// Names and meaning of the constants set before loading (`override_global`); all are 0 in the object file.
pub mod globals {
    /// u32: only this thread group is recorded (numbered by the initial pid namespace), which saves others the search in the
    /// table of processes; 0: whichever is in the table.
    pub const TARGET_TGID: &str = "TARGET_TGID";
    /// u32: 1 if thread groups can't be told apart ([`crate::process::ANY`]).
    pub const ANY_PROCESS: &str = "ANY_PROCESS";
    /// u32: 1 to tell the stacks of threads apart.
    pub const BY_THREAD: &str = "BY_THREAD";
    /// u32: 1 to report every process that is forked or executes a program, traced or not.
    pub const ANNOUNCE: &str = "ANNOUNCE";
    /// u32: 1 if the probes reach every process that maps the probed files, so that a new program's calls can be recorded at
    /// once.
    pub const UNFILTERED: &str = "UNFILTERED";
    /// u64: bits of the stack hash to clear. Only tests set any, to make different stacks collide.
    pub const HASH_IGNORE: &str = "HASH_IGNORE";
    /// u32: length of the table of images, a power of two.
    pub const MAX_IMAGES: &str = "MAX_IMAGES";
    /// u32: number of entries of the stack table.
    pub const MAX_STACKS: &str = "MAX_STACKS";
    /// u32: [`super::ReturnInstances::task`]; 0: not known.
    pub const RETURN_TASK: &str = "RETURN_TASK";
    /// u32: [`super::ReturnInstances::list`].
    pub const RETURN_LIST: &str = "RETURN_LIST";
    /// u32: [`super::ReturnInstances::stack`].
    pub const RETURN_STACK: &str = "RETURN_STACK";
    /// u32: [`super::ReturnInstances::address`].
    pub const RETURN_ADDRESS: &str = "RETURN_ADDRESS";
    /// u32: [`super::ReturnInstances::next`].
    pub const RETURN_NEXT: &str = "RETURN_NEXT";
    /// u32: 1 if page faults are recorded.
    pub const RECORDS_PAGES: &str = "RECORDS_PAGES";
    /// u32: offset in bytes of `tgid` in `struct task_struct`; 0: not known.
    pub const TASK_TGID: &str = "TASK_TGID";
    /// u32: 1 to trace the processes that traced ones fork.
    pub const FOLLOW: &str = "FOLLOW";
    /// u32: offset in bytes of `pagefault_disabled` in `struct task_struct`; 0: not known.
    pub const FAULTS_DISABLED: &str = "FAULTS_DISABLED";
    /// u32: 1 to walk every stack from its innermost frame, without the thread's last one; only for measurements.
    pub const PLAIN_WALKS: &str = "PLAIN_WALKS";
    /// u32: 1 if [`super::calls`] were replaced by the kernel functions that they stand for; 0: they are never made.
    pub const PREEMPT_GUARD: &str = "PREEMPT_GUARD";
}

/// Numbers of helpers that no kernel has. Calls of them stand for calls of kernel functions, whose numbers only the
/// running kernel's type information tells; where they are not replaced, the verifier must not come by.
pub mod calls {
    /// `bpf_preempt_disable` (Linux 6.10).
    pub const PREEMPT_DISABLE: i32 = 0x7eb0_0001;
    /// `bpf_preempt_enable` (Linux 6.10).
    pub const PREEMPT_ENABLE: i32 = 0x7eb0_0002;
}

/// Where the kernel keeps the return addresses that it has replaced for return probes: offsets in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReturnInstances {
    /// `utask` in `struct task_struct`.
    pub task: u32,
    /// `return_instances` in `struct uprobe_task`.
    pub list: u32,
    /// `stack` in `struct return_instance`: where the return address lay.
    pub stack: u32,
    /// `orig_ret_vaddr` there: the return address.
    pub address: u32,
    /// `next` there.
    pub next: u32,
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

/// The entries of the `CONTROL` map, a u64 each: the user side changes one without writing over another that the kernel
/// side is changing.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// A [`Run`]. All probes read it first, so that a trace starts and ends at one moment for all of them.
    Run = 0,
    /// How stacks are walked: an [`Unwind`].
    Unwind = 1,
    /// The next free stack number. Starts at [`crate::stack::FIRST_STACK`].
    NextStack = 2,
}

impl Control {
    /// Number of entries.
    pub const COUNT: u32 = 3;
}

/// How stacks are walked.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unwind {
    /// By unwind tables where there are any, by frame pointers in code without.
    Auto = 0,
    /// By unwind tables only.
    Dwarf = 1,
    /// By frame pointers only.
    FramePointers = 2,
}
