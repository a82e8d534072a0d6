//! A call under way, from the gate to the recorded answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use agl_store::RegisteredModel;
use axum::http::StatusCode;
use bytes::Bytes;
use tokio::sync::mpsc;

use super::LARGE_BODY_BYTES;
use super::answer::{self, Answer};
use super::aside::aside;
use super::attempt_tree::{CallResult, Finished, Recorded};
use super::entry::{Asked, Caller, Prepared};
use super::event::{Described, event_data, seed};
use super::flights::{Seat, Taken};
use super::kind::Kind;
use super::live::Words;
use super::recorder::{AttemptKey, RecordError};
use super::reply::Reply;
use super::request::Mode;
use super::routes::{Target, target};
use super::through::Through;
use super::upstream::{Ask, End, Progress};
use crate::app::App;
use crate::clock;
use crate::config::duration;
use crate::dialect::Voice;
use crate::dialect::fields::LeftOut;
use crate::error::ApiError;
use crate::watchdog::Wait;

/// The status recorded for a call whose harness hung up and did not come back in time.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// A call that has been read and checked.
pub(crate) struct Call {
    pub(crate) call_id: String,
    app: Arc<App>,
    voice: Voice,
    key: AttemptKey,
    mode: Mode,
    agent: Option<String>,
    target: Target,
    ask: Ask,
    left_out: LeftOut,
    asked: Asked,
}

impl Call {
    pub(crate) async fn new(
        app: &Arc<App>,
        caller: Caller,
        prepared: Prepared,
        asked: Asked,
    ) -> Result<Self, ApiError> {
        let Caller { key, mode, rollout, agent, .. } = caller;
        let Prepared { mut body, path, voice, left_out } = prepared;
        let target = target(&app.config, voice.model.as_deref(), agent.as_deref());
        body.prepare(&target, mode, &app.config.default_proxy);
        let number = app.recorder.begin_call(&key).await?;
        let seed = (!body.has("seed")).then(|| seed(&rollout, number));
        let trace = asked.trace.clone();
        let ask = Ask { key: key.clone(), model: target.model.clone(), mode, path, body, seed, trace };
        let call_id = format!("call-{}", uuid::Uuid::now_v7().simple());
        Ok(Self { app: Arc::clone(app), call_id, voice, key, mode, agent, target, ask, left_out, asked })
    }

    /// Calls and records, and answers whoever waits then.
    pub(crate) async fn fly(self, mut seat: Seat) {
        let (recorder, key, digest) = (Arc::clone(&self.app.recorder), self.key.clone(), self.asked.digest);
        let (told, telling) = mpsc::unbounded_channel();
        let mut through = self.voice.stream.then(|| Through::new(&self.voice, &self.call_id, told));
        let trace = self.asked.trace.clone();
        let landed = self.run(&mut seat, &mut through, telling).await;
        if landed.as_ref().is_err_and(|error| error.status.is_server_error()) {
            trace.failed();
        }
        let taken = seat.land();
        let outcome = match (landed, &taken) {
            (Ok((reply, recorded)), Some(_)) => Ok(reply.handed_over(recorder.hand_over(&key, digest, recorded))),
            (Ok((_, recorded)), None) => {
                recorder.leave_behind(&key, digest, recorded);
                return;
            }
            (Err(error), _) => Err(error),
        };
        // Nobody takes it where the harness has hung up just now: dropping it says so to the recorder.
        match taken {
            Some(Taken::Waiting(taker)) => drop(taker.send(outcome)),
            Some(Taken::Listening(listener)) => {
                let last = match (outcome, &mut through) {
                    (Ok(reply), _) => Some(reply.into_last_words()),
                    (Err(error), Some(through)) => Some(Words::Last(through.fail(&error), None)),
                    (Err(_), None) => None,
                };
                if let Some(last) = last {
                    drop(listener.send(last));
                }
            }
            None => {}
        }
    }

