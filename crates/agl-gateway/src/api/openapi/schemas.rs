//! What is sent and answered, as JSON schemas. A test compares their fields with what the types are written as.

use serde_json::{Map, Value, json};

use crate::proxy::kind::Kind;

/// A schema, with what it means where that is not plain.
fn said(mut schema: Value, what: &str) -> Value {
    if !what.is_empty() {
        schema["description"] = what.into();
    }
    schema
}

fn typed(kind: &str, what: &str) -> Value {
    said(json!({"type": kind}), what)
}

/// The same, or null.
fn or_null(mut schema: Value) -> Value {
    match schema["type"].take() {
        Value::Null => json!({"anyOf": [schema, {"type": "null"}]}),
        kind => {
            schema["type"] = json!([kind, "null"]);
            schema
        }
    }
}

pub(super) fn text(what: &str) -> Value {
    typed("string", what)
}

/// Ids of callers: what is said of them beside stays to be said, the pattern counts characters and not bytes.
const ID: &str = r"^[^/\\\x00-\x1f\x7f-\x9f.][^/\\\x00-\x1f\x7f-\x9f]{0,199}$";

fn text_like(pattern: &str, what: &str) -> Value {
    let mut schema = text(what);
    schema["pattern"] = pattern.into();
    schema
}

fn maybe_text_like(pattern: &str, what: &str) -> Value {
    or_null(text_like(pattern, what))
}

fn maybe_text(what: &str) -> Value {
    or_null(text(what))
}

pub(super) fn name(what: &str, names: &[&str]) -> Value {
    said(json!({"type": "string", "enum": names}), what)
}

fn maybe_name(what: &str, names: &[&str]) -> Value {
    json!({"anyOf": [name(what, names), {"type": "null"}]})
}

fn flag(what: &str) -> Value {
    typed("boolean", what)
}

fn maybe_flag(what: &str) -> Value {
    or_null(flag(what))
}

fn number(what: &str) -> Value {
    typed("number", what)
}

/// Up to a year, a leap year at most.
fn maybe_seconds(what: &str) -> Value {
    or_null(said(json!({"type": "number", "minimum": 0, "maximum": 31_622_400}), what))
}

fn maybe_number(what: &str) -> Value {
    or_null(number(what))
}

/// From 0.
pub(super) fn count(what: &str) -> Value {
    said(json!({"type": "integer", "minimum": 0, "maximum": u64::MAX}), what)
}

fn maybe_count_to(most: u32, what: &str) -> Value {
    or_null(said(json!({"type": "integer", "minimum": 0, "maximum": most}), what))
}

pub(super) fn integer(what: &str) -> Value {
    said(json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX}), what)
}

fn maybe_int32(what: &str) -> Value {
    or_null(said(json!({"type": "integer", "minimum": i32::MIN, "maximum": i32::MAX}), what))
}

/// Any JSON value.
pub(super) fn anything(what: &str) -> Value {
    said(json!({}), what)
}

/// An object with whatever fields.
pub(super) fn free(what: &str) -> Value {
    typed("object", what)
}

fn maybe_free(what: &str) -> Value {
    or_null(free(what))
}

fn texts_by_name() -> Value {
    json!({"type": "object", "additionalProperties": text("")})
}

pub(super) fn list(of: Value) -> Value {
    json!({"type": "array", "items": of})
}

/// `[one, other]`
fn pair(one: Value, other: Value, what: &str) -> Value {
    said(json!({"type": "array", "prefixItems": [one, other], "minItems": 2, "maxItems": 2}), what)
}

/// The schema of that name.
pub(super) fn the(schema: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{schema}")})
}

fn maybe(schema: &str) -> Value {
    json!({"anyOf": [the(schema), {"type": "null"}]})
}

/// A field that is always there.
fn needed(name: &'static str, of: Value) -> (&'static str, Value, bool) {
    (name, of, true)
}

/// A field that may be left out.
fn field(name: &'static str, of: Value) -> (&'static str, Value, bool) {
    (name, of, false)
}

