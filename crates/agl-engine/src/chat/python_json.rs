//! JSON exactly as Python's `json.dumps(…, ensure_ascii=False)` writes it, which is what models saw in training.

use serde_json::Value;

/// Layout options of `json.dumps`.
#[derive(Clone, Debug)]
pub(super) struct Style {
    pub indent: Option<usize>,
    pub item_separator: String,
    pub key_separator: String,
    pub sort_keys: bool,
    pub ensure_ascii: bool,
}

impl Style {
    /// Python's defaults: a space after every separator, but none at a line's end.
    pub(super) fn new(indent: Option<usize>) -> Self {
        let item_separator = if indent.is_some() { "," } else { ", " };
        Self {
            indent,
            item_separator: item_separator.to_owned(),
            key_separator: ": ".to_owned(),
            sort_keys: false,
            ensure_ascii: false,
        }
    }
}

/// `value` as text.
pub(super) fn dumps(value: &Value, style: &Style) -> String {
    let mut out = String::new();
    write(&mut out, value, style, 0);
    out
}

fn write(out: &mut String, value: &Value, style: &Style, depth: usize) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
        Value::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() => out.push_str(&float_repr(float)),
            _ => out.push_str(&number.to_string()),
        },
        Value::String(text) => write_string(out, text, style.ensure_ascii),
        Value::Array(items) => {
            sequence(out, '[', ']', items.iter(), style, depth, |out, item| write(out, item, style, depth + 1));
        }
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            if style.sort_keys {
                entries.sort_by_key(|(key, _)| key.as_str());
            }
            sequence(out, '{', '}', entries.into_iter(), style, depth, |out, (key, item)| {
                write_string(out, key, style.ensure_ascii);
                out.push_str(&style.key_separator);
                write(out, item, style, depth + 1);
            });
        }
    }
}

fn sequence<T>(
    out: &mut String,
    open: char,
    close: char,
    items: impl ExactSizeIterator<Item = T>,
    style: &Style,
    depth: usize,
    mut write_item: impl FnMut(&mut String, T),
) {
    out.push(open);
    let line_break = |out: &mut String, depth: usize| {
        if let Some(width) = style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width * depth));
        }
    };
    let empty = items.len() == 0;
    for (i, item) in items.enumerate() {
        if i > 0 {
            out.push_str(&style.item_separator);
        }
        line_break(out, depth + 1);
        write_item(out, item);
    }
    if !empty {
        line_break(out, depth);
    }
    out.push(close);
}

fn write_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (ensure_ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// Python's `repr` of a float: shortest digits, exponent below 1e-4 and from 1e16.
pub(super) fn float_repr(value: f64) -> String {
    let scientific = format!("{value:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{mantissa}e{sign}{:02}", exponent.abs())
        }
        _ => {
            let plain = format!("{value}");
            if plain.contains('.') { plain } else { plain + ".0" }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn text_equals_that_of_python() {
        let value = json!({"b": [1, 2.0, 1e-5, 1e16, 0.1], "a": "é\n\"", "c": {}, "d": []});
        let expected = r#"{"b": [1, 2.0, 1e-05, 1e+16, 0.1], "a": "é\n\"", "c": {}, "d": []}"#;
        assert_eq!(dumps(&value, &Style::new(None)), expected);
    }

    #[test]
    fn indentation_equals_that_of_python() {
        let value = json!({"a": [1], "b": {}});
        assert_eq!(dumps(&value, &Style::new(Some(2))), "{\n  \"a\": [\n    1\n  ],\n  \"b\": {}\n}");
    }
}
