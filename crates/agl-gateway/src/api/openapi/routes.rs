//! Every operation: where, what goes in, what comes out.

use serde_json::{Map, Value, json};

use super::KEYS;
use super::schemas::{ROLLOUT_STATES, anything, free, integer, list, name, text, the};

/// One operation.
pub(super) struct Route {
    method: &'static str,
    path: String,
    tag: &'static str,
    summary: String,
    parameters: Vec<Value>,
    body: Option<Value>,
    responses: Map<String, Value>,
    keyed: bool,
}

const GET: &str = "get";
const POST: &str = "post";
const PATCH: &str = "patch";
const DELETE: &str = "delete";

const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";

fn route(method: &'static str, path: &str, tag: &'static str, summary: &str) -> Route {
    let segments = path.split('{').skip(1).filter_map(|rest| rest.split_once('}')).map(|(segment, _)| segment);
    let parameters = segments.map(in_path).collect();
    let (path, summary) = (path.to_owned(), summary.to_owned());
    Route { method, path, tag, summary, parameters, body: None, responses: Map::new(), keyed: false }
}

fn in_path(segment: &str) -> Value {
    let schema = if segment == "mode" { name("As the rollout's", &["train", "val"]) } else { text("") };
    json!({"name": segment, "in": "path", "required": true, "schema": schema})
}

fn answer(what: &str, kind: &str, schema: Value) -> Value {
    json!({"description": what, "content": {kind: {"schema": schema}}})
}

impl Route {
    fn query(mut self, name: &str, schema: Value, required: bool) -> Self {
        self.parameters.push(json!({"name": name, "in": "query", "required": required, "schema": schema}));
        self
    }

    fn may(self, name: &str, schema: Value) -> Self {
        self.query(name, schema, false)
    }

    fn body(mut self, schema: Value, required: bool) -> Self {
        self.body = Some(json!({"required": required, "content": {JSON: {"schema": schema}}}));
        self.fails(&[(408, "The body did not come in time"), (413, "The body is too large")])
    }

    fn takes(self, schema: Value, required: bool) -> Self {
        self.body(schema, required).invalid()
    }

    fn gives(self, status: u16, what: &str, schema: Value) -> Self {
        self.answers(&status.to_string(), answer(what, JSON, schema))
    }

    fn answers(mut self, status: &str, answer: Value) -> Self {
        self.responses.insert(status.to_owned(), answer);
        self
    }

    fn fails(self, with: &[(u16, &str)]) -> Self {
        with.iter().fold(self, |route, (status, what)| route.gives(*status, what, the("Error")))
    }

    fn invalid(self) -> Self {
        self.gives(422, "Something in the request cannot be used", the("Invalid"))
    }

    fn keyed(mut self) -> Self {
        self.keyed = true;
        self.fails(&[(401, "No key, or a wrong one")])
    }

    /// What may befall every request that reads or writes the store.
    fn stored(self) -> Self {
        self.fails(&[
            (400, "The path cannot be read, or the body broke off"),
            (500, "The store failed"),
            (503, "The gateway is stopping, or its database is away: nothing was done"),
            (504, "The database went away: whether it was done is not known"),
            (507, "No room on the store's disk"),
        ])
    }

    /// Path, method, and what is to be said of it.
    pub(super) fn described(self) -> (String, &'static str, Value) {
        let mut operation = json!({"tags": [self.tag], "summary": self.summary, "parameters": self.parameters});
        if let Some(body) = self.body {
            operation["requestBody"] = body;
        }
        operation["responses"] = self.responses.into();
        if self.keyed {
            operation["security"] = KEYS.iter().map(|key| json!({*key: []})).collect();
        }
        (self.path, self.method, operation)
    }
}

/// Every operation of the gateway.
pub(super) fn all() -> Vec<Route> {
    let mut routes = watching();
    routes.extend(management().into_iter().map(|route| route.keyed().stored()));
    routes.push(events());
    for place in ["", "/agent/{agent}"] {
        let base = format!("/proxy/rollout/{{rollout_id}}/attempt/{{attempt_id}}/mode/{{mode}}{place}");
        routes.extend(harnesses(&base));
    }
    routes
}

fn watching() -> Vec<Route> {
    let get = |path, summary| route(GET, path, "watching", summary);
    vec![
        get("/healthz", "Whether it runs").gives(200, "It does", the("Ok")),
        get("/readyz", "Whether it can work")
            .gives(200, "It can", the("Ok"))
            .fails(&[(503, "It stops, or its store does not answer")]),
        get("/openapi.json", "This document").gives(200, "OpenAPI 3.1", free("")),
        get("/metrics", "Metrics for Prometheus")
            .keyed()
            .answers("200", answer("Prometheus' text form", "text/plain", text(""))),
    ]
}

