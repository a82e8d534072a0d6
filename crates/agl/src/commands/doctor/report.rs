//! What was seen of a rollout, as a checklist.

use std::collections::BTreeMap;

use agl_client::AttemptDetail;
use agl_client::wire::SequencesResponse;
use agl_core::event::{Event, MODEL_REQUEST};
use agl_core::rollout::{Rollout, RolloutState};
use agl_core::trajectory::{BreakClass, PathBreak};
use serde::Serialize;
use serde_json::Value;

use super::door::Knock;
use super::model::Decoded;
use super::outside::{is_here, serves_models};
use super::times::Times;
use crate::output::{clipped, line};

/// Everything that was seen.
pub struct Findings {
    /// The rollout at its end.
    pub rollout: Rollout,
    /// Its last attempt; `None` where it got none.
    pub attempt: Option<AttemptDetail>,
    /// Its events.
    pub events: Vec<Event>,
    /// Its training sequences.
    pub sequences: SequencesResponse,
    /// The texts of the breaks' tokens.
    pub decoded: Decoded,
    /// Every request that reached the gateway.
    pub knocks: Vec<Knock>,
    /// Hosts that were called past the gateway; `None` where nobody watched.
    pub hosts: Option<BTreeMap<String, usize>>,
    /// Where the time went; `None` where the agent was not started.
    pub times: Option<Times>,
    /// True where an evaluator is configured.
    pub has_evaluator: bool,
}

/// One line of the checklist.
#[derive(Debug, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it is.
    pub verdict: Verdict,
    /// In a line.
    pub finding: String,
    /// More lines: what it means, what to do.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub more: Vec<String>,
}

/// How something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As training needs it.
    Ok,
    /// Training works; look at it.
    Warning,
    /// Training would not work, or would learn the wrong thing.
    Fails,
    /// There was nothing to look at.
    Unknown,
}

impl Check {
    fn new(name: &'static str, verdict: Verdict, finding: impl Into<String>) -> Self {
        Self { name, verdict, finding: finding.into(), more: Vec::new() }
    }

    fn with(mut self, more: impl IntoIterator<Item = String>) -> Self {
        self.more.extend(more);
        self
    }
}

/// Prints the checklist.
pub fn print(checks: &[Check]) {
    for check in checks {
        let mark = match check.verdict {
            Verdict::Ok => "ok",
            Verdict::Warning => "look",
            Verdict::Fails => "FAILS",
            Verdict::Unknown => "–",
        };
        line(format!("{mark:>5}  {:<10} {}", check.name, check.finding));
        check.more.iter().for_each(|more| line(format!("{:18}{more}", "")));
    }
}

impl Findings {
    /// The checklist, in the order in which a rollout happens.
    pub fn checks(&self) -> Vec<Check> {
        let mut checks = vec![self.agent(), self.calls()];
        if !self.requests().is_empty() {
            checks.extend([self.dialect(), self.token_ids(), self.log_probs(), self.turns()]);
        }
        checks.push(self.reward());
        if let Some(times) = &self.times {
            checks.push(Check::new("time", Verdict::Ok, times.to_string()));
        }
        checks
    }

    fn requests(&self) -> Vec<&Event> {
        self.events.iter().filter(|event| event.event_type == MODEL_REQUEST).collect()
    }

    fn agent(&self) -> Check {
        let Some(detail) = &self.attempt else {
            let why = self.rollout.status.error_message.clone().unwrap_or_else(|| "it was not started".into());
            return Check::new("agent", Verdict::Fails, why);
        };
        let attempt = &detail.attempt;
        let seconds = attempt.updated_at - attempt.created_at;
        if self.rollout.status.state == RolloutState::Succeeded {
            return Check::new("agent", Verdict::Ok, format!("ended by itself after {seconds:.1} s"));
        }
        let why = attempt.error_message.as_ref().or(self.rollout.status.error_message.as_ref());
        let why = why.cloned().unwrap_or_else(|| format!("it {}", self.rollout.status.state));
        // What the controller says of calls stands in the next line already.
        let (said, words) = why.split_once("stderr ends with: ").unwrap_or((&why, ""));
        let said = said.split("; ").next().unwrap_or_default();
        let words = words.lines().filter(|words| !words.trim().is_empty());
        let words = words.map(|words| format!("│ {}", clipped(words, 150)));
        Check::new("agent", Verdict::Fails, format!("{said} ({seconds:.1} s)")).with(words)
    }

