//! A scripted answer as a response body in vLLM's shape.

use serde_json::{Value, json};

use crate::script::{Answer, Fault, Script, Select, WhenDone};
use crate::tokenizer::{MESSAGE_END, display, encode, message_text, render_chat, render_tool_call};

/// What the client asked for, as far as the answer depends on it.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Chat or plain completion.
    pub chat: bool,
    /// Token ids of each prompt; a chat has one.
    pub prompts: Vec<Vec<u32>>,
    /// How many answers to each prompt.
    pub choices: usize,
    /// Cut after this many tokens.
    pub max_tokens: usize,
    /// Token ids wanted.
    pub return_token_ids: bool,
    /// Log-probs wanted.
    pub logprobs: bool,
    /// Number of `assistant` messages.
    pub turn: usize,
    /// True where the conversation holds a tool call or its result already.
    pub has_called: bool,
    /// The tools it offers, as it describes them.
    pub tools: Vec<Value>,
    /// What an echo gives back.
    pub last_text: String,
    /// The model's name as the client wrote it.
    pub model: Option<String>,
}

/// Reads a request, or says what is wrong with it.
///
/// # Errors
/// The message of the 400 that the client gets.
pub fn read_request(chat: bool, body: &Value) -> Result<Asked, String> {
    if body.get("stream").and_then(Value::as_bool) == Some(true) {
        return Err("this mock server does not stream; send \"stream\": false".to_owned());
    }
    let (prompts, turn, last_text) = if chat { read_chat(body)? } else { read_prompts(body)? };
    let number = |name: &str| body.get(name).and_then(Value::as_u64).and_then(|value| usize::try_from(value).ok());
    let logprobs = match body.get("logprobs") {
        Some(Value::Bool(wanted)) => *wanted,
        Some(Value::Number(_)) => true,
        _ => false,
    };
    Ok(Asked {
        chat,
        prompts,
        choices: number("n").unwrap_or(1).max(1),
        max_tokens: number("max_completion_tokens").or_else(|| number("max_tokens")).unwrap_or(usize::MAX),
        return_token_ids: body.get("return_token_ids").and_then(Value::as_bool).unwrap_or(false),
        logprobs,
        turn,
        has_called: messages_of(body)
            .any(|message| message.pointer("/tool_calls/0").is_some() || message.get("role") == Some(&json!("tool"))),
        tools: body.get("tools").and_then(Value::as_array).cloned().unwrap_or_default(),
        last_text,
        model: body.get("model").and_then(Value::as_str).map(str::to_owned),
    })
}

fn messages_of(body: &Value) -> impl Iterator<Item = &Value> {
    body.get("messages").and_then(Value::as_array).into_iter().flatten()
}

type Prompts = (Vec<Vec<u32>>, usize, String);

fn read_chat(body: &Value) -> Result<Prompts, String> {
    let messages = body.get("messages").and_then(Value::as_array).ok_or("\"messages\" must be a list")?;
    let last = messages.last().ok_or("\"messages\" is empty")?;
    let turn = messages.iter().filter(|message| message.get("role") == Some(&json!("assistant"))).count();
    Ok((vec![render_chat(messages, body.get("tools"))], turn, message_text(last)))
}

fn read_prompts(body: &Value) -> Result<Prompts, String> {
    let wrong = "\"prompt\" must be a text, a list of texts, a list of token ids, or a list of such lists";
    let ids = |list: &[Value]| -> Option<Vec<u32>> {
        list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
    };
    let prompt = body.get("prompt").ok_or(wrong)?;
    let prompts = match prompt {
        Value::String(text) => vec![encode(text)],
        Value::Array(list) if list.iter().all(Value::is_u64) => vec![ids(list).ok_or(wrong)?],
        Value::Array(list) => list
            .iter()
            .map(|prompt| match prompt {
                Value::String(text) => Some(encode(text)),
                Value::Array(list) => ids(list),
                _ => None,
            })
            .collect::<Option<_>>()
            .ok_or(wrong)?,
        _ => return Err(wrong.to_owned()),
    };
    let last = prompts.last().map(|prompt| crate::tokenizer::decode(prompt)).unwrap_or_default();
    Ok((prompts, 0, last))
}

/// The answer of the script at `position`, or `None` where the script is at its end and says so.
#[must_use]
pub fn choose(script: &Script, asked: &Asked, next: usize) -> Option<Answer> {
    let position = match script.select {
        Select::Next => next,
        Select::Turn => asked.turn,
    };
    let echo = || Some(Answer::Text(asked.last_text.clone()));
    let count = script.answers.len();
    let is_possible = |answer: &&Answer| match answer {
        Answer::Tools { tool_calls, .. } if script.only_offered_tools => {
            let offers =
                |name: &str| asked.tools.iter().any(|tool| tool.pointer("/function/name") == Some(&json!(name)));
            tool_calls.iter().all(|call| offers(&call.name))
        }
        _ => true,
    };
    if let Some(answer) = script.answers.iter().skip(position).find(is_possible) {
        return Some(answer.clone());
    }
    match script.when_done {
        WhenDone::Echo => echo(),
        WhenDone::RepeatLast => script.answers.last().cloned().or_else(echo),
        WhenDone::Cycle if count > 0 => script.answers.get(position % count).cloned(),
        WhenDone::Cycle => echo(),
        WhenDone::Fail => None,
        WhenDone::Probe => Some(crate::probe::answer(asked.has_called || next >= crate::probe::PATIENCE, &asked.tools)),
    }
}

