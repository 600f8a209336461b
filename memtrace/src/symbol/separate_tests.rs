//! Tests of where debug files are looked for, and of which are believed.

#![allow(clippy::unwrap_used)]

use std::{fs, os::unix::fs::symlink, process::Command};

use super::*;
use crate::{
    symbol::symbols::Symbols,
    target::{image::DebugLink, test_program::Workshop},
};

const SOURCE: &str = "
__attribute__((noinline)) static int hidden(int x) { return x + 1; }
int main(int argc, char **argv) { (void)argv; return hidden(argc); }
";

/// A stripped program with a debug link, and its debug file.
struct Split {
    workshop: Workshop,
    stripped: PathBuf,
    debug: PathBuf,
}

fn objcopy(arguments: &[&str], from: &Path, to: &Path) {
    let done = Command::new("objcopy").args(arguments).arg(from).arg(to).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

fn split(flags: &[&str]) -> Split {
    let workshop = Workshop::new();
    let program = workshop.compile("program", SOURCE, &[&["-O1", "-g"], flags].concat());
    let (debug, stripped) = (program.with_extension("debug"), program.with_extension("stripped"));
    objcopy(&["--only-keep-debug"], &program, &debug);
    objcopy(&["--strip-all", &format!("--add-gnu-debuglink={}", debug.display())], &program, &stripped);
    Split { workshop, stripped, debug }
}

const ID: &str = "-Wl,--build-id=0xfeed0001feed0002feed0003";
const NO_ID: &str = "-Wl,--build-id=none";

impl Split {
    /// A root directory with the debug file at `path` in it.
    fn root(&self, path: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::copy(&self.debug, path).unwrap();
        root
    }

    /// Whether the debug file is found for the program at `/usr/lib/app/program`.
    fn found_in(&self, root: &Path) -> bool {
        let places = Places { roots: vec![Root::at(root).unwrap()], server: None };
        self.find(&places).debug.is_some()
    }

    fn find(&self, places: &Places) -> Separate {
        places.find(&Image::open(&self.stripped).unwrap(), Path::new("/usr/lib/app/program"))
    }
}

#[test]
fn where_debug_files_are() {
    for (flag, paths) in [
        (ID, &["usr/lib/debug/.build-id/fe/ed0001feed0002feed0003.debug"][..]),
        (
            NO_ID,
            &[
                "usr/lib/app/program.debug",
                "usr/lib/app/.debug/program.debug",
                "usr/lib/debug/usr/lib/app/program.debug",
                "usr/lib/debug/lib/app/program.debug",
            ],
        ),
    ] {
        let split = split(&[flag]);
        for path in paths {
            assert!(split.found_in(split.root(path).path()), "{path}");
        }
        for path in ["usr/lib/program.debug", "program.debug", "usr/lib/debug/program.debug"] {
            assert!(!split.found_in(split.root(path).path()), "{path}");
        }
    }
}

/// One that was made of another build is worse than none.
#[test]
fn only_those_that_belong_to_the_program() {
    let (with, without) = (split(&[ID]), split(&[NO_ID]));
    let other = split(&["-Wl,--build-id=0x1111111122222222"]);
    let by_id = other.root("usr/lib/debug/.build-id/fe/ed0001feed0002feed0003.debug");
    assert!(!with.found_in(by_id.path()));
    let by_link = other.root("usr/lib/app/program.debug");
    assert!(!with.found_in(by_link.path()) && !without.found_in(by_link.path()));
    // The checksum is of every byte.
    let changed = without.root("usr/lib/app/program.debug");
    let path = changed.path().join("usr/lib/app/program.debug");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    assert!(!without.found_in(changed.path()));
    // A file that says no more than the program itself.
    let useless = tempfile::tempdir().unwrap();
    let place = useless.path().join("usr/lib/debug/.build-id/fe");
    fs::create_dir_all(&place).unwrap();
    fs::copy(&with.stripped, place.join("ed0001feed0002feed0003.debug")).unwrap();
    assert!(!with.found_in(useless.path()));
}

#[test]
fn the_targets_root_comes_first_and_nothing_leads_out_of_it() {
    let split = split(&[NO_ID]);
    let host = split.root("usr/lib/app/program.debug");
    let target = tempfile::tempdir().unwrap();
    let directory = target.path().join("usr/lib/app");
    fs::create_dir_all(&directory).unwrap();
    let roots = |paths: &[&Path]| {
        let roots = paths.iter().map(|path| Root::at(path).unwrap()).collect();
        Places { roots, server: None }
    };
    // Absolute, to a file that exists only outside.
    symlink(host.path().join("usr/lib/app/program.debug"), directory.join("program.debug")).unwrap();
    assert!(split.find(&roots(&[target.path()])).debug.is_none());
    // memtrace's own root is looked at after it.
    assert!(split.find(&roots(&[target.path(), host.path()])).debug.is_some());
    // A link that stays inside.
    fs::remove_file(directory.join("program.debug")).unwrap();
    fs::copy(&split.debug, target.path().join("real")).unwrap();
    symlink("../../../../../../real", directory.join("program.debug")).unwrap();
    assert!(split.find(&roots(&[target.path()])).debug.is_some());
    // Where both have one, the target's is taken.
    let both = split.find(&roots(&[target.path(), host.path()]));
    fs::remove_file(host.path().join("usr/lib/app/program.debug")).unwrap();
    assert_eq!(both.debug.unwrap().data(), fs::read(&split.debug).unwrap());
    drop(split.workshop);
}

#[test]
fn names_of_links_that_are_paths() {
    let link = |name: &[u8]| DebugLink { name: name.to_vec(), crc: 0 };
    for name in [&b""[..], b".", b"..", b"../x", b"/etc/passwd", b"a/b"] {
        assert_eq!(by_link(&link(name), Path::new("/usr/bin/x")), None, "{name:?}");
    }
    let paths = by_link(&link(b"x"), Path::new("/usr/bin/x")).unwrap();
    let expected = ["/usr/bin/.debug/x", "usr/lib/debug/usr/bin/x", "usr/lib/debug/bin/x"];
    assert_eq!(paths, expected.map(PathBuf::from), "a program is not its own debug file");
    assert_eq!(by_link(&link(b"y"), Path::new("/usr/bin/x")).unwrap().len(), 4);
    let short = by_build_id(&[0xab, 0xcd]);
    assert_eq!(short, Path::new("usr/lib/debug/.build-id/ab/cd.debug"));
}

/// A function whose name is in another file, as dwz leaves it: both files written by hand.
#[test]
fn debug_information_that_continues_in_another_file() {
    let workshop = Workshop::new();
    let assemble = |name: &str, source: &str, id: &str| {
        let (file, out) = (workshop.0.path().join(format!("{name}.s")), workshop.0.path().join(name));
        fs::write(&file, source).unwrap();
        let id = format!("-Wl,--build-id={id}");
        let done = Command::new("cc")
            .args(["-nostdlib", "-shared", "-x", "assembler"])
            .arg(&file)
            .arg("-o")
            .arg(&out)
            .arg(id)
            .output()
            .unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        out
    };
    // DW_TAG_compile_unit 0x11, DW_TAG_subprogram 0x2e, DW_TAG_partial_unit 0x3c; DW_AT_name 3, DW_AT_low_pc 0x11, DW_AT_high_pc 0x12;
    // DW_FORM_addr 1, DW_FORM_data8 7, DW_FORM_GNU_strp_alt 0x1f21 (uleb128 a1 3e).
    let program = assemble(
        "program.so",
        r#"
        .text
start:  nop
        nop
end:
        .section .debug_abbrev
        .byte 1, 0x11, 1, 0x11, 1, 0x12, 7, 0, 0
        .byte 2, 0x2e, 0, 3, 0xa1, 0x3e, 0x11, 1, 0x12, 7, 0, 0, 0
        .section .debug_info
        .long last - first
first:  .value 4
        .long 0
        .byte 8, 1
        .quad start, end - start
        .byte 2
        .long 1
        .quad start, end - start
        .byte 0
last:
        .section .gnu_debugaltlink
        .asciz "../../../../common.debug"
        .quad 0x8877665544332211
"#,
        "none",
    );
    let continued = "
        .section .debug_str
        .byte 0
        .asciz \"from_elsewhere\"
        .section .debug_abbrev
        .byte 1, 0x3c, 0, 0, 0, 0
        .section .debug_info
        .long 8
        .value 4
        .long 0
        .byte 8, 1
";
    let common = assemble("common.so", continued, "0x1122334455667788");
    let other = assemble("other.so", continued, "0x1122334455667799");
    let module = Image::open(&program).unwrap();
    let name = |root: &Path| {
        let places = Places { roots: vec![Root::at(root).unwrap()], server: None };
        let found = places.find(&module, Path::new("/usr/lib/app/program.so"));
        let sections = crate::symbol::dwarf::Sections::read(&module, found.continued.as_ref()).unwrap();
        let information = sections.index().unwrap();
        let text = module.address_of(0x1000).unwrap();
        let functions = information.find(text).map(|found| found.functions).unwrap_or_default();
        (
            functions.first().copied().flatten().map(|name| String::from_utf8_lossy(name).into_owned()),
            found.problems.len(),
        )
    };
    let root = tempfile::tempdir().unwrap();
    // What a relative path begins at has to be there.
    fs::create_dir_all(root.path().join("usr/lib/app")).unwrap();
    assert_eq!(name(root.path()), (None, 1));
    fs::copy(&other, root.path().join("common.debug")).unwrap();
    assert_eq!(name(root.path()), (None, 1), "of another build ID");
    let found = (Some("from_elsewhere".to_owned()), 0);
    // The relative path ends at the root.
    fs::copy(&common, root.path().join("common.debug")).unwrap();
    assert_eq!(name(root.path()), found);
    fs::remove_file(root.path().join("common.debug")).unwrap();
    let by_id = root.path().join("usr/lib/debug/.build-id/11");
    fs::create_dir_all(&by_id).unwrap();
    fs::copy(&common, by_id.join("22334455667788.debug")).unwrap();
    assert_eq!(name(root.path()), found);
    assert!(Symbols::of(&[&module]).find(0).is_none());
}
