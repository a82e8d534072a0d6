//! The model's own chat template, rendered as `transformers` renders it.

use std::path::Path;

use minijinja::value::{Kwargs, Value as Jinja, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, context};
use serde_json::{Map, Value};

use super::python_json::{Style, dumps};
use crate::EngineError;

const NAME: &str = "chat_template";

/// A compiled template with the special tokens it may name.
#[derive(Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: Map<String, Value>,
    /// The template prints arguments that are text as they stand; otherwise it expects them parsed.
    arguments_as_text: bool,
}

impl ChatTemplate {
    /// Compiles `source`, which came from `path`.
    pub(super) fn new(path: &Path, source: &str, special_tokens: Map<String, Value>) -> Result<Self, EngineError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(format_as_python);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", raise_exception);
        // The markers of assistant spans are a tag of transformers alone; they print nothing.
        let source = strip_generation_tags(source);
        let arguments_as_text = source.contains("arguments is string");
        environment.add_template_owned(NAME, source).map_err(|error| EngineError::Model {
            path: path.to_owned(),
            what: format!("the chat template is broken: {error:#}"),
        })?;
        Ok(Self { environment, special_tokens, arguments_as_text })
    }

    /// The prompt of a conversation. `extra` are further variables (`chat_template_kwargs`).
    pub(super) fn render(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String, EngineError> {
        let failed = |error: Error| EngineError::ChatTemplate(describe(&error));
        let messages: Vec<Value> = messages.iter().map(|message| self.with_usable_arguments(message)).collect();
        let template = self.environment.get_template(NAME).map_err(failed)?;
        let variables = context! {
            messages => Jinja::from_serialize(&messages),
            tools => tools.map(Jinja::from_serialize),
            documents => (),
            add_generation_prompt => add_generation_prompt,
            ..context! { ..Jinja::from_serialize(extra), ..Jinja::from_serialize(&self.special_tokens) }
        };
        template.render(variables).map_err(failed)
    }

    /// OpenAI's clients send a call's arguments as JSON text, templates were written for the parsed object. Where the
    /// template handles text, the text is kept: it is what the model wrote, so the next prompt repeats it to the letter.
    fn with_usable_arguments(&self, message: &Value) -> Value {
        let mut message = message.clone();
        if self.arguments_as_text {
            return message;
        }
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten() {
            if let Some(arguments) = call.pointer_mut("/function/arguments")
                && let Some(parsed) = arguments.as_str().and_then(|text| serde_json::from_str(text).ok())
            {
                *arguments = parsed;
            }
        }
        message
    }
}

fn strip_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(length) = rest[open..].find("%}") else { break };
        let close = open + length + 2;
        let inner = rest[open + 2..close - 2].trim_matches(['-', '+']).trim();
        out.push_str(&rest[..open]);
        if inner == "generation" || inner == "endgeneration" {
            // A block that does nothing keeps the whitespace control of the tag.
            out.push_str(&rest[open..close].replace(inner, "set _generation = none"));
        } else {
            out.push_str(&rest[open..close]);
        }
        rest = &rest[close..];
    }
    out.push_str(rest);
    out
}

/// `None`, `True` and `False` print with Python's capitals.
fn format_as_python(out: &mut Output<'_>, state: &State<'_, '_>, value: &Jinja) -> Result<(), Error> {
    let word = match value.kind() {
        ValueKind::None => "None",
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        _ => return minijinja::escape_formatter(out, state, value),
    };
    out.write_str(word).map_err(Error::from)
}

fn to_json(value: Jinja, options: Kwargs) -> Result<Jinja, Error> {
    let json = serde_json::to_value(&value)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("tojson cannot write this value: {error}")))?;
    let mut style = Style::new(options.get::<Option<usize>>("indent")?);
    if let Some(sort_keys) = options.get("sort_keys")? {
        style.sort_keys = sort_keys;
    }
    if let Some(ensure_ascii) = options.get("ensure_ascii")? {
        style.ensure_ascii = ensure_ascii;
    }
    if let Some(separators) = options.get::<Option<Vec<String>>>("separators")?
        && let [item, key] = separators.as_slice()
    {
        (style.item_separator, style.key_separator) = (item.clone(), key.clone());
    }
    options.assert_all_used()?;
    Ok(Jinja::from_safe_string(dumps(&json, &style)))
}

fn raise_exception(message: String) -> Result<Jinja, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn describe(error: &Error) -> String {
    let line = error.line().map(|line| format!(" (template line {line})")).unwrap_or_default();
    match error.detail() {
        Some(detail) => format!("{detail}{line}"),
        None => format!("{error}{line}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, messages: &Value) -> Result<String, EngineError> {
        let template = ChatTemplate::new(Path::new("t"), source, Map::new())?;
        template.render(messages.as_array().unwrap(), None, true, &Map::new())
    }

    #[test]
    fn arguments_are_parsed_for_a_template_that_dumps_them() {
        let messages =
            json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"x\":1}"}}]}]);
        let source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}";
        assert_eq!(render(source, &messages).unwrap(), r#"{"x": 1}"#);
    }

    #[test]
    fn arguments_stay_text_for_a_template_that_prints_text() {
        let messages =
            json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"x\":1}"}}]}]);
        let source = "{% set c = messages[0].tool_calls[0].function %}{% if c.arguments is string %}{{ c.arguments }}{% endif %}";
        assert_eq!(render(source, &messages).unwrap(), r#"{"x":1}"#);
    }

    #[test]
    fn generation_tags_are_ignored() {
        let source = "{% for m in messages %}\n{%- generation %}{{ m.content }}{% endgeneration -%}\n{% endfor %}";
        assert_eq!(render(source, &json!([{"content": "a"}, {"content": "b"}])).unwrap(), "ab");
    }

    #[test]
    fn an_exception_of_the_template_reaches_the_caller() {
        let error = render("{{ raise_exception('roles must alternate') }}", &json!([])).unwrap_err();
        assert!(error.to_string().contains("roles must alternate"), "{error}");
    }
}
