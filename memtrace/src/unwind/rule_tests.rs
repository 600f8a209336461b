#![allow(clippy::unwrap_used, clippy::expect_used)]

use CfaRule::{DerefRbp, DerefRbpPlus8, DerefRsp, DerefRspPlus8, End, NoInfo, Plt, Rbp, Rbx, Rsp, Signal, Unsupported};

use super::*;
use crate::unwind::fixture::{Fixture, Rule, rule, rule_at};

/// Assembles directives, each followed by an instruction, in a function of its own with the usual start (CFA = rsp + 8),
/// and compares the rules there.
fn check(cases: &[(&str, Rule)]) {
    let mut source = String::from(".text\n");
    for (number, (directives, _)) in cases.iter().enumerate() {
        source += &format!("f{number}: .cfi_startproc\nnop\n{directives}\nl{number}: nop\n.cfi_endproc\nnop\n");
    }
    let fixture = Fixture::assemble(&source);
    let (table, symbols) = (fixture.table(), fixture.symbols());
    for (number, (directives, rule)) in cases.iter().enumerate() {
        let at = symbols[&format!("l{number}")];
        let start = if directives.contains("signal_frame") { unsupported(Reason::SignalFrame) } else { PLAIN };
        assert_eq!(rule_at(&table, at - 1), start, "{directives}");
        assert_eq!(rule_at(&table, at), *rule, "{directives}");
        assert_eq!(rule_at(&table, at + 1).0, NoInfo, "{directives}");
    }
}

const PLAIN: Rule = (Rsp, 1, RbpRule::Same, 0);

fn unsupported(reason: Reason) -> Rule {
    (Unsupported, reason as i32, RbpRule::Same, 0)
}

#[test]
fn plain_frame_addresses() {
    check(&[
        (".cfi_def_cfa rsp, 16", (Rsp, 2, RbpRule::Same, 0)),
        (".cfi_def_cfa rsp, 0", (Rsp, 0, RbpRule::Same, 0)),
        (".cfi_def_cfa rsp, -8", (Rsp, -1, RbpRule::Same, 0)),
        (".cfi_def_cfa rbp, 16", (Rbp, 2, RbpRule::Same, 0)),
        (".cfi_def_cfa rbx, 32", (Rbx, 4, RbpRule::Same, 0)),
        (".cfi_def_cfa rsp, 32760", (Rsp, 4095, RbpRule::Same, 0)),
        (".cfi_def_cfa rsp, 32768", (Rsp, 4096, RbpRule::Same, 0)),
        (".cfi_def_cfa rsp, 1048576\n.cfi_offset rbp, -48", (Rsp, 131_072, RbpRule::Cfa, -6)),
        (".cfi_def_cfa rsp, 8388600\n.cfi_offset rbp, -16", (Rsp, 1_048_575, RbpRule::Cfa, -2)),
        (".cfi_def_cfa rsp, 8388608", unsupported(Reason::Offset)),
        (".cfi_def_cfa rsp, 1048576\n.cfi_offset rbp, -112", unsupported(Reason::Offset)),
        (".cfi_def_cfa rbp, 32768", unsupported(Reason::Offset)),
        (".cfi_def_cfa rsp, 12", unsupported(Reason::Offset)),
        (".cfi_def_cfa r10, 0", unsupported(Reason::Register)),
        (".cfi_def_cfa rax, 8", unsupported(Reason::Register)),
    ]);
}

#[test]
fn frame_pointers_of_callers() {
    check(&[
        (".cfi_offset rbp, -16", (Rsp, 1, RbpRule::Cfa, -2)),
        (".cfi_offset rbp, 1016", (Rsp, 1, RbpRule::Cfa, 127)),
        (".cfi_offset rbp, -1024", (Rsp, 1, RbpRule::Cfa, -128)),
        (".cfi_offset rbp, -1032", unsupported(Reason::Offset)),
        (".cfi_offset rbp, -16\n.cfi_restore rbp", PLAIN),
        (".cfi_offset rbp, -16\n.cfi_same_value rbp", PLAIN),
        (".cfi_undefined rbp", (Rsp, 1, RbpRule::Undefined, 0)),
        (".cfi_register rbp, r9", unsupported(Reason::Rbp)),
        (".cfi_val_offset rbp, -16", unsupported(Reason::Rbp)),
        // DW_CFA_expression of r6: breg6 0; breg6 -24; breg7 0; breg6 4.
        (".cfi_escape 0x10, 6, 2, 0x76, 0", (Rsp, 1, RbpRule::Rbp, 0)),
        (".cfi_escape 0x10, 6, 2, 0x76, 0x68", (Rsp, 1, RbpRule::Rbp, -3)),
        (".cfi_escape 0x10, 6, 2, 0x77, 0", unsupported(Reason::Rbp)),
        (".cfi_escape 0x10, 6, 2, 0x76, 4", unsupported(Reason::Offset)),
        // The same as a value, not a place.
        (".cfi_escape 0x16, 6, 2, 0x76, 0", unsupported(Reason::Rbp)),
        // Other registers don't matter.
        (".cfi_offset r15, -16\n.cfi_undefined r12\n.cfi_register r13, r8", PLAIN),
    ]);
}

