//! What an inference server answered: token ids, log-probs and policy versions, found where vLLM and our own engine put them.
//! A field that is not what it should be is treated as absent and complained about; it never fails the call.

use agl_core::trajectory::VersionRun;
use agl_core::trajectory::row::version_runs;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::dialect::answer::ToolCall;

mod scan;

/// The part of an answer that the gateway looks at.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Answer {
    /// False where the body is no JSON object.
    pub(crate) is_object: bool,
    pub(crate) choices: Vec<Choice>,
    pub(crate) usage: Option<Value>,
    /// Of the first choice.
    pub(crate) finish_reason: Option<String>,
    /// Of all choices.
    pub(crate) tool_calls: Vec<ToolCall>,
    /// What is wrong with it, for the log.
    pub(crate) complaints: Vec<String>,
}

/// One sampled answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Choice {
    /// Prompt and sampled ids; `None` where either is missing.
    pub(crate) ids: Option<(Vec<u32>, Vec<u32>)>,
    /// Parallel to the sampled ids; `None` where missing, unusable or of another length.
    pub(crate) log_probs: Option<Vec<f32>>,
    /// The counts add up to the number of sampled ids.
    pub(crate) versions: Vec<VersionRun>,
}

/// What an answer says, before it is judged.
#[derive(Default)]
struct Said {
    prompt: Option<Vec<u32>>,
    choices: Vec<SaidChoice>,
    version: Option<u64>,
    usage: Option<Value>,
}

#[derive(Default)]
struct SaidChoice {
    prompt: Option<Vec<u32>>,
    sampled: Option<Vec<u32>>,
    log_probs: Option<Vec<f32>>,
    versions: Option<Vec<u64>>,
    finish_reason: Option<String>,
    tool_calls: Vec<Value>,
}

/// `registered` is the version that the server was registered with, for servers that do not say.
pub(crate) fn read(body: &[u8], registered: u64) -> Answer {
    let Some(said) = well_formed::read(body).or_else(|| field_by_field::read(body)) else {
        return Answer { complaints: vec!["the answer is no JSON object".to_owned()], ..Answer::default() };
    };
    judged(said, registered)
}

fn judged(said: Said, registered: u64) -> Answer {
    let mut complaints = Vec::new();
    if said.choices.is_empty() {
        complaints.push("the answer has no choices".to_owned());
    }
    let version = said.version.unwrap_or(registered);
    let finish_reason = said.choices.first().and_then(|choice| choice.finish_reason.clone());
    let mut answer = Answer {
        is_object: true,
        usage: said.usage.filter(Value::is_object),
        finish_reason: finish_reason.filter(|reason| !reason.is_empty()),
        ..Answer::default()
    };
    let mut shared_prompt = said.prompt.or_else(|| said.choices.first().and_then(|choice| choice.prompt.clone()));
    let last = said.choices.len().saturating_sub(1);
    for (index, choice) in said.choices.into_iter().enumerate() {
        let SaidChoice { prompt, sampled, log_probs, versions, tool_calls, .. } = choice;
        answer.tool_calls.extend(tool_calls.iter().map(ToolCall::read));
        // A prompt may be long, and mostly there is one choice.
        let prompt = prompt.or_else(|| if index == last { shared_prompt.take() } else { shared_prompt.clone() });
        let (Some(prompt), Some(sampled)) = (prompt, sampled) else {
            complaints.push(format!("choice {index} has no token ids"));
            answer.choices.push(Choice::default());
            continue;
        };
        if let Some(found) = log_probs.as_ref().map(Vec::len).filter(|&found| found != sampled.len()) {
            complaints.push(format!("choice {index} has {} token ids but {found} log-probs", sampled.len()));
        }
        if let Some(found) = versions.as_ref().map(Vec::len).filter(|&found| found != sampled.len()) {
            complaints.push(format!("choice {index} has {} token ids but {found} policy versions", sampled.len()));
        }
        let versions = versions
            .filter(|versions| versions.len() == sampled.len())
            .map_or_else(|| version_runs(std::iter::repeat_n(version, sampled.len())), version_runs);
        answer.choices.push(Choice {
            log_probs: log_probs.filter(|values| values.len() == sampled.len()),
            versions,
            ids: Some((prompt, sampled)),
        });
    }
    answer.complaints = complaints;
    answer
}