fn object(what: &str, fields: impl IntoIterator<Item = (&'static str, Value, bool)>) -> Value {
    let mut schema = free(what);
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for (name, of, is_needed) in fields {
        properties.insert(name.to_owned(), of);
        required.extend(is_needed.then_some(name));
    }
    schema["properties"] = properties.into();
    if !required.is_empty() {
        schema["required"] = required.into();
    }
    schema
}

/// An object of which other fields are refused.
fn closed(mut object: Value) -> Value {
    object["additionalProperties"] = false.into();
    object
}

const STATES: [&str; 4] = ["queuing", "running", "succeeded", "failed"];
pub(super) const ROLLOUT_STATES: &[&str] = &STATES;
const ATTEMPT_STATES: [&str; 4] = ["starting", "running", "succeeded", "failed"];
const FAILURES: [&str; 4] = ["agent", "timeout", "infrastructure", "cancelled"];

/// Every schema by its name.
pub(super) fn all() -> Vec<(&'static str, Value)> {
    let config = object(
        "How the controller runs a rollout; unknown fields are kept",
        [
            field("timeout_seconds", count("Wall-clock limit of an attempt's agent")),
            field("local", maybe("LocalConfig")),
            field("k8s", maybe("K8sConfig")),
            field("process", maybe("ProcessConfig")),
            field("evaluator", maybe("EvaluatorConfig")),
            field("reward_source", maybe_name("Who may post the reward", &["agent", "evaluator"])),
            field("max_attempts", maybe_count_to(u32::MAX, "What infrastructure failures may cost")),
        ],
    );
    let attempt = [
        needed("rollout_id", text("")),
        needed("attempt_id", text("")),
        needed("state", name("", &ATTEMPT_STATES)),
        needed("failure", maybe_name("Whose failure it was", &FAILURES)),
        needed("error_message", maybe_text("")),
        needed("exit_code", maybe_int32("Negative: the signal that ended it")),
        needed("runner", free("What the runner wants to find again")),
        needed("agent_ended", flag("The agent's key has been withdrawn")),
        needed("created_at", number("Seconds since the epoch")),
        needed("updated_at", number("Seconds since the epoch")),
        needed("calls", count("Model calls recorded")),
        needed("last_call", maybe("LastCall")),
        needed("gateway_started_at", number("Since when no gateway has come or gone")),
    ];
    let keys = [
        needed("key", text("Opens the attempt's proxy and event URLs until the agent has ended")),
        needed("reward_key", text("Opens the attempt's event URL until the attempt has ended")),
    ];
    vec![
        ("Error", object("What was wrong", [needed("detail", anything("A text, or a list of complaints"))])),
        (
            "Invalid",
            object(
                "What was wrong, as FastAPI says it",
                [needed(
                    "detail",
                    list(object(
                        "",
                        [needed("type", text("")), needed("loc", list(anything(""))), needed("msg", text(""))],
                    )),
                )],
            ),
        ),
        ("Ok", object("Done", [needed("status", text(""))])),
        ("Marked", object("Done", [needed("status", text("")), needed("marked", count("How many of them there are"))])),
        (
            "RolloutCreate",
            object(
                "A rollout to enqueue",
                [
                    needed("input", anything("One row of the data set, handed to the agent as it is")),
                    field("is_train", flag("Train or validation")),
                    field("config", maybe("RolloutConfig")),
                    field("metadata", maybe_free("What the trainer wants to find again")),
                    field(
                        "rollout_id",
                        maybe_text_like(
                            ID,
                            "A known id gives the existing rollout untouched; 1 to 200 bytes, without / and \\",
                        ),
                    ),
                    field("retry_of", maybe_text("The rollout that this one repeats")),
                ],
            ),
        ),
        (
            "Rollout",
            object(
                "One execution of an agent on one task",
                [
                    needed("rollout_id", text("")),
                    needed("input", anything("")),
                    needed("is_train", flag("")),
                    needed("config", the("RolloutConfig")),
                    needed("metadata", free("")),
                    needed("status", the("RolloutStatus")),
                    field("retry_of", text("")),
                    field("consumed", the("Consumed")),
                ],
            ),
        ),
        (
            "Consumed",
            object("The checkpoint that trained on it", [needed("run_id", text("")), needed("step", count(""))]),
        ),
        ("RolloutConfig", config),
        (
            "LocalConfig",
            object(
                "A Python class with a run() method",
                [field("agent_class", maybe_text("package.module:Class")), field("env_map", texts_by_name())],
            ),
        ),
        (
            "K8sConfig",
            object("A Kubernetes Job", [field("job_template", maybe_text("Jinja source of a Job manifest"))]),
        ),
        (
            "ProcessConfig",
            closed(object(
                "Any command; every text is a Jinja template",
                [needed("argv", list(text(""))), field("env", texts_by_name()), field("cwd", maybe_text(""))],
            )),
        ),
        (
            "EvaluatorConfig",
            closed(object(
                "A command that judges what the agent left and posts the reward",
                [needed("argv", list(text(""))), field("env", texts_by_name()), field("timeout_seconds", count(""))],
            )),
        ),
        (
            "RolloutStatus",
            object(
                "The part of a rollout that changes",
                [
                    needed("state", name("", &STATES)),
                    needed("k8s_job_name", maybe_text("")),
                    needed("last_attempt_id", maybe_text("The attempt that counts")),
                    needed("error_message", maybe_text("Why it failed")),
                    needed("version", count("Counts the patches, from 1")),
                    needed("created_at", number("Seconds since the epoch")),
                    needed("updated_at", number("Seconds since the epoch")),
                ],
            ),
        ),
        ("RolloutPatch", object("A change of a rollout", [field("status", maybe("StatusPatch"))])),
        (
            "StatusPatch",
            closed(object(
                "A change of a rollout's status: absent fields stay",
                [
                    field("state", maybe_name("A legal next state", &STATES)),
                    field("k8s_job_name", maybe_text("")),
                    field("last_attempt_id", maybe_text("")),
                    field("error_message", maybe_text("")),
                ],
            )),
        ),
        (
            "RolloutDetail",
            object(
                "A rollout and the attempts that have events",
                [needed("rollout", the("Rollout")), needed("attempts", list(text("")))],
            ),
        ),
        (
            "TerminalPage",
            object(
                "Rollouts in the order in which they ended",
                [
                    needed("items", list(the("TerminalItem"))),
                    needed("next_after", count("Pass it as `after` for what ended since")),
                    needed("total_terminal", count("How many ever ended")),
                ],
            ),
        ),
        (
            "TerminalItem",
            object(
                "A rollout that has ended, without its payload",
                [
                    needed("rollout_id", text("")),
                    needed("state", name("", &STATES)),
                    needed("data_id", text("")),
                    needed("is_train", flag("")),
                ],
            ),
        ),
        (
            "ConsumedCreate",
            closed(object(
                "A checkpoint that trained on these rollouts is on disk",
                [needed("run_id", text("")), needed("step", count("")), needed("rollout_ids", list(text("")))],
            )),
        ),
        (
            "AttemptCreate",
            closed(object(
                "An attempt to make",
                [field(
                    "attempt_id",
                    maybe_text_like(ID, "The next number if absent; 1 to 200 bytes, without / and \\"),
                )],
            )),
        ),
        ("Attempt", object("One try at a rollout", attempt.clone())),
        ("AttemptGrant", object("A new attempt with its keys", attempt.into_iter().chain(keys))),
        (
            "LastCall",
            object(
                "How the last model call ended",
                [needed("http_status", count("")), needed("status", name("", &["ok", "error"]))],
            ),
        ),
        (
            "AttemptPatch",
            closed(object(
                "A change of an attempt: absent fields stay",
                [
                    field("state", maybe_name("A legal next state", &ATTEMPT_STATES)),
                    field("failure", maybe_name("", &FAILURES)),
                    field("error_message", maybe_text("")),
                    field("exit_code", maybe_int32("")),
                    field("runner", maybe_free("Merged into what is there")),
                    field("agent_ended", maybe_flag("Cannot be taken back")),
                ],
            )),
        ),
        (
            "EventCreate",
            object(
                "An event to append",
                [
                    needed("event_type", text("`reward`, or anything")),
                    field("data", free("Of a reward: `value`, and `call_id` where it belongs to one call")),
                ],
            ),
        ),
        (
            "Event",
            object(
                "One entry of an attempt's log",
                [
                    needed("event_type", text("`model_request`, `reward`, or anything")),
                    needed("rollout_id", text("")),
                    needed("attempt_id", text("")),
                    needed("timestamp", number("Seconds since the epoch")),
                    needed("data", free("")),
                ],
            ),
        ),
        (
            "Sequences",
            object(
                "The training rows of an attempt and its rewards",
                [
                    needed("rollout_id", text("")),
                    needed("attempt_id", text("")),
                    needed("reward", maybe_number("The last one that names no call")),
                    needed("call_rewards", list(pair(text(""), number(""), "Call and value"))),
                    needed("level", name("", &["trajectory", "transition"])),
                    needed("sequences", list(the("Sequence"))),
                    needed("breaks", list(the("PathBreak"))),
                    needed("counts", the("TreeCounts")),
                ],
            ),
        ),
        (
            "Sequence",
            object(
                "One training row; its lists are parallel",
                [
                    needed("token_ids", list(count(""))),
                    needed("mask", list(count("1 where the policy sampled the token"))),
                    needed("log_probs", maybe_list(number(""))),
                    needed("policy_versions", list(integer("-1 where the mask is 0"))),
                    needed("prompt_length", count("")),
                    needed("calls", list(the("CallSpan"))),
                ],
            ),
        ),
        (
            "CallSpan",
            object(
                "Where a call's sampled tokens stand in a row",
                [
                    needed("seq", count("")),
                    needed("call_id", text("")),
                    needed("start", count("")),
                    needed("end", count("")),
                    needed("trainable", flag("")),
                ],
            ),
        ),
        (
            "PathBreak",
            object(
                "A call that shares the opening of an earlier path but does not extend it",
                [
                    needed("seq", count("")),
                    needed("call_id", text("")),
                    needed("previous_seq", count("The call whose path it left")),
                    needed("at", count("How many tokens the two share")),
                    needed("new_conversation", flag("They part inside the earlier path's first prompt")),
                    needed("previous_tokens", list(count(""))),
                    needed("tokens", list(count(""))),
                ],
            ),
        ),
        (
            "TreeCounts",
            object(
                "What became of an attempt's calls",
                [
                    "calls",
                    "live",
                    "failed",
                    "without_token_ids",
                    "undelivered",
                    "superseded",
                    "frozen",
                    "merges",
                    "breaks",
                ]
                .map(|name| needed(name, count(""))),
            ),
        ),
        (
            "Model",
            object(
                "An inference server, keyed by model and endpoint",
                [
                    needed("model", text("The name that callers ask for")),
                    needed("endpoint", text_like("^https?://.", "Base URL including /v1; http or https")),
                    field("version", count("The training step of the weights it serves")),
                    field("kind", name("What it understands beyond the common interface", &Kind::ALL.map(Kind::name))),
                    field(
                        "trainable",
                        maybe_flag("Whether its answers are trained on; absent: if it serves the policy"),
                    ),
                    field("upstream_model", maybe_text("The model's name at the server")),
                    field("api_key_env", maybe_text("The gateway's variable with the server's key")),
                ],
            ),
        ),
        (
            "PauseCreate",
            object(
                "A pause around a weight update",
                [
                    field("retry_after_seconds", count("What a caller that cannot be held is told to wait")),
                    field("reason", maybe_text("For a person")),
                    field("owner", maybe_text("Who may renew and end it")),
                    field("lease_seconds", maybe_seconds("When it ends by itself")),
                ],
            ),
        ),
        ("Resume", object("The end of a pause", [field("owner", maybe_text("Absent: any pause ends"))])),
        (
            "ProxyState",
            object(
                "The state of the proxy",
                [
                    needed("paused", flag("")),
                    needed("retry_after_seconds", count("")),
                    needed("reason", maybe_text("")),
                    needed("inflight", count("Calls at servers")),
                    needed("held", count("Calls held by the pause")),
                    needed("waiting", count("Calls that wait for their turn")),
                    needed("owner", maybe_text("")),
                    needed("lease_expires_at", maybe_number("Seconds since the epoch")),
                ],
            ),
        ),
    ]
}

fn maybe_list(of: Value) -> Value {
    or_null(list(of))
}
