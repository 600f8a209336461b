//! Which tests run in the machine, and which do not.

use serde::{Deserialize, Serialize};

/// The plan's file in the machine.
pub const FILE: &str = "/plan.json";

/// Tests that do not run in the machine, by the beginning of their names, and why.
const LEFT_OUT: [(&str, &str); 56] = [
    ("e2e support::", NO_KERNEL),
    ("e2e allocators::", LIBRARIES),
    ("e2e real_", LIBRARIES),
    ("e2e fixtures::every_fixture_compiles", COMPILER),
    ("e2e fixtures::every_rule_runs_untraced", NO_KERNEL),
    ("e2e fixtures::the_truth_has_the_breadth", NO_KERNEL),
    ("oracle the_programs_compile", COMPILER),
    ("oracle the_cpp_compiler", COMPILER),
    ("oracle python_of_the_distribution", "one Python is brought along"),
    ("oracle perl", OTHERS_DO),
    ("oracle sqlite", OTHERS_DO),
    ("doctor selftest_", "slow: the check \"selftest\" is the same without what is measured, which emulation distorts"),
    (
        "e2e harm::sigkill_at_any_moment",
        "slow: the check \"killed while tracing\" is the same with 8 kills in place of 50",
    ),
    ("e2e harm::sigkill_leaves_children", "slow: ten kills of a memtrace that has just started"),
    ("e2e limits::a_full_stack_table", OTHERS_DO),
    ("e2e command::a_command_that_succeeds", OTHERS_DO),
    ("e2e outputs::two_outputs", NO_KERNEL),
    ("e2e outputs::without_outputs", NO_KERNEL),
    ("e2e outputs::folded_goes", NO_KERNEL),
    ("e2e outputs::a_duration", NO_KERNEL),
    ("e2e outputs::names_in_a_library", OTHERS_DO),
    ("e2e places::a_hostile_command_name", NO_KERNEL),
    ("e2e stacks::the_first_call_through", OTHERS_DO),
    ("e2e stacks::indirect_calls", OTHERS_DO),
    ("e2e truth::a_library_and_threads", OTHERS_DO),
    ("e2e truth::every_function_path", OTHERS_DO),
    ("e2e rules::blocks_of_zero_bytes", OTHERS_DO),
    ("e2e rules::calls_that_give_no_block", OTHERS_DO),
    ("e2e rules::free_of_null", OTHERS_DO),
    ("e2e rules::realloc_to_zero", OTHERS_DO),
    ("e2e rules::an_array_size_that_wraps", OTHERS_DO),
    ("e2e rules::a_longjmp_out_of_realloc_does_not_blind_the_frame", OTHERS_DO),
    ("e2e rules::a_longjmp_out_of_realloc_does_not_blind_shallower", OTHERS_DO),
    ("e2e names::", NO_KERNEL),
    ("e2e names_apart::", NO_KERNEL),
    ("e2e pages::", "slow, others do the same in the kernel, and files are memory there"),
    ("e2e pages_exact::", "before Linux 6.2 the kernel reports 64 pages at a time"),
    ("e2e pages_life::", OTHERS_DO),
    ("e2e pages_refused::", NO_KERNEL),
    ("e2e reconcile::", OTHERS_DO),
    ("e2e reconcile_programs::", "programs that are not brought along"),
    ("e2e space::", OTHERS_DO),
    ("e2e stacks_bounds::", NO_KERNEL),
    ("e2e stacks_late::", "slow: millions of calls"),
    ("e2e stacks_loader::", OTHERS_DO),
    ("e2e targets_blind::", LIBRARIES),
    ("e2e targets_chosen::", "control groups and namespaces that are not set up there"),
    ("e2e targets_filter::probes_in_all", OTHERS_DO),
    ("e2e targets_life::a_process_that_executes_itself", "slow: a hundred programs"),
    ("e2e targets_life::a_command_that_goes_on", OTHERS_DO),
    ("e2e targets_servers::", LIBRARIES),
    ("e2e targets_split::threads", NO_KERNEL),
    ("e2e targets::", NO_KERNEL),
    ("e2e rules::as_many_calls", "slow: millions of calls"),
    ("e2e rules::an_address_freed_by_one_thread", "slow: hundreds of thousands of calls"),
    ("e2e rules::thousands_of_short_threads", "slow: thousands of threads"),
];

