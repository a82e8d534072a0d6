//! Where harnesses come in: a route per dialect. Each checks who calls, has the body translated, and gives the answer in the
//! dialect's own words, errors too.

use std::sync::Arc;
use std::time::Instant;

use agl_core::rollout::Rollout;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;

use super::aside::aside;
use super::recorder::AttemptKey;
use super::request::{Mode, RequestBody, UpstreamPath, digest};
use super::routes::target;
use super::{LARGE_BODY_BYTES, count, models, read_body, reply};
use crate::app::App;
use crate::dialect::fields::LeftOut;
use crate::dialect::{Detail, Dialect, Translated, Voice, gemini, messages, responses};
use crate::error::ApiError;
use crate::keys::{Access, Scope};
use crate::traces::CallTrace;

/// The segments of a proxy URL before the dialect's own.
#[derive(Debug, Deserialize)]
pub(crate) struct Place {
    rollout_id: String,
    attempt_id: String,
    mode: String,
    /// Which agent of several calls, where the URL says so.
    agent: Option<String>,
    /// The dialect's own rest of the path, where it varies.
    path: Option<String>,
}

/// A harness that may call.
pub(crate) struct Caller {
    pub(crate) key: AttemptKey,
    pub(crate) mode: Mode,
    pub(crate) rollout: Arc<Rollout>,
    /// The agent's name, for runs with several.
    pub(crate) agent: Option<String>,
    /// It says that it asked this before.
    pub(crate) is_retry: bool,
}

/// A request as it goes to the server, and how its answer is to be told.
pub(crate) struct Prepared {
    pub(crate) body: RequestBody,
    pub(crate) path: UpstreamPath,
    pub(crate) voice: Voice,
    pub(crate) left_out: LeftOut,
}

/// The circumstances of a request.
pub(crate) struct Asked {
    /// Equal for equal requests.
    pub(crate) digest: [u8; 32],
    /// When it had come.
    pub(crate) started: Instant,
    pub(crate) trace: CallTrace,
}

/// Names the agent that calls, for harnesses that cannot change their URL.
const AGENT_HEADER: &str = "x-agl-agent";
/// Counts a client's retries of one request; the SDKs of OpenAI and Anthropic send it.
const RETRY_HEADER: &str = "x-stainless-retry-count";

/// `…/openai/v1/{chat/completions | completions | responses}`.
pub(crate) async fn openai(State(app): State<Arc<App>>, Path(mut place): Path<Place>, request: Request) -> Response {
    let path = place.path.take().unwrap_or_default();
    let dialect = match path.as_str() {
        "chat/completions" => Dialect::Chat,
        "completions" => Dialect::Completions,
        "responses" => Dialect::Responses,
        _ => return ApiError::new(StatusCode::NOT_FOUND, format!("Unsupported upstream path: {path}")).into_response(),
    };
    answer(&app, dialect, place, request, move |raw, remembered| match dialect {
        Dialect::Responses => translated(responses::request(json(raw)?)?, remembered),
        _ => passed(raw, dialect, remembered),
    })
    .await
}

/// `…/anthropic/v1/messages`.
pub(crate) async fn anthropic(State(app): State<Arc<App>>, Path(place): Path<Place>, request: Request) -> Response {
    answer(&app, Dialect::Messages, place, request, |raw, remembered| {
        translated(messages::request(json(raw)?)?, remembered)
    })
    .await
}

/// `…/anthropic/v1/messages/count_tokens`.
pub(crate) async fn anthropic_count(
    State(app): State<Arc<App>>,
    Path(place): Path<Place>,
    request: Request,
) -> Response {
    let counted = async {
        let caller = admit(&app, place, request.headers(), request.uri()).await?;
        let raw = read_body(&app, request).await?;
        count::messages(&app, &caller, messages::request(json(&raw)?)?).await
    };
    counted.await.unwrap_or_else(|error: ApiError| Dialect::Messages.error(error).into_response())
}

/// `…/gemini/v1beta/models/{model}:{generateContent | streamGenerateContent | countTokens}`.
pub(crate) async fn gemini(State(app): State<Arc<App>>, Path(mut place): Path<Place>, request: Request) -> Response {
    let path = place.path.take().unwrap_or_default();
    let (model, verb) = path
        .rsplit_once(':')
        .map_or((path.clone(), String::new()), |(model, verb)| (model.to_owned(), verb.to_owned()));
    let as_events = wants_events(request.uri());
    match verb.as_str() {
        "generateContent" | "streamGenerateContent" => {
            let stream = verb == "streamGenerateContent";
            answer(&app, Dialect::Gemini, place, request, move |raw, remembered| {
                translated(gemini::request(json(raw)?, &model, stream, as_events)?, remembered)
            })
            .await
        }
        "countTokens" => {
            let counted = async {
                let caller = admit(&app, place, request.headers(), request.uri()).await?;
                let raw = read_body(&app, request).await?;
                count::gemini(&app, &caller, gemini::count_request(json(&raw)?, &model)?).await
            };
            counted.await.unwrap_or_else(|error: ApiError| Dialect::Gemini.error(error).into_response())
        }
        _ => {
            let error = ApiError::new(StatusCode::NOT_FOUND, format!("Unsupported upstream path: models/{path}"));
            Dialect::Gemini.error(error).into_response()
        }
    }
}

/// `GET …/openai/v1/models` and `…/anthropic/v1/models`: what this harness may ask for.
pub(crate) async fn openai_models(State(app): State<Arc<App>>, Path(place): Path<Place>, request: Request) -> Response {
    match admit(&app, place, request.headers(), request.uri()).await {
        Ok(_) => models::openai(&app).into_response(),
        Err(error) => Dialect::Chat.error(error).into_response(),
    }
}

