//! What was probed, for the coverage header.

use crate::{
    profile::{AttachedLate, Subject},
    view::{Coverage, ProbedModule},
};

use super::{escape, units};

/// Most files with a line of their own.
const MOST_FILES: usize = 12;
/// Most functions that one line names: more than any allocator known has.
const MOST_FUNCTIONS: usize = 64;

/// Lines with their labels: the files through which most was allocated, and those that were loaded during the trace.
pub fn lines(coverage: &Coverage) -> Vec<(&'static str, String)> {
    let probed = &coverage.probed;
    let (shown, rest) = probed.split_at(MOST_FILES.min(probed.len()));
    let mut lines: Vec<String> = shown.iter().map(line).collect();
    if probed.is_empty() && coverage.subject == Subject::Heap {
        lines.push("nothing".into());
    }
    if !rest.is_empty() {
        let functions: usize = rest.iter().map(|module| module.functions.len()).sum();
        lines.push(format!(
            "… and {}, {}",
            units::counted(rest.len() as u64, "more file"),
            units::counted(functions as u64, "function")
        ));
    }
    if coverage.everywhere {
        lines.push(
            "in every process that maps these files: each of their calls takes the kernel's trap (--all-processes)"
                .into(),
        );
    }
    labelled("probed", lines).chain(labelled("late", late(coverage))).collect()
}

fn labelled(label: &'static str, lines: Vec<String>) -> impl Iterator<Item = (&'static str, String)> {
    lines.into_iter().enumerate().map(move |(position, line)| (if position == 0 { label } else { "" }, line))
}

fn line(module: &ProbedModule) -> String {
    let (shown, rest) = module.functions.split_at(MOST_FUNCTIONS.min(module.functions.len()));
    let functions: Vec<_> = shown.iter().map(|function| escape::text(function)).collect();
    let more = match rest.len() {
        0 => String::new(),
        more => format!(" … and {more} more"),
    };
    format!("{}: {}{more}", escape::text(&module.module), functions.join(" "))
}

fn late(coverage: &Coverage) -> Vec<String> {
    let all = &coverage.attached_late;
    let (shown, rest) = all.split_at(MOST_FILES.min(all.len()));
    let mut lines: Vec<String> = shown.iter().map(|late| late_line(coverage, late)).collect();
    if !rest.is_empty() {
        let functions = rest.iter().fold(0u64, |sum, late| sum.saturating_add(late.functions));
        lines.push(format!(
            "… and {} that were loaded during the trace, {}",
            units::counted(rest.len() as u64, "more file"),
            units::counted(functions, "function")
        ));
    }
    lines
}

fn late_line(coverage: &Coverage, late: &AttachedLate) -> String {
    let process = coverage.processes.get(late.process);
    let process = process.map(|process| format!(" in {} (pid {})", escape::text(&process.comm), process.pid));
    format!(
        "{}{}: {}, from {:.3} s on; what it did before is not seen and in no total",
        escape::text(&late.module),
        process.unwrap_or_default(),
        units::counted(late.functions, "function"),
        late.since.as_secs_f64()
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        profile::NamedProfile,
        view::{self, sample},
    };

    fn text(profile: &NamedProfile) -> Vec<String> {
        lines(&view::coverage(profile)).into_iter().map(|(label, line)| format!("{label}|{line}")).collect()
    }

    #[test]
    fn files_through_which_most_was_allocated_come_first() {
        let mut profile = sample::plain();
        let files = (0..20).map(|file| format!("lib{file}.so"));
        profile.functions = files.flat_map(|file| ["f", "g"].map(|name| sample::function(name, &file))).collect();
        profile.through = (0..40).map(|function| sample::amount(u64::from(function == 37), 1)).collect();
        let found = text(&profile);
        assert_eq!(found.len(), 13);
        assert_eq!(found[0], "probed|lib18.so: f g");
        assert_eq!(found[1], "|lib0.so: f g");
        assert_eq!(found[12], "|… and 8 more files, 16 functions");
        profile.functions.truncate(26);
        assert_eq!(text(&profile)[12], "|… and 1 more file, 2 functions");
        profile.functions = (0..66).map(|number| sample::function(&format!("f{number}"), "a.so")).collect();
        let [line] = &text(&profile)[..] else { panic!("{profile:?}") };
        assert!(line.ends_with(" f63 … and 2 more"), "{line}");
    }

    #[test]
    fn allocators_that_were_loaded_late() {
        let mut profile = sample::plain();
        profile.functions.clear();
        assert_eq!(text(&profile), ["probed|nothing"]);
        profile.functions.push(sample::function("malloc", "a.so"));
        let late = |number| AttachedLate {
            process: 0,
            module: format!("lib{number}\u{1b}.so"),
            functions: number,
            since: Duration::from_micros(3_204_400),
        };
        profile.attached_late = (1..=14).map(late).collect();
        let found = text(&profile);
        assert_eq!(
            found[1],
            "late|lib1\\u{1b}.so in server (pid 4242): 1 function, from 3.204 s on; what it did before is not seen and in \
             no total"
        );
        assert!(found[2].starts_with("|lib2\\u{1b}.so in server (pid 4242): 2 functions"), "{}", found[2]);
        assert_eq!(found[13], "|… and 2 more files that were loaded during the trace, 27 functions");
        assert!(!view::coverage(&profile).lower_bound);
    }
}