    fn calls(&self) -> Check {
        let requests = self.requests();
        let failed = requests.iter().filter(|event| number(event, "http_status").is_some_and(|status| status >= 400.0));
        let failed: Vec<String> = failed.map(|event| described_failure(event)).collect();
        let refused = self.refused();
        let past: Vec<String> = self
            .hosts
            .iter()
            .flatten()
            .filter(|(host, _)| serves_models(host))
            .map(|(host, times)| {
                format!("{host} was called {times}× past the gateway: a model call there is not recorded")
            })
            .collect();
        let verdict = match () {
            () if requests.is_empty() => Verdict::Fails,
            // Beside calls that were captured it may be the harness's own statistics.
            () if !failed.is_empty() || !refused.is_empty() || !past.is_empty() => Verdict::Warning,
            () => Verdict::Ok,
        };
        let finding = match requests.len() {
            0 => "the harness called no model through the gateway".to_owned(),
            count => format!("{} captured", counted(count, "call")),
        };
        let mut check = Check::new("calls", verdict, finding).with(past).with(failed).with(refused);
        if requests.is_empty() {
            check.more.extend(self.why_bypassed());
        }
        let others = self.hosts.iter().flatten().filter(|(host, _)| !serves_models(host) && !is_here(host));
        let others: Vec<&str> = others.map(|(host, _)| host.as_str()).collect();
        if !others.is_empty() {
            check.more.push(format!("other hosts called: {}", others.join(", ")));
        }
        check
    }

    /// Requests that never became a call: a wrong path, a key that is not the attempt's.
    fn refused(&self) -> Vec<String> {
        let mut seen: BTreeMap<(String, u16), usize> = BTreeMap::new();
        for knock in &self.knocks {
            let status = knock.status.unwrap_or(502);
            let is_recorded = knock.is_call() && !matches!(status, 401 | 403 | 404 | 405);
            // Some clients look whether anybody is there.
            if status >= 400 && !is_recorded && knock.method != "HEAD" {
                *seen.entry((format!("{} {}", knock.method, knock.path), status)).or_default() += 1;
            }
        }
        let advice = |status: u16| match status {
            401 | 403 => {
                ": it came without the attempt's key; does the harness send OPENAI_API_KEY, ANTHROPIC_API_KEY or GEMINI_API_KEY as it finds it?"
            }
            404 | 405 => {
                ": there is no such path; is something put behind the base URL that is in it already, or left out?"
            }
            _ => "",
        };
        seen.into_iter()
            .map(|((request, status), times)| {
                format!("{request} was refused with {status}, {times}×{}", advice(status))
            })
            .collect()
    }

    fn why_bypassed(&self) -> Vec<String> {
        let mut why = Vec::new();
        if self.knocks.is_empty() {
            why.push(
                "it must take its base URL from OPENAI_BASE_URL, ANTHROPIC_BASE_URL or GOOGLE_GEMINI_BASE_URL, or get it as an \
                 argument: {{ openai_base_url }}, {{ anthropic_base_url }}, {{ gemini_base_url }} and {{ key }} stand for it in the command"
                    .to_owned(),
            );
        }
        if self.hosts.is_none() {
            why.push(
                "what it called instead is not known: this machine has a proxy set already, so nobody watched".into(),
            );
        }
        why
    }

