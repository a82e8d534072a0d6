//! `POST /v1/chat/completions`; `POST /tokenize` for how long its prompt would be, and `POST /detokenize` for how tokens read.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use futures_util::future::try_join_all;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::answer::{created, finish_reason, stop_reason, token_text, unique_id, usage};
use super::error::ApiError;
use super::request::{Sampling, parse, unsupported};
use crate::chat::tool_calls;
use crate::{ChatTokenizer, Engine, GenerateOutput, GenerateRequest};

#[derive(Debug, Deserialize)]
struct ChatRequest {
    messages: Vec<Map<String, Value>>,
    #[serde(default)]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    tool_choice: Option<Value>,
    #[serde(default)]
    response_format: Option<Value>,
    #[serde(default)]
    max_completion_tokens: Option<usize>,
    #[serde(default)]
    logprobs: Option<bool>,
    #[serde(default)]
    top_logprobs: Option<usize>,
    #[serde(default)]
    add_generation_prompt: Option<bool>,
    #[serde(default)]
    chat_template_kwargs: Option<Map<String, Value>>,
}

pub(super) async fn create(State(engine): State<Engine>, body: Bytes) -> Result<Json<Value>, ApiError> {
    let request: ChatRequest = parse(&body)?;
    let mut sampling: Sampling = parse(&body)?;
    sampling.max_tokens = request.max_completion_tokens.or(sampling.max_tokens);
    let (params, n) = sampling.params(request.top_logprobs.unwrap_or(0))?;
    let tools = request.usable_tools()?;
    let prompt = request.prompt(engine.tokenizer(), tools)?;
    let outputs = try_join_all((0..n).map(|choice| {
        let sampling = Sampling::for_choice(&params, choice);
        engine.generate(GenerateRequest { prompt: prompt.clone(), sampling })
    }))
    .await?;
    let with_ids = sampling.return_token_ids.unwrap_or(false);
    let choices = outputs
        .iter()
        .enumerate()
        .map(|(index, output)| request.choice(index, output, tools.is_some(), with_ids, engine.tokenizer()))
        .collect::<Result<Vec<_>, _>>()?;
    let mut answer = json!({
        "id": unique_id("chatcmpl-"),
        "object": "chat.completion",
        "created": created(),
        "model": engine.model_name(),
        "choices": choices,
        "usage": usage(prompt.len(), n, &outputs),
        "policy_version": engine.policy_version(),
    });
    if with_ids {
        answer["prompt_token_ids"] = json!(prompt);
    }
    Ok(Json(answer))
}

/// The prompt of a conversation as token ids, in vLLM's form.
pub(super) async fn tokenize(State(engine): State<Engine>, body: Bytes) -> Result<Json<Value>, ApiError> {
    let request: ChatRequest = parse(&body)?;
    let tokens = request.prompt(engine.tokenizer(), request.usable_tools()?)?;
    Ok(Json(json!({"count": tokens.len(), "max_model_len": engine.max_model_len(), "tokens": tokens})))
}

#[derive(Debug, Deserialize)]
struct DetokenizeRequest {
    tokens: Vec<u32>,
}

/// The text of token ids, special tokens in it, in vLLM's form.
pub(super) async fn detokenize(State(engine): State<Engine>, body: Bytes) -> Result<Json<Value>, ApiError> {
    let request: DetokenizeRequest = parse(&body)?;
    Ok(Json(json!({"prompt": engine.tokenizer().decode(&request.tokens, false)?})))
}

impl ChatRequest {
    /// The tools the model may call: none if there are none or `tool_choice` is "none".
    fn usable_tools(&self) -> Result<Option<&[Value]>, ApiError> {
        let text_only = |format: &Value| format.get("type").and_then(Value::as_str) == Some("text");
        if self.response_format.as_ref().is_some_and(|format| !format.is_null() && !text_only(format)) {
            return Err(unsupported("response_format"));
        }
        let tools = self.tools.as_deref().filter(|tools| !tools.is_empty());
        match &self.tool_choice {
            None | Some(Value::Null) => Ok(tools),
            Some(choice) if choice == "auto" => Ok(tools),
            Some(choice) if choice == "none" => Ok(None),
            Some(choice) => Err(ApiError::invalid(
                "tool_choice",
                format!(
                    "`tool_choice` may be \"auto\" or \"none\" here, but it is {choice}: forcing a call is not supported"
                ),
            )),
        }
    }

