#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{os::unix::process::CommandExt as _, process::Command, sync::mpsc, time::Duration};

use super::*;
use crate::target::test_program::{Running, SLEEPER, Workshop, is_root};

#[test]
fn this_process() {
    let process = Process::open(std::process::id()).unwrap();
    assert_eq!(process.pid(), std::process::id());
    assert_eq!(process.exe(), std::env::current_exe().unwrap());
    assert_eq!(process.comm().as_bytes(), fs::read("/proc/self/comm").unwrap().strip_suffix(b"\n").unwrap());
    // SAFETY: no arguments, cannot fail.
    assert_eq!(process.uid(), unsafe { libc::geteuid() });
    assert!(process.is_alive());
}

#[test]
fn resident_memory_grows_by_what_is_touched() {
    let process = Process::open(std::process::id()).unwrap();
    let before = process.rss().unwrap();
    assert!(before.total >= before.anonymous + before.file, "{before:?}");
    let block = vec![1u8; 256 << 20];
    let after = process.rss().unwrap();
    std::hint::black_box(&block);
    // Other tests run in this process too.
    assert!(after.anonymous > before.anonymous + (200 << 20), "{before:?} {after:?}");
}

#[test]
fn no_such_pid() {
    for pid in [0, u32::MAX, i32::MAX as u32] {
        assert!(matches!(Process::open(pid), Err(TargetError::NoSuchProcess { .. })), "{pid}");
    }
    let mut child = Command::new("true").spawn().unwrap();
    let pid = child.id();
    child.wait().unwrap();
    assert!(matches!(Process::open(pid), Err(TargetError::NoSuchProcess { .. })));
}

#[test]
fn a_thread_is_told_from_its_process() {
    let (send, receive) = mpsc::channel();
    let (stop, wait) = mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        // SAFETY: no arguments, cannot fail.
        send.send(unsafe { libc::gettid() } as u32).unwrap();
        let _ = wait.recv();
    });
    let tid = receive.recv().unwrap();
    let error = Process::open(tid).unwrap_err();
    assert!(matches!(error, TargetError::Thread { pid, process } if pid == tid && process == std::process::id()));
    assert!(error.to_string().contains(&format!("-p {}", std::process::id())));
    drop(stop);
    thread.join().unwrap();
}

#[test]
fn a_kernel_thread() {
    // In a container there may be none.
    if fs::read("/proc/2/comm").is_ok_and(|comm| comm == b"kthreadd\n") {
        let error = Process::open(2).unwrap_err();
        assert!(matches!(error, TargetError::KernelThread { .. }), "{error}");
    }
}

