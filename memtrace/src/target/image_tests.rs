//! Tests of files that a C compiler and binutils make, and of what hostile ones claim.

#![allow(clippy::unwrap_used)]

use std::{fs, io::Write as _, path::PathBuf, process::Command};

use super::*;
use crate::{symbol::symbols::Symbols, target::test_program::Workshop};

const SOURCE: &str = "
__attribute__((noinline)) static int hidden(int x) { return x + 1; }
int main(int argc, char **argv) { (void)argv; return hidden(argc); }
";

fn run(command: &mut Command) {
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
}

fn objcopy(arguments: &[&str], from: &Path, to: &Path) {
    run(Command::new("objcopy").args(arguments).arg(from).arg(to));
}

/// Adds a section with a content to a file.
fn with_section(file: &Path, name: &str, content: &[u8]) -> PathBuf {
    let (data, out) = (file.with_extension("section"), file.with_extension("with"));
    fs::write(&data, content).unwrap();
    objcopy(&["--add-section", &format!("{name}={}", data.display())], file, &out);
    out
}

fn xz(content: &[u8]) -> Vec<u8> {
    packed_by(&["-c"], content)
}

fn packed_by(arguments: &[&str], content: &[u8]) -> Vec<u8> {
    let mut child = Command::new("xz")
        .args(arguments)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let content = content.to_vec();
    let writer = std::thread::spawn(move || input.write_all(&content).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success());
    output.stdout
}

/// Address of a function, by nm.
fn address(program: &Path, function: &str) -> u64 {
    let output = Command::new("nm").arg(program).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find(|line| line.split(' ').next_back() == Some(function)).unwrap();
    u64::from_str_radix(line.split(' ').next().unwrap(), 16).unwrap()
}

#[test]
fn links_and_build_ids() {
    let workshop = Workshop::new();
    let program = workshop.compile("program", SOURCE, &["-O1", "-g", "-Wl,--build-id=0x0102030405060708090a"]);
    let debug = program.with_extension("debug");
    objcopy(&["--only-keep-debug"], &program, &debug);
    let stripped = program.with_extension("stripped");
    objcopy(&["--strip-all", &format!("--add-gnu-debuglink={}", debug.display())], &program, &stripped);
    let (image, separate) = (Image::open(&stripped).unwrap(), Image::open(&debug).unwrap());
    let id: &[u8] = &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
    assert_eq!((image.build_id(), separate.build_id()), (Some(id), Some(id)));
    let link = image.debug_link().unwrap();
    assert_eq!((link.name.as_slice(), link.crc), (&b"program.debug"[..], separate.crc()));
    assert!(!image.has(".debug_info") && !image.has(".symtab"));
    assert!(separate.has(".debug_info") && separate.has(".symtab") && !separate.has(".text"));
    let hidden = address(&program, "hidden");
    assert_eq!(Symbols::of(&[&image]).find(hidden), None);
    assert_eq!(Symbols::of(&[&image, &separate]).find(hidden + 1), Some(&b"hidden"[..]));
    // No section, one without an end, one without a checksum.
    for content in [&b""[..], b"name", b"name\0\0\0\0\x01\x02\x03", b"n\0"] {
        let odd = with_section(&program, ".gnu_debuglink", content);
        assert_eq!(Image::open(&odd).unwrap().debug_link(), None, "{content:?}");
    }
}

#[test]
fn continuations() {
    let workshop = Workshop::new();
    let program = workshop.compile("program", SOURCE, &["-O1"]);
    let image = |content: &[u8]| Image::open(&with_section(&program, ".gnu_debugaltlink", content)).unwrap();
    let link = image(b"../x/common.debug\0\x01\x02\x03\x04").alt_link().unwrap();
    assert_eq!((link.path.as_slice(), link.build_id.as_slice()), (&b"../x/common.debug"[..], &[1, 2, 3, 4][..]));
    for content in [&b"x"[..], b"\0abcd", b"x\0", &[b"x\0", &[7; 65][..]].concat()] {
        assert_eq!(image(content).alt_link(), None, "{content:?}");
    }
}

