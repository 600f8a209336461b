//! A flame graph, drawn by inferno: root at the bottom, width by value, colours by name, so that one profile always
//! gives the same bytes. Names are whole: a box shows as much of one as fits, and all of it when the mouse is over it.

use std::io::{self, Write};

use inferno::flamegraph::{self, Options, Palette, color::BasicPalette};

use crate::{
    profile::NamedProfile,
    view::{self, Coverage, Unit, Which},
};

use super::{ViewOptions, escape, folded, processes, units};

/// Writes the SVG document.
pub fn write(profile: &NamedProfile, options: &ViewOptions, out: &mut dyn Write) -> io::Result<()> {
    let coverage = view::coverage(profile);
    let title = title(&coverage, options.which);
    let subtitle = subtitle(&coverage, options.which);
    let lines = folded::lines(profile, options);
    if lines.is_empty() {
        return write_empty(&title, &subtitle, view::words(profile.subject, options.which).nothing, out);
    }
    let total = lines.values().try_fold(0u64, |sum, value| sum.checked_add(*value));
    if total.is_none() {
        return Err(io::Error::other("the values add up to more than 64 bits can hold; use --unit count"));
    }
    let lines: Vec<String> = lines.into_iter().map(|(path, value)| format!("{path} {value}")).collect();
    let mut graph = Options::default();
    graph.title = title;
    graph.subtitle = Some(subtitle);
    graph.colors = Palette::Basic(BasicPalette::Mem);
    graph.deterministic = true;
    graph.count_name = match options.unit {
        Unit::Bytes => "bytes".into(),
        Unit::Count => format!("{}s", view::words(profile.subject, options.which).noun),
        Unit::Pages => "pages".into(),
    };
    flamegraph::from_lines(&mut graph, lines.iter().map(String::as_str), out)
}

/// Most processes that the title names.
const MOST_PROCESSES: usize = 3;

fn title(coverage: &Coverage, which: Which) -> String {
    let what = view::words(coverage.subject, which).title;
    format!("{what}: {}", processes::subject(coverage, MOST_PROCESSES, escape::folded))
}

/// Totals, and what makes them doubtful, in one line.
fn subtitle(coverage: &Coverage, which: Which) -> String {
    let total = match which {
        Which::Unfreed => coverage.unfreed,
        Which::All => coverage.allocated,
    };
    let noun = view::words(coverage.subject, which).noun;
    let mut line = String::new();
    if coverage.lower_bound {
        line.push_str("at least ");
    }
    line.push_str(&format!(
        "{} in {}, traced {}",
        units::bytes(total.bytes),
        units::counted(total.count, noun),
        units::duration(coverage.duration),
    ));
    if which == Which::Unfreed && !coverage.older.is_zero() {
        line.push_str(&format!("; blocks younger than {} left out", units::duration(coverage.older)));
    }
    if let Some(missed) = processes::missed(coverage) {
        line.push_str(&format!("; {missed}"));
    }
    let truncated: u64 = coverage.truncated.iter().map(|cut| cut.share.stacks).sum();
    if truncated != 0 {
        line.push_str(&format!("; {truncated} of {} truncated", units::counted(coverage.stacks, "stack")));
    }
    if !coverage.losses.is_empty() {
        let losses: Vec<String> = coverage.losses.iter().map(|loss| format!("{} {}", loss.count, loss.name)).collect();
        line.push_str(&format!("; lost: {}", losses.join(", ")));
    }
    if let Some(growth) = coverage.missed_growth() {
        line.push_str(&format!("; no probed function was called while RSS grew by {}", units::bytes(growth)));
    }
    line
}

/// Nothing to draw is a result too, and inferno has no picture for it.
fn write_empty(title: &str, subtitle: &str, nothing: &str, out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        r##"<?xml version="1.0" encoding="UTF-8" standalone="no"?>
<svg version="1.1" width="1200" height="120" viewBox="0 0 1200 120" xmlns="http://www.w3.org/2000/svg">
<rect width="1200" height="120" fill="#eef2ee"/>
<g font-family="monospace" font-size="12" text-anchor="middle">
<text x="600" y="30" font-size="17">{}</text>
<text x="600" y="60">{}</text>
<text x="600" y="90">{nothing}</text>
</g>
</svg>"##,
        escape::xml(title),
        escape::xml(subtitle),
    )
}
