//! The gateway's settings. Every field has a default; an unknown key is an error.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// Everything that can be set. Durations are in seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayConfig {
    /// `ADDRESS:PORT`; port 0 takes a free one.
    pub listen: String,
    /// The server key. It opens everything; empty turns authentication off, which is refused off the loopback address.
    pub key: String,
    /// Serve without a key on an address that others can reach.
    pub allow_unauthenticated: bool,
    /// `memory`, `sqlite:PATH`, a path to a SQLite file, or `postgres://USER@HOST:PORT/DATABASE`, which several gateways may
    /// share.
    pub store: String,
    /// The URL under which agents reach this gateway, where it is not the one it listens on.
    pub agent_url: Option<String>,
    /// Which model the proxy serves, and what it sets in requests.
    pub default_proxy: DefaultProxyConfig,
    /// Which models and agents go elsewhere; the first route that fits counts.
    pub routes: Vec<RouteConfig>,
    /// How inference servers are called.
    pub upstream: UpstreamConfig,
    /// How long capture goes on after a harness has hung up.
    pub hangup_grace_seconds: f64,
    /// A stream that waits longer than this for its answer begins without it, and says so often that it still waits.
    pub stream_keep_alive_seconds: f64,
    /// What is held during a pause, or waits for its turn.
    pub hold: HoldConfig,
    /// What one client, one rollout and all calls together may take.
    pub limits: LimitsConfig,
    /// What waits longer than this is named in the log and in the metrics.
    pub watchdog_seconds: f64,
    /// How long a call waits for a model to be registered.
    pub no_model_wait_seconds: f64,
    /// The largest request body, in bytes.
    pub body_limit: usize,
    /// How long a pause lasts that names no lease.
    pub pause_lease_seconds: f64,
    /// How long calls in flight may take to finish once the gateway is asked to stop.
    pub shutdown_grace_seconds: f64,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8080".to_owned(),
            key: String::new(),
            allow_unauthenticated: false,
            store: "sqlite:agl.db".to_owned(),
            agent_url: None,
            default_proxy: DefaultProxyConfig::default(),
            routes: Vec::new(),
            upstream: UpstreamConfig::default(),
            hangup_grace_seconds: 30.0,
            stream_keep_alive_seconds: 10.0,
            hold: HoldConfig::default(),
            limits: LimitsConfig::default(),
            watchdog_seconds: 120.0,
            no_model_wait_seconds: 10.0,
            body_limit: 64 * 1024 * 1024,
            pause_lease_seconds: 3600.0,
            shutdown_grace_seconds: 10.0,
        }
    }
}

/// What the proxy sets in every request, by mode, as Agent Lightning v1.0 does. Each override can be turned off; what the
/// harness sent then stays.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DefaultProxyConfig {
    /// The policy: the model that is trained.
    pub model_name: String,
    /// In mode `train`.
    pub train: SamplingConfig,
    /// In mode `val`.
    pub val: SamplingConfig,
    /// Ask for log-probs in mode `train`.
    pub include_log_probs: bool,
    /// Send `model_name` whatever model the harness asks for. Off: a harness may name any registered model.
    pub override_model: bool,
    /// Send the mode's temperature.
    pub override_temperature: bool,
    /// Ask for token ids, without which nothing can be trained.
    pub override_return_token_ids: bool,
    /// Ask for log-probs where `include_log_probs` says so.
    pub override_logprobs: bool,
    /// Send the arguments of earlier tool calls as the model wrote them, where the harness has only laid them out anew.
    pub restore_arguments: bool,
}

impl Default for DefaultProxyConfig {
    fn default() -> Self {
        Self {
            model_name: "policy".to_owned(),
            train: SamplingConfig { temperature: 1.0 },
            val: SamplingConfig { temperature: 0.7 },
            include_log_probs: true,
            override_model: true,
            override_temperature: true,
            override_return_token_ids: true,
            override_logprobs: true,
            restore_arguments: true,
        }
    }
}

/// Calls that go to another model than the policy, or are not trained on. `*` in a pattern stands for anything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteConfig {
    /// The model's name as the harness asks for it; absent: any, also none.
    #[serde(default)]
    pub model: Option<String>,
    /// The agent's name (`X-AGL-Agent`, or the URL's `/agent/NAME`); absent: any, also none.
    #[serde(default)]
    pub agent: Option<String>,
    /// The registered model that answers.
    pub to: String,
    /// Whether the answers are trained on; absent: as the model is registered.
    #[serde(default)]
    pub trainable: Option<bool>,
}

/// How a mode samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplingConfig {
    /// Sampling temperature.
    pub temperature: f64,
}

/// How inference servers are called.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UpstreamConfig {
    /// Tries per call. Status 408, 409, 429, 5xx and broken connections are tried again.
    pub max_attempts: u32,
    /// The wait before the second try; it doubles from there, jittered by a quarter.
    pub backoff_seconds: f64,
    /// The longest such wait.
    pub backoff_cap_seconds: f64,
    /// How long one try may take.
    pub timeout_seconds: f64,
}

impl Default for UpstreamConfig {
    fn default() -> Self {
        Self { max_attempts: 6, backoff_seconds: 0.5, backoff_cap_seconds: 8.0, timeout_seconds: 300.0 }
    }
}

/// What is held during a pause, or waits for its turn among `max_inflight_calls`. Beyond it callers are answered 429 with
/// `Retry-After`, and during a pause with `X-Agl-Paused: true`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HoldConfig {
    /// How long one call is held.
    pub max_seconds: f64,
    /// How many calls are held at once.
    pub max_requests: usize,
}

