//! Values as Python's `str` and `repr` write them: some templates print tools and arguments without turning them into JSON.

use serde_json::Value;

use super::python_json::float_repr;

/// `str(value)`: text as it stands, everything else as [`repr`].
pub(super) fn str(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => repr(other),
    }
}

/// `repr(value)`.
fn repr(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() => float_repr(float),
            _ => number.to_string(),
        },
        Value::String(text) => string_repr(text),
        Value::Array(items) => format!("[{}]", joined(items.iter().map(repr))),
        Value::Object(map) => {
            format!("{{{}}}", joined(map.iter().map(|(key, value)| format!("{}: {}", string_repr(key), repr(value)))))
        }
    }
}

fn joined(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(", ")
}

fn string_repr(text: &str) -> String {
    // Single quotes, unless double ones save escaping.
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::with_capacity(text.len() + 2);
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => out.push_str(&match u32::from(c) {
                code @ ..=0xff => format!("\\x{code:02x}"),
                code @ ..=0xffff => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
        }
    }
    out.push(quote);
    out
}

/// Whether Python shows a character as it is: no control character, no space but the plain one, nothing invisible.
fn is_printable(c: char) -> bool {
    let invisible = matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e000}'..='\u{f8ff}');
    c == ' ' || !(c.is_control() || c.is_whitespace() || invisible)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_print_as_in_python() {
        let value = json!({"a": [1, 2.0, 1e20, null, true], "b's": {}, "c": "x"});
        assert_eq!(str(&value), r#"{'a': [1, 2.0, 1e+20, None, True], "b's": {}, 'c': 'x'}"#);
        assert_eq!(str(&json!("it's")), "it's");
    }

    #[test]
    fn quotes_and_characters_that_do_not_show_are_escaped_as_in_python() {
        let value = json!(["'", "\"'", "\n\t\\", "\u{1}\u{a0}\u{200b}é"]);
        assert_eq!(str(&value), r#"["'", '"\'', '\n\t\\', '\x01\xa0\u200bé']"#);
    }
}
