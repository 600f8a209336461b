//! Golden files: what every format makes of the sample profiles stands in `tests/data/<format>/`. With `BLESS=1` in the
//! environment they are written anew; look at the difference before committing it.

#![allow(clippy::unwrap_used)]

use std::fs;

use super::*;
use crate::{profile::By, view::sample};

fn options(which: Which, unit: Unit) -> ViewOptions {
    ViewOptions { which, unit, ..ViewOptions::default() }
}

fn written(format: Format, profile: &NamedProfile, options: &ViewOptions) -> String {
    let mut out = Vec::new();
    format.write(profile, options, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

fn check(format: Format, name: &str, content: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(format.name())
        .join(format!("{name}.{}", format.extension()));
    if std::env::var_os("BLESS").is_some_and(|value| value == "1") {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        content == expected,
        "{} differs; if the change is meant, run the tests with BLESS=1\n--- expected\n{expected}\n--- got\n{content}",
        path.display()
    );
}

/// The sample profiles in the views that are worth looking at.
fn check_all(format: Format, prepare: impl Fn(String) -> String) {
    let cases = [
        ("plain-unfreed", sample::plain(), Which::Unfreed, Unit::Bytes),
        ("plain-all-count", sample::plain(), Which::All, Unit::Count),
        ("hostile-unfreed", sample::hostile(), Which::Unfreed, Unit::Bytes),
        ("hostile-all-count", sample::hostile(), Which::All, Unit::Count),
        ("lined-unfreed", sample::lined(), Which::Unfreed, Unit::Bytes),
        ("empty", sample::empty(), Which::Unfreed, Unit::Bytes),
    ];
    let cases = cases.map(|(name, profile, which, unit)| (name.to_owned(), profile, which, unit));
    let split = By::ALL.map(|by| (format!("several-{}", by.name()), sample::several(by), Which::Unfreed, Unit::Bytes));
    for (name, profile, which, unit) in cases.into_iter().chain(split) {
        let content = written(format, &profile, &options(which, unit));
        assert_harmless(&content, &name);
        check(format, &name, &prepare(content));
    }
}

/// No character in any output can act on a terminal, but for line feeds.
fn assert_harmless(content: &str, name: &str) {
    let harmful = |character: char| {
        (character.is_control() && character != '\n' && character != '\t')
            || matches!(character, '\u{202a}'..='\u{202e}' | '\u{fffe}' | '\u{ffff}')
    };
    assert_eq!(content.find(harmful), None, "{name}");
}

#[test]
fn text_golden() {
    check_all(Format::Text, |content| content);
}

#[test]
fn folded_golden() {
    check_all(Format::Folded, |content| content);
}

#[test]
fn json_golden() {
    check_all(Format::Json, |content| content);
}

/// inferno's script and style are its own affair, and under its own licence: left out of the golden files.
fn without_script(svg: String) -> String {
    let mut svg = svg;
    for element in ["style", "script"] {
        if let Some(start) = svg.find(&format!("<{element}")) {
            let end = format!("</{element}>");
            let length = svg[start..].find(&end).unwrap() + end.len();
            svg.replace_range(start..start + length, "\n");
        }
    }
    svg.replace("</g><g>", "</g>\n<g>")
}

#[test]
fn svg_golden() {
    check_all(Format::Svg, without_script);
}

#[test]
fn svg_is_the_same_every_time() {
    let options = ViewOptions::default();
    let first = written(Format::Svg, &sample::plain(), &options);
    assert_eq!(first, written(Format::Svg, &sample::plain(), &options));
    let mut reversed = sample::plain();
    reversed.stacks.reverse();
    assert_eq!(first, written(Format::Svg, &reversed, &options));
}

/// The sum of the lines is the sum of the profile: no name can hide or add bytes.
#[test]
fn folded_lines_add_up() {
    let several = By::ALL.map(sample::several);
    for profile in [sample::plain(), sample::hostile()].into_iter().chain(several) {
        for which in Which::ALL {
            for unit in Unit::ALL {
                let content = written(Format::Folded, &profile, &options(which, unit));
                let sum: u64 =
                    content.lines().map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum();
                let expected: u64 = profile.stacks.iter().map(|stack| unit.of(which.of(stack))).sum();
                assert_eq!(sum, expected);
            }
        }
    }
}

/// What inferno draws has the same total, so it dropped no line as a comment or as malformed.
#[test]
fn svg_holds_every_byte() {
    let profile = sample::hostile();
    let svg = written(Format::Svg, &profile, &ViewOptions::default());
    let total: u64 = profile.stacks.iter().map(|stack| stack.unfreed.bytes).sum();
    assert!(svg.contains(&format!(r#"total_samples="{total}""#)), "{total}");
}

#[test]
fn json_gives_names_back_unchanged() {
    let profile = sample::hostile();
    let content = written(Format::Json, &profile, &options(Which::All, Unit::Bytes));
    let value: serde_json::Value = serde_json::from_str(&content).unwrap();
    assert_eq!(value["schema"], 1);
    assert_eq!(value["coverage"]["comm"], &*profile.processes[0].comm);
    let mut read: Vec<Vec<String>> = serde_json::from_value(
        value["stacks"].as_array().unwrap().iter().map(|stack| stack["frames"].clone()).collect(),
    )
    .unwrap();
    let mut expected: Vec<Vec<String>> =
        profile.stacks.iter().map(|stack| stack.frames.iter().map(|frame| frame.to_string()).collect()).collect();
    read.sort();
    expected.sort();
    assert_eq!(read, expected);
}

#[test]
fn text_shows_the_top_and_counts_the_rest() {
    let options = ViewOptions { top: 1, ..ViewOptions::default() };
    let content = written(Format::Text, &sample::plain(), &options);
    assert!(content.contains("… and 2 more call paths with 3145728 B (3.0 MiB) in 37 blocks"), "{content}");
    assert!(!content.contains("load_config"));
}

#[test]
fn text_colours_only_when_asked() {
    let options = ViewOptions { colour: true, ..ViewOptions::default() };
    let coloured = written(Format::Text, &sample::hostile(), &options);
    assert!(coloured.contains("\u{1b}[1m"));
    let mut plain = coloured;
    for sequence in ["\u{1b}[1m", "\u{1b}[2m", "\u{1b}[0m"] {
        plain = plain.replace(sequence, "");
    }
    assert_eq!(plain, written(Format::Text, &sample::hostile(), &ViewOptions::default()));
}

#[test]
fn formats_by_name_and_extension() {
    for format in Format::ALL {
        assert_eq!(Format::from_name(format.name()), Ok(format));
        assert_eq!(Format::from_name(format.extension()), Ok(format));
        let path = PathBuf::from(format!("a/b.{}", format.extension().to_uppercase()));
        assert_eq!(Format::from_path(&path), Ok(format));
    }
    let error = Format::from_name("xml").unwrap_err().to_string();
    assert_eq!(error, r#"there is no output format "xml"; use one of text folded svg json"#);
    let error = Format::from_path(Path::new("a\u{1b}.xml")).unwrap_err().to_string();
    assert!(error.contains(".txt .folded .svg .json") && !error.contains('\u{1b}'), "{error}");
}

#[test]
fn names_are_whole_in_the_table_when_asked_for() {
    let whole = ViewOptions { full_names: true, ..options(Which::Unfreed, Unit::Bytes) };
    let name = "void std::vector<Entry, std::allocator<Entry> >::_M_realloc_insert<Entry>(Entry&&)";
    let short = "void std::vector<…>::_M_realloc_insert<Entry>(Entry&&)";
    let table = written(Format::Text, &sample::plain(), &whole);
    assert!(table.contains(name) && !table.contains(short), "{table}");
    let table = written(Format::Text, &sample::plain(), &options(Which::Unfreed, Unit::Bytes));
    assert!(table.contains(short) && !table.contains(name), "{table}");
    for format in [Format::Folded, Format::Json] {
        assert!(written(format, &sample::plain(), &options(Which::Unfreed, Unit::Bytes)).contains(name));
    }
}

/// The member that was there before a trace could be of several processes tells the same as it did.
#[test]
fn json_still_lists_children() {
    let content = written(Format::Json, &sample::several(By::None), &ViewOptions::default());
    let value: serde_json::Value = serde_json::from_str(&content).unwrap();
    let children = value["coverage"]["children"].as_array().unwrap();
    let pids: Vec<u64> = children.iter().map(|child| child["pid"].as_u64().unwrap()).collect();
    assert_eq!(pids, [101, 102]);
    assert_eq!((&children[0]["rss"]["before"], &children[1]["state"]), (&(5u64 << 20).into(), &"ended".into()));
    let plain = written(Format::Json, &sample::plain(), &ViewOptions::default());
    let value: serde_json::Value = serde_json::from_str(&plain).unwrap();
    assert_eq!(value["coverage"]["children"], serde_json::Value::Null);
}

/// Numbers in the document lead to where they say, whatever it is split by.
#[test]
fn json_indices_lead_somewhere() {
    for by in By::ALL {
        let content = written(Format::Json, &sample::several(by), &options(Which::All, Unit::Count));
        let value: serde_json::Value = serde_json::from_str(&content).unwrap();
        let counts = |values: &serde_json::Value| -> u64 {
            values.as_array().unwrap().iter().map(|value| value["count"].as_u64().unwrap()).sum()
        };
        let (stacks, groups) = (value["stacks"].as_array().unwrap(), value["groups"].as_array().unwrap());
        assert_eq!(counts(&value["stacks"]), value["total"]["count"].as_u64().unwrap());
        assert_eq!(groups.is_empty(), by == By::None);
        for (number, group) in groups.iter().enumerate() {
            let of_group = stacks.iter().filter(|stack| stack["group"] == number);
            let sum: u64 = of_group.clone().map(|stack| stack["count"].as_u64().unwrap()).sum();
            assert_eq!(group["count"], sum, "{by:?}");
            for stack in of_group.filter(|_| by != By::Cgroup) {
                assert_eq!((&stack["process"], &stack["thread"]), (&group["process"], &group["thread"]));
                let process = &value["processes"][group["process"].as_u64().unwrap() as usize];
                assert_eq!(process["comm"], stack["comm"]);
            }
        }
    }
}

#[test]
fn text_shows_the_top_groups_and_counts_the_rest() {
    let options = ViewOptions { top: 1, ..ViewOptions::default() };
    let content = written(Format::Text, &sample::several(By::Process), &options);
    let rest = "… and 3 more processes with 1053372 B (1.0 MiB) in 48 blocks\ntotal at least 22029088 B";
    assert!(content.contains(rest), "{content}");
}
