#![allow(clippy::unwrap_used, clippy::expect_used)]

use super::*;

const A: Arguments = Arguments::NONE;

fn alloc(text: &str) -> Spec {
    parse(Role::Allocate, text).unwrap_or_else(|error| panic!("{error}"))
}

fn free(text: &str) -> Spec {
    parse(Role::Free, text).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn keys_of_allocating_functions() {
    let stored = Arguments { size: Arg::A1, out: Arg::A0, answer: Answer::Stored, ..A };
    for (keys, arguments, constant) in [
        ("size=arg1,ptr=ret", Arguments { size: Arg::A1, ..A }, None),
        ("size=arg5", Arguments { size: Arg::A5, ..A }, None),
        ("size=arg2*arg3", Arguments { count: Arg::A2, size: Arg::A3, ..A }, None),
        ("ptr=*arg0,size=arg1", stored, None),
        ("size=arg1,ptr=*arg0,ok=any", Arguments { answer: Answer::StoredAny, ..stored }, None),
        ("ok=any,size=arg1,ptr=*arg0", Arguments { answer: Answer::StoredAny, ..stored }, None),
        ("old=arg0,size=arg1*arg2", Arguments { pointer: Arg::A0, count: Arg::A1, size: Arg::A2, ..A }, None),
        ("size=64", A, Some(64)),
        ("size=0x100000,ptr=*arg4", Arguments { out: Arg::A4, answer: Answer::Stored, ..A }, Some(1 << 20)),
    ] {
        let spec = alloc(&format!("pool_get:{keys}"));
        assert_eq!((spec.arguments, spec.constant), (arguments, constant), "{keys}");
        assert_eq!((spec.role(), spec.text()), (Role::Allocate, format!("pool_get:{keys}").as_str()));
    }
}

#[test]
fn keys_of_freeing_functions() {
    for (text, pointer) in
        [("pool_put", Arg::A0), ("pool_put:ptr=arg0", Arg::A0), ("lib.so:pool_put:ptr=arg3", Arg::A3)]
    {
        let spec = free(text);
        assert_eq!(
            (spec.arguments, spec.constant, spec.role()),
            (Arguments { pointer, ..A }, None, Role::Free),
            "{text}"
        );
    }
}

#[test]
fn names_of_functions_and_modules() {
    let symbol = |name: &str| Target::Symbol(Name::new(name));
    for (text, module, function) in [
        ("pool_put", None, symbol("pool_put")),
        ("pool_*", None, symbol("pool_*")),
        ("_ZN5ArenanwEm", None, symbol("_ZN5ArenanwEm")),
        ("pool_put.part.0:ptr=arg1", None, symbol("pool_put.part.0")),
        ("libpool.so.1:pool_put", Some("libpool.so.1"), symbol("pool_put")),
        ("libpool*:pool_?ut:ptr=arg1", Some("libpool*"), symbol("pool_?ut")),
        ("exe:0x12aF", Some("exe"), Target::Address(0x12af)),
        ("exe:+0x12aF:ptr=arg0", Some("exe"), Target::Address(0x12af)),
        ("\"Arena::put(void*, int=)\"", None, Target::Readable("Arena::put(void*, int=)".into())),
        ("\"lib:pool.so\":\"Arena::put\":ptr=arg1", Some("lib:pool.so"), Target::Readable("Arena::put".into())),
        ("libpool.so:\"a::operator=\"", Some("libpool.so"), Target::Readable("a::operator=".into())),
    ] {
        let spec = free(text);
        assert_eq!(spec.module.as_ref().map(Name::text).as_deref(), module, "{text}");
        assert_eq!(spec.function, function, "{text}");
        assert_eq!(spec.names_module(), module.is_some());
    }
    assert!(Name::new("pool_*").is("pool_get"));
    assert!(!Name::new("pool_*").is("a_pool_get"));
    assert!(Name::new("pool_?et").is("pool_get"));
    assert!(!Name::new("pool").is("pool_get"));
}

/// The marked part of an error, and its first line. Where something is missing, the place is marked.
fn wrong(role: Role, text: &str) -> (String, String) {
    let error = parse(role, text).expect_err(text).to_string();
    let lines: Vec<_> = error.lines().collect();
    let [message, shown, marks, example] = lines.as_slice() else { panic!("{error}") };
    assert!(example.contains("example: --"), "{error}");
    let part = shown.chars().zip(marks.chars()).filter(|(_, mark)| *mark == '^').map(|(character, _)| character);
    (part.collect(), (*message).to_owned())
}

#[test]
fn errors_mark_the_wrong_part() {
    for (text, part, message) in [
        ("pool_get:size=arg6", "arg6", "six"),
        ("pool_get:size=arg1*arg2*arg3", "arg1*arg2*arg3", "argN*argM"),
        ("pool_get:size=64*arg1", "64", "is no argument"),
        ("pool_get:size=0", "0", "from 1 to 1048576"),
        ("pool_get:size=1048577", "1048577", "from 1 to 1048576"),
        ("pool_get:size=99999999999999999999", "99999999999999999999", "from 1"),
        ("pool_get:size=-1", "-1", "is no argument"),
        ("pool_get:size=", "", "is no argument"),
        ("pool_get:ptr=ret", "ptr=ret", "size is missing"),
        ("pool_get", "", "size is missing"),
        ("libpool.so:pool_get", "", "size is missing"),
        ("pool_get:size=arg0,size=arg1", "size=arg1", "twice"),
        ("pool_get:size=arg0,arg1", "arg1", "KEY=VALUE"),
        ("pool_get:size=arg0,", "", "KEY=VALUE"),
        ("pool_get:size=arg0,ptr=arg1", "arg1", "ret"),
        ("pool_get:size=arg0,ptr=*ret", "ret", "is no argument"),
        ("pool_get:size=arg0,ok=any", "ok=any", "ptr=*argN"),
        ("pool_get:size=arg0,ptr=*arg1,ok=0", "0", "any"),
        ("pool_get:size=arg0,new=arg1", "new", "size, ptr, old and ok"),
        ("pool_get:size=arg0,old=arg0", "size=arg0,old=arg0", "two things"),
        ("pool_get:size=arg0*arg0", "size=arg0*arg0", "two things"),
        ("Arena::get:size=arg0", "Arena::get:size=arg0", "double quotes"),
        ("get(int):size=arg0", "get(int)", "double quotes"),
        ("operator new:size=arg0", "operator new", "double quotes"),
        ("\"get:size=arg0", "\"get:size=arg0", "closing quote"),
        ("\"get\"x:size=arg0", "\"get\"x", "whole name"),
        ("\"\":size=arg0", "\"\"", "missing"),
        (":size=arg0", "", "missing"),
        ("", "", "missing"),
        (":get:size=arg0", "", "module is missing"),
        ("0x1234:size=arg0", "0x1234", "needs its module"),
        ("exe:0x:size=arg0", "0x", "no address"),
        ("exe:0x+1:size=arg0", "0x+1", "no address"),
        ("exe:+1234:size=arg0", "+1234", "no address"),
        ("exe:0x11112222333344445:size=arg0", "0x11112222333344445", "no address"),
        ("a:b:c:size=arg0", "a:b:c:size=arg0", "too many colons"),
        ("\u{e4}\n:size=\u{e4}rg0", "\u{e4}rg0", "is no argument"),
    ] {
        let (marked, said) = wrong(Role::Allocate, text);
        assert!(marked == part || (part.is_empty() && marked.chars().count() <= 1), "{text}: {marked}");
        assert!(said.contains(message), "{text}: {said}");
    }
    for (text, part, message) in [
        ("pool_put:size=arg0", "size", "only ptr"),
        ("pool_put:ptr=ret", "ret", "no argument"),
        ("a:b:c", "a:b:c", "colons"),
    ] {
        let (marked, said) = wrong(Role::Free, text);
        assert_eq!(marked, part, "{text}");
        assert!(said.contains(message), "{text}: {said}");
    }
    assert!(parse(Role::Free, &"x".repeat(MAX_TEXT + 1)).is_err());
}

/// Every cut, and every doubled or replaced byte, of a text is a result or an error, never a panic.
#[test]
fn damaged_texts() {
    let whole = "\"lib\u{e4}.so\":\"A::get(int)\":size=arg1*arg2,ptr=*arg0,ok=any,old=arg3";
    let cuts: Vec<_> = (0..=whole.len()).filter(|cut| whole.is_char_boundary(*cut)).collect();
    for cut in &cuts {
        for part in [&whole[..*cut], &whole[*cut..]] {
            for insert in ["", ":", "=", ",", "\"", "*", "\0", "\u{10ffff}"] {
                for text in [format!("{part}{insert}"), format!("{insert}{part}")] {
                    for role in [Role::Allocate, Role::Free] {
                        if let Err(error) = parse(role, &text) {
                            assert_eq!(error.to_string().lines().count(), 4, "{error}");
                        }
                    }
                }
            }
        }
    }
}
