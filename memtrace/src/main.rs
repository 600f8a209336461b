//! The `memtrace` command: everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    memtrace::cli::main()
}