const GONE: (u16, &str) = (404, "No such rollout");
const NOT_NOW: (u16, &str) = (409, "Not in its present state");

fn management() -> Vec<Route> {
    let rollouts =
        |method, path: &str, summary: &str| route(method, &format!("/api/rollouts{path}"), "rollouts", summary);
    let attempts = |method, path: &str, summary: &str| {
        route(method, &format!("/api/rollouts/{{rollout_id}}{path}"), "attempts", summary)
    };
    let models = |method, summary| route(method, "/api/models", "models", summary);
    let pause = |method, path, summary| route(method, path, "pause", summary);
    let an_attempt = || text("The attempt that counts if absent");
    vec![
        rollouts(GET, "", "Rollouts by state, oldest first")
            .query("state_in", list(name("", ROLLOUT_STATES)), true)
            .may("limit", integer("500 if absent"))
            .may("after", text("Those behind this rollout"))
            .may("run_id", text("Those whose metadata.run_id it is"))
            .gives(200, "A page", list(the("Rollout")))
            .fails(&[(404, "The rollout `after` is gone")])
            .invalid(),
        rollouts(POST, "", "Enqueues rollouts; a known id gives the existing one untouched")
            .takes(list(the("RolloutCreate")), true)
            .gives(201, "In the order asked for", list(the("Rollout"))),
        rollouts(GET, "/terminal", "Rollouts in the order in which they ended")
            .may("after", integer("0 if absent"))
            .may("limit", integer("1000 if absent"))
            .gives(200, "A page", the("TerminalPage"))
            .invalid(),
        rollouts(GET, "/watch", "What happens to rollouts, as it happens")
            .may("after", integer("The cursor to resume from; without it every rollout that has not ended comes first"))
            .answers("200", answer("Events named `rollout`; their id is the cursor", EVENTS, text("")))
            .invalid(),
        rollouts(POST, "/consumed", "Marks rollouts as trained on by a checkpoint that is on disk")
            .takes(the("ConsumedCreate"), true)
            .gives(200, "Marked", the("Marked")),
        rollouts(GET, "/{rollout_id}", "A rollout")
            .gives(200, "The rollout and the attempts that have events", the("RolloutDetail"))
            .fails(&[GONE]),
        rollouts(PATCH, "/{rollout_id}", "Changes a rollout's status")
            .takes(the("RolloutPatch"), true)
            .gives(200, "As it is now", the("Rollout"))
            .fails(&[GONE, NOT_NOW]),
        rollouts(DELETE, "/{rollout_id}", "Deletes a rollout with all that belongs to it")
            .answers("204", json!({"description": "It is gone, or never was"})),
        rollouts(POST, "/{rollout_id}/cancel", "Ends a rollout as failed; one that has ended stays as it is")
            .gives(200, "As it is now", the("Rollout"))
            .fails(&[GONE]),
        rollouts(
            POST,
            "/{rollout_id}/retry",
            "Another attempt of a rollout that runs, or a new rollout of one that has ended",
        )
        .gives(201, "The new one", the("Rollout"))
        .gives(200, "The one that runs", the("Rollout"))
        .fails(&[GONE, NOT_NOW]),
        attempts(GET, "/attempts", "The attempts of a rollout, oldest first")
            .gives(200, "All of them", list(the("Attempt")))
            .fails(&[GONE]),
        attempts(POST, "/attempts", "Makes an attempt; a known id gives the existing one and its keys")
            .takes(the("AttemptCreate"), false)
            .gives(201, "The attempt with its keys", the("AttemptGrant"))
            .fails(&[GONE]),
        attempts(PATCH, "/attempts/{attempt_id}", "Changes an attempt")
            .takes(the("AttemptPatch"), true)
            .gives(200, "As it is now", the("Attempt"))
            .fails(&[(404, "No such rollout or attempt"), NOT_NOW]),
        attempts(GET, "/events", "The events of an attempt")
            .may("event_type", text("Those of this type"))
            .may("format", text("`triplet`: token ids, log-probs and rewards alone"))
            .may("attempt_id", an_attempt())
            .gives(200, "In the order of their appending", list(the("Event")))
            .fails(&[GONE]),
        attempts(GET, "/sequences", "The training sequences of an attempt")
            .may("level", name("", &["trajectory", "transition"]))
            .may("attempt_id", an_attempt())
            .gives(200, "Its rows", the("Sequences"))
            .fails(&[GONE])
            .invalid(),
        models(GET, "The registered inference servers").gives(200, "All of them", list(the("Model"))),
        models(POST, "Registers inference servers")
            .takes(list(the("Model")), true)
            .gives(201, "As they are registered", list(the("Model")))
            .fails(&[(403, "A server's key needs a gateway with a key")]),
        models(DELETE, "Removes the policy's servers, another model's, or one server")
            .may("model", text("The policy if absent"))
            .may("endpoint", text("All of the model's if absent"))
            .gives(200, "They are gone", the("Ok")),
        pause(POST, "/proxy/pause", "Holds new calls; the owner of a live pause renews it")
            .takes(the("PauseCreate"), true)
            .gives(200, "Paused", the("ProxyState"))
            .fails(&[(409, "Another owner's pause is live")]),
        pause(POST, "/proxy/resume", "Ends a pause")
            .takes(the("Resume"), false)
            .gives(200, "Open", the("ProxyState"))
            .fails(&[(409, "Another owner's pause is live")]),
        pause(GET, "/proxy/state", "Whether calls are held, and how many are at servers").gives(
            200,
            "As it is now",
            the("ProxyState"),
        ),
    ]
}

