//! Names from the target are hostile input: they must not start a line of their own in a file, nor move the cursor or
//! change the colours, the title or the reading order of a terminal.

use std::borrow::Cow;

/// Characters that are not themselves visible but change how others are shown or read: control characters, line and
/// paragraph separators, the bidirectional controls (Unicode Standard Annex 9), zero-width characters, and the two code
/// points that no XML document may contain.
fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{61c}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fffe}'
                | '\u{ffff}'
        )
}

/// Stands for a name without any visible character.
const NO_NAME: &str = "[no name]";

/// For terminals and text: hidden characters are written as `\u{1b}`; a name of nothing but spaces is `[no name]`.
pub fn text(name: &str) -> Cow<'_, str> {
    if name.trim_matches(' ').is_empty() {
        return Cow::Borrowed(NO_NAME);
    }
    if !name.contains(is_hidden) {
        return Cow::Borrowed(name);
    }
    let mut out = String::with_capacity(name.len() + 8);
    for character in name.chars() {
        if is_hidden(character) {
            out.extend(character.escape_unicode());
        } else {
            out.push(character);
        }
    }
    Cow::Owned(out)
}

/// For folded stacks: `;`, which separates frames, becomes `:`; hidden characters become `?`; spaces beyond ASCII become
/// plain ones, and those around the name, which readers would trim, are dropped; a name with nothing left is
/// `[no name]`.
pub fn folded(name: &str) -> Cow<'_, str> {
    let forbidden = |character: char| character == ';' || is_hidden(character) || other_space(character);
    let name = if name.contains(forbidden) {
        let replaced: String = name
            .chars()
            .map(|character| match character {
                ';' => ':',
                _ if is_hidden(character) => '?',
                _ if other_space(character) => ' ',
                _ => character,
            })
            .collect();
        Cow::Owned(replaced.trim_matches(' ').to_owned())
    } else {
        Cow::Borrowed(name.trim_matches(' '))
    };
    if name.is_empty() {
        return Cow::Borrowed(NO_NAME);
    }
    name
}

/// Spaces beyond ASCII, which some readers trim or split at.
fn other_space(character: char) -> bool {
    character.is_whitespace() && character != ' '
}

/// For the text of an SVG: hidden characters become `?`, and the characters that mean something to XML are escaped.
pub fn xml(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            _ if is_hidden(character) => out.push('?'),
            _ => out.push(character),
        }
    }
    out
}

/// For JSON: whether a character has to be written as an escape to be harmless on a terminal. JSON itself escapes only
/// the control characters of ASCII.
pub fn needs_json_escape(character: char) -> bool {
    is_hidden(character)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn harmless_names_stay() {
        let name = "void ns::f<int>(char const*)::{lambda()#1} — größer";
        assert_eq!(text(name), name);
        assert_eq!(folded(name), name);
    }

    #[test]
    fn terminal_sequences() {
        assert_eq!(text("\u{1b}[31mred"), "\\u{1b}[31mred");
        assert_eq!(text("a\nb\r\u{9b}c"), "a\\u{a}b\\u{d}\\u{9b}c");
        assert_eq!(text("\u{202e}gpj.exe"), "\\u{202e}gpj.exe");
    }

    #[test]
    fn folded_frames() {
        assert_eq!(folded("[u8; 4]"), "[u8: 4]");
        assert_eq!(folded("a\nb;c 5"), "a?b:c 5");
        assert_eq!(folded("  x "), "x");
        assert_eq!(folded("   "), "[no name]");
        assert_eq!(folded("\u{3000}a\u{a0}b\u{3000}"), "a b");
    }

    #[test]
    fn xml_text() {
        assert_eq!(xml("<a b=\"c\">&'\u{1b}"), "&lt;a b=&quot;c&quot;&gt;&amp;&apos;?");
    }
}