    fn prompt(&self, tokenizer: &ChatTokenizer, tools: Option<&[Value]>) -> Result<Vec<u32>, ApiError> {
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "`messages` must hold at least one message"));
        }
        let messages = self.messages.iter().enumerate().map(|(i, m)| message(i, m)).collect::<Result<Vec<_>, _>>()?;
        let no_variables = Map::new();
        let text = tokenizer.apply_chat_template_with(
            &messages,
            tools,
            self.add_generation_prompt.unwrap_or(true),
            self.chat_template_kwargs.as_ref().unwrap_or(&no_variables),
        )?;
        Ok(tokenizer.encode(&text)?)
    }

    fn choice(
        &self,
        index: usize,
        output: &GenerateOutput,
        may_call: bool,
        with_ids: bool,
        tokenizer: &ChatTokenizer,
    ) -> Result<Value, ApiError> {
        let mut message = json!({"role": "assistant", "content": output.text});
        let mut finish = finish_reason(output);
        if may_call {
            let parsed = tool_calls::parse(&output.text);
            if !parsed.calls.is_empty() {
                let call = |call: &tool_calls::ToolCall| {
                    json!({
                        "id": unique_id("call_"),
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    })
                };
                message["content"] = json!(parsed.content);
                message["tool_calls"] = parsed.calls.iter().map(call).collect();
                finish = "tool_calls";
            }
        }
        let log_probs = match self.logprobs {
            Some(true) => log_probs(output, tokenizer)?,
            _ => Value::Null,
        };
        let mut choice = json!({
            "index": index,
            "message": message,
            "logprobs": log_probs,
            "finish_reason": finish,
            "stop_reason": stop_reason(output),
            "policy_versions": output.policy_versions,
        });
        if with_ids {
            choice["token_ids"] = json!(output.token_ids);
        }
        Ok(choice)
    }
}

/// A message as templates expect it: content in parts becomes one text.
fn message(index: usize, message: &Map<String, Value>) -> Result<Value, ApiError> {
    let wrong = |field: &str, what: &str| {
        let path = format!("messages[{index}].{field}");
        ApiError::invalid(path.clone(), format!("`{path}` {what}"))
    };
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(wrong("role", "must be a string such as \"user\""));
    }
    let mut message = message.clone();
    match message.get("content") {
        None | Some(Value::Null | Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            let text = |part: &Value| part.get("text").and_then(Value::as_str).map(str::to_owned);
            let texts = parts
                .iter()
                .map(|part| {
                    text(part)
                        .ok_or_else(|| wrong("content", "has a part that is not text; this model reads text only"))
                })
                .collect::<Result<Vec<_>, _>>()?;
            message.insert("content".to_owned(), texts.join("\n").into());
        }
        Some(_) => return Err(wrong("content", "must be a string, a list of text parts, or null")),
    }
    Ok(Value::Object(message))
}

fn log_probs(output: &GenerateOutput, tokenizer: &ChatTokenizer) -> Result<Value, ApiError> {
    let entry = |id: u32, log_prob: f32| -> Result<Value, ApiError> {
        let text = token_text(tokenizer, id)?;
        Ok(json!({"token": text, "logprob": log_prob, "bytes": text.as_bytes()}))
    };
    let content = output
        .token_ids
        .iter()
        .zip(&output.log_probs)
        .zip(&output.top_log_probs)
        .map(|((id, log_prob), top)| {
            let mut token = entry(*id, *log_prob)?;
            token["top_logprobs"] =
                top.iter().map(|(id, log_prob)| entry(*id, *log_prob)).collect::<Result<Value, _>>()?;
            Ok(token)
        })
        .collect::<Result<Value, ApiError>>()?;
    Ok(json!({ "content": content }))
}