/// The usual case, in one pass: every field that is there is what it should be.
mod well_formed {
    use super::scan::Scan;
    use super::{Forms, Said, SaidChoice, Token, tool_calls};

    pub(super) fn read(body: &[u8]) -> Option<Said> {
        let mut said = Said::default();
        let mut scan = Scan::new(std::str::from_utf8(body).ok()?);
        scan.object(|scan, key| {
            match key {
                b"prompt_token_ids" => said.prompt = scan.nullable(Scan::ids)?,
                b"choices" => {
                    said.choices.clear();
                    scan.array(|scan| choice(scan).map(|choice| said.choices.push(choice)))?;
                }
                b"usage" => said.usage = serde_json::from_slice(scan.raw()?).ok(),
                b"policy_version" => said.version = scan.nullable(Scan::integer)?,
                _ => scan.skip()?,
            }
            Some(())
        })?;
        scan.is_at_end().then_some(said)
    }

    fn choice(scan: &mut Scan<'_>) -> Option<SaidChoice> {
        let mut said = SaidChoice::default();
        scan.object(|scan, key| {
            match key {
                b"prompt_token_ids" => said.prompt = scan.nullable(Scan::ids)?,
                b"token_ids" => said.sampled = scan.nullable(Scan::ids)?,
                b"logprobs" => said.log_probs = scan.nullable(forms)?.and_then(Forms::values),
                b"policy_versions" => {
                    said.versions = scan.nullable(|scan| {
                        let mut versions = Vec::new();
                        scan.array(|scan| scan.integer().map(|version| versions.push(version)))?;
                        Some(versions)
                    })?;
                }
                b"finish_reason" => {
                    said.finish_reason = scan.nullable(|scan| serde_json::from_slice(scan.raw()?).ok())?;
                }
                b"message" => said.tool_calls = tool_calls(scan.raw()?),
                _ => scan.skip()?,
            }
            Some(())
        })?;
        Some(said)
    }

    fn forms(scan: &mut Scan<'_>) -> Option<Forms> {
        let mut found = Forms { content: None, token_logprobs: None };
        scan.object(|scan, key| {
            match key {
                b"content" => {
                    found.content = scan.nullable(|scan| {
                        let mut tokens = Vec::new();
                        scan.array(|scan| token(scan).map(|token| tokens.push(token)))?;
                        Some(tokens)
                    })?;
                }
                b"token_logprobs" => {
                    found.token_logprobs = scan.nullable(|scan| {
                        let mut values = Vec::new();
                        scan.array(|scan| scan.number().map(|value| values.push(value)))?;
                        Some(values)
                    })?;
                }
                _ => scan.skip()?,
            }
            Some(())
        })?;
        Some(found)
    }

    fn token(scan: &mut Scan<'_>) -> Option<Token> {
        let mut log_prob = None;
        scan.object(|scan, key| {
            match key {
                b"logprob" => log_prob = Some(scan.number()?),
                _ => scan.skip()?,
            }
            Some(())
        })?;
        log_prob.map(|logprob| Token { logprob })
    }
}

/// Where some field is not what it should be: each is looked at by itself, and only that one is lost.
mod field_by_field {
    use serde::Deserialize;
    use serde_json::value::RawValue;

    use super::{Forms, Said, SaidChoice, known, tool_calls};

    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Whole<'a> {
        #[serde(borrow)]
        prompt_token_ids: Option<&'a RawValue>,
        #[serde(borrow)]
        choices: Option<&'a RawValue>,
        #[serde(borrow)]
        usage: Option<&'a RawValue>,
        #[serde(borrow)]
        policy_version: Option<&'a RawValue>,
    }

    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Choice<'a> {
        #[serde(borrow)]
        prompt_token_ids: Option<&'a RawValue>,
        #[serde(borrow)]
        token_ids: Option<&'a RawValue>,
        #[serde(borrow)]
        logprobs: Option<&'a RawValue>,
        #[serde(borrow)]
        policy_versions: Option<&'a RawValue>,
        #[serde(borrow)]
        finish_reason: Option<&'a RawValue>,
        #[serde(borrow)]
        message: Option<&'a RawValue>,
    }

    pub(super) fn read(body: &[u8]) -> Option<Said> {
        let whole: Whole<'_> = serde_json::from_slice(body).ok()?;
        let choices = whole.choices.and_then(|choices| serde_json::from_str::<Vec<Choice<'_>>>(choices.get()).ok());
        let choices = choices.unwrap_or_default().into_iter().map(|choice| SaidChoice {
            prompt: known(choice.prompt_token_ids),
            sampled: known(choice.token_ids),
            log_probs: known::<Forms>(choice.logprobs).and_then(Forms::values),
            versions: known(choice.policy_versions),
            finish_reason: known(choice.finish_reason),
            tool_calls: choice.message.map(|message| tool_calls(message.get().as_bytes())).unwrap_or_default(),
        });
        Some(Said {
            prompt: known(whole.prompt_token_ids),
            choices: choices.collect(),
            version: known(whole.policy_version),
            usage: known(whole.usage),
        })
    }
}