#[test]
fn small_symbol_tables_are_read() {
    let workshop = Workshop::new();
    let program = workshop.compile("program", SOURCE, &["-O1"]);
    let hidden = address(&program, "hidden");
    let table = program.with_extension("table");
    objcopy(&["--only-keep-debug"], &program, &table);
    let stripped = program.with_extension("stripped");
    objcopy(&["--strip-all"], &program, &stripped);
    let packed = with_section(&stripped, ".gnu_debugdata", &xz(&fs::read(&table).unwrap()));
    let image = Image::open(&packed).unwrap();
    let mini = image.mini_debug_info().unwrap().unwrap();
    assert_eq!(Symbols::of(&[&image, &mini]).find(hidden), Some(&b"hidden"[..]));
    assert!(Image::open(&stripped).unwrap().mini_debug_info().unwrap().is_none());
}

#[test]
fn small_symbol_tables_can_not_be_bombs() {
    let workshop = Workshop::new();
    let program = workshop.compile("program", SOURCE, &["-O1"]);
    let bomb = xz(&vec![0; 20 << 20]);
    assert!(bomb.len() < 10_000);
    assert_eq!(unpack_xz(&bomb, 20 << 20).unwrap().len(), 20 << 20);
    assert!(matches!(unpack_xz(&bomb, (20 << 20) - 1), Err(ImageError::TooLarge { .. })));
    for content in [&b""[..], b"garbage", &bomb[..bomb.len() / 2], &bomb] {
        let image = Image::open(&with_section(&program, ".gnu_debugdata", content)).unwrap();
        assert!(!matches!(image.mini_debug_info(), Ok(Some(_))), "{content:?}");
    }
    // A dictionary of 1.5 GiB, as the largest that xz makes.
    let greedy = packed_by(&["--lzma2=preset=0,dict=1536MiB", "-c"], b"x");
    assert!(unpack_xz(&greedy, 1 << 20).is_err());
    let small = xz(&vec![0; 1 << 12]);
    for position in 0..small.len() {
        for bit in 0..8 {
            let mut damaged = small.clone();
            damaged[position] ^= 1 << bit;
            let _ = unpack_xz(&damaged, 1 << 20);
        }
    }
}

#[test]
fn compressed_sections() {
    let workshop = Workshop::new();
    let program = workshop.compile("program", SOURCE, &["-O1", "-g"]);
    let plain = Image::open(&program).unwrap();
    let info = plain.content(".debug_info", &mut Budget::default()).unwrap();
    assert!(info.len() > 100);
    for kind in ["zlib-gabi", "zlib-gnu", "zstd"] {
        let packed = program.with_extension(kind);
        let mut command = Command::new("objcopy");
        command.arg(format!("--compress-debug-sections={kind}")).arg(&program).arg(&packed);
        let done = command.output().unwrap();
        if !done.status.success() {
            // binutils before 2.40 have no zstd.
            assert_eq!(kind, "zstd", "{}", String::from_utf8_lossy(&done.stderr));
            continue;
        }
        let image = Image::open(&packed).unwrap();
        assert_eq!(image.content(".debug_info", &mut Budget::default()).unwrap(), info, "{kind}");
        let mut small = Budget(info.len() as u64 - 1);
        assert!(matches!(image.content(".debug_info", &mut small), Err(ImageError::TooLarge { .. })), "{kind}");
        let mut twice = Budget(info.len() as u64);
        image.content(".debug_info", &mut twice).unwrap();
        assert!(image.content(".debug_info", &mut twice).is_err(), "{kind}");
    }
}

#[test]
fn offsets_to_addresses() {
    let workshop = Workshop::new();
    let program = workshop.compile("program", SOURCE, &["-O1", "-no-pie", "-Wl,-z,noseparate-code"]);
    let image = Image::open(&program).unwrap();
    let main = address(&program, "main");
    let offset = main - image.address_of(0).unwrap();
    assert_eq!(image.address_of(offset), Some(main));
    assert_eq!(image.address_of(u64::MAX), None);
}

#[test]
fn other_files_are_refused() {
    let workshop = Workshop::new();
    let directory = workshop.0.path();
    let garbage = directory.join("garbage");
    fs::write(&garbage, [0x7f; 5000]).unwrap();
    fs::write(directory.join("empty"), "").unwrap();
    let mut other = fs::read("/proc/self/exe").unwrap();
    // e_machine: AArch64.
    (other[18], other[19]) = (183, 0);
    fs::write(directory.join("other"), &other).unwrap();
    for path in [&garbage, directory, &directory.join("missing"), &directory.join("empty"), &directory.join("other")] {
        assert!(Image::open(path).is_err(), "{path:?}");
    }
}
