//! llama.cpp's server, made to answer as vLLM does: with `prompt_token_ids` and `token_ids`.
//!
//! It tells what it sampled in `__verbose.tokens`, every token, the one that ended the answer included; servers before that field
//! only beside the log-probs. What it was prompted with it does not tell: its own template (`/apply-template`) and tokenizer
//! (`/tokenize`) say so while it generates. Every count that it gives is held against these ids; where one differs, the answer has
//! none, which is logged and counted, and nothing is guessed.
//!
//! Log-probs are missing for tokens that end inside a character, and for those of a stop text: such an answer has ids, but no
//! log-probs. Of several choices it tells the tokens of the first only: each is asked for by a call of its own.

use agl_store::RegisteredModel;
use axum::http::StatusCode;
use bytes::Bytes;
use futures_util::future::try_join_all;
use serde::Deserialize;
use serde_json::{Value, json};

use super::LARGE_BODY_BYTES;
use super::request::UpstreamPath;
use super::upstream::{Ask, Envelope, Upstream, UpstreamAnswer, beside_v1};

/// As many as OpenAI's own interface gives.
const MOST_CHOICES: u64 = 128;

/// What the server would be prompted with.
struct Prompt {
    /// As its template renders the conversation; `None` where the harness wrote the prompt itself.
    text: Option<String>,
    ids: Vec<u32>,
}

/// Sends the call once, and the questions that come with it.
pub(super) async fn call(
    upstream: &Upstream,
    server: &RegisteredModel,
    envelope: Envelope,
    ask: &Ask,
    url: &str,
) -> Result<UpstreamAnswer, reqwest::Error> {
    if !upstream.wants_ids() {
        return upstream.try_once(url, envelope, upstream.dress(ask, server, &[])).await;
    }
    let bodies = bodies(upstream, server, ask);
    let answers = try_join_all(bodies.iter().map(|body| upstream.try_once(url, envelope.clone(), body.clone())));
    let prompt = async {
        match ask.path {
            UpstreamPath::ChatCompletions => {
                of_conversation(upstream, server, envelope.clone(), upstream.dress(ask, server, &[])).await
            }
            UpstreamPath::Completions => of_prompt(upstream, server, envelope.clone(), ask.body.value("prompt")?).await,
        }
    };
    let (answers, prompt) = tokio::join!(answers, prompt);
    let mut answers = answers?;
    if let Some(failed) = answers.iter().position(|answer| answer.status != StatusCode::OK) {
        return Ok(answers.swap_remove(failed));
    }
    let raw: Vec<Bytes> = answers.iter().map(|answer| answer.body.clone()).collect();
    let path = ask.path;
    let retell = move || retell(&raw, prompt.as_ref(), path);
    let is_large = answers.iter().map(|answer| answer.body.len()).sum::<usize>() > LARGE_BODY_BYTES;
    let told = if is_large { agl_store::aside(retell).await.flatten() } else { retell() };
    let mut answer = answers.swap_remove(0);
    if let Some(Retold { body, complaints }) = told {
        answer.body = body;
        if !complaints.is_empty() {
            tracing::warn!(
                server = server.endpoint,
                complaints = complaints.join("; "),
                "llama.cpp's answer is recorded without token ids"
            );
        }
    }
    Ok(answer)
}

/// A body for each choice.
fn bodies(upstream: &Upstream, server: &RegisteredModel, ask: &Ask) -> Vec<Bytes> {
    let choices = ask.body.number("n").or_else(|| ask.body.number("n_cmpl")).unwrap_or(1);
    // What is no number of choices is the server's to refuse.
    if !(2..=MOST_CHOICES).contains(&choices) {
        return vec![upstream.dress(ask, server, &[])];
    }
    (0..choices)
        .map(|choice| {
            // Equal seeds would sample the same answer each time.
            let seed = ask.body.number("seed").map(|seed| ("seed", json!(seed.wrapping_add(choice))));
            let single = [("n", json!(1)), ("n_cmpl", json!(1))].into_iter().chain(seed);
            upstream.dress(ask, server, &single.collect::<Vec<_>>())
        })
        .collect()
}

