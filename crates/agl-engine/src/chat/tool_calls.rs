//! Tool calls in the Hermes/Qwen form: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` within the answer's text.

use serde::Deserialize;
use serde_json::value::RawValue;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// A parsed call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ToolCall {
    pub name: String,
    /// The JSON object to the letter as the model wrote it: rendered into the next prompt it gives the same tokens.
    pub arguments: String,
}

/// An answer split into what is said and what is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ParsedAnswer {
    /// Text before the first call; `None` if there are calls and nothing before them.
    pub content: Option<String>,
    pub calls: Vec<ToolCall>,
}

#[derive(Deserialize)]
struct Written<'a> {
    name: String,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
}

/// Splits an answer. If any call is malformed, the whole answer stays text: guessing what was meant would show the agent
/// a call the model did not make. The last call may lack its closing tag (the stop token took its place).
pub(crate) fn parse(text: &str) -> ParsedAnswer {
    let plain = || ParsedAnswer { content: Some(text.to_owned()), calls: Vec::new() };
    let Some(first) = text.find(OPEN) else { return plain() };
    let mut calls = Vec::new();
    let mut rest = &text[first..];
    while let Some(open) = rest.find(OPEN) {
        let body = &rest[open + OPEN.len()..];
        let (written, after) = match body.find(CLOSE) {
            Some(close) => (&body[..close], &body[close + CLOSE.len()..]),
            None => (body, ""),
        };
        match parse_call(written) {
            Some(call) => calls.push(call),
            None => return plain(),
        }
        rest = after;
    }
    // The template puts one line break between text and call; it is not part of what was said.
    let said = &text[..first];
    let said = said.strip_suffix('\n').unwrap_or(said);
    let content = (!said.trim().is_empty()).then(|| said.to_owned());
    ParsedAnswer { content, calls }
}

fn parse_call(written: &str) -> Option<ToolCall> {
    let call: Written<'_> = serde_json::from_str(written).ok()?;
    let arguments = call.arguments.map_or("{}", RawValue::get);
    arguments.starts_with('{').then(|| ToolCall { name: call.name, arguments: arguments.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str, arguments: &str) -> ToolCall {
        ToolCall { name: name.to_owned(), arguments: arguments.to_owned() }
    }

    #[test]
    fn arguments_keep_the_letters_of_the_model() {
        let answer = parse("<tool_call>\n{\"name\": \"calc\", \"arguments\": {\"e\":  \"1+2\"}}\n</tool_call>");
        assert_eq!(answer, ParsedAnswer { content: None, calls: vec![call("calc", r#"{"e":  "1+2"}"#)] });
    }

    #[test]
    fn text_before_the_calls_is_content() {
        let answer = parse(
            "First.\n<tool_call>\n{\"name\": \"a\"}\n</tool_call>\n<tool_call>{\"name\": \"b\", \"arguments\": {}}</tool_call>",
        );
        assert_eq!(answer.content.as_deref(), Some("First."));
        assert_eq!(answer.calls, [call("a", "{}"), call("b", "{}")]);
    }

    #[test]
    fn a_call_cut_off_by_the_stop_token_counts_if_it_is_whole() {
        assert_eq!(parse("<tool_call>\n{\"name\": \"a\", \"arguments\": {}}\n").calls, [call("a", "{}")]);
    }

    #[test]
    fn a_malformed_call_stays_text() {
        for text in [
            "<tool_call>\n{\"name\": \"calc\", \"arguments\": {\"e\": }}\n</tool_call>",
            "<tool_call>{\"arguments\": {}}</tool_call>",
            "<tool_call>{\"name\": \"a\", \"arguments\": \"x\"}</tool_call>",
            "<tool_call>{\"name\": \"a\"}</tool_call><tool_call>oops</tool_call>",
        ] {
            assert_eq!(parse(text), ParsedAnswer { content: Some(text.to_owned()), calls: vec![] });
        }
    }

    #[test]
    fn an_answer_without_calls_is_all_content() {
        assert_eq!(parse("42").content.as_deref(), Some("42"));
        assert_eq!(parse("").content.as_deref(), Some(""));
    }
}
