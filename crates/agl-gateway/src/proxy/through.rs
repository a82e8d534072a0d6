//! A stream on its way through the gateway: read from the server, told to the harness in its own words at once, and put together
//! for the record.
//!
//! For servers that are registered with `stream = "through"`. The ids that came with the chunks have to be as many as the server
//! says it sampled; where they are not, the answer is recorded without any. Once something has been told, nothing is tried again:
//! a stream that breaks ends with an error.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use super::upstream::Fault;
use crate::dialect::live::Teller;
use crate::dialect::{Voice, message_of};
use crate::error::ApiError;

/// What `stream` of a registered model may say.
pub(crate) const THROUGH: &str = "through";
/// The other, which is the same as saying nothing.
pub(crate) const SYNTHESISE: &str = "synthesise";

/// See the [module](self).
pub(crate) struct Through {
    voice: Voice,
    call_id: String,
    teller: Teller,
    lines: Lines,
    answer: Gathered,
    told: mpsc::UnboundedSender<Bytes>,
    has_spoken: bool,
}

/// What is wrong with a stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Broken(pub(crate) String);

impl Through {
    /// What is to be told goes to `told`.
    pub(crate) fn new(voice: &Voice, call_id: &str, told: mpsc::UnboundedSender<Bytes>) -> Self {
        Self {
            voice: voice.clone(),
            call_id: call_id.to_owned(),
            teller: Teller::new(voice, call_id),
            lines: Lines::default(),
            answer: Gathered::default(),
            told,
            has_spoken: false,
        }
    }

    /// True once the harness has been told anything.
    pub(crate) fn has_spoken(&self) -> bool {
        self.has_spoken
    }

    /// Tells a stream of the server's to its end, and gives the whole answer.
    pub(super) async fn carry(&mut self, mut response: reqwest::Response) -> Result<Bytes, Fault> {
        // One that was tried before has told nothing.
        self.lines = Lines::default();
        self.answer = Gathered::default();
        self.teller = Teller::new(&self.voice, &self.call_id);
        while let Some(bytes) = response.chunk().await.map_err(Fault::Request)? {
            self.hear(&bytes)?;
        }
        Ok(self.end()?)
    }

    /// Takes what came from the server.
    fn hear(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        self.lines.buffer.extend_from_slice(bytes);
        let mut words = String::new();
        while let Some(data) = self.lines.next_event() {
            if data == b"[DONE]" {
                self.answer.is_done = true;
                continue;
            }
            let chunk: Value = serde_json::from_slice(&data)
                .map_err(|_| Broken("the server's stream has an event that is no JSON".to_owned()))?;
            if chunk.get("error").is_some_and(|error| !error.is_null()) {
                return Err(Broken(format!("the server says: {}", message_of(&chunk))));
            }
            self.answer.add(&chunk);
            let told = self.teller.tell(&chunk).map_err(|_| {
                Broken("the server's stream goes back to a tool call after the next one has begun".to_owned())
            })?;
            words += &told;
        }
        self.say(words);
        Ok(())
    }

    /// The whole answer, once the server's stream has ended.
    fn end(&self) -> Result<Bytes, Broken> {
        if !self.answer.is_whole() {
            return Err(Broken("the server's stream ended before its answer did".to_owned()));
        }
        Ok(self.answer.whole().to_string().into())
    }

    /// The last words of the answer, after it has been recorded.
    pub(crate) fn finish(&mut self) -> Bytes {
        self.teller.finish(&self.answer.whole()).into()
    }

    /// The last words of an answer that broke off.
    pub(crate) fn fail(&mut self, error: &ApiError) -> Bytes {
        self.teller.fail(&self.voice, error).into()
    }

    fn say(&mut self, words: String) {
        if !words.is_empty() {
            self.has_spoken = true;
            // Nobody listens where the call has been given up.
            let _given_up = self.told.send(words.into());
        }
    }
}

/// The data of server-sent events, as they become whole.
#[derive(Default)]
struct Lines {
    buffer: Vec<u8>,
    data: Option<Vec<u8>>,
}

impl Lines {
    fn next_event(&mut self) -> Option<Vec<u8>> {
        while let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.buffer.drain(..=end).collect();
            let line = line.strip_suffix(b"\n").unwrap_or(&line);
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if line.is_empty() {
                if let Some(data) = self.data.take() {
                    return Some(data);
                }
            } else if let Some(data) = line.strip_prefix(b"data:") {
                let data = data.strip_prefix(b" ").unwrap_or(data);
                match &mut self.data {
                    Some(before) => {
                        before.push(b'\n');
                        before.extend_from_slice(data);
                    }
                    None => self.data = Some(data.to_vec()),
                }
            }
        }
        None
    }
}

/// The answer as far as it has come.
#[derive(Default)]
struct Gathered {
    /// What the answer says of itself, from its first chunk.
    head: Map<String, Value>,
    choices: BTreeMap<u64, Choice>,
    prompt_token_ids: Option<Value>,
    usage: Option<Value>,
    is_done: bool,
}

