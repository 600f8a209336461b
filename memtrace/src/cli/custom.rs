//! The options that describe custom allocator functions.

use crate::target::{
    custom::{self, Spec},
    function::Role,
};

/// Custom allocator functions.
#[derive(Debug, clap::Args)]
pub struct Custom {
    /// Counts what FUNCTION allocates, too: "[MODULE:]FUNCTION:size=arg1", or size=arg0*arg1 or size=64, and if it does not
    /// return the block, ptr=*arg0; old=arg0 if it resizes that block. May be given many times; see the README
    #[arg(long, value_name = "SPEC", value_parser = alloc)]
    alloc: Vec<Spec>,
    /// Counts what FUNCTION frees, too: "[MODULE:]FUNCTION:ptr=arg0". May be given many times
    #[arg(long, value_name = "SPEC", value_parser = free)]
    free: Vec<Spec>,
}

impl Custom {
    /// All of them, those that allocate first.
    pub fn specs(&self) -> Vec<Spec> {
        self.alloc.iter().chain(&self.free).cloned().collect()
    }

    /// What is suspicious about them, in one sentence.
    pub fn warning(&self) -> Option<&'static str> {
        (!self.alloc.is_empty() && self.free.is_empty()).then_some(
            "--alloc without --free: what those functions allocate never counts as freed; name the function that frees it \
             with --free, or look at --all",
        )
    }
}

fn alloc(text: &str) -> Result<Spec, custom::ParseError> {
    custom::parse(Role::Allocate, text)
}

fn free(text: &str) -> Result<Spec, custom::ParseError> {
    custom::parse(Role::Free, text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        custom: Custom,
    }

    fn parse(arguments: &[&str]) -> Result<Custom, clap::Error> {
        Ok(Cli::try_parse_from(std::iter::once(&"memtrace").chain(arguments))?.custom)
    }

    #[test]
    fn specs_in_order() {
        let custom =
            parse(&["--free", "pool_put", "--alloc", "pool_get:size=arg1", "--alloc", "\"a::get\":size=8"]).unwrap();
        let specs: Vec<_> = custom.specs().iter().map(|spec| (spec.role(), spec.text().to_owned())).collect();
        let expected =
            [(Role::Allocate, "pool_get:size=arg1"), (Role::Allocate, "\"a::get\":size=8"), (Role::Free, "pool_put")];
        assert_eq!(specs, expected.map(|(role, text)| (role, text.to_owned())));
    }

    #[test]
    fn allocations_that_nothing_frees_are_suspicious() {
        assert!(
            parse(&["--alloc", "pool_get:size=arg1"]).unwrap().warning().unwrap().starts_with("--alloc without --free")
        );
        assert_eq!(parse(&["--alloc", "pool_get:size=arg1", "--free", "pool_put"]).unwrap().warning(), None);
        assert_eq!(parse(&["--free", "pool_put"]).unwrap().warning(), None);
        assert_eq!(parse(&[]).unwrap().warning(), None);
    }

    #[test]
    fn errors_name_the_option_and_mark_the_place() {
        let error = parse(&["--alloc", "pool_get:size=arg9"]).unwrap_err().to_string();
        assert!(error.contains("'--alloc <SPEC>'"), "{error}");
        assert!(error.contains("\n  pool_get:size=arg9\n                ^^^^\n  example: --alloc"), "{error}");
    }
}
