#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{io::Read as _, os::unix::process::CommandExt as _, process::Command};

use super::*;
use crate::target::{
    mappings,
    test_program::{Running, SLEEPER, Workshop, is_root},
};

fn own_code() -> (Process, Mapping) {
    let process = Process::open(std::process::id()).unwrap();
    let here = own_code as fn() -> (Process, Mapping) as usize as u64;
    let mut mappings = mappings::read(&process).unwrap();
    mappings.retain(|mapping| (mapping.start..mapping.end).contains(&here));
    (process, mappings.remove(0))
}

/// The mapping of the program's code.
fn code_of(process: &Process, name: &str) -> Mapping {
    let mappings = mappings::read(process).unwrap();
    mappings.into_iter().find(|mapping| mapping.executable && mapping.file_name() == name).unwrap()
}

#[test]
fn this_program() {
    let (process, mapping) = own_code();
    let module = Module::open(&process, &mapping).unwrap();
    let metadata = std::fs::metadata("/proc/self/exe").unwrap();
    assert_eq!((module.identity().device, module.identity().inode), (metadata.dev(), metadata.ino()));
    assert_eq!(module.name(), std::env::current_exe().unwrap().file_name().unwrap().to_str().unwrap());
    assert_eq!(std::fs::metadata(module.path()).unwrap().ino(), metadata.ino());
    assert!(module.has_interpreter());
    // Where this function is in memory, in the file, and in the file's numbering of addresses.
    let here = own_code as fn() -> (Process, Mapping) as usize as u64;
    let offset = mapping.file_offset(here).unwrap();
    let address = module.address_of(offset).unwrap();
    assert_eq!(module.file_offset(address), Some(offset));
    // Linkers let segments share a page of the file: the code's mapping then begins with another segment's end.
    assert_eq!(module.code_address(&mapping).map(|first| first + (here - mapping.start)), Some(address));
    let (found, code) = module.code(address, 16).unwrap().unwrap();
    assert_eq!(found, offset);
    // SAFETY: code of this very program.
    let in_memory = unsafe { std::slice::from_raw_parts(here as *const u8, 16) };
    assert_eq!(code, in_memory);
    assert_eq!(module.code(u64::MAX, 16).unwrap(), None);
}

#[test]
fn a_file_is_open_once() {
    let (process, mapping) = own_code();
    let (one, two) = (Module::open(&process, &mapping).unwrap(), Module::open(&process, &mapping).unwrap());
    assert_eq!(one.path(), two.path());
    let place = one.shared.place;
    drop((one, two));
    let again = Module::open(&process, &mapping).unwrap();
    assert_eq!(again.shared.place, place);
}

#[test]
fn the_fallback_compares_the_file() {
    let (process, mapping) = own_code();
    let file = open_by_path(&process, &mapping).unwrap();
    assert_eq!(file.metadata().unwrap().ino(), mapping.file.inode);
    let mut other = mapping.clone();
    other.file.inode += 1;
    assert!(matches!(open_by_path(&process, &other), Err(ModuleProblem::Replaced)));
    other.name = "/nothing/here".into();
    assert!(matches!(open_by_path(&process, &other), Err(ModuleProblem::Replaced)));
    other.name = "[vdso]".into();
    assert!(matches!(open_by_path(&process, &other), Err(ModuleProblem::Replaced)));
    // A mapping that map_files does not know (any more) is opened by its path.
    let mut stale = mapping.clone();
    stale.end += 4096;
    assert!(Module::open(&process, &stale).is_ok());
}

#[test]
fn only_regular_files_are_opened() {
    for path in ["/dev/zero", "/proc/self/fd", "/"] {
        assert!(matches!(open_regular(Path::new(path)), Err(ModuleProblem::NotRegular)), "{path}");
    }
    assert!(matches!(open_regular(Path::new("/nothing")), Err(ModuleProblem::Io(_))));
    // Opening a pipe would block.
    let workshop = Workshop::new();
    let pipe = workshop.0.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert!(matches!(open_regular(&pipe), Err(ModuleProblem::NotRegular)));
}

#[test]
fn a_deleted_and_replaced_program() {
    let workshop = Workshop::new();
    let program = workshop.compile("sleeper", SLEEPER, &[]);
    let original = std::fs::read(&program).unwrap();
    let running = Running::program(&program);
    std::fs::remove_file(&program).unwrap();
    std::fs::write(&program, "something else").unwrap();
    let process = Process::open(running.pid()).unwrap();
    let mapping = code_of(&process, "sleeper");
    assert!(mapping.name.to_str().unwrap().ends_with(" (deleted)"));
    match Module::open(&process, &mapping) {
        Ok(module) => {
            drop(running);
            let mut bytes = Vec::new();
            File::open(module.path()).unwrap().read_to_end(&mut bytes).unwrap();
            assert_eq!(bytes, original, "readable after the process has ended");
        }
        // Without the capability for map_files.
        Err(problem) => assert!(matches!(problem, ModuleProblem::Replaced) && !is_root(), "{problem}"),
    }
}

#[test]
fn a_program_that_only_another_mount_namespace_has() {
    if !is_root() {
        return;
    }
    let workshop = Workshop::new();
    let program = workshop.compile("sleeper", SLEEPER, &[]);
    let hidden = workshop.0.path().join("hidden");
    std::fs::create_dir(&hidden).unwrap();
    let target = std::ffi::CString::new(hidden.to_str().unwrap()).unwrap();
    let mut command = Command::new("/bin/sh");
    command.arg("-c").arg("cp \"$0\" \"$1\" && exec \"$1\"").arg(&program).arg(hidden.join("inside"));
    // SAFETY: only system calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            let done = libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(
                    std::ptr::null(),
                    c"/".as_ptr(),
                    std::ptr::null(),
                    libc::MS_REC | libc::MS_PRIVATE,
                    std::ptr::null(),
                ) == 0
                && libc::mount(c"none".as_ptr(), target.as_ptr(), c"tmpfs".as_ptr(), 0, std::ptr::null()) == 0;
            if done { Ok(()) } else { Err(io::Error::last_os_error()) }
        });
    }
    let running = Running::start(&mut command);
    assert!(!hidden.join("inside").exists(), "not visible from here");
    let process = Process::open(running.pid()).unwrap();
    let mapping = code_of(&process, "inside");
    let module = Module::open(&process, &mapping).unwrap();
    assert_eq!(std::fs::read(module.path()).unwrap(), std::fs::read(&program).unwrap());
    let by_path = open_by_path(&process, &mapping).unwrap();
    assert_eq!(by_path.metadata().unwrap().ino(), module.identity().inode);
}