fn events() -> Route {
    let path = "/api/rollouts/{rollout_id}/attempt/{attempt_id}/events";
    route(POST, path, "attempts", "Appends an event; the attempt's keys open this too")
        .takes(the("EventCreate"), true)
        .gives(200, "As it was appended", the("Event"))
        .keyed()
        .stored()
        .fails(&[(403, "Not with this key"), GONE])
}

/// One base URL for each dialect. Beyond what is named here every status of a server may come, in the dialect's own words.
fn harnesses(base: &str) -> Vec<Route> {
    let call = |path: &str, summary: &str| {
        route(POST, &format!("{base}/{path}"), "proxy", summary).keyed().answers_in_its_words()
    };
    let told = |route: Route| {
        let body = free(
            "The dialect's own request. Fields that chat completions have no place for are left out and named in the event",
        );
        let mut told = answer(
            "The model's answer in the dialect's own form, as events where a stream was asked for",
            JSON,
            anything(""),
        );
        told["content"][EVENTS] = json!({"schema": text("")});
        Route { body: Some(json!({"required": true, "content": {JSON: {"schema": body}}})), ..route }
            .answers("200", told)
    };
    let models = |path: &str| {
        let models = route(GET, &format!("{base}/{path}"), "proxy", "The models that may be asked for");
        models.keyed().gives(200, "In the dialect's own form", free("")).answers_in_its_words()
    };
    let mut routes: Vec<Route> = [
        ("openai/v1/chat/completions", "A chat completion"),
        ("openai/v1/completions", "A completion"),
        ("openai/v1/responses", "A response; nothing is kept between calls"),
        ("anthropic/v1/messages", "A message"),
        ("anthropic/v1/messages/count_tokens", "How many tokens a message would be"),
    ]
    .into_iter()
    .map(|(path, summary)| told(call(path, summary)))
    .collect();
    for version in ["v1beta", "v1"] {
        for (verb, summary) in [
            ("generateContent", "Content"),
            ("streamGenerateContent", "Content as a stream: a JSON list, or events with `alt=sse`"),
            ("countTokens", "How many tokens a content would be"),
        ] {
            let route = told(call(&format!("gemini/{version}/models/{{model}}:{verb}"), summary));
            routes.push(if verb.starts_with("stream") { route.may("alt", text("`sse`: as events")) } else { route });
        }
    }
    routes.extend([models("openai/v1/models"), models("anthropic/v1/models")]);
    for path in ["anthropic", "anthropic/"] {
        let there = route(GET, &format!("{base}/{path}"), "proxy", "Whether anybody is there; needs no key");
        routes.push(there.answers("200", json!({"description": "Yes"})));
    }
    routes
}

impl Route {
    /// Errors of a proxy URL.
    fn answers_in_its_words(self) -> Self {
        self.answers("401", answer("No key, or a wrong one", JSON, anything("")))
            .answers("404", answer("No such rollout, mode or place", JSON, anything("")))
            .answers(
                "default",
                answer("An error, the server's or the gateway's, in the dialect's own form", JSON, anything("")),
            )
    }
}
