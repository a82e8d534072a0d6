//! What an inference server answered: token ids, log-probs and policy versions, found where vLLM and our own engine put them.
//! A field that is not what it should be is treated as absent and complained about; it never fails the call.

use agl_core::trajectory::VersionRun;
use agl_core::trajectory::row::version_runs;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::dialect::answer::ToolCall;

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

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawAnswer<'a> {
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
struct RawChoice<'a> {
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

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawMessage {
    tool_calls: Option<Vec<Value>>,
}

/// `registered` is the version that the server was registered with, for servers that do not say.
pub(crate) fn read(body: &[u8], registered: u64) -> Answer {
    let Ok(raw) = serde_json::from_slice::<RawAnswer<'_>>(body) else {
        return Answer { complaints: vec!["the answer is no JSON object".to_owned()], ..Answer::default() };
    };
    let raw_choices: Vec<RawChoice<'_>> =
        raw.choices.and_then(|choices| serde_json::from_str(choices.get()).ok()).unwrap_or_default();
    let shared_prompt: Option<Vec<u32>> =
        known(raw.prompt_token_ids).or_else(|| raw_choices.first().and_then(|choice| known(choice.prompt_token_ids)));
    let version = known(raw.policy_version).unwrap_or(registered);
    let mut complaints = Vec::new();
    if raw_choices.is_empty() {
        complaints.push("the answer has no choices".to_owned());
    }
    let choices = raw_choices
        .iter()
        .enumerate()
        .map(|(index, choice)| {
            let prompt = known(choice.prompt_token_ids).or_else(|| shared_prompt.clone());
            let (Some(prompt), Some(sampled)) = (prompt, known::<Vec<u32>>(choice.token_ids)) else {
                complaints.push(format!("choice {index} has no token ids"));
                return Choice::default();
            };
            let log_probs = log_probs(choice.logprobs);
            if let Some(found) = log_probs.as_ref().map(Vec::len).filter(|&found| found != sampled.len()) {
                complaints.push(format!("choice {index} has {} token ids but {found} log-probs", sampled.len()));
            }
            let versions: Option<Vec<u64>> = known(choice.policy_versions);
            if let Some(found) = versions.as_ref().map(Vec::len).filter(|&found| found != sampled.len()) {
                complaints.push(format!("choice {index} has {} token ids but {found} policy versions", sampled.len()));
            }
            let versions = versions
                .filter(|versions| versions.len() == sampled.len())
                .map_or_else(|| version_runs(std::iter::repeat_n(version, sampled.len())), version_runs);
            Choice {
                log_probs: log_probs.filter(|values| values.len() == sampled.len()),
                versions,
                ids: Some((prompt, sampled)),
            }
        })
        .collect();
    let finish_reason = raw_choices.first().and_then(|choice| known::<String>(choice.finish_reason));
    let messages = raw_choices.iter().filter_map(|choice| known::<RawMessage>(choice.message)?.tool_calls);
    Answer {
        is_object: true,
        choices,
        tool_calls: messages.flatten().map(|call| ToolCall::read(&call)).collect(),
        usage: known::<Value>(raw.usage).filter(Value::is_object),
        finish_reason: finish_reason.filter(|reason| !reason.is_empty()),
        complaints,
    }
}

fn known<T: DeserializeOwned>(raw: Option<&RawValue>) -> Option<T> {
    serde_json::from_str(raw?.get()).ok()
}

/// The chat form `{"content": [{"logprob": …}]}` or the completions form `{"token_logprobs": […]}`; `None` where any value
/// is no finite number.
pub(crate) fn log_probs(raw: Option<&RawValue>) -> Option<Vec<f32>> {
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
    let forms: Forms = known(raw)?;
    let values: Vec<f64> = match forms.content {
        Some(tokens) => tokens.into_iter().map(|token| token.logprob).collect(),
        None => forms.token_logprobs?,
    };
    #[expect(clippy::cast_possible_truncation, reason = "log-probs are stored and used in single precision")]
    let values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
    values.iter().all(|value| value.is_finite()).then_some(values)
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
}