/// The response body for `answers`, one per choice of each prompt. `fault` may spoil ids and log-probs.
#[must_use]
pub fn response(script: &Script, asked: &Asked, answers: &[Answer], number: u64, fault: Option<&Fault>) -> Value {
    let mut completion_tokens = 0;
    let choices: Vec<Value> = answers
        .iter()
        .enumerate()
        .map(|(index, answer)| {
            let prompt = asked.prompts.get(index / asked.choices).map(Vec::as_slice).unwrap_or_default();
            let (choice, tokens) = choice(asked, answer, index, prompt, number, fault);
            completion_tokens += tokens;
            choice
        })
        .collect();
    let prompt_tokens: usize = asked.prompts.iter().map(Vec::len).sum();
    let with_ids = asked.return_token_ids && !matches!(fault, Some(Fault::MissingIds));
    let (kind, object) = if asked.chat { ("chatcmpl", "chat.completion") } else { ("cmpl", "text_completion") };
    let mut body = json!({
        "id": format!("{kind}-{number:08x}"),
        "object": object,
        "created": 1_700_000_000 + number,
        "model": asked.model.as_deref().unwrap_or(&script.model),
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    });
    if asked.chat {
        body["prompt_logprobs"] = Value::Null;
        body["prompt_token_ids"] = if with_ids { json!(asked.prompts.first()) } else { Value::Null };
    }
    if let Some(version) = script.policy_version {
        body["policy_version"] = json!(version);
    }
    body
}

/// One choice, and how many tokens were sampled for it.
fn choice(
    asked: &Asked,
    answer: &Answer,
    index: usize,
    prompt: &[u32],
    number: u64,
    fault: Option<&Fault>,
) -> (Value, usize) {
    let (text, calls) = match answer {
        Answer::Text(text) | Answer::Raw { raw: text, .. } => (text.as_str(), [].as_slice()),
        Answer::Tools { text, tool_calls } => (text.as_str(), tool_calls.as_slice()),
    };
    let mut tokens = encode(text);
    for call in calls {
        tokens.extend(encode(&render_tool_call(&call.name, &call.arguments_text())));
    }
    tokens.push(MESSAGE_END);
    let cut = tokens.len() > asked.max_tokens;
    tokens.truncate(asked.max_tokens);

    let mut choice = json!({"index": index, "finish_reason": "stop", "stop_reason": null});
    if cut {
        choice["finish_reason"] = json!("length");
    } else if !calls.is_empty() {
        choice["finish_reason"] = json!("tool_calls");
    }
    let shown = if cut { crate::tokenizer::decode(&tokens) } else { text.to_owned() };
    if !asked.chat {
        choice["text"] = json!(shown);
    } else if calls.is_empty() || cut {
        choice["message"] = json!({"role": "assistant", "content": shown, "tool_calls": []});
    } else {
        let calls: Vec<Value> = calls
            .iter()
            .enumerate()
            .map(|(call_index, call)| {
                json!({"id": format!("call-{number:x}-{index}-{call_index}"), "type": "function",
                       "function": {"name": call.name, "arguments": call.arguments_text()}})
            })
            .collect();
        let content = (!shown.is_empty()).then_some(shown);
        choice["message"] = json!({"role": "assistant", "content": content, "tool_calls": calls});
    }
    let with_ids = asked.return_token_ids && !matches!(fault, Some(Fault::MissingIds));
    choice["token_ids"] = if with_ids { json!(tokens) } else { Value::Null };
    if !asked.chat {
        choice["prompt_token_ids"] = if with_ids { json!(prompt) } else { Value::Null };
    }
    let with_logprobs = asked.logprobs && !matches!(fault, Some(Fault::MissingLogprobs));
    choice["logprobs"] = if with_logprobs {
        let missing = usize::from(matches!(fault, Some(Fault::CountMismatch)));
        logprobs(asked.chat, prompt.len(), &tokens[..tokens.len().saturating_sub(missing)])
    } else {
        Value::Null
    };
    (choice, tokens.len())
}

fn logprobs(chat: bool, prompt_tokens: usize, tokens: &[u32]) -> Value {
    let values = tokens.iter().enumerate().map(|(index, token)| log_prob(prompt_tokens + index, *token));
    if chat {
        let content: Vec<Value> = tokens
            .iter()
            .zip(values)
            .map(|(token, value)| {
                let bytes = u8::try_from(*token).map(|byte| vec![byte]).unwrap_or_default();
                json!({"token": display(*token), "logprob": value, "bytes": bytes, "top_logprobs": []})
            })
            .collect();
        return json!({"content": content});
    }
    let names: Vec<String> = tokens.iter().map(|token| display(*token)).collect();
    let offsets: Vec<usize> = (0..tokens.len()).collect();
    json!({"tokens": names, "token_logprobs": values.collect::<Vec<_>>(), "top_logprobs": null, "text_offset": offsets})
}

/// The log-prob of `token` at `position`: the same at every asking, and different from its neighbours'.
#[must_use]
pub fn log_prob(position: usize, token: u32) -> f32 {
    let mixed =
        (position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ u64::from(token).wrapping_mul(0xD1B5_4A32_D192_ED03);
    let unit = ((mixed >> 40) as f32) / ((1_u64 << 24) as f32);
    -0.001 - 3.0 * unit
}