#[test]
fn rbx_of_callers() {
    let cases = [
        ("", RbxRule::SAME),
        (".cfi_offset rbx, -16", RbxRule::saved(-2)),
        (".cfi_offset rbx, -56", RbxRule::saved(-7)),
        (".cfi_offset rbx, -16\n.cfi_restore rbx", RbxRule::SAME),
        (".cfi_same_value rbx", RbxRule::SAME),
        (".cfi_offset rbx, -64", RbxRule::LOST),
        (".cfi_offset rbx, -8", RbxRule::LOST),
        (".cfi_undefined rbx", RbxRule::LOST),
        (".cfi_register rbx, r8", RbxRule::LOST),
        (".cfi_val_offset rbx, -16", RbxRule::LOST),
    ];
    let mut source = String::from(".text\n");
    for (number, (directives, _)) in cases.iter().enumerate() {
        source += &format!(".cfi_startproc\n{directives}\nl{number}: nop\n.cfi_endproc\nnop\n");
    }
    let fixture = Fixture::assemble(&source);
    let (table, symbols) = (fixture.table(), fixture.symbols());
    for (number, (directives, rbx)) in cases.iter().enumerate() {
        let row = table.lookup(symbols[&format!("l{number}")] - table.base()).unwrap();
        assert_eq!(rule(row), PLAIN, "{directives}");
        assert_eq!(row.rbx, *rbx, "{directives}");
    }
}

#[test]
fn return_addresses_and_stack_pointers_of_callers() {
    check(&[
        (".cfi_undefined rip", (End, 0, RbpRule::Same, 0)),
        (".cfi_undefined rip\n.cfi_def_cfa r10, 4\n.cfi_offset rbp, -16", (End, 0, RbpRule::Same, 0)),
        (".cfi_offset rip, -16", unsupported(Reason::ReturnAddress)),
        (".cfi_register rip, rdi", unsupported(Reason::ReturnAddress)),
        (".cfi_same_value rip", unsupported(Reason::ReturnAddress)),
        (".cfi_register rsp, r8", unsupported(Reason::Rsp)),
        (".cfi_offset rsp, -16", unsupported(Reason::Rsp)),
        (".cfi_same_value rsp", unsupported(Reason::Rsp)),
        (".cfi_val_offset rsp, 0", PLAIN),
    ]);
}

#[test]
fn expressions_for_frame_addresses() {
    check(&[
        // DW_CFA_def_cfa_expression: breg6 -8, deref.
        (".cfi_escape 0x0f, 3, 0x76, 0x78, 0x06", (DerefRbp, -1, RbpRule::Same, 0)),
        (".cfi_escape 0x0f, 3, 0x77, 16, 0x06", (DerefRsp, 2, RbpRule::Same, 0)),
        // And plus_uconst 0, 8, 16.
        (".cfi_escape 0x0f, 5, 0x76, 0x78, 0x06, 0x23, 0", (DerefRbp, -1, RbpRule::Same, 0)),
        (".cfi_escape 0x0f, 5, 0x77, 16, 0x06, 0x23, 0", (DerefRsp, 2, RbpRule::Same, 0)),
        (".cfi_escape 0x0f, 5, 0x77, 16, 0x06, 0x23, 8", (DerefRspPlus8, 2, RbpRule::Same, 0)),
        (".cfi_escape 0x0f, 5, 0x76, 16, 0x06, 0x23, 8", (DerefRbpPlus8, 2, RbpRule::Same, 0)),
        (".cfi_escape 0x0f, 5, 0x77, 16, 0x06, 0x23, 16", unsupported(Reason::Expression)),
        // Another register; a number that is no multiple of 8; deref_size 8; nothing; two derefs; nonsense.
        (".cfi_escape 0x0f, 3, 0x7a, 0x78, 0x06", unsupported(Reason::Expression)),
        (".cfi_escape 0x0f, 3, 0x76, 4, 0x06", unsupported(Reason::Offset)),
        (".cfi_escape 0x0f, 4, 0x76, 8, 0x94, 4", unsupported(Reason::Expression)),
        (".cfi_escape 0x0f, 0", unsupported(Reason::Expression)),
        (".cfi_escape 0x0f, 4, 0x77, 16, 0x06, 0x06", unsupported(Reason::Expression)),
        (".cfi_escape 0x0f, 1, 0xff", unsupported(Reason::Expression)),
        (".cfi_escape 0x0f, 1, 0x77", unsupported(Reason::Expression)),
    ]);
}

