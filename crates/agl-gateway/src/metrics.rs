//! What the gateway counts and times, for Prometheus: `GET /metrics`.
//!
//! A recorder of the gateway's own, not the process-wide one: several gateways may live in one process.

use std::time::Duration;

use agl_core::trajectory::{CallOutcome, Continuation};
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder, SharedString, Unit};
use metrics_exporter_prometheus::{BuildError, PrometheusBuilder, PrometheusRecorder};

use crate::gate::GateView;
use crate::watchdog::Wait;

/// From half a millisecond to the longest answers, in seconds.
const BUCKETS: [f64; 18] =
    [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];
const METADATA: Metadata<'static> = Metadata::new("agl_gateway", Level::INFO, None);

const CALLS: &str = "agl_gateway_calls_total";
const UPSTREAM: &str = "agl_gateway_upstream_seconds";
const OVERHEAD: &str = "agl_gateway_overhead_seconds";
const COMMIT: &str = "agl_gateway_commit_seconds";
const RETRIES: &str = "agl_gateway_upstream_retries_total";
const REPEATED: &str = "agl_gateway_repeated_calls_total";
const HANGUPS: &str = "agl_gateway_hangups_total";
const ANSWERS: &str = "agl_gateway_answers_total";
const INFLIGHT: &str = "agl_gateway_inflight";
const HELD: &str = "agl_gateway_held";
const PAUSED: &str = "agl_gateway_paused";
const WAITING: &str = "agl_gateway_waiting";
const STUCK: &str = "agl_gateway_stuck";
const STUCK_EVER: &str = "agl_gateway_stuck_total";
const LOOP_LAG: &str = "agl_gateway_event_loop_lag_seconds";
const LOOP_LATE: &str = "agl_gateway_event_loop_late_total";

/// See the [module](self).
pub(crate) struct Metrics(PrometheusRecorder);

/// How a harness that asked again was answered without a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Repeated {
    /// From the call under way.
    Joined,
    /// From the store.
    Recorded,
}

impl Metrics {
    pub(crate) fn new() -> Result<Self, BuildError> {
        let recorder = PrometheusBuilder::new().set_buckets(&BUCKETS)?.build_recorder();
        let counters = [
            (CALLS, "Model calls, by dialect, mode and the status that the harness got"),
            (RETRIES, "Tries at a server beyond the first"),
            (REPEATED, "Calls that were answered without asking a server, because they had been asked before"),
            (HANGUPS, "Calls whose harness was gone when their answer came"),
            (ANSWERS, "Sampled answers, by what training can make of them"),
            (STUCK_EVER, "What has waited too long, by what it waited for"),
            (LOOP_LATE, "How often the event loop came so late that calls felt it"),
        ];
        let histograms = [
            (UPSTREAM, "Calls from the gate to the server's answer, holds and retries included"),
            (OVERHEAD, "What the gateway adds to a call: reading, translating, recording, committing"),
            (COMMIT, "Recording a call until it is durable"),
        ];
        let gauges = [
            (INFLIGHT, "Calls at servers now"),
            (HELD, "Calls held by a pause now"),
            (PAUSED, "1 during a pause"),
            (WAITING, "Calls that wait for their turn now"),
            (STUCK, "What waits too long now, by what it waits for"),
            (LOOP_LAG, "How late the event loop came when it was last looked at"),
        ];
        for (name, what) in counters {
            recorder.describe_counter(KeyName::from(name), None, SharedString::from(what));
        }
        for (name, what) in histograms {
            recorder.describe_histogram(KeyName::from(name), Some(Unit::Seconds), SharedString::from(what));
        }
        for (name, what) in gauges {
            recorder.describe_gauge(KeyName::from(name), None, SharedString::from(what));
        }
        Ok(Self(recorder))
    }

    /// In Prometheus' text form.
    pub(crate) fn render(&self, gate: &GateView, waiting: usize, stuck: &[(Wait, usize)]) -> String {
        for (name, value) in [
            (INFLIGHT, gate.inflight as f64),
            (HELD, gate.held as f64),
            (PAUSED, f64::from(u8::from(gate.pause.is_some()))),
            (WAITING, waiting as f64),
        ] {
            self.gauge(name, Vec::new()).set(value);
        }
        for &(wait, count) in stuck {
            self.gauge(STUCK, vec![label("waits_for", wait.name())]).set(count as f64);
        }
        self.0.handle().render()
    }

    /// Sorts the samples taken into their buckets; to be done now and then, also where nobody asks for the metrics.
    pub(crate) fn tidy(&self) {
        self.0.handle().run_upkeep();
    }

    /// A call that has been answered.
    pub(crate) fn call(&self, dialect: &'static str, mode: &'static str, status: u16) {
        let labels = [label("dialect", dialect), label("mode", mode), Label::new("status", status.to_string())];
        self.counter(CALLS, labels.into()).increment(1);
    }

    /// How long it was on its way to a server and back, and how often it was tried again.
    pub(crate) fn upstream(&self, model: &str, took: Duration, retries: u32) {
        self.histogram(UPSTREAM, vec![Label::new("model", model.to_owned())]).record(took);
        self.counter(RETRIES, Vec::new()).increment(retries.into());
    }

    /// What the gateway itself took for it, and how much of that for the commit.
    pub(crate) fn overhead(&self, took: Duration, commit: Duration) {
        self.histogram(OVERHEAD, Vec::new()).record(took);
        self.histogram(COMMIT, Vec::new()).record(commit);
    }

    pub(crate) fn repeated(&self, how: Repeated) {
        let how = match how {
            Repeated::Joined => "joined",
            Repeated::Recorded => "recorded",
        };
        self.counter(REPEATED, vec![label("how", how)]).increment(1);
    }

    pub(crate) fn hung_up(&self) {
        self.counter(HANGUPS, Vec::new()).increment(1);
    }

    /// A sampled answer, or the lack of one.
    pub(crate) fn answer(&self, outcome: CallOutcome, how: Continuation) {
        let kind = match (outcome, how) {
            (CallOutcome::Failed, _) => "failed",
            (CallOutcome::NoTokenIds, _) => "without_token_ids",
            (CallOutcome::Ok, Continuation::New) => "new",
            (CallOutcome::Ok, Continuation::Merge) => "merge",
            (CallOutcome::Ok, Continuation::Break) => "break",
            (CallOutcome::Ok, Continuation::Branch) => "branch",
        };
        self.counter(ANSWERS, vec![label("kind", kind)]).increment(1);
    }

    /// Something has waited too long.
    pub(crate) fn stuck(&self, wait: Wait) {
        self.counter(STUCK_EVER, vec![label("waits_for", wait.name())]).increment(1);
    }

    /// How late the event loop came.
    pub(crate) fn event_loop(&self, late: Duration) {
        self.gauge(LOOP_LAG, Vec::new()).set(late.as_secs_f64());
    }

    /// It came so late that calls felt it.
    pub(crate) fn event_loop_late(&self) {
        self.counter(LOOP_LATE, Vec::new()).increment(1);
    }

    fn gauge(&self, name: &'static str, labels: Vec<Label>) -> Gauge {
        self.0.register_gauge(&Key::from_parts(name, labels), &METADATA)
    }

    fn counter(&self, name: &'static str, labels: Vec<Label>) -> Counter {
        self.0.register_counter(&Key::from_parts(name, labels), &METADATA)
    }

    fn histogram(&self, name: &'static str, labels: Vec<Label>) -> Histogram {
        self.0.register_histogram(&Key::from_parts(name, labels), &METADATA)
    }
}

fn label(key: &'static str, value: &'static str) -> Label {
    Label::from_static_parts(key, value)
}
