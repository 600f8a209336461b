//! The programs.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

/// Variable that names a directory of compiled programs: those in it are used as they are, others are compiled into it.
const DIRECTORY: &str = "MEMTRACE_FIXTURES";

/// A program that runs by itself and ends with status 0.
pub struct Program {
    pub name: &'static str,
    pub command: Vec<OsString>,
    /// Of how many calls one gives a sample.
    pub every: u32,
}

fn program(name: &'static str, every: u32, command: &[&str]) -> Program {
    Program { name, command: command.iter().map(OsString::from).collect(), every }
}

/// What a command prints. Panics with its words if it fails.
fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} failed: {errors}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// The interpreter behind `python3`, which can be a script that chooses one.
pub fn own_python() -> PathBuf {
    output(Command::new("python3").args(["-c", "import sys; print(sys.executable)"])).into()
}

/// Another one, if there is.
pub fn other_python() -> Option<PathBuf> {
    let other = Path::new("/usr/bin/python3");
    let same = || own_python().canonicalize().ok() == other.canonicalize().ok();
    (other.exists() && !same()).then(|| other.to_owned())
}

pub fn python(interpreter: PathBuf) -> Program {
    let script = fixture("oracle.py");
    Program { name: "python3", command: vec![interpreter.into(), script.into()], every: 20 }
}

pub fn sqlite() -> Program {
    program(
        "sqlite3",
        20,
        &[
            "sqlite3",
            ":memory:",
            "create table t(a integer primary key, b text, c real);
             with recursive n(i) as (select 1 union all select i + 1 from n where i < 60000)
               insert into t select i, printf('%d-%s', i * 7919 % 60000, hex(randomblob(20))), i * 0.5 from n;
             create index t_b on t(b);
             create view v as select b, count(*) as n from t group by substr(b, 1, 3);
             select count(*), sum(n) from v join t on t.b > v.b and t.a < 20;
             select count(*) from (select b, row_number() over (order by c desc) r from t) where r % 7 = 0;
             select json_group_array(a) from t where a < 5;
             delete from t where a % 3 = 0;
             vacuum;",
        ],
    )
}

pub fn perl() -> Program {
    program(
        "perl",
        20,
        &[
            "perl",
            "-e",
            r"my %h; sub deep { my ($n) = @_; return $n ? [deep($n - 1), 'x' x $n] : {} }
              for my $i (1 .. 3000) { my $s = 'key' . ($i * 7919 % 3000); $h{$s} = deep($i % 30);
              $s =~ s/(\d+)/<$1>/g; $h{$s} = [sort map { $_ ** 2 } 1 .. $i % 20]; eval { die { n => $i } } if $i % 10 == 0; }
              exit(keys %h > 3000 ? 0 : 1);",
        ],
    )
}

/// GNU's C++ compiler proper, on the C++ fixture.
pub fn compiler() -> Program {
    let compiler = output(Command::new("g++").arg("-print-prog-name=cc1plus"));
    let result = directory().join("oracle.s");
    let machine = output(Command::new("g++").arg("-print-multiarch"));
    let mut program = program("cc1plus", 200, &[&compiler, "-quiet", "-O2", "-imultiarch", &machine]);
    program.command.extend([fixture("oracle.cpp").into(), "-o".into(), result.into()]);
    program
}

pub fn cpp() -> Program {
    let mut command = Command::new("g++");
    command.args(["-O2", "-fomit-frame-pointer", "-pthread", "-std=c++17", "-o"]);
    Program { name: "C++", command: vec![compiled("oracle-cpp", &mut command, "oracle.cpp").into()], every: 20 }
}

pub fn rust() -> Program {
    let mut command = Command::new("rustc");
    command.args(["-O", "--edition", "2021", "-o"]);
    Program { name: "Rust", command: vec![compiled("oracle-rust", &mut command, "oracle.rs").into()], every: 20 }
}

/// Where the program `name` is; compiles it first, unless it was brought along.
fn compiled(name: &str, command: &mut Command, source: &str) -> PathBuf {
    let program = directory().join(name);
    let brought = std::env::var_os(DIRECTORY).is_some() && program.exists();
    if !brought {
        output(command.arg(&program).arg(fixture(source)));
    }
    program
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn directory() -> PathBuf {
    let directory = std::env::var_os(DIRECTORY)
        .map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("oracle"), PathBuf::from);
    std::fs::create_dir_all(&directory).expect("the directory for the compiled programs can be made");
    directory
}