/// How many tokens a conversation is; `None` where the server does not say.
pub(super) async fn count(
    upstream: &Upstream,
    server: &RegisteredModel,
    envelope: Envelope,
    body: Bytes,
) -> Option<u64> {
    Some(of_conversation(upstream, server, envelope, body).await?.ids.len() as u64)
}

/// The prompt of a chat, from the server's own template.
async fn of_conversation(
    upstream: &Upstream,
    server: &RegisteredModel,
    envelope: Envelope,
    body: Bytes,
) -> Option<Prompt> {
    #[derive(Deserialize)]
    struct Rendered {
        prompt: String,
    }
    let rendered = upstream.try_once(&beside_v1(server, "apply-template"), envelope.clone(), body).await.ok()?;
    let Rendered { prompt } = serde_json::from_slice(&rendered.body).ok()?;
    let ids = tokenize(upstream, server, envelope, &json!(prompt)).await?;
    Some(Prompt { text: Some(prompt), ids })
}

/// The prompt of a completion: a text, or token ids already.
async fn of_prompt(upstream: &Upstream, server: &RegisteredModel, envelope: Envelope, prompt: Value) -> Option<Prompt> {
    let ids = match &prompt {
        Value::String(_) => tokenize(upstream, server, envelope, &prompt).await?,
        // Several prompts are several answers, of which it tells the first.
        _ => serde_json::from_value(prompt).ok()?,
    };
    Some(Prompt { text: None, ids })
}

/// As the server tokenizes what it is prompted with.
async fn tokenize(
    upstream: &Upstream,
    server: &RegisteredModel,
    envelope: Envelope,
    content: &Value,
) -> Option<Vec<u32>> {
    #[derive(Deserialize)]
    struct Tokens {
        tokens: Vec<u32>,
    }
    let body = json!({"content": content, "add_special": true, "parse_special": true}).to_string();
    let answer = upstream.try_once(&beside_v1(server, "tokenize"), envelope, body.into()).await.ok()?;
    Some(serde_json::from_slice::<Tokens>(&answer.body).ok()?.tokens)
}

/// An answer in vLLM's form.
struct Retold {
    body: Bytes,
    /// Why it has no token ids, where it has none.
    complaints: Vec<String>,
}

/// One answer out of those to the single choices; `None` where they are no answers.
fn retell(answers: &[Bytes], prompt: Option<&Prompt>, path: UpstreamPath) -> Option<Retold> {
    let mut told: Vec<Value> =
        answers.iter().map(|answer| serde_json::from_slice(answer)).collect::<Result<_, _>>().ok()?;
    let mut complaints = Vec::new();
    let (mut choices, mut sampled_tokens) = (Vec::new(), 0);
    for answer in &mut told {
        let verbose = answer.as_object_mut()?.shift_remove("__verbose").unwrap_or_default();
        let found = sampled(answer, &verbose).and_then(|sampled| {
            check(prompt, sampled.len(), answer, &verbose)?;
            Ok(sampled)
        });
        sampled_tokens += answer["usage"]["completion_tokens"].as_u64().unwrap_or_default();
        let Some(mut own) = answer["choices"].as_array_mut().map(std::mem::take) else { continue };
        match (found, own.as_mut_slice()) {
            (Ok(sampled), [choice]) => {
                choice["token_ids"] = json!(sampled);
                if let Some(prompt) = prompt.filter(|_| path == UpstreamPath::Completions) {
                    choice["prompt_token_ids"] = json!(prompt.ids);
                }
            }
            (Ok(_), _) => complaints.push("it tells the tokens of the first of several choices only".to_owned()),
            (Err(complaint), _) => complaints.push(complaint),
        }
        choices.append(&mut own);
    }
    let mut whole = told.swap_remove(0);
    for (index, choice) in choices.iter_mut().enumerate() {
        choice["index"] = index.into();
    }
    whole["choices"] = choices.into();
    if let Some(prompt) = prompt.filter(|_| path == UpstreamPath::ChatCompletions) {
        whole["prompt_token_ids"] = json!(prompt.ids);
    }
    if answers.len() > 1 {
        let prompt_tokens = whole["usage"]["prompt_tokens"].as_u64().unwrap_or_default();
        whole["usage"]["completion_tokens"] = sampled_tokens.into();
        whole["usage"]["total_tokens"] = (prompt_tokens + sampled_tokens).into();
    }
    Some(Retold { body: whole.to_string().into(), complaints })
}