impl Default for HoldConfig {
    fn default() -> Self {
        Self { max_seconds: 300.0, max_requests: 4096 }
    }
}

/// What one client, one rollout and all calls together may take.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsConfig {
    /// Calls at servers at once. Further ones wait in the order in which they came, as [`HoldConfig`] says.
    pub max_inflight_calls: usize,
    /// Events of one rollout. Beyond it calls and events are refused with 403, except rewards from the evaluator or with the
    /// server key.
    pub max_events_per_rollout: u64,
    /// How long a client may take for the header of a request; a connection without requests is closed after the same time.
    pub header_timeout_seconds: f64,
    /// How long a client may take for the body of a request; 408 then.
    pub body_timeout_seconds: f64,
    /// How long a client may take nothing of its answer; its connection is closed then.
    pub write_timeout_seconds: f64,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            max_inflight_calls: 4096,
            max_events_per_rollout: 100_000,
            header_timeout_seconds: 60.0,
            body_timeout_seconds: 120.0,
            write_timeout_seconds: 60.0,
        }
    }
}

impl GatewayConfig {
    /// The first setting that cannot be used: its name and what is wrong with it.
    pub(crate) fn problem(&self) -> Option<(&'static str, String)> {
        let durations = [
            ("upstream.backoff_seconds", self.upstream.backoff_seconds),
            ("upstream.backoff_cap_seconds", self.upstream.backoff_cap_seconds),
            ("upstream.timeout_seconds", self.upstream.timeout_seconds),
            ("hangup_grace_seconds", self.hangup_grace_seconds),
            ("stream_keep_alive_seconds", self.stream_keep_alive_seconds),
            ("hold.max_seconds", self.hold.max_seconds),
            ("limits.header_timeout_seconds", self.limits.header_timeout_seconds),
            ("limits.body_timeout_seconds", self.limits.body_timeout_seconds),
            ("limits.write_timeout_seconds", self.limits.write_timeout_seconds),
            ("watchdog_seconds", self.watchdog_seconds),
            ("no_model_wait_seconds", self.no_model_wait_seconds),
            ("pause_lease_seconds", self.pause_lease_seconds),
            ("shutdown_grace_seconds", self.shutdown_grace_seconds),
        ];
        let unusable = durations.into_iter().find(|(_, seconds)| seconds_to_duration(*seconds).is_none());
        if let Some((name, seconds)) = unusable {
            return Some((name, format!("{seconds} is no number of seconds from 0 up to a year")));
        }
        for (name, seconds, why) in [
            (
                "stream_keep_alive_seconds",
                self.stream_keep_alive_seconds,
                "0 would never stop saying that it waits; 10 is usual",
            ),
            ("watchdog_seconds", self.watchdog_seconds, "0 would take everything for stuck; 120 is usual"),
            ("limits.header_timeout_seconds", self.limits.header_timeout_seconds, "0 would let nobody in; 60 is usual"),
            ("limits.body_timeout_seconds", self.limits.body_timeout_seconds, "0 would let nobody in; 120 is usual"),
            ("limits.write_timeout_seconds", self.limits.write_timeout_seconds, "0 would answer nobody; 60 is usual"),
        ] {
            if seconds == 0.0 {
                return Some((name, why.to_owned()));
            }
        }
        if self.limits.max_inflight_calls == 0 {
            return Some(("limits.max_inflight_calls", "0 would never call a server; 4096 is usual".to_owned()));
        }
        if self.upstream.max_attempts == 0 {
            return Some(("upstream.max_attempts", "0 would never call the server; 1 calls it once".to_owned()));
        }
        if self.default_proxy.model_name.is_empty() {
            return Some(("default_proxy.model_name", "it is empty; name the model that is trained".to_owned()));
        }
        None
    }

    /// The store as it may be shown and written to files: without a password.
    #[must_use]
    pub fn shown_store(&self) -> String {
        agl_store::shown(&self.store)
    }

    /// True where a caller on another machine could reach the address.
    pub(crate) fn is_reachable(address: SocketAddr) -> bool {
        !address.ip().is_loopback()
    }
}

/// A setting in seconds as a duration, if it is one.
pub(crate) fn seconds_to_duration(seconds: f64) -> Option<std::time::Duration> {
    const YEAR: f64 = 366.0 * 86_400.0;
    (0.0..=YEAR).contains(&seconds).then(|| std::time::Duration::from_secs_f64(seconds))
}

/// As [`seconds_to_duration`], for settings that [`GatewayConfig::problem`] has passed.
pub(crate) fn duration(seconds: f64) -> std::time::Duration {
    seconds_to_duration(seconds).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_configuration_is_the_default() {
        let config: GatewayConfig = serde_json::from_str("{}").unwrap();
        assert_eq!(config, GatewayConfig::default());
        assert_eq!(config.problem(), None);
    }

    #[test]
    fn an_unknown_key_is_an_error_that_names_it() {
        let error = serde_json::from_str::<GatewayConfig>(r#"{"hold": {"max_second": 3}}"#).unwrap_err().to_string();
        assert!(error.contains("max_second") && error.contains("max_seconds"), "{error}");
    }

    #[test]
    fn a_duration_that_is_none_is_named() {
        let mut config = GatewayConfig::default();
        config.hold.max_seconds = f64::NAN;
        assert_eq!(config.problem().unwrap().0, "hold.max_seconds");
    }
}