    fn dialect(&self) -> Check {
        let mut spoken: BTreeMap<String, usize> = BTreeMap::new();
        let mut left_out: BTreeMap<String, usize> = BTreeMap::new();
        for event in self.requests() {
            let name = event.data.get("dialect").and_then(Value::as_str).unwrap_or("?");
            let streamed = event.data.get("stream").and_then(Value::as_bool).unwrap_or(false);
            *spoken.entry(format!("{name}{}", if streamed { ", streamed" } else { "" })).or_default() += 1;
            let fields = event.data.get("left_out").and_then(Value::as_array).into_iter().flatten();
            fields.filter_map(Value::as_str).for_each(|field| *left_out.entry(field.to_owned()).or_default() += 1);
        }
        let finding: Vec<String> = spoken.into_iter().map(|(name, times)| format!("{name} ({times}×)")).collect();
        let verdict = if left_out.is_empty() { Verdict::Ok } else { Verdict::Warning };
        let fields: Vec<String> = left_out.into_keys().collect();
        let lost = (!fields.is_empty()).then(|| format!("not carried to the model: {}", fields.join(", ")));
        Check::new("dialect", verdict, finding.join("; ")).with(lost)
    }

    fn token_ids(&self) -> Check {
        let counts = &self.sequences.assembly.counts;
        let answered = counts.calls - counts.failed;
        if answered == 0 {
            return Check::new("token ids", Verdict::Unknown, "no call was answered");
        }
        let with_ids = answered - counts.without_token_ids;
        let finding = format!("{with_ids} of {answered} answered calls have them");
        let set_aside = [
            (counts.superseded, "repeated by the harness: only the last answer is trained"),
            (counts.undelivered, "answered to nobody: the harness had hung up"),
            (counts.frozen, "of a model that is not trained"),
        ];
        let set_aside = set_aside.into_iter().filter(|(calls, _)| *calls > 0);
        let set_aside: Vec<String> = set_aside.map(|(calls, why)| format!("{calls} {why}")).collect();
        if counts.without_token_ids > 0 {
            return Check::new("token ids", Verdict::Fails, finding).with(set_aside).with([
                "the server gave none: vLLM and SGLang must be recent enough for return_token_ids; is --kind right?"
                    .to_owned(),
            ]);
        }
        Check::new("token ids", Verdict::Ok, finding).with(set_aside)
    }

    fn log_probs(&self) -> Check {
        let rows = &self.sequences.assembly.sequences;
        let without = rows.iter().filter(|row| row.log_probs.is_none()).count();
        match (rows.len(), without) {
            (0, _) => Check::new("log-probs", Verdict::Unknown, "no row to look at"),
            (_, 0) => Check::new("log-probs", Verdict::Ok, "one for every sampled token"),
            (rows, without) => Check::new("log-probs", Verdict::Fails, format!("{without} of {rows} rows have none"))
                .with(["without them the importance ratio is not known".to_owned()]),
        }
    }

    fn turns(&self) -> Check {
        let assembly = &self.sequences.assembly;
        let (counts, rows) = (&assembly.counts, assembly.sequences.len());
        let breaks: Vec<&PathBreak> = assembly.breaks.iter().filter(|found| !found.new_conversation).collect();
        let conversations = assembly.breaks.len() - breaks.len() + 1;
        if counts.merges == 0 && breaks.is_empty() {
            return Check::new(
                "turns",
                Verdict::Unknown,
                format!("nothing to merge: {}, {}", counted(counts.live, "call"), counted(rows, "row")),
            )
            .with(["a task of several turns shows more: see --answer, --script, --model and --endpoint".to_owned()]);
        }
        let rows = counted(rows, "row");
        let mut finding = format!("{} in {rows}: {}", counted(counts.live, "call"), counted(counts.merges, "merge"));
        if conversations > 1 {
            finding += &format!(", {conversations} conversations");
        }
        if breaks.is_empty() {
            return Check::new("turns", Verdict::Ok, finding);
        }
        let shown = breaks.iter().take(3).flat_map(|found| self.broken(found));
        Check::new("turns", Verdict::Warning, format!("{finding}, {}", counted(breaks.len(), "break"))).with(shown)
    }