#[derive(Default)]
struct Choice {
    is_chat: bool,
    text: String,
    thought: String,
    calls: BTreeMap<u64, Call>,
    /// Parallel to the sampled tokens, where the server gives them.
    lists: BTreeMap<&'static str, Vec<Value>>,
    /// Whatever else it says, as it said it last.
    rest: Map<String, Value>,
}

#[derive(Default)]
struct Call {
    id: String,
    name: String,
    arguments: String,
}

const IDS: &str = "token_ids";
const VERSIONS: &str = "policy_versions";
/// Of chat completions.
const LOG_PROBS: &str = "content";
/// Of completions.
const TOKEN_LOG_PROBS: &str = "token_logprobs";

impl Gathered {
    fn add(&mut self, chunk: &Value) {
        for key in ["id", "created", "model", "system_fingerprint", "policy_version"] {
            if let Some(value) = chunk.get(key).filter(|_| !self.head.contains_key(key)) {
                self.head.insert(key.to_owned(), value.clone());
            }
        }
        if let Some(ids) = chunk.get("prompt_token_ids").filter(|ids| ids.is_array()) {
            self.prompt_token_ids.get_or_insert_with(|| ids.clone());
        }
        if let Some(usage) = chunk.get("usage").filter(|usage| usage.is_object()) {
            self.usage = Some(usage.clone());
        }
        for choice in chunk["choices"].as_array().into_iter().flatten() {
            self.choices.entry(choice["index"].as_u64().unwrap_or_default()).or_default().add(choice);
        }
    }

    fn is_whole(&self) -> bool {
        let ended = self.choices.values().all(|choice| choice.rest.get("finish_reason").is_some_and(Value::is_string));
        !self.choices.is_empty() && (self.is_done || ended)
    }

    /// As the server would have told it whole. Without ids where they are not as many as it says it sampled.
    fn whole(&self) -> Value {
        let is_chat = self.choices.values().any(|choice| choice.is_chat);
        let mut whole = self.head.clone();
        whole.insert("object".to_owned(), if is_chat { "chat.completion" } else { "text_completion" }.into());
        let told: usize = self.choices.values().filter_map(|choice| choice.lists.get(IDS)).map(Vec::len).sum();
        let sampled = self.usage.as_ref().and_then(|usage| usage["completion_tokens"].as_u64());
        let has_all_ids = sampled == Some(told as u64);
        if let Some(ids) = &self.prompt_token_ids {
            whole.insert("prompt_token_ids".to_owned(), ids.clone());
        }
        let choices = self.choices.iter().map(|(&index, choice)| choice.whole(index, has_all_ids)).collect();
        whole.insert("choices".to_owned(), choices);
        whole.insert("usage".to_owned(), self.usage.clone().unwrap_or_default());
        Value::Object(whole)
    }
}

impl Choice {
    fn add(&mut self, choice: &Value) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        self.text += &text(&choice["text"]);
        if let Some(delta) = choice.get("delta") {
            self.is_chat = true;
            self.text += &text(&delta["content"]);
            let thought = delta.get("reasoning_content").filter(|thought| thought.is_string());
            self.thought += &text(thought.unwrap_or(&delta["reasoning"]));
            for piece in delta["tool_calls"].as_array().into_iter().flatten() {
                let call = self.calls.entry(piece["index"].as_u64().unwrap_or_default()).or_default();
                // Some servers repeat both with every piece.
                for (known, said) in [(&mut call.id, &piece["id"]), (&mut call.name, &piece["function"]["name"])] {
                    if known.is_empty() {
                        *known = text(said);
                    }
                }
                call.arguments += &text(&piece["function"]["arguments"]);
            }
        }
        for key in [IDS, VERSIONS] {
            self.extend(key, &choice[key]);
        }
        for key in [LOG_PROBS, TOKEN_LOG_PROBS] {
            self.extend(key, &choice["logprobs"][key]);
        }
        for key in ["finish_reason", "stop_reason", "prompt_token_ids"] {
            if let Some(value) = choice.get(key).filter(|value| !value.is_null()) {
                self.rest.insert(key.to_owned(), value.clone());
            }
        }
    }

    fn extend(&mut self, key: &'static str, more: &Value) {
        if let Some(more) = more.as_array() {
            self.lists.entry(key).or_default().extend(more.iter().cloned());
        }
    }

    fn whole(&self, index: u64, has_all_ids: bool) -> Value {
        let mut whole = self.rest.clone();
        whole.insert("index".to_owned(), index.into());
        if self.is_chat {
            let is_silent = self.text.is_empty() && !self.calls.is_empty();
            let mut message = json!({"role": "assistant", "content": (!is_silent).then_some(&self.text)});
            if !self.thought.is_empty() {
                message["reasoning_content"] = self.thought.clone().into();
            }
            if !self.calls.is_empty() {
                message["tool_calls"] = self.calls.values().map(Call::whole).collect();
            }
            whole.insert("message".to_owned(), message);
        } else {
            whole.insert("text".to_owned(), self.text.clone().into());
        }
        for (&key, list) in &self.lists {
            match key {
                LOG_PROBS | TOKEN_LOG_PROBS => drop(whole.insert("logprobs".to_owned(), json!({ key: list }))),
                _ if has_all_ids => drop(whole.insert(key.to_owned(), list.clone().into())),
                _ => {}
            }
        }
        Value::Object(whole)
    }
}