/// What was sampled, and that the ids beside the log-probs are no others.
fn sampled(answer: &Value, verbose: &Value) -> Result<Vec<u32>, String> {
    #[derive(Deserialize)]
    struct Token {
        id: u32,
    }
    let beside = Vec::<Token>::deserialize(&answer["choices"][0]["logprobs"]["content"]).ok();
    let beside = beside.map(|tokens| tokens.into_iter().map(|token| token.id).collect::<Vec<_>>());
    match (Vec::<u32>::deserialize(&verbose["tokens"]).ok(), beside) {
        (Some(sampled), Some(beside)) if sampled.len() == beside.len() && sampled != beside => {
            Err("its tokens are others than those of its log-probs".to_owned())
        }
        (Some(sampled), _) => Ok(sampled),
        (None, Some(beside)) => Ok(beside),
        (None, None) => Err("it tells no tokens: it must be llama.cpp of 2025 or later".to_owned()),
    }
}

/// Everything that the server says of its prompt and of what it sampled has to agree with the ids.
fn check(prompt: Option<&Prompt>, sampled: usize, answer: &Value, verbose: &Value) -> Result<(), String> {
    let prompt = prompt.ok_or(
        "its prompt is not known: /apply-template and /tokenize must be open, and a completion have one prompt",
    )?;
    let counted = |key: &str| answer["usage"][key].as_u64().unwrap_or_default();
    let (prompt_tokens, completion_tokens) = (counted("prompt_tokens"), counted("completion_tokens"));
    if completion_tokens != sampled as u64 {
        return Err(format!("it sampled {completion_tokens} tokens and tells {sampled}"));
    }
    if prompt_tokens != prompt.ids.len() as u64 {
        return Err(format!("its prompt had {prompt_tokens} tokens, its template gives {}", prompt.ids.len()));
    }
    // Tokens that begin every prompt are no part of the template's text.
    if let (Some(text), Some(evaluated)) = (&prompt.text, verbose["prompt"].as_str())
        && !evaluated.ends_with(text.trim_start())
    {
        return Err("its prompt was another than its template gives now".to_owned());
    }
    // The last token that was sampled is not in the cache yet.
    if verbose["truncated"] == true
        && verbose["tokens_cached"].as_u64().is_some_and(|cached| cached + 1 < prompt_tokens + completion_tokens)
    {
        return Err("it forgot a part of the prompt on the way: start it without --context-shift".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt() -> Prompt {
        Prompt { text: Some("<|user|>hi".to_owned()), ids: vec![1, 2, 3] }
    }

    /// As the server answers: two tokens, the second of which ended the answer.
    fn answer() -> Value {
        json!({
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x"},
                         "logprobs": {"content": [{"id": 7, "logprob": -0.5}, {"id": 9, "logprob": -0.25}]}}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            "__verbose": {"tokens": [7, 9], "prompt": "<s><|user|>hi", "truncated": false, "tokens_cached": 4},
        })
    }

    fn told(answers: &[Value], prompt: Option<&Prompt>, path: UpstreamPath) -> (Value, Vec<String>) {
        let answers: Vec<Bytes> = answers.iter().map(|answer| answer.to_string().into()).collect();
        let told = retell(&answers, prompt, path).unwrap();
        (serde_json::from_slice(&told.body).unwrap(), told.complaints)
    }

    /// What is said against an answer that was changed so.
    fn complaint(change: impl Fn(&mut Value)) -> String {
        let mut changed = answer();
        change(&mut changed);
        let (told, complaints) = told(&[changed], Some(&prompt()), UpstreamPath::ChatCompletions);
        assert_eq!(told["choices"][0].get("token_ids"), None, "{complaints:?}");
        complaints.join("; ")
    }

    #[test]
    fn an_answer_gets_the_ids_where_vllm_has_them_and_loses_what_is_said_for_our_sake() {
        let (told, complaints) = told(&[answer()], Some(&prompt()), UpstreamPath::ChatCompletions);
        assert_eq!(complaints, [""; 0]);
        assert_eq!((&told["prompt_token_ids"], &told["choices"][0]["token_ids"]), (&json!([1, 2, 3]), &json!([7, 9])));
        assert_eq!(told.get("__verbose"), None);
        let (told, _) = self::told(&[answer()], Some(&prompt()), UpstreamPath::Completions);
        assert_eq!(told["choices"][0]["prompt_token_ids"], json!([1, 2, 3]));
    }

    #[test]
    fn log_probs_may_be_missing_where_ids_are_not() {
        let mut cut = answer();
        cut["choices"][0]["logprobs"]["content"].as_array_mut().unwrap().pop();
        let (told, complaints) = told(&[cut], Some(&prompt()), UpstreamPath::ChatCompletions);
        assert_eq!((&told["choices"][0]["token_ids"], complaints.len()), (&json!([7, 9]), 0));
    }

    #[test]
    fn a_server_that_tells_tokens_beside_its_log_probs_only_is_believed_where_the_count_is_right() {
        let mut old = answer();
        old.as_object_mut().unwrap().remove("__verbose");
        let (told, _) = told(&[old], Some(&prompt()), UpstreamPath::ChatCompletions);
        assert_eq!(told["choices"][0]["token_ids"], json!([7, 9]));
        let cut = complaint(|answer| {
            answer.as_object_mut().unwrap().remove("__verbose");
            answer["choices"][0]["logprobs"]["content"].as_array_mut().unwrap().pop();
        });
        assert_eq!(cut, "it sampled 2 tokens and tells 1");
    }

    #[test]
    fn whatever_does_not_agree_leaves_the_answer_without_ids() {
        for (expected, change) in [
            (
                "sampled 3 tokens and tells 2",
                (|answer| answer["usage"]["completion_tokens"] = 3.into()) as fn(&mut Value),
            ),
            ("prompt had 4 tokens, its template gives 3", |answer| answer["usage"]["prompt_tokens"] = 4.into()),
            ("another than its template", |answer| answer["__verbose"]["prompt"] = "<s><|user|>ha".into()),
            ("others than those of its log-probs", |answer| answer["__verbose"]["tokens"] = json!([7, 8])),
            ("--context-shift", |answer| {
                answer["__verbose"]["truncated"] = true.into();
                answer["__verbose"]["tokens_cached"] = 3.into();
            }),
            ("tells no tokens", |answer| {
                answer["__verbose"] = json!({});
                answer["choices"][0]["logprobs"] = Value::Null;
            }),
        ] {
            let said = complaint(change);
            assert!(said.contains(expected), "{said:?} does not say {expected:?}");
        }
        let (told, complaints) = told(&[answer()], None, UpstreamPath::ChatCompletions);
        assert_eq!(told["choices"][0].get("token_ids"), None);
        assert!(complaints[0].contains("/apply-template"), "{complaints:?}");
    }

    #[test]
    fn choices_that_were_asked_for_one_by_one_are_one_answer() {
        let mut second = answer();
        second["__verbose"]["tokens"] = json!([8, 9]);
        second["choices"][0]["logprobs"]["content"][0]["id"] = 8.into();
        let (told, complaints) = told(&[answer(), second], Some(&prompt()), UpstreamPath::ChatCompletions);
        assert_eq!(complaints, [""; 0]);
        assert_eq!((&told["choices"][1]["index"], &told["choices"][1]["token_ids"]), (&json!(1), &json!([8, 9])));
        assert_eq!(told["usage"], json!({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}));
    }
}