/// Of those, the ones that do run, by the beginning of their names.
const KEPT: [&str; 6] = [
    "e2e pages::writes_by_many_paths_and",
    "e2e pages::pages_moved_by_mremap",
    "e2e pages_life::children_are_followed",
    "e2e space::ranges_",
    "e2e targets::code_of_two",
    "e2e targets_chosen::a_process_that_a_filter",
];

/// Reasons.
const COMPILER: &str = "needs a compiler";
const LIBRARIES: &str = "programs and libraries that are not brought along";
const NO_KERNEL: &str = "does not depend on the kernel";
const OTHERS_DO: &str = "slow, and others do the same in the kernel";

/// What the machine's first process shall run.
#[derive(Debug, Default, Deserialize, Serialize)]
pub struct Plan {
    /// In the order in which they run.
    pub suites: Vec<Suite>,
    /// For the tests' environment.
    pub variables: Vec<(String, String)>,
}

/// Tests of one program.
#[derive(Debug, Deserialize, Serialize)]
pub struct Suite {
    /// Name of cargo's test target.
    pub name: String,
    /// The test program, at the same place as on the machine that built it: it knows paths beside it.
    pub program: String,
    /// Where it is started.
    pub directory: String,
    pub tests: Vec<String>,
}

/// A test that does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    pub name: String,
    pub why: &'static str,
}

/// A test's name among those of all suites.
pub fn full_name(suite: &str, test: &str) -> String {
    format!("{suite} {test}")
}

/// Takes the tests that are left out from a suite.
pub fn leave_out(suite: &mut Suite) -> Vec<LeftOut> {
    let mut left_out = Vec::new();
    let Suite { name, tests, .. } = suite;
    tests.retain(|test| {
        let name = full_name(name, test);
        let kept = KEPT.iter().any(|start| name.starts_with(start));
        let found = LEFT_OUT.iter().find(|(start, _)| !kept && name.starts_with(start));
        left_out.extend(found.map(|(_, why)| LeftOut { name, why }));
        found.is_none()
    });
    left_out
}

impl Plan {
    /// Keeps the tests only whose names have one of `parts` in them.
    pub fn keep_only(&mut self, parts: &[String]) {
        for Suite { name, tests, .. } in &mut self.suites {
            tests.retain(|test| parts.iter().any(|part| full_name(name, test).contains(part)));
        }
    }
}

/// Beginnings of names that none of `left_out` has: their tests are gone.
pub fn stale(left_out: &[LeftOut]) -> Vec<&'static str> {
    let starts = LEFT_OUT.iter().map(|(start, _)| *start);
    starts.filter(|start| !left_out.iter().any(|test| test.name.starts_with(start))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_left_out_by_the_beginning_of_their_names() {
        let mut suite = Suite {
            name: "e2e".into(),
            program: String::new(),
            directory: String::new(),
            tests: ["support::a", "truth::b", "fixtures::every_fixture_compiles"].map(str::to_owned).to_vec(),
        };
        let left_out = leave_out(&mut suite);
        assert_eq!(suite.tests, ["truth::b"]);
        assert_eq!(left_out.len(), 2);
        assert_eq!(left_out[0].name, "e2e support::a");
        assert!(left_out.iter().all(|test| !test.why.is_empty()));
        assert!(!stale(&left_out).contains(&"e2e support::"));
        assert!(stale(&left_out).contains(&"oracle the_programs_compile"));
    }

    #[test]
    fn some_of_those_are_kept() {
        let mut suite = Suite {
            name: "e2e".into(),
            program: String::new(),
            directory: String::new(),
            tests: ["space::ranges_a", "space::b"].map(str::to_owned).to_vec(),
        };
        assert_eq!(leave_out(&mut suite).len(), 1);
        assert_eq!(suite.tests, ["space::ranges_a"]);
    }
}
