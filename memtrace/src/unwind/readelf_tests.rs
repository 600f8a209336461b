//! Tables against what `readelf` of binutils says of the same files.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::Path,
    process::Command,
};

use memtrace_common::unwind::{CfaRule, RbpRule, RbxRule};

use super::{
    Reason, Table,
    fixture::{Rule, from_compiler, mapped, rbx_at, rule_at, table, vdso},
};

fn readelf(option: &str, path: &Path) -> String {
    let options = ["--wide", "--debug-dump=no-follow-links", option];
    let done = Command::new("readelf").args(options).arg(path).output().expect("binutils is installed");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// One line of a function's table.
#[derive(Clone)]
struct Line {
    pc: u64,
    cfa: String,
    columns: HashMap<String, String>,
}

struct Function {
    start: u64,
    end: u64,
    lines: Vec<Line>,
}

/// Parses `readelf --debug-dump=frames-interp`.
fn functions(text: &str) -> Vec<Function> {
    let mut functions: Vec<Function> = Vec::new();
    let mut cies: HashMap<String, Vec<Line>> = HashMap::new();
    let mut names: Vec<&str> = Vec::new();
    let mut cie = None;
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match &words[..] {
            [offset, _, _, "CIE", ..] => {
                cie = Some((*offset).to_owned());
                cies.insert((*offset).to_owned(), Vec::new());
            }
            [_, _, _, "FDE", parent, range, ..] => {
                let (start, end) = range.strip_prefix("pc=").unwrap().split_once("..").unwrap();
                let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16).unwrap());
                cie = None;
                // What a function does not repeat holds from its start.
                let mut lines = cies[parent.strip_prefix("cie=").unwrap()].clone();
                lines.iter_mut().for_each(|line| line.pc = start);
                functions.push(Function { start, end, lines });
            }
            ["LOC", "CFA", columns @ ..] => {
                names = columns.to_vec();
                if let Some(function) = functions.last_mut().filter(|_| cie.is_none()) {
                    function.lines.clear();
                }
            }
            [pc, cfa, values @ ..] if pc.len() == 16 && values.len() >= names.len() => {
                // A register is shown as "r9 (r9)".
                let values = values.iter().filter(|value| !value.starts_with('('));
                let line = Line {
                    pc: u64::from_str_radix(pc, 16).unwrap(),
                    cfa: (*cfa).to_owned(),
                    columns: names
                        .iter()
                        .zip(values)
                        .map(|(name, value)| (name.to_string(), value.to_string()))
                        .collect(),
                };
                match &cie {
                    Some(offset) => cies.get_mut(offset).unwrap().push(line),
                    None => functions.last_mut().unwrap().lines.push(line),
                }
            }
            _ => {}
        }
    }
    functions
}

/// The expressions of each function, by its start, from `readelf --debug-dump=frames`.
fn expressions(text: &str) -> HashMap<u64, BTreeSet<String>> {
    let mut all: HashMap<u64, BTreeSet<String>> = HashMap::new();
    let mut start = 0;
    for line in text.lines() {
        if let Some((_, range)) = line.split_once(" pc=") {
            start = u64::from_str_radix(range.split_once("..").unwrap().0, 16).unwrap();
        } else if line.contains("_expression") {
            all.entry(start).or_default().insert(line.trim().to_owned());
        }
    }
    all
}

/// What a line must be in a table. `Err` tells why it has no rule; the reason is left open where readelf's output does
/// not tell.
fn expected(line: &Line, rule: Rule, expressions: &BTreeSet<String>) -> Result<Rule, &'static str> {
    let column = |name: &str| line.columns.get(name).map_or("u", String::as_str);
    let said = |text: &str| expressions.iter().any(|expression| expression == text);
    if column("ra") == "u" {
        return Ok((CfaRule::End, 0, RbpRule::Same, 0));
    }
    if column("ra") == "exp" {
        let signal = [
            "DW_CFA_def_cfa_expression (DW_OP_breg7 (rsp): 160; DW_OP_deref)",
            "DW_CFA_expression: r6 (rbp) (DW_OP_breg7 (rsp): 120)",
            "DW_CFA_expression: r7 (rsp) (DW_OP_breg7 (rsp): 160)",
            "DW_CFA_expression: r16 (rip) (DW_OP_breg7 (rsp): 168)",
        ];
        assert!(signal.into_iter().all(said), "{expressions:?}");
        return Ok((CfaRule::Signal, 0, RbpRule::Same, 0));
    }
    if column("ra") != "c-8" {
        return Err("return address");
    }
    if column("rsp") != "u" {
        return Err("rsp");
    }
    let offset = |text: &str| text.parse::<i32>().unwrap();
    let (cfa, cfa_offset) = match line.cfa.split_at(3) {
        ("rsp", rest) if offset(rest) % 8 == 0 => (CfaRule::Rsp, offset(rest) / 8),
        ("rbp", rest) if offset(rest) % 8 == 0 => (CfaRule::Rbp, offset(rest) / 8),
        ("rbx", rest) if offset(rest) % 8 == 0 => (CfaRule::Rbx, offset(rest) / 8),
        ("exp", _) => {
            let text = match rule.0 {
                CfaRule::Plt => format!(
                    "DW_OP_breg7 (rsp): 8; DW_OP_breg16 (rip): 0; DW_OP_lit15; DW_OP_and; DW_OP_lit{}; DW_OP_ge; \
                     DW_OP_lit3; DW_OP_shl; DW_OP_plus",
                    rule.1
                ),
                CfaRule::DerefRbp => format!("DW_OP_breg6 (rbp): {}; DW_OP_deref", rule.1 * 8),
                CfaRule::DerefRsp => format!("DW_OP_breg7 (rsp): {}; DW_OP_deref", rule.1 * 8),
                CfaRule::DerefRbpPlus8 => {
                    format!("DW_OP_breg6 (rbp): {}; DW_OP_deref; DW_OP_plus_uconst: 8", rule.1 * 8)
                }
                CfaRule::DerefRspPlus8 => {
                    format!("DW_OP_breg7 (rsp): {}; DW_OP_deref; DW_OP_plus_uconst: 8", rule.1 * 8)
                }
                _ => return Err("expression"),
            };
            assert!(said(&format!("DW_CFA_def_cfa_expression ({text})")), "{text} in {expressions:?}");
            (rule.0, rule.1)
        }
        ("rsp" | "rbp" | "rbx", _) => return Err("offset"),
        _ => return Err("register"),
    };
    let (rbp, rbp_offset) = match column("rbp") {
        "u" | "s" => (RbpRule::Same, 0),
        "exp" => {
            let text = format!("DW_CFA_expression: r6 (rbp) (DW_OP_breg6 (rbp): {})", i32::from(rule.3) * 8);
            if rule.2 != RbpRule::Rbp || !said(&text) {
                return Err("rbp");
            }
            (RbpRule::Rbp, rule.3)
        }
        saved => match saved.strip_prefix('c').map(offset) {
            Some(saved) if saved % 8 == 0 => (RbpRule::Cfa, i8::try_from(saved / 8).map_err(|_| "offset")?),
            _ => return Err("rbp"),
        },
    };
    Ok((cfa, cfa_offset, rbp, rbp_offset))
}

