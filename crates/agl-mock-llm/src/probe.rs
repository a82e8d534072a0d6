//! An answer that brings out what a harness does with its model's words: where tools are offered, the call of one that does
//! no harm; then a word to end with.

use serde_json::{Map, Value, json};

use crate::script::{Answer, ToolCall};

/// What the model says once it has nothing left to do.
const LAST_WORD: &str = "Done.";
/// From so many answers on no tool is called any more: a harness that forgets what it was answered would go round for ever.
pub const PATIENCE: usize = 16;
/// What is run by a tool that runs commands.
const COMMAND: &str = "echo agl";
/// Names that tools which run commands go by.
const RUNS_COMMANDS: [&str; 6] = ["bash", "shell", "terminal", "exec", "command", "run"];
/// Names that tools which only look go by.
const LOOKS: [&str; 9] = ["calc", "list", "ls", "glob", "grep", "search", "read", "get", "view"];
/// Names that tools which change or end something go by: called only where there is no other.
const CHANGES: [&str; 11] =
    ["delete", "remove", "write", "edit", "patch", "create", "submit", "finish", "exit", "kill", "send"];

/// The answer in a conversation in which `tools` (as a chat request describes them) may be called, and one was or was not yet.
#[must_use]
pub fn answer(has_called: bool, tools: &[Value]) -> Answer {
    let functions = tools.iter().filter_map(|tool| tool.get("function"));
    let harmless =
        functions.filter_map(|function| Some((rank(name(function)?), function))).min_by_key(|(rank, _)| *rank);
    match harmless {
        Some((_, function)) if !has_called => {
            let name = name(function).unwrap_or_default().to_owned();
            let arguments = example("", function.get("parameters").unwrap_or(&Value::Null));
            let arguments = if arguments.is_object() { arguments } else { json!({}) };
            Answer::Tools { text: String::new(), tool_calls: vec![ToolCall { name, arguments }] }
        }
        _ => Answer::Text(LAST_WORD.to_owned()),
    }
}

fn name(function: &Value) -> Option<&str> {
    function.get("name")?.as_str()
}

/// The lower, the less harm.
fn rank(name: &str) -> usize {
    let name = name.to_lowercase();
    let has = |words: &[&str]| words.iter().any(|word| name.contains(word));
    match () {
        () if has(&CHANGES) => 3,
        () if has(&RUNS_COMMANDS) => 0,
        () if has(&LOOKS) => 1,
        () => 2,
    }
}

/// The least value that fits a JSON schema: what it requires and no more.
fn example(property: &str, schema: &Value) -> Value {
    if let Some(first) = schema.get("enum").and_then(Value::as_array).and_then(|allowed| allowed.first()) {
        return first.clone();
    }
    if let Some(value) = schema.get("const").or_else(|| schema.get("default")) {
        return value.clone();
    }
    let any_of = ["anyOf", "oneOf"].iter().find_map(|key| schema.get(key)?.as_array()?.first());
    if let Some(first) = any_of {
        return example(property, first);
    }
    let kind = match schema.get("type") {
        Some(Value::Array(kinds)) => kinds.first().and_then(Value::as_str),
        kind => kind.and_then(Value::as_str),
    };
    let at_least = |key: &str| schema.get(key).and_then(Value::as_u64).unwrap_or(0);
    match kind {
        Some("integer" | "number") => schema.get("minimum").cloned().unwrap_or_else(|| json!(1)),
        Some("boolean") => json!(false),
        Some("array") => {
            let item = schema.get("items").unwrap_or(&Value::Null);
            let count = if is_command(property) { 1 } else { at_least("minItems") };
            (0..count).map(|_| example(property, item)).collect()
        }
        Some("object") => object(schema),
        None if schema.get("properties").is_some() => object(schema),
        Some("null") => Value::Null,
        _ if is_command(property) => json!(COMMAND),
        _ => json!("1"),
    }
}

fn is_command(property: &str) -> bool {
    ["cmd", "command", "commands", "script"].contains(&property)
}

fn object(schema: &Value) -> Value {
    let required = schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    let fields: Map<String, Value> = required
        .map(|property| {
            let described = schema.pointer(&format!("/properties/{property}")).unwrap_or(&Value::Null);
            (property.to_owned(), example(property, described))
        })
        .collect();
    Value::Object(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str, parameters: Value) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    }

    #[test]
    fn the_tool_that_does_least_harm_is_called_once_with_what_it_requires() {
        let path = json!({"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]});
        let shell = json!({
            "type": "object", "required": ["command", "timeout", "mode"],
            "properties": {
                "command": {"type": "string"}, "timeout": {"type": "integer", "minimum": 5},
                "mode": {"enum": ["fast", "slow"]}, "background": {"type": "boolean"},
            }
        });
        let tools = [tool("delete_file", path.clone()), tool("read_file", path), tool("Bash", shell)];
        let Answer::Tools { tool_calls, .. } = answer(false, &tools) else { panic!("no tool was called") };
        assert_eq!(tool_calls[0].name, "Bash");
        assert_eq!(tool_calls[0].arguments, json!({"command": COMMAND, "timeout": 5, "mode": "fast"}));
        let Answer::Tools { tool_calls, .. } = answer(false, &tools[..2]) else { panic!("no tool was called") };
        assert_eq!((tool_calls[0].name.as_str(), &tool_calls[0].arguments), ("read_file", &json!({"path": "1"})));
        assert_eq!(answer(true, &tools), Answer::Text(LAST_WORD.to_owned()));
        assert_eq!(answer(false, &[]), Answer::Text(LAST_WORD.to_owned()));
    }
}