/// Those of a message.
fn tool_calls(message: &[u8]) -> Vec<Value> {
    #[derive(Deserialize)]
    struct Message {
        #[serde(default)]
        tool_calls: Option<Vec<Value>>,
    }
    serde_json::from_slice::<Message>(message).ok().and_then(|message| message.tool_calls).unwrap_or_default()
}

fn known<T: DeserializeOwned>(raw: Option<&RawValue>) -> Option<T> {
    serde_json::from_str(raw?.get()).ok()
}

/// Log-probs in the chat form `{"content": [{"logprob": …}]}` or the completions form `{"token_logprobs": […]}`.
#[derive(Deserialize)]
struct Forms {
    #[serde(default)]
    content: Option<Vec<Token>>,
    #[serde(default)]
    token_logprobs: Option<Vec<f64>>,
}

#[derive(Deserialize)]
struct Token {
    logprob: f64,
}

impl Forms {
    /// `None` where any value is no finite number.
    fn values(self) -> Option<Vec<f32>> {
        let values: Vec<f64> = match self.content {
            Some(tokens) => tokens.into_iter().map(|token| token.logprob).collect(),
            None => self.token_logprobs?,
        };
        #[expect(clippy::cast_possible_truncation, reason = "log-probs are stored and used in single precision")]
        let values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
        values.iter().all(|value| value.is_finite()).then_some(values)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer(value: &Value) -> Answer {
        read(value.to_string().as_bytes(), 5)
    }

    #[test]
    fn chat_ids_and_log_probs_are_found() {
        let found = answer(&json!({
            "prompt_token_ids": [1, 2],
            "choices": [{"token_ids": [7, 8], "finish_reason": "stop",
                         "logprobs": {"content": [{"logprob": -0.5, "token": "a"}, {"logprob": -1}]}}],
            "usage": {"total_tokens": 4},
        }));
        assert_eq!(found.choices[0].ids, Some((vec![1, 2], vec![7, 8])));
        assert_eq!(found.choices[0].log_probs, Some(vec![-0.5, -1.0]));
        assert_eq!(found.choices[0].versions, [VersionRun { version: 5, count: 2 }]);
        assert_eq!(found.finish_reason.as_deref(), Some("stop"));
        assert_eq!(found.usage, Some(json!({"total_tokens": 4})));
        assert!(found.complaints.is_empty());
    }

    #[test]
    fn completions_have_prompt_ids_per_choice_and_log_probs_as_a_list() {
        let found = answer(&json!({"choices": [
            {"prompt_token_ids": [1], "token_ids": [2], "logprobs": {"token_logprobs": [-0.25]}},
            {"prompt_token_ids": [3], "token_ids": [4]},
            {"token_ids": [5]},
        ]}));
        assert_eq!(found.choices[0].log_probs, Some(vec![-0.25]));
        assert_eq!(found.choices[1].ids, Some((vec![3], vec![4])));
        assert_eq!(found.choices[2].ids, Some((vec![1], vec![5])));
    }

    #[test]
    fn versions_come_per_token_or_for_the_whole_answer() {
        let found = answer(&json!({"prompt_token_ids": [1], "policy_version": 9, "choices": [
            {"token_ids": [2, 3, 4], "policy_versions": [7, 7, 8]},
            {"token_ids": [2]},
            {"token_ids": [2], "policy_versions": [7, 7]},
        ]}));
        assert_eq!(found.choices[0].versions, version_runs([7, 7, 8]));
        assert_eq!(found.choices[1].versions, version_runs([9]));
        assert_eq!(found.choices[2].versions, version_runs([9]));
        assert_eq!(found.complaints.len(), 1);
    }

    #[test]
    fn a_wrong_count_of_log_probs_drops_them_and_complains() {
        let found = answer(&json!({"prompt_token_ids": [1], "choices": [
            {"token_ids": [2, 3], "logprobs": {"content": [{"logprob": -0.5}]}}
        ]}));
        assert!(found.choices[0].ids.is_some());
        assert_eq!(found.choices[0].log_probs, None);
        assert!(found.complaints[0].contains("2 token ids but 1 log-probs"), "{:?}", found.complaints);
    }

    #[test]
    fn what_is_missing_or_malformed_is_absent_not_an_error() {
        for body in [json!({}), json!({"choices": "none"}), json!({"choices": []})] {
            let found = answer(&body);
            assert!(found.is_object && found.choices.is_empty() && !found.complaints.is_empty(), "{body}");
        }
        for ids in [json!(null), json!("x"), json!([1, "2"]), json!([-1]), json!([1.5])] {
            let found = answer(&json!({"prompt_token_ids": [1], "choices": [{"token_ids": ids}]}));
            assert_eq!(found.choices[0].ids, None, "{ids}");
        }
        for values in [json!([null]), json!(["x"]), json!([1e39])] {
            let found = answer(&json!({"prompt_token_ids": [1],
                "choices": [{"token_ids": [2], "logprobs": {"token_logprobs": values}}]}));
            assert_eq!(found.choices[0].log_probs, None, "{values}");
        }
        assert!(!read(b"<html>", 0).is_object);
        assert!(!read(b"[1]", 0).is_object || read(b"[1]", 0).choices.is_empty());
    }

    /// What both ways of reading make of a body.
    fn both(body: &str) -> [Option<Answer>; 2] {
        [well_formed::read(body.as_bytes()), field_by_field::read(body.as_bytes())]
            .map(|said| said.map(|said| judged(said, 5)))
    }

    #[test]
    fn both_ways_of_reading_agree() {
        let usual = r#"{"id":"x\"y","prompt_token_ids":[1, 2,3],"choices":[{"index":0,"message":{"role":"assistant","content":"{[\"]}",
            "tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]},"finish_reason":"st\u006fp",
            "logprobs":{"content":[{"token":"a\"]","logprob":-0.5,"bytes":[97],"top_logprobs":[{"x":[]}]},{"logprob":-1e-7}],"refusal":null},
            "token_ids":[7,8],"policy_versions":[3,4],"prompt_token_ids":null},{"token_ids":[],"logprobs":{"token_logprobs":[]}}],
            "usage":{"total_tokens":4,"more":{"a":[1]}},"policy_version":9,"x":-1.5e3,"y":true,"z":[{}]} "#;
        for body in [
            usual,
            "{}",
            r#"{"choices":[]}"#,
            r#" { "choices" : [ { } ] , "usage" : null } "#,
            r#"{"choices":[{"logprobs":null}]}"#,
        ] {
            let [fast, slow] = both(body);
            assert!(fast.is_some(), "{body}");
            assert_eq!(fast, slow, "{body}");
        }
        for body in [
            r#"{"choices":[{"token_\u0069ds":[7]}]}"#,
            "{\"choices\":[{\"message\":\"a\nb\"}]}",
            r#"{"choices":[],"x":"\d"}"#,
            r#"{"choices":[],"x":{"content":"a"]}"#,
            r#"{"choices":[],"x":nan}"#,
            r#"{"choices":[],"x":[01]}"#,
            r#"{"choices":[],"x":[-.5]}"#,
            r#"{"choices":[],"x":[1 2]}"#,
            r#"{"choices":[]} x"#,
        ] {
            assert_eq!(both(body)[0], None, "{body}");
        }
        assert_eq!(both(&format!(r#"{{"x":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000)))[0], None);
        // Cut anywhere it is no JSON any more, and changed anywhere the two agree or the fast one leaves it to the other.
        for at in 0..usual.len() - 2 {
            if usual.is_char_boundary(at) {
                assert_eq!(both(&usual[..at])[0], None, "{at}");
            }
            for byte in [b'"', b'[', b'}', b'\\', b',', b'0', b'n', b' '] {
                let mut changed = usual.as_bytes().to_vec();
                changed[at] = byte;
                let [fast, slow] = both(&String::from_utf8(changed).unwrap());
                assert!(fast.is_none() || fast == slow, "{at} {}", char::from(byte));
            }
        }
    }
}