/// Where rbx is by a line.
fn rbx(line: &Line) -> RbxRule {
    match line.columns.get("rbx").map_or("u", String::as_str) {
        "u" | "s" => RbxRule::SAME,
        saved => match saved.strip_prefix('c').and_then(|offset| offset.parse::<i64>().ok()) {
            Some(offset) if offset % 8 == 0 => RbxRule::saved(offset / 8),
            _ => RbxRule::LOST,
        },
    }
}

/// Compares all functions; returns how many lines there are, and how many have no rule for which reason.
fn compare(table: &Table, path: &Path) -> (usize, BTreeMap<&'static str, usize>) {
    let raw = readelf("--debug-dump=frames", path);
    // readelf shows an undefined rbp as it does an unchanged one.
    assert!(!raw.contains("DW_CFA_undefined: r6"));
    let expressions = expressions(&raw);
    let functions = functions(&readelf("--debug-dump=frames-interp", path));
    let starts: BTreeSet<u64> = functions.iter().map(|function| function.start).collect();
    let (mut lines, mut without) = (0, BTreeMap::new());
    for function in functions.iter().filter(|function| function.start < function.end) {
        let none = BTreeSet::new();
        let expressions = expressions.get(&function.start).unwrap_or(&none);
        let ends = function.lines.iter().skip(1).map(|line| line.pc).chain([function.end]);
        for (line, end) in function.lines.iter().zip(ends).filter(|(line, end)| line.pc < *end) {
            lines += 1;
            for pc in [line.pc, end - 1] {
                let rule = rule_at(table, pc);
                match expected(line, rule, expressions) {
                    Ok(expected) => {
                        assert_eq!(rule, expected, "{path:?} {pc:x}");
                        if !matches!(rule.0, CfaRule::End | CfaRule::Signal) {
                            assert_eq!(rbx_at(table, pc), rbx(line), "{path:?} {pc:x}");
                        }
                    }
                    Err(reason) => {
                        assert_eq!(rule.0, CfaRule::Unsupported, "{path:?} {pc:x} {reason}");
                        *without.entry(reason).or_default() += usize::from(pc == line.pc);
                    }
                }
            }
        }
        if !starts.contains(&function.end) {
            assert_eq!(rule_at(table, function.end).0, CfaRule::NoInfo, "{path:?} {:x}", function.end);
        }
    }
    assert_eq!(rule_at(table, table.base() + u64::from(u32::MAX)).0, CfaRule::NoInfo);
    (lines, without)
}

fn check(path: &Path) {
    let table = table(path);
    let (lines, without) = compare(&table, path);
    let (summary, skipped) = (table.summary(), table.skipped());
    println!("{path:?}: {lines} lines of readelf, without a rule: {without:?}; {summary:?}, {skipped:?}");
    assert!(lines > 500);
    assert_eq!(skipped.damaged, 0);
    assert!(summary.unsupported.iter().all(|(reason, _)| *reason != Reason::Damaged));
    assert_eq!(without.is_empty(), summary.unsupported.is_empty());
}

#[test]
fn the_c_library() {
    check(&mapped("libc.so"));
}

#[test]
fn the_dynamic_loader() {
    check(&mapped("ld-linux"));
}

#[test]
fn the_cxx_library() {
    check(&from_compiler("libstdc++.so.6"));
}

#[test]
fn the_compilers_library() {
    check(&from_compiler("libgcc_s.so.1"));
}

#[test]
fn python() {
    let done = Command::new("python3").args(["-c", "print(open('/proc/self/maps').read())"]).output();
    let maps = String::from_utf8(done.expect("python3 is installed").stdout).unwrap();
    // The interpreter is in the program or in a library.
    let mut paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let program = paths.next().unwrap();
    check(Path::new(paths.find(|path| path.contains("/libpython3")).unwrap_or(program)));
}

#[test]
fn this_program() {
    check(&std::env::current_exe().unwrap());
}

#[test]
fn the_vdso() {
    let bytes = vdso();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &bytes).unwrap();
    let table = Table::read(&bytes[..]).unwrap();
    let (lines, without) = compare(&table, file.path());
    assert!(lines >= 5 && without.is_empty(), "{lines} {without:?}");
}
