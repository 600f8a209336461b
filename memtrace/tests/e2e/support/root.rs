//! What the tests need of the machine, and their turn on it.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits until no other test traces, and checks that tracing is possible.
///
/// Panics with what is missing: these tests are never skipped.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    require_root();
    // Some tests keep both CPUs of a small machine busy; together they would only take longer. A test that panicked
    // leaves nothing behind that the next would trip over.
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn require_root() {
    // SAFETY: takes nothing, changes nothing.
    let uid = unsafe { libc::geteuid() };
    assert!(uid == 0, "the end-to-end tests must run as root, since they load eBPF programs: this is user {uid}");
    for file in ["/sys/kernel/btf/vmlinux", "/sys/bus/event_source/devices/uprobe/type"] {
        assert!(
            std::path::Path::new(file).exists(),
            "the end-to-end tests need a kernel with BTF and uprobes: {file} is missing"
        );
    }
}
