//! The calls of a rollout as a conversation: each message once, in the order in which it was said.

use agl_core::event::Event;
use serde_json::Value;

use crate::output::line;

/// Prints the model calls of an attempt. Calls that go on with an earlier conversation print only what is new.
pub fn print<'a>(requests: impl Iterator<Item = &'a Event>) {
    let mut conversations: Vec<Vec<String>> = Vec::new();
    for (number, event) in requests.enumerate() {
        let data = &event.data;
        let request = data.get("request").unwrap_or(&Value::Null);
        let messages: Vec<&Value> = match request.get("messages").and_then(Value::as_array) {
            Some(messages) => messages.iter().collect(),
            None => Vec::new(),
        };
        let said: Vec<String> = messages.iter().map(|message| fingerprint(message)).collect();
        let known = conversations
            .iter()
            .enumerate()
            .filter(|(_, conversation)| said.starts_with(conversation))
            .max_by_key(|(_, conversation)| conversation.len())
            .map(|(index, _)| index);
        let new_from = known.map_or(0, |index| conversations[index].len());
        line(format!(
            "\n── call {number} · {}{}",
            note(event),
            if known.is_some() { "" } else { " · new conversation" }
        ));
        for message in &messages[new_from..] {
            print_message(message);
        }
        if let Some(prompt) = request.get("prompt") {
            print_text("prompt", &prompt.as_str().map_or_else(|| prompt.to_string(), str::to_owned));
        }
        let choices = data.get("response").and_then(|response| response.get("choices")).and_then(Value::as_array);
        let mut conversation = said;
        for choice in choices.into_iter().flatten() {
            if let Some(message) = choice.get("message") {
                print_message(message);
                conversation.push(fingerprint(message));
            } else if let Some(text) = choice.get("text").and_then(Value::as_str) {
                print_text("answer", text);
            }
        }
        match known {
            Some(index) => conversations[index] = conversation,
            None => conversations.push(conversation),
        }
    }
}

/// How the call went, in a few words.
fn note(event: &Event) -> String {
    let data = &event.data;
    let mut parts = Vec::new();
    if let Some(status) = data.get("http_status").and_then(Value::as_u64).filter(|&status| status >= 400) {
        parts.push(format!("HTTP {status}"));
    }
    if let Some(reason) = data.get("finish_reason").and_then(Value::as_str) {
        parts.push(reason.to_owned());
    }
    if let Some(tokens) = data.get("usage").and_then(|usage| usage.get("completion_tokens")) {
        parts.push(format!("{tokens} tokens"));
    }
    if let Some(latency) = data.get("latency_ms").and_then(Value::as_f64) {
        parts.push(format!("{latency:.0} ms"));
    }
    if data.get("delivered").and_then(Value::as_bool) == Some(false) {
        parts.push("not delivered".into());
    }
    parts.join(" · ")
}

/// What makes two messages the same, whatever optional keys the harness dropped or added when it sent one back.
fn fingerprint(message: &Value) -> String {
    let text = content(message);
    let calls: Vec<String> = tool_calls(message).map(|(name, arguments)| format!("{name}({arguments})")).collect();
    format!("{}\u{1f}{text}\u{1f}{}", role(message), calls.join("\u{1f}"))
}

fn role(message: &Value) -> &str {
    message.get("role").and_then(Value::as_str).unwrap_or("?")
}

fn content(message: &Value) -> String {
    match message.get("content") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().map(|part| match part.get("text").and_then(Value::as_str) {
                Some(text) => text.to_owned(),
                None => format!("[{}]", part.get("type").and_then(Value::as_str).unwrap_or("part")),
            });
            texts.collect::<Vec<_>>().join("")
        }
        Some(other) => other.to_string(),
    }
}

fn tool_calls(message: &Value) -> impl Iterator<Item = (&str, &str)> {
    let calls = message.get("tool_calls").and_then(Value::as_array).into_iter().flatten();
    calls.filter_map(|call| {
        let function = call.get("function")?;
        Some((function.get("name")?.as_str()?, function.get("arguments")?.as_str().unwrap_or("")))
    })
}

fn print_message(message: &Value) {
    let text = content(message);
    if !text.is_empty() {
        print_text(role(message), &text);
    }
    for (name, arguments) in tool_calls(message) {
        print_text(role(message), &format!("→ {name}({arguments})"));
    }
    if text.is_empty() && tool_calls(message).next().is_none() {
        print_text(role(message), "(nothing)");
    }
}

/// The role in a margin, the text beside it.
fn print_text(role: &str, text: &str) {
    for (index, part) in text.trim_end().split('\n').enumerate() {
        line(format!("{:>10}  {part}", if index == 0 { role } else { "" }));
    }
}