    /// Where a turn parted from the one before, both sides decoded.
    fn broken(&self, found: &PathBreak) -> Vec<String> {
        let side = |cut: &[u32]| {
            let text = if self.decoded.knows(cut) {
                format!("{:?}", agl_core::trajectory::TokenDecoder::decode(&self.decoded, cut))
            } else {
                "(the server has no /detokenize)".to_owned()
            };
            format!("{text}  {cut:?}")
        };
        let (class, meaning) = if self.decoded.knows(&found.tokens) && self.decoded.knows(&found.previous_tokens) {
            explained(found.classify(&self.decoded))
        } else {
            ("not classified", "the tokens could not be decoded")
        };
        let [was, came_back] = first_differing(found);
        vec![
            format!("call {} parts from call {} at token {}: {class}", found.seq, found.previous_seq, found.at),
            format!("  was       {}", side(was)),
            format!("  came back {}", side(came_back)),
            format!("  {meaning}"),
        ]
    }

    fn reward(&self) -> Check {
        let by_call = self.sequences.call_rewards.len();
        match self.sequences.reward {
            Some(value) => Check::new("reward", Verdict::Ok, format!("{value}")),
            None if by_call > 0 => Check::new("reward", Verdict::Ok, format!("{by_call} of single calls")),
            None if self.has_evaluator => Check::new("reward", Verdict::Fails, "the evaluator posted none").with([
                "it must post {\"event_type\": \"reward\", \"data\": {\"value\": 1.0}} to $AGL_EVENT_URL with $AGL_KEY"
                    .to_owned(),
            ]),
            None => Check::new("reward", Verdict::Warning, "none was posted")
                .with(["post it from the agent, or name an evaluator: rollout.evaluator.argv, or --evaluator '…'"
                    .to_owned()]),
        }
    }
}

/// The first tokens of both sides from where they differ: of the path that was, and of the prompt that came back.
pub fn first_differing(found: &PathBreak) -> [&[u32]; 2] {
    /// Tokens that are shown of each side.
    const SHOWN: usize = 24;
    let shared = found.tokens.iter().zip(&found.previous_tokens).take_while(|(one, other)| one == other).count();
    [&found.previous_tokens, &found.tokens]
        .map(|tokens| &tokens[shared.min(tokens.len())..(shared + SHOWN).min(tokens.len())])
}

/// A class of break, and what to do about it.
fn explained(class: BreakClass) -> (&'static str, &'static str) {
    match class {
        BreakClass::NewConversation => ("new conversation", "another conversation: a sub-agent, say"),
        BreakClass::Retokenisation => (
            "re-tokenisation",
            "the same text came back in other tokens: nothing is lost, but each such turn is a row of its own",
        ),
        BreakClass::ChatTemplate => (
            "chat template",
            "the same turn was rendered another way (thinking left out, white space): does the template drop earlier thoughts?",
        ),
        BreakClass::RewrittenHistory => (
            "rewritten history",
            "the harness shows the model another past than it had: summaries, cut outputs, time stamps. What was sampled before \
             stays a row of its own; a harness that keeps its history trains faster",
        ),
    }
}

/// `1 call`, `2 calls`.
fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn number(event: &Event, key: &str) -> Option<f64> {
    event.data.get(key).and_then(Value::as_f64)
}

fn described_failure(event: &Event) -> String {
    let status = number(event, "http_status").unwrap_or(0.0);
    let response = event.data.get("response");
    let message = response.and_then(|body| body.pointer("/error/message").or_else(|| body.get("detail")));
    let message = message.and_then(Value::as_str).unwrap_or("no message");
    format!("a call failed with {status}: {}", clipped(message, 150))
}
