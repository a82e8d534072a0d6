//! One turn in each dialect: what is sent, and what a complete answer says.

use serde_json::{Value, json};

use super::POLICY;

#[derive(Clone, Copy, Debug)]
pub enum Dialect {
    Chat,
    Responses,
    Messages,
    Gemini,
}

/// How an agent speaks.
#[derive(Clone, Copy, Debug)]
pub struct Harness {
    pub dialect: Dialect,
    pub stream: bool,
}

/// Who said something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    User,
    Model,
}

impl Harness {
    /// The dialects in turn, each streamed and whole.
    pub fn of(number: usize) -> Self {
        let dialects = [Dialect::Chat, Dialect::Responses, Dialect::Messages, Dialect::Gemini];
        Self { dialect: dialects[number % 4], stream: number / 4 % 2 == 1 }
    }

    /// Behind the attempt's proxy URL.
    pub fn path(self) -> String {
        match (self.dialect, self.stream) {
            (Dialect::Chat, _) => "openai/v1/chat/completions".to_owned(),
            (Dialect::Responses, _) => "openai/v1/responses".to_owned(),
            (Dialect::Messages, _) => "anthropic/v1/messages".to_owned(),
            (Dialect::Gemini, false) => format!("gemini/v1beta/models/{POLICY}:generateContent"),
            (Dialect::Gemini, true) => format!("gemini/v1beta/models/{POLICY}:streamGenerateContent?alt=sse"),
        }
    }

    /// The header that brings the key.
    pub fn key(self, key: &str) -> (&'static str, String) {
        match self.dialect {
            Dialect::Chat | Dialect::Responses => ("authorization", format!("Bearer {key}")),
            Dialect::Messages => ("x-api-key", key.to_owned()),
            Dialect::Gemini => ("x-goog-api-key", key.to_owned()),
        }
    }

    /// The whole conversation so far, as the harness sends it each time.
    pub fn body(self, said: &[(Who, String)]) -> Value {
        let role = |who: Who| if who == Who::User { "user" } else { "assistant" };
        let messages: Vec<Value> =
            said.iter().map(|(who, text)| json!({"role": role(*who), "content": text})).collect();
        let mut body = match self.dialect {
            Dialect::Chat => json!({"model": POLICY, "messages": messages}),
            Dialect::Responses => json!({"model": POLICY, "input": messages}),
            Dialect::Messages => json!({"model": POLICY, "messages": messages, "max_tokens": 100_000}),
            Dialect::Gemini => {
                let role = |who: Who| if who == Who::User { "user" } else { "model" };
                let content = |(who, text): &(Who, String)| json!({"role": role(*who), "parts": [{"text": text}]});
                json!({"contents": said.iter().map(content).collect::<Vec<_>>()})
            }
        };
        if self.stream && !matches!(self.dialect, Dialect::Gemini) {
            body["stream"] = json!(true);
        }
        body
    }

    /// The text of an answer; `None` if it is not whole.
    pub fn text(self, body: &str) -> Option<String> {
        if self.stream { self.streamed(body) } else { self.whole(&serde_json::from_str(body).ok()?) }
    }

    fn whole(self, answer: &Value) -> Option<String> {
        match self.dialect {
            Dialect::Chat => Some(answer["choices"][0]["message"]["content"].as_str()?.to_owned()),
            Dialect::Responses => texts(&answer["output"][0]["content"]),
            Dialect::Messages => texts(&answer["content"]),
            Dialect::Gemini => texts(&answer["candidates"][0]["content"]["parts"]),
        }
    }

    fn streamed(self, body: &str) -> Option<String> {
        let data = body.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim);
        let is_done = data.clone().any(|data| data == "[DONE]");
        let events: Vec<Value> =
            data.filter(|data| *data != "[DONE]").map(serde_json::from_str).collect::<Result<_, _>>().ok()?;
        let joined = |part: &dyn Fn(&Value) -> Option<String>| events.iter().filter_map(part).collect::<String>();
        let string = |value: &Value| value.as_str().map(str::to_owned);
        match self.dialect {
            Dialect::Chat => is_done.then(|| joined(&|event| string(&event["choices"][0]["delta"]["content"]))),
            Dialect::Responses => {
                let end = events.last().filter(|event| event["type"] == "response.completed")?;
                self.whole(&end["response"])
            }
            Dialect::Messages => {
                events.last().filter(|event| event["type"] == "message_stop")?;
                Some(joined(&|event| string(&event["delta"]["text"])))
            }
            Dialect::Gemini => {
                events.last().filter(|event| event["candidates"][0]["finishReason"].is_string())?;
                Some(joined(&|event| self.whole(event)))
            }
        }
    }
}

/// The texts of the parts, joined.
fn texts(parts: &Value) -> Option<String> {
    parts.as_array()?.iter().map(|part| part["text"].as_str()).collect()
}
