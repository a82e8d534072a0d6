//! The model's own chat template, rendered as `transformers` renders it.

use std::path::Path;

use minijinja::value::{Kwargs, Value as Jinja, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, context};
use serde_json::{Map, Value};

use super::python_json::{Style, dumps};
use super::python_text;
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
        environment.add_filter("string", to_string);
        environment.add_filter("trim", trim);
        environment.add_test("iterable", is_iterable);
        environment.add_test("sequence", is_sequence);
        environment.add_function("strftime_now", strftime_now);
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

/// What is printed without a filter reads as in Python: `None`, `True`, lists and objects.
fn format_as_python(out: &mut Output<'_>, state: &State<'_, '_>, value: &Jinja) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Seq | ValueKind::Map => {
            out.write_str(&python_text::str(&as_json("printing", value)?)).map_err(Error::from)
        }
        _ => minijinja::escape_formatter(out, state, value),
    }
}

fn as_json(what: &str, value: &Jinja) -> Result<Value, Error> {
    serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("{what} cannot write this value: {error}")))
}

/// Python's `str`.
fn to_string(value: &Jinja) -> Result<String, Error> {
    match value.kind() {
        ValueKind::String | ValueKind::Undefined => Ok(value.to_string()),
        _ => as_json("string", value).map(|json| python_text::str(&json)),
    }
}

/// As in Python text is, and `None` is not.
fn is_iterable(value: &Jinja) -> bool {
    matches!(
        value.kind(),
        ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable | ValueKind::Undefined
    )
}

/// What has a length and can be indexed.
fn is_sequence(value: &Jinja) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
}

/// Takes anything, as in Python: contents in parts become their text.
fn trim(value: &Jinja, characters: Option<String>) -> Result<String, Error> {
    let text = to_string(value)?;
    Ok(match characters {
        Some(characters) => text.trim_matches(|c| characters.contains(c)).to_owned(),
        None => text.trim().to_owned(),
    })
}

/// The date and time in the form that `strftime` of C describes. In UTC, so that all machines of a run render one prompt.
fn strftime_now(form: String) -> Result<String, Error> {
    jiff::fmt::strtime::format(&form, jiff::Timestamp::now()).map_err(|error| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now cannot write `{form}`: {error}"))
    })
}

fn to_json(value: Jinja, options: Kwargs) -> Result<Jinja, Error> {
    let json = as_json("tojson", &value)?;
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
    fn a_template_may_print_the_date() {
        let now = || jiff::Timestamp::now().strftime("%d %B %Y").to_string();
        let before = now();
        let printed = render("{{ strftime_now('%d %B %Y') }}", &json!([])).unwrap();
        assert!(printed == before || printed == now(), "{printed}");
        let error = render("{{ strftime_now('%') }}", &json!([])).unwrap_err();
        assert!(error.to_string().contains("strftime_now cannot write `%`"), "{error}");
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
