//! The table for people: call paths ranked by what they hold, then the coverage header. If results are split, the groups come
//! first.
//!
//! Every row is a line of numbers, the frame that says most with the allocator function, and then all callers, innermost
//! first.

use std::io::{self, Write};

use crate::{
    profile::{By, NamedProfile, NamedStack, Resident, Subject},
    view::{self, Coverage, LeakRow, LeakTable, Owners, Unit, Which, frame},
};

use super::{ViewOptions, escape, group_table, header, units};

const BOLD: &str = "\u{1b}[1m";
const DIM: &str = "\u{1b}[2m";
const RESET: &str = "\u{1b}[0m";

/// Writes one table and the coverage header.
pub fn write(profile: &NamedProfile, options: &ViewOptions, out: &mut dyn Write) -> io::Result<()> {
    write_views(profile, &[options.which], options, out)
}

/// Writes a table for each of `views` ([`ViewOptions::which`] is ignored) and the coverage header once.
pub fn write_views(
    profile: &NamedProfile,
    views: &[Which],
    options: &ViewOptions,
    out: &mut dyn Write,
) -> io::Result<()> {
    let coverage = view::coverage(profile);
    for which in views {
        if profile.by != By::None {
            group_table::write(profile, *which, options, &coverage, out)?;
            writeln!(out)?;
        }
        let table = view::leaks(profile, options.unit, *which);
        write_table(&table, &coverage, Owners::new(profile), options, out)?;
        writeln!(out)?;
    }
    header::write(&coverage, out)
}

fn write_table(
    table: &LeakTable<'_>,
    coverage: &Coverage,
    owners: Owners<'_>,
    options: &ViewOptions,
    out: &mut dyn Write,
) -> io::Result<()> {
    let style = Style(options.colour);
    let view::Words { title, noun, .. } = view::words(table.subject, table.which);
    let order = order(table.unit, noun);
    writeln!(out, "{}", style.bold(&format!("{title}, call paths by {order}s")))?;
    if table.rows.is_empty() {
        return writeln!(out, "none");
    }
    let (shown, hidden) = table.rows.split_at(options.top.min(table.rows.len()));
    let cells: Vec<Vec<String>> = std::iter::once(titles(table))
        .chain(shown.iter().enumerate().map(|(position, row)| cells(table, position + 1, row)))
        .collect();
    let widths = widths(&cells);
    for (position, line) in cells.iter().enumerate() {
        let numbers = align(line, &widths);
        match position.checked_sub(1) {
            None => writeln!(out, "{numbers}")?,
            Some(row) => {
                writeln!(out, "{}", style.bold(&numbers))?;
                let has_leaf = !matches!(table.subject, Subject::Faults | Subject::Exact | Subject::Touched);
                let stack = shown[row].stack;
                write_path(stack, owners.of(stack).as_deref(), has_leaf, options.full_names, style, out)?;
            }
        }
    }
    if !hidden.is_empty() {
        let bytes = hidden.iter().fold(0u64, |sum, row| sum.saturating_add(row.amount.bytes));
        let count = hidden.iter().fold(0u64, |sum, row| sum.saturating_add(row.amount.count));
        writeln!(
            out,
            "… and {} with {bytes} B ({}) in {}",
            units::counted(hidden.len() as u64, "more call path"),
            units::bytes(bytes),
            units::counted(count, noun),
        )?;
    }
    writeln!(
        out,
        "total {}{} B ({}) in {}, {}",
        if coverage.lower_bound { "at least " } else { "" },
        table.total.bytes,
        units::bytes(table.total.bytes),
        units::counted(table.total.count, noun),
        units::counted(table.rows.len() as u64, "call path"),
    )
}

