//! The table of processes, threads or control groups that results are split by.

use std::io::{self, Write};

use crate::{
    profile::{Amount, NamedProfile},
    view::{self, Coverage, GroupRow, Which},
};

use super::{
    ViewOptions, escape,
    text::{self, Style},
    units,
};

/// Writes the groups that hold something, at most as many as call paths are shown.
pub fn write(
    profile: &NamedProfile,
    which: Which,
    options: &ViewOptions,
    coverage: &Coverage,
    out: &mut dyn Write,
) -> io::Result<()> {
    let style = Style(options.colour);
    let view::Words { title, noun, .. } = view::words(profile.subject, which);
    let one = view::groups::noun(profile.by);
    let several = plural(one);
    let order = text::order(options.unit, noun);
    writeln!(out, "{}", style.bold(&format!("{title}, {several} by {order}s")))?;
    let table = view::groups(profile, options.unit, which);
    let rows: Vec<&GroupRow<'_>> = table.rows.iter().filter(|row| row.amount != Amount::default()).collect();
    if rows.is_empty() {
        return writeln!(out, "none");
    }
    let (shown, hidden) = rows.split_at(options.top.min(rows.len()));
    let nouns = format!("{noun}s");
    let titles = ["rank", "bytes", "", "share", &nouns, one].map(str::to_owned).to_vec();
    let row = |(position, row): (usize, &&GroupRow<'_>)| {
        vec![
            (position + 1).to_string(),
            row.amount.bytes.to_string(),
            units::bytes(row.amount.bytes),
            units::percent(row.share),
            row.amount.count.to_string(),
            escape::text(&row.group.label).into_owned(),
        ]
    };
    let cells: Vec<Vec<String>> = std::iter::once(titles).chain(shown.iter().enumerate().map(row)).collect();
    let widths = text::widths(&cells);
    for line in &cells {
        writeln!(out, "{}", text::align(line, &widths))?;
    }
    let numbers = |amount: Amount| {
        format!("{} B ({}) in {}", amount.bytes, units::bytes(amount.bytes), units::counted(amount.count, noun))
    };
    if !hidden.is_empty() {
        let rest = hidden.iter().fold(Amount::default(), |sum, row| sum.plus(row.amount));
        let more = units::counted_as(hidden.len() as u64, &format!("more {one}"), &format!("more {several}"));
        writeln!(out, "… and {more} with {}", numbers(rest))?;
    }
    writeln!(
        out,
        "total {}{}, {}",
        if coverage.lower_bound { "at least " } else { "" },
        numbers(table.total),
        units::counted_as(rows.len() as u64, one, &several),
    )
}

fn plural(noun: &str) -> String {
    if noun.ends_with('s') { format!("{noun}es") } else { format!("{noun}s") }
}