    /// Calls, records, and gives what is to be answered.
    async fn run(
        self,
        seat: &mut Seat,
        through: &mut Option<Through>,
        mut telling: mpsc::UnboundedReceiver<Bytes>,
    ) -> Result<(Reply, Recorded), ApiError> {
        let Self { app, call_id, voice, key, mode, agent, target, ask, left_out, asked } = self;
        let Asked { digest, started, trace } = asked;
        let mut progress = Progress::default();
        let sent_any = AtomicBool::new(false);
        let began_asking = started.elapsed();
        let end = {
            let call = app.upstream.call(&ask, &mut progress, &sent_any, through.as_mut());
            tokio::pin!(call);
            // A call that was still held has cost nothing yet.
            let grace = || match sent_any.load(Ordering::SeqCst) {
                true => duration(app.config.hangup_grace_seconds),
                false => Duration::ZERO,
            };
            loop {
                tokio::select! {
                    Some(words) = telling.recv() => seat.tell(words),
                    end = &mut call => break Some(end),
                    () = seat.is_abandoned(grace) => break None,
                }
            }
        };
        while let Ok(words) = telling.try_recv() {
            seat.tell(words);
        }
        let asking = started.elapsed() - began_asking;
        let served = progress.server.as_ref().map_or("unknown", |server| server.model.as_str());
        app.metrics.upstream(served, asking, progress.retries);
        let abandoned = end.is_none();
        if abandoned && progress.sent.is_none() {
            trace.left();
            tracing::info!("the harness hung up before its call was sent");
            return Err(abandoned_error());
        }
        let end = end.unwrap_or_else(|| End::Failed(abandoned_error()));
        let client_present = !abandoned && seat.is_taken();
        if !client_present {
            app.metrics.hung_up();
            trace.left();
            tracing::info!(call_id, abandoned, "the harness hung up");
        }
        let version = progress.server.as_ref().map_or(0, |server| server.version);
        let (http_status, response, mut answer) = match &end {
            End::Answered(answer) => {
                (answer.status.as_u16(), answer.body.clone(), read_answer(&answer.body, version).await)
            }
            End::Failed(_) if abandoned => (CLIENT_CLOSED_REQUEST, Bytes::new(), Answer::default()),
            End::Failed(error) => (error.status.as_u16(), error.body.to_string().into(), Answer::default()),
        };
        let ok = http_status < 400;
        let trainable = is_trainable(&target, progress.server.as_ref());
        if ok && trainable {
            complain(&answer, &progress, &call_id);
        }
        if ok {
            app.verbatim.remember(&key, std::mem::take(&mut answer.tool_calls));
        }
        trace.answered(&answer, progress.server.as_ref());
        let described = Described {
            model: &target.model,
            dialect: voice.dialect,
            stream: voice.stream,
            agent: agent.as_deref(),
            left_out: &left_out,
            latency_ms: asking.as_secs_f64() * 1000.0,
            http_status,
        };
        let finished = Finished {
            data: event_data(&described, &progress, &answer),
            call_id: call_id.clone(),
            timestamp: clock::now(),
            request: progress.sent.unwrap_or_else(|| ask.body.to_bytes(&[])),
            response,
            result: if ok { CallResult::Answered(answer.choices) } else { CallResult::Failed },
            digest,
            http_status,
            trainable,
            client_present,
            key: key.clone(),
        };
        let recording = Instant::now();
        let recorded = {
            let _watched = app.watchdog.watch(Wait::Commit, &key, &app.shown_store);
            let _span = trace.record();
            app.recorder.record(finished).await?
        };
        app.quota.note(&key.rollout_id);
        let commit = recording.elapsed();
        for &(outcome, joint) in &recorded.answers {
            app.metrics.answer(outcome, joint);
        }
        let dialect = voice.dialect.name();
        let reply = match end {
            End::Failed(error) => Err(error),
            End::Answered(_) if through.as_ref().is_some_and(Through::has_spoken) => {
                Ok(Reply::last_words(through.as_mut().map(Through::finish).unwrap_or_default()))
            }
            End::Answered(answer) => Reply::tell(answer, voice, &call_id).await,
        };
        let told = reply.as_ref().map_or_else(|error| error.status, Reply::status).as_u16();
        app.metrics.call(dialect, mode.name(), told);
        app.metrics.overhead(started.elapsed() - asking, commit);
        match reply {
            Ok(reply) => Ok((reply, recorded)),
            Err(error) => {
                app.recorder.leave_behind(&key, digest, recorded);
                Err(error)
            }
        }
    }
}

/// What the route says, then what the server was registered with; otherwise the policy is trained, unless it comes from an API of
/// others.
fn is_trainable(target: &Target, server: Option<&RegisteredModel>) -> bool {
    let registered = server.and_then(|server| server.trainable);
    let gives_ids = server.and_then(|server| Kind::from_name(&server.kind)).is_none_or(Kind::gives_ids);
    target.trainable.or(registered).unwrap_or(target.is_policy && gives_ids)
}

fn abandoned_error() -> ApiError {
    let status = StatusCode::from_u16(CLIENT_CLOSED_REQUEST).unwrap_or(StatusCode::BAD_REQUEST);
    ApiError::new(status, "The client closed the connection")
}

/// Says what keeps an answer from being trained on.
fn complain(answer: &Answer, progress: &Progress, call_id: &str) {
    if answer.complaints.is_empty() {
        return;
    }
    let endpoint = progress.server.as_ref().map_or("", |server| server.endpoint.as_str());
    tracing::warn!(
        server = endpoint,
        call_id,
        complaints = answer.complaints.join("; "),
        "this answer cannot be trained on as it is; the server must honour `return_token_ids` and `logprobs` (vLLM 0.10.2 or later does)"
    );
}

async fn read_answer(body: &Bytes, version: u64) -> Answer {
    if body.len() <= LARGE_BODY_BYTES {
        return answer::read(body, version);
    }
    let body = body.clone();
    aside(move || answer::read(&body, version)).await.unwrap_or_default()
}

impl From<RecordError> for ApiError {
    fn from(error: RecordError) -> Self {
        match error {
            RecordError::Store(error) => error.into(),
            other => {
                tracing::error!(error = %other, "a call cannot be recorded");
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, other.to_string())
            }
        }
    }
}