/// What a unit orders by, one of it.
pub(super) const fn order(unit: Unit, noun: &'static str) -> &'static str {
    match unit {
        Unit::Bytes => "byte",
        Unit::Count => noun,
        Unit::Pages => "page",
    }
}

/// Numbers first, aligned right; the last column is aligned left.
fn titles(table: &LeakTable<'_>) -> Vec<String> {
    let noun = format!("{}s", view::words(table.subject, table.which).noun);
    let own: &[&str] = match (table.subject, table.which) {
        (Subject::Heap, Which::Unfreed) => &["oldest", "growth"],
        (Subject::Heap, Which::All) => &["unfreed bytes", ""],
        (Subject::Faults, Which::Unfreed) => &["kind"],
        (Subject::Faults, Which::All) => &["resident pages", ""],
        (Subject::Exact, _) => &["kind", "taken away"],
        (Subject::Touched, _) => &[""],
        (Subject::Mappings, Which::Unfreed) => &["oldest", "resident"],
        (Subject::Mappings, Which::All) => &["mapped bytes", ""],
    };
    let titles = ["rank", "bytes", "", "share", &noun].into_iter().chain(own.iter().copied());
    titles.map(str::to_owned).collect()
}

fn cells(table: &LeakTable<'_>, rank: usize, row: &LeakRow<'_>) -> Vec<String> {
    let mut cells = vec![
        rank.to_string(),
        row.amount.bytes.to_string(),
        units::bytes(row.amount.bytes),
        units::percent(row.share),
        row.amount.count.to_string(),
    ];
    match (table.subject, table.which) {
        (Subject::Heap, Which::Unfreed) => {
            cells.push(row.oldest.map(units::duration).unwrap_or_default());
            let rate = row.growth.per_second.map(units::rate).unwrap_or_default();
            let growth = format!("{}  {rate}", units::sparkline(row.growth.series));
            cells.push(growth.trim().to_owned());
        }
        (Subject::Faults, Which::Unfreed) => cells.push(row.stack.resident.map(kinds).unwrap_or_default()),
        (Subject::Exact, _) => {
            cells.push(row.stack.resident.map(kinds).unwrap_or_default());
            cells.push(units::bytes(row.stack.freed.bytes));
        }
        (Subject::Touched, _) => cells.push(String::new()),
        (Subject::Mappings, Which::Unfreed) => {
            cells.push(row.oldest.map(units::duration).unwrap_or_default());
            cells.push(row.stack.resident.map(|resident| units::bytes(resident.total())).unwrap_or_default());
        }
        (Subject::Heap | Subject::Mappings, Which::All) => {
            cells.push(row.stack.unfreed.bytes.to_string());
            cells.push(String::new());
        }
        (Subject::Faults, Which::All) => {
            cells.push(row.stack.unfreed.count.to_string());
            cells.push(String::new());
        }
    }
    cells
}

/// What the pages of a call path are: `anonymous`, or `anonymous 30.9 %, file 69.1 %`.
fn kinds(resident: Resident) -> String {
    let parts = [("anonymous", resident.anonymous), ("file", resident.file), ("shared", resident.shared)];
    let there: Vec<(&str, u64)> = parts.into_iter().filter(|(_, bytes)| *bytes > 0).collect();
    let name = |(name, bytes): &(&str, u64)| match there.len() {
        1 => (*name).to_owned(),
        _ => format!("{name} {}", units::percent(view::share(*bytes, resident.total()))),
    };
    there.iter().map(name).collect::<Vec<_>>().join(", ")
}

pub(super) fn widths(lines: &[Vec<String>]) -> Vec<usize> {
    let columns = lines.first().map_or(0, Vec::len);
    (0..columns).map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0)).collect()
}

pub(super) fn align(cells: &[String], widths: &[usize]) -> String {
    let mut line = String::new();
    for (column, (cell, width)) in cells.iter().zip(widths).enumerate() {
        if column + 1 == cells.len() {
            line.push_str(&format!("  {cell}"));
        } else if column == 0 {
            line.push_str(&format!("{cell:>width$}"));
        } else {
            line.push_str(&format!("  {cell:>width$}"));
        }
    }
    line.truncate(line.trim_end().len());
    line
}

/// The headline with whose the path is, then every frame, innermost first; the last is not one of them if it is a function or system call that was
/// called. A headline that is the innermost frame is not repeated.
fn write_path(
    stack: &NamedStack,
    owner: Option<&str>,
    has_leaf: bool,
    full_names: bool,
    style: Style,
    out: &mut dyn Write,
) -> io::Result<()> {
    let Some(last) = stack.frames.len().checked_sub(1) else {
        return Ok(());
    };
    let label = |position| {
        let label = if full_names { frame::label(stack, position) } else { frame::short_label(stack, position) };
        escape::text(&label).into_owned()
    };
    let owner = owner.map(|owner| format!("  in {}", escape::text(owner))).unwrap_or_default();
    let callers = stack.frames.len() - usize::from(has_leaf);
    let mut rest = callers;
    match view::headline(&stack.frames, has_leaf) {
        Some(headline) => {
            let via = if has_leaf { format!("  via {}", label(last)) } else { String::new() };
            writeln!(out, "      {}{via}{owner}", style.bold(&label(headline)))?;
            if headline + 1 == callers {
                rest = headline;
            }
        }
        None => writeln!(out, "      {}{owner}", style.bold(&label(last)))?,
    }
    for position in (0..rest).rev() {
        writeln!(out, "        {}", style.dim(&label(position)))?;
    }
    Ok(())
}

/// Whether to colour.
#[derive(Clone, Copy)]
pub(super) struct Style(pub bool);

impl Style {
    pub fn bold(self, text: &str) -> String {
        self.wrap(BOLD, text)
    }

    fn dim(self, text: &str) -> String {
        self.wrap(DIM, text)
    }

    fn wrap(self, start: &str, text: &str) -> String {
        if self.0 { format!("{start}{text}{RESET}") } else { text.to_owned() }
    }
}