#[test]
fn a_zombie_and_an_exit_between_two_steps() {
    let workshop = Workshop::new();
    let mut running = Running::program(&workshop.compile("sleeper", SLEEPER, &[]));
    let process = Process::open(running.pid()).unwrap();
    assert!(process.is_alive());
    running.0.kill().unwrap();
    // Not reaped yet: wait until it has ended.
    while process.is_alive() {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(matches!(Process::open(running.pid()), Err(TargetError::Zombie { .. })));
    let ended = |process: &Process| {
        assert!(matches!(process.rss(), Err(TargetError::Exited { .. })));
        assert!(matches!(process.hazard_inputs(), Err(TargetError::Exited { .. })));
        assert!(matches!(process.exe_file(), Err(TargetError::Exited { .. })));
        assert!(matches!(crate::target::mappings::read(process), Err(TargetError::Exited { .. })));
    };
    ended(&process);
    running.0.wait().unwrap();
    ended(&process);
    assert!(matches!(Process::open(running.pid()), Err(TargetError::NoSuchProcess { .. })));
}

#[test]
fn a_main_thread_that_has_ended() {
    let source = r#"
        #include <pthread.h>
        #include <stdio.h>
        #include <unistd.h>
        static void *other(void *main) {
            pthread_join(*(pthread_t *)main, 0);
            puts("ready"); fflush(stdout);
            for (;;) pause();
        }
        static pthread_t self;
        int main(void) { pthread_t t; self = pthread_self(); pthread_create(&t, 0, other, &self); pthread_exit(0); }
    "#;
    let workshop = Workshop::new();
    let running = Running::program(&workshop.compile("headless", source, &["-pthread"]));
    let error = Process::open(running.pid()).unwrap_err();
    assert!(matches!(error, TargetError::MainThreadEnded { .. }), "{error}");
}

#[test]
fn a_process_of_another_user() {
    let workshop = Workshop::new();
    let running = Running::program(&workshop.compile("sleeper", SLEEPER, &[]));
    let pid = if is_root() { running.pid() } else { 1 };
    let error = std::thread::spawn(move || {
        if is_root() {
            // The system call changes this thread only, unlike the C function.
            // SAFETY: takes three integers.
            let done = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
            assert_eq!(done, 0);
        }
        Process::open(pid).unwrap_err()
    })
    .join()
    .unwrap();
    assert!(matches!(error, TargetError::PermissionDenied { owner: Some(0), .. }), "{error}");
    assert!(error.to_string().contains("CAP_SYS_PTRACE"));
}

#[test]
fn programs_by_their_first_bytes() {
    let header = |class, data, machine: u16| {
        let mut header = [0; 20];
        header[..4].copy_from_slice(b"\x7fELF");
        header[4] = class;
        header[5] = data;
        header[18..].copy_from_slice(&machine.to_le_bytes());
        header
    };
    assert!(check_program(1, &header(2, 1, 62)).is_ok());
    assert!(matches!(check_program(1, &header(1, 1, 3)), Err(TargetError::ThirtyTwoBit { .. })));
    assert!(matches!(check_program(1, &header(1, 1, 62)), Err(TargetError::ThirtyTwoBit { .. })), "x32");
    assert!(matches!(check_program(1, &header(2, 1, 183)), Err(TargetError::OtherMachine { .. })));
    assert!(matches!(check_program(1, &header(2, 2, 62)), Err(TargetError::OtherMachine { .. })));
    for length in 0..20 {
        assert!(matches!(check_program(1, &header(2, 1, 62)[..length]), Err(TargetError::OtherMachine { .. })));
    }
}

#[test]
fn a_32_bit_program() {
    // No 32-bit C library is needed for this: it pauses by system call 29, after writing "ready\n" by system call 4.
    let source = r#"
        void _start(void) {
            static const char text[] = "ready\n";
            int result;
            __asm__ volatile("int $0x80" : "=a"(result) : "a"(4), "b"(1), "c"(text), "d"(6) : "memory");
            for (;;) __asm__ volatile("int $0x80" : "=a"(result) : "a"(29) : "memory");
        }
    "#;
    let workshop = Workshop::new();
    let flags = ["-m32", "-nostdlib", "-static", "-ffreestanding", "-fno-pie", "-no-pie", "-fno-stack-protector"];
    let program = workshop.compile("small", source, &flags);
    let mut command = Command::new(&program);
    match command.spawn() {
        // The kernel may be built without 32-bit support.
        Err(error) if error.raw_os_error() == Some(libc::ENOEXEC) => return,
        Err(error) => panic!("{error}"),
        Ok(mut child) => {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
    let running = Running::program(&program);
    let error = Process::open(running.pid()).unwrap_err();
    assert!(matches!(error, TargetError::ThirtyTwoBit { .. }), "{error}");
}

#[test]
fn hostile_command_name() {
    let source = r#"
        #include <stdio.h>
        #include <sys/prctl.h>
        #include <unistd.h>
        int main(void) { prctl(PR_SET_NAME, ") Z 1\n\033[31m\377"); puts("ready"); fflush(stdout); for (;;) pause(); }
    "#;
    let workshop = Workshop::new();
    let running = Running::program(&workshop.compile("named", source, &[]));
    let process = Process::open(running.pid()).unwrap();
    assert_eq!(process.comm(), ") Z 1\n\u{1b}[31m\u{fffd}");
    let text = TargetError::KernelThread { pid: 1, comm: process.comm().into() }.to_string();
    assert!(!text.contains('\u{1b}') && !text.contains('\n'), "{text}");
}

#[test]
fn seccomp_of_one_thread_counts() {
    let workshop = Workshop::new();
    let program = workshop.compile("sleeper", SLEEPER, &[]);
    let plain = Running::program(&program);
    let none = HazardInputs { seccomp: Seccomp::Disabled, shadow_stack: false };
    // This machine's shells may have a filter themselves.
    let inherited = procfs::number(&fs::read("/proc/self/status").unwrap(), "Seccomp", 0) != Some(0);
    if !inherited {
        assert_eq!(Process::open(plain.pid()).unwrap().hazard_inputs().unwrap(), none);
    }
    let mut command = Command::new(&program);
    // SAFETY: only system calls between fork and exec.
    unsafe {
        command.pre_exec(|| {
            // A filter of one instruction, `BPF_RET | BPF_K` with SECCOMP_RET_ALLOW.
            let allow = libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0x7fff_0000 };
            let filter = libc::sock_fprog { len: 1, filter: (&raw const allow).cast_mut() };
            if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) != 0
            {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
    let filtered = Running::start(&mut command);
    assert_eq!(Process::open(filtered.pid()).unwrap().hazard_inputs().unwrap().seccomp, Seccomp::Filter);

    let mut inputs = none;
    add_hazards(&mut inputs, b"Seccomp:\t0\nx86_Thread_features:\t\nx86_Thread_features_locked:\tshstk\n");
    assert_eq!(inputs, none);
    add_hazards(&mut inputs, b"Seccomp:\t1\nx86_Thread_features:\tshstk wrss \n");
    add_hazards(&mut inputs, b"Name:\tx\n");
    assert_eq!(inputs, HazardInputs { seccomp: Seccomp::Strict, shadow_stack: true });
}
