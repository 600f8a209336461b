//! Discovery and the parsers of `/proc` with damaged input.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use super::{Random, SAMPLES, cuts, memory::Taken, memory::taken, mutant, structures};
use crate::target::{Discovery, Mapping, Process, TargetError, discover_in, mappings, mappings::FileKey, procfs};

/// Most memory that discovery may take for one of the samples, which have some 20 KiB: it keeps what it has read.
const MOST: Taken = Taken { bytes: 4 << 20, calls: 20_000 };

/// As if a process had mapped all of a file at an address.
fn mapping(path: &Path, start: u64) -> Mapping {
    let file = fs::metadata(path).unwrap();
    let device = (libc::major(file.dev()), libc::minor(file.dev()));
    Mapping {
        start,
        end: start + (1 << 20),
        executable: true,
        writable: false,
        shared: false,
        offset: 0,
        file: FileKey { device, inode: file.ino() },
        name: path.into(),
    }
}

fn own() -> Process {
    Process::open(std::process::id()).unwrap()
}

fn discovered(process: &Process, mappings: &[Mapping]) -> (Result<Discovery, TargetError>, Taken) {
    taken(|| discover_in(process, mappings))
}

/// Every cut at and beside a boundary, and damage of every kind.
#[test]
fn discovery_survives_damaged_files() {
    let directory = tempfile::tempdir().unwrap();
    let process = own();
    let whole = directory.path().join(SAMPLES[0].name);
    fs::write(&whole, &SAMPLES[0].bytes).unwrap();
    let sites = discovered(&process, &[mapping(&whole, 1 << 30)]).0.unwrap().sites;
    assert!(sites.iter().any(|site| site.function == "malloc"), "{sites:?}");
    let mut most = Taken::default();
    for sample in SAMPLES.iter() {
        let path = directory.path().join(sample.name);
        let parts = structures(&sample.bytes);
        let mut look = |bytes: &[u8], what: &dyn std::fmt::Debug| {
            fs::write(&path, bytes).unwrap();
            let (_, taken) = discovered(&process, &[mapping(&path, 1 << 30)]);
            assert!(taken.max(MOST) == MOST, "{} with {what:?}: {taken:?}", sample.name);
            most = most.max(taken);
        };
        for end in cuts(&sample.bytes, &parts) {
            look(&sample.bytes[..end], &end);
        }
        for seed in 0..150 {
            look(&mutant(&sample.bytes, &parts, seed), &seed);
        }
    }
    println!("at most {most:?}");
}

/// Whatever else a process maps, its allocator is found.
#[test]
fn damaged_files_hide_no_allocator() {
    let directory = tempfile::tempdir().unwrap();
    let process = own();
    let libraries = mappings::read(&process).unwrap();
    // Without the test program itself, whose symbols are many.
    let libraries: Vec<Mapping> =
        libraries.into_iter().filter(|mapping| mapping.path() != Some(process.exe())).collect();
    let sites = |discovery: Discovery| {
        let site = |site: &crate::target::ProbeSite| {
            (discovery.modules[site.module].name().to_owned(), site.placement.offset, site.function.to_string())
        };
        let mut sites: Vec<_> = discovery.sites.iter().map(site).collect();
        sites.retain(|(module, ..)| module == "libc.so.6");
        sites.sort();
        sites
    };
    let alone = sites(discover_in(&process, &libraries).unwrap());
    assert!(alone.iter().any(|(_, _, function)| function == "malloc"), "{alone:?}");
    let mut all = libraries.clone();
    let damaged: Vec<PathBuf> = (0..200)
        .map(|seed| {
            let sample = &SAMPLES[seed % SAMPLES.len()];
            let path = directory.path().join(format!("lib{seed}.so"));
            fs::write(&path, mutant(&sample.bytes, &structures(&sample.bytes), seed as u64)).unwrap();
            path
        })
        .collect();
    all.extend(damaged.iter().enumerate().map(|(number, path)| mapping(path, (1 << 30) + (number as u64) * (1 << 21))));
    all.sort_by_key(|mapping| mapping.start);
    assert_eq!(sites(discover_in(&process, &all).unwrap()), alone);
}

/// What the kernel would never write, from what it writes.
#[test]
fn texts_of_proc_survive_damage() {
    let files = ["maps", "smaps", "status", "stat", "cgroup", "mountinfo"];
    for file in files {
        let Ok(whole) = fs::read(Path::new("/proc/self").join(file)) else { continue };
        let whole = &whole[..whole.len().min(4096)];
        for seed in 0..1000 {
            let mut random = Random::new(seed);
            let mut text = whole.to_vec();
            for _ in 0..=random.below(6) {
                let place = random.below(text.len());
                match random.below(4) {
                    0 => text.truncate(place.max(1)),
                    1 => text[place] = random.next() as u8,
                    2 => text[place] = *random.of(b" -:()\n0fF+\\"),
                    _ => {
                        let from = random.below(text.len());
                        let length = random.below(text.len() - from.max(place)) + 1;
                        text.copy_within(from..from + length, place);
                    }
                }
            }
            let size = text.len();
            let (_, taken) = taken(|| {
                if let Ok(mappings) = mappings::parse(&text) {
                    assert!(mappings.iter().all(|mapping| mapping.start < mapping.end));
                    mappings::maps_libc(&mappings);
                }
                let _ = procfs::Stat::parse(&text);
                for key in ["Name", "NSpid", "Uid", "VmRSS", "RssAnon", ""] {
                    let _ = (procfs::field(&text, key), procfs::number(&text, key, 2), procfs::kibibytes(&text, key));
                }
            });
            assert!(taken.bytes < 64 * size.max(64), "{file} with {seed}: {taken:?}");
        }
    }
}