#[test]
fn the_procedure_linkage_tables_expression() {
    // breg7 8, breg16 0, lit15, and, litN, ge, lit3, shl, plus.
    let expression = |byte: u8| {
        format!(".cfi_escape 0x0f, 11, 0x77, 8, 0x80, 0, 0x3f, 0x1a, {}, 0x2a, 0x33, 0x24, 0x22", 0x30 + byte)
    };
    let cases: Vec<_> = (0..16).map(|byte| (expression(byte), (Plt, i32::from(byte), RbpRule::Same, 0))).collect();
    let cases: Vec<_> = cases.iter().map(|(text, rule)| (text.as_str(), *rule)).collect();
    check(&cases);
    check(&[
        // Byte 16; lit4 for the shift; rsp + 16; rip + 1; 17 as a mask; `gt` instead of `ge`.
        (&expression(16), unsupported(Reason::Expression)),
        (&expression(11).replace("0x33", "0x34"), unsupported(Reason::Expression)),
        (&expression(11).replace("0x77, 8", "0x77, 16"), unsupported(Reason::Expression)),
        (&expression(11).replace("0x80, 0", "0x80, 1"), unsupported(Reason::Expression)),
        (&expression(11).replace("0x3f", "0x41"), unsupported(Reason::Expression)),
        (&expression(11).replace("0x2a", "0x2b"), unsupported(Reason::Expression)),
    ]);
}

#[test]
fn signal_frames() {
    // As glibc's sysdeps/unix/sysv/linux/x86_64/libc_sigaction.c has them: breg7 with a two-byte offset.
    let cfa = ".cfi_escape 0x0f, 4, 0x77, 0xa0, 1, 0x06";
    let rbp = ".cfi_escape 0x10, 6, 3, 0x77, 0xf8, 0";
    let rsp = ".cfi_escape 0x10, 7, 3, 0x77, 0xa0, 1";
    let rip = ".cfi_escape 0x10, 16, 3, 0x77, 0xa8, 1";
    let rule = (Signal, 0, RbpRule::Same, 0);
    let all = |parts: &[&str]| [&[".cfi_signal_frame"], parts].concat().join("\n");
    let bad = unsupported(Reason::SignalFrame);
    check(&[
        (&all(&[cfa, rbp, rsp, rip]), rule),
        (&all(&[cfa, rbp, rip]), rule),
        (&[cfa, rbp, rsp, rip].join("\n"), rule),
        // Something is missing or elsewhere.
        (&all(&[cfa, rsp, rip]), bad),
        (&all(&[rbp, rsp, rip]), bad),
        (&all(&[cfa, rbp, rsp]), bad),
        (&all(&[cfa, &rbp.replace("0xf8", "0xf0"), rsp, rip]), bad),
        (&all(&[cfa, rbp, &rsp.replace("0xa0", "0xa8"), rip]), bad),
        (&all(&[cfa, rbp, rsp, &rip.replace("0xa8", "0xb0")]), bad),
        (&all(&[&cfa.replace("0xa0", "0x98"), rbp, rsp, rip]), bad),
        // A signal frame with rules that are fine otherwise: its caller must be looked up by the very pc.
        (&all(&[".cfi_def_cfa rsp, 16"]), bad),
    ]);
}

#[test]
fn reasons_are_numbered_by_position() {
    for (number, reason) in Reason::ALL.into_iter().enumerate() {
        assert_eq!(reason as usize, number);
        assert_eq!(Reason::of(reason.row(7)), Some(reason));
    }
    assert_eq!(Reason::of(bare(7, CfaRule::End)), None);
    assert_eq!(Reason::of(Row { cfa_offset: 99, ..bare(7, CfaRule::Unsupported) }), None);
}