impl Call {
    fn whole(&self) -> Value {
        json!({"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}})
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::{Detail, Dialect};

    fn through() -> (Through, mpsc::UnboundedReceiver<Bytes>) {
        let (told, telling) = mpsc::unbounded_channel();
        let voice = Voice { dialect: Dialect::Chat, stream: true, model: None, detail: Detail::Nothing };
        (Through::new(&voice, "c", told), telling)
    }

    fn event(chunk: &Value) -> String {
        format!("data: {chunk}\n\n")
    }

    fn delta(delta: Value, ids: Value) -> String {
        event(
            &json!({"id": "x", "model": "m", "choices": [{"index": 0, "delta": delta, "token_ids": ids, "finish_reason": null}]}),
        )
    }

    fn end(sampled: u64) -> String {
        let finish = json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls", "token_ids": [9]}]});
        let usage = json!({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": sampled}});
        event(&finish) + &event(&usage) + "data: [DONE]\n\n"
    }

    fn call(more: Value) -> Value {
        json!({"tool_calls": [{"index": 0, "function": more}]})
    }

    fn stream(sampled: u64) -> String {
        let mut begun = call(json!({"name": "f", "arguments": ""}));
        begun["tool_calls"][0]["id"] = "c1".into();
        let first = json!({"prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]});
        event(&first)
            + &delta(json!({"reasoning": "Hm."}), json!([3]))
            + &delta(json!({"content": "é"}), json!([4, 5]))
            + &delta(begun, json!([6]))
            + &delta(call(json!({"arguments": "{\"a\""})), json!([7]))
            + ": a comment\r\n\r\n"
            + &delta(call(json!({"arguments": ":1}"})), json!([8]))
            + &end(sampled)
    }

    #[test]
    fn a_stream_is_put_together_however_it_is_cut() {
        for size in [1, 7, 10_000] {
            let (mut through, _telling) = through();
            for piece in stream(7).as_bytes().chunks(size) {
                through.hear(piece).unwrap();
            }
            let whole: Value = serde_json::from_slice(&through.end().unwrap()).unwrap();
            assert_eq!(
                whole,
                json!({
                    "id": "x", "model": "m", "object": "chat.completion", "prompt_token_ids": [1, 2],
                    "choices": [{"finish_reason": "tool_calls", "index": 0, "token_ids": [3, 4, 5, 6, 7, 8, 9], "message": {
                        "role": "assistant", "content": "é", "reasoning_content": "Hm.", "tool_calls": [
                            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}}]}}],
                    "usage": {"prompt_tokens": 2, "completion_tokens": 7},
                })
            );
        }
    }

    #[test]
    fn ids_that_are_not_as_many_as_were_sampled_are_none() {
        let (mut through, _telling) = through();
        through.hear(stream(8).as_bytes()).unwrap();
        let whole: Value = serde_json::from_slice(&through.end().unwrap()).unwrap();
        assert_eq!(whole["choices"][0].get("token_ids"), None);
    }

    #[test]
    fn what_ends_an_answer_is_told_last() {
        let (mut through, mut telling) = through();
        through.hear(stream(7).as_bytes()).unwrap();
        let told = String::from_utf8(telling.try_recv().unwrap().to_vec()).unwrap();
        assert!(told.contains("\"é\"") && !told.contains("\"tool_calls\",") && !told.contains("DONE"), "{told}");
        let last = String::from_utf8(through.finish().to_vec()).unwrap();
        assert!(last.contains("\"finish_reason\":\"tool_calls\"") && last.ends_with("data: [DONE]\n\n"), "{last}");
        assert!(!last.contains("usage"), "nobody asked for it");
    }

    #[test]
    fn a_stream_that_is_not_whole_is_broken() {
        let heard = |stream: &str| {
            let (mut through, _telling) = through();
            through.hear(stream.as_bytes()).and_then(|()| through.end().map(drop)).unwrap_err().0
        };
        assert!(heard(&delta(json!({"content": "a"}), json!([1]))).contains("ended before"));
        assert!(heard("").contains("ended before"));
        assert!(heard("data: {\"a\n\n").contains("no JSON"));
        assert_eq!(heard("data: {\"error\": {\"message\": \"out of memory\"}}\n\n"), "the server says: out of memory");
    }
}
