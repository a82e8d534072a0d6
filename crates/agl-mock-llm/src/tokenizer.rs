//! Text to tokens: a token is a byte, and two more frame the messages of a chat.

use serde_json::Value;

/// Opens a message.
pub const MESSAGE_START: u32 = 256;
/// Closes a message. The last token of every answer that was not cut.
pub const MESSAGE_END: u32 = 257;

/// The tokens of a text.
#[must_use]
pub fn encode(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// The text of tokens; frames are left out and broken UTF-8 is replaced.
#[must_use]
pub fn decode(tokens: &[u32]) -> String {
    let bytes: Vec<u8> = tokens.iter().filter_map(|token| u8::try_from(*token).ok()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The text of tokens with their frames in it.
#[must_use]
pub fn decode_with_frames(tokens: &[u32]) -> String {
    let is_frame = |token: &u32| u8::try_from(*token).is_err();
    tokens
        .chunk_by(|one, other| !is_frame(one) && !is_frame(other))
        .map(
            |run| {
                if run.iter().all(is_frame) { run.iter().map(|token| display(*token)).collect() } else { decode(run) }
            },
        )
        .collect()
}

/// One token as a server shows it beside its log-prob.
#[must_use]
pub fn display(token: u32) -> String {
    match token {
        MESSAGE_START => "<|start|>".to_owned(),
        MESSAGE_END => "<|end|>".to_owned(),
        byte => decode(&[byte]),
    }
}

/// The prompt of a chat: the tools, every message in its frame, and the opening of the answer.
#[must_use]
pub fn render_chat(messages: &[Value], tools: Option<&Value>) -> Vec<u32> {
    let mut tokens = Vec::new();
    if let Some(tools) = tools.filter(|tools| tools.as_array().is_some_and(|tools| !tools.is_empty())) {
        frame(&mut tokens, "tools", &tools.to_string());
    }
    for message in messages {
        let role = message.get("role").and_then(Value::as_str).unwrap_or("user");
        frame(&mut tokens, role, &message_text(message));
    }
    tokens.push(MESSAGE_START);
    tokens.extend(encode("assistant\n"));
    tokens
}

fn frame(tokens: &mut Vec<u32>, role: &str, text: &str) {
    tokens.push(MESSAGE_START);
    tokens.extend(encode(role));
    tokens.extend(encode("\n"));
    tokens.extend(encode(text));
    tokens.push(MESSAGE_END);
    tokens.extend(encode("\n"));
}

/// A message's content followed by its tool calls.
#[must_use]
pub fn message_text(message: &Value) -> String {
    let mut text = match message.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => parts.iter().filter_map(|part| part.get("text").and_then(Value::as_str)).collect(),
        _ => String::new(),
    };
    for call in message.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
        let field = |name| call.pointer(name).and_then(Value::as_str).unwrap_or_default();
        text.push_str(&render_tool_call(field("/function/name"), field("/function/arguments")));
    }
    text
}

/// A tool call as the policy writes it. `arguments` is JSON text and stays as it is, byte for byte.
#[must_use]
pub fn render_tool_call(name: &str, arguments: &str) -> String {
    format!("<tool_call>{name} {arguments}</tool_call>")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn frames_are_shown_between_texts() {
        let tokens = [encode("a—"), vec![MESSAGE_END], encode("\n"), vec![MESSAGE_START], encode("b")].concat();
        assert_eq!(decode_with_frames(&tokens), "a—<|end|>\n<|start|>b");
    }

    #[test]
    fn an_answer_and_the_next_turn_extend_the_prompt_before() {
        let tools = json!([{"type": "function", "function": {"name": "calculator"}}]);
        let mut messages = vec![json!({"role": "user", "content": [{"type": "text", "text": "2+2 — now"}]})];
        let prompt = render_chat(&messages, Some(&tools));
        let mut path = prompt;
        path.extend(encode(&("thinking".to_owned() + &render_tool_call("calculator", "{\"a\": 2}"))));
        path.push(MESSAGE_END);
        messages.push(json!({"role": "assistant", "content": "thinking", "tool_calls": [
            {"id": "any", "type": "function", "function": {"name": "calculator", "arguments": "{\"a\": 2}"}}]}));
        messages.push(json!({"role": "tool", "tool_call_id": "any", "content": "4"}));
        let next = render_chat(&messages, Some(&tools));
        assert!(next.starts_with(&path));
        assert!(next.len() > path.len());
    }
}