/// See [`openai_models`].
pub(crate) async fn anthropic_models(
    State(app): State<Arc<App>>,
    Path(place): Path<Place>,
    request: Request,
) -> Response {
    match admit(&app, place, request.headers(), request.uri()).await {
        Ok(_) => models::anthropic(&app).into_response(),
        Err(error) => Dialect::Messages.error(error).into_response(),
    }
}

async fn answer(
    app: &Arc<App>,
    dialect: Dialect,
    place: Place,
    request: Request,
    prepare: impl FnOnce(&Bytes, &Remembered) -> Result<Prepared, ApiError> + Send + 'static,
) -> Response {
    let trace = CallTrace::begin(dialect, (&place.rollout_id, &place.attempt_id), &place.mode, request.headers());
    let answered = async {
        let caller = admit(app, place, request.headers(), request.uri()).await?;
        app.quota.check(&caller.key.rollout_id).await?;
        let place = format!(
            "{}\n{}\n{}",
            request.uri().path(),
            wants_events(request.uri()),
            caller.agent.as_deref().unwrap_or_default()
        );
        let raw = read_body(app, request).await?;
        let started = Instant::now();
        let is_large = raw.len() > LARGE_BODY_BYTES;
        let remembered = Remembered { app: Arc::clone(app), key: caller.key.clone() };
        let prepare = move || {
            let prepared = prepare(&raw, &remembered)?;
            Ok::<_, ApiError>((prepared, digest(&raw, &place)))
        };
        let (prepared, digest) = if is_large { aside(prepare).await?? } else { prepare()? };
        if trace.is_on() {
            let model = target(&app.config, prepared.voice.model.as_deref(), caller.agent.as_deref()).model;
            trace.asks(dialect, &model, caller.agent.as_deref());
        }
        reply::give(app, caller, prepared, Asked { digest, started, trace: trace.clone() }).await
    };
    let response = answered.await.unwrap_or_else(|error: ApiError| dialect.error(error).into_response());
    trace.ended(response.status());
    response
}

/// Gemini streams a JSON list unless it is asked for events.
fn wants_events(uri: &Uri) -> bool {
    uri.query().is_some_and(|query| query.split('&').any(|pair| pair == "alt=sse"))
}

/// What earlier answers of the attempt said to the letter.
struct Remembered {
    app: Arc<App>,
    key: AttemptKey,
}

/// Checks the key, the mode and that the rollout exists.
async fn admit(app: &App, place: Place, headers: &HeaderMap, uri: &Uri) -> Result<Caller, ApiError> {
    let Place { rollout_id, attempt_id, mode, agent, .. } = place;
    let key = AttemptKey { rollout_id, attempt_id };
    let access = app.check_attempt(headers, uri, &key.rollout_id, &key.attempt_id).await?;
    if access == Access::Attempt(Scope::Reward) {
        return Err(ApiError::forbidden("The evaluator's key opens the attempt's events, not the model"));
    }
    let mode = Mode::from_name(&mode)
        .ok_or_else(|| ApiError::new(StatusCode::NOT_FOUND, format!("Unsupported proxy mode: {mode}")))?;
    let standing = app.store.standing(&key.rollout_id, &key.attempt_id).await?;
    let rollout = standing.ok_or_else(|| ApiError::not_found(&key.rollout_id))?.rollout;
    if matches!(access, Access::Attempt(_)) && mode.name() != rollout.mode() {
        return Err(ApiError::forbidden(format!(
            "Rollout {} is of mode {}: its agent's key does not open mode {}; use the base URL that the agent was given",
            rollout.rollout_id,
            rollout.mode(),
            mode.name()
        )));
    }
    let named = || headers.get(AGENT_HEADER).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let count = headers.get(RETRY_HEADER).and_then(|value| value.to_str().ok()?.parse::<u32>().ok());
    Ok(Caller { key, mode, rollout, agent: agent.or_else(named), is_retry: count.is_some_and(|count| count > 0) })
}

fn json(raw: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(raw).map_err(|_| ApiError::bad_request("Invalid JSON in request body"))
}

impl Remembered {
    /// See [`super::verbatim`].
    fn restore(&self, messages: &mut [Value]) -> bool {
        self.app.config.default_proxy.restore_arguments && self.app.verbatim.restore(&self.key, messages)
    }
}

/// A request in chat completions' own words: only what we set is touched, everything else leaves byte for byte as it came.
fn passed(raw: &Bytes, dialect: Dialect, remembered: &Remembered) -> Result<Prepared, ApiError> {
    let mut body = RequestBody::parse(raw)?;
    // Reading the messages costs time: only where there is something to find.
    if remembered.app.verbatim.knows(&remembered.key)
        && let Some(mut messages) = body.list("messages")
        && remembered.restore(&mut messages)
    {
        body.set("messages", &messages);
    }
    let stream = body.is_truthy("stream");
    let usage = body.is_true_in("stream_options", "include_usage");
    if stream {
        // The server is to answer whole.
        body.remove("stream");
        body.remove("stream_options");
    }
    let detail = if usage { Detail::IncludeUsage } else { Detail::Nothing };
    let path = if dialect == Dialect::Chat { UpstreamPath::ChatCompletions } else { UpstreamPath::Completions };
    let voice = Voice { dialect, stream, model: body.text("model"), detail };
    Ok(Prepared { body, path, voice, left_out: LeftOut::new() })
}

fn translated(request: Translated, remembered: &Remembered) -> Result<Prepared, ApiError> {
    let Translated { mut chat, left_out, voice } = request;
    if let Some(Value::Array(messages)) = chat.get_mut("messages") {
        remembered.restore(messages);
    }
    Ok(Prepared { body: RequestBody::of(&chat), path: UpstreamPath::ChatCompletions, voice, left_out })
}
