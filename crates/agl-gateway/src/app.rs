//! What every handler shares.

use std::sync::Arc;

use agl_store::{SharedStore, Standing, StoreError};
use axum::http::{HeaderMap, Uri};
use tokio::sync::{Semaphore, watch};

use crate::config::{GatewayConfig, duration};
use crate::error::{ApiError, GatewayError};
use crate::gate::Gate;
use crate::keys::{Access, Keys, Scope, presented};
use crate::metrics::Metrics;
use crate::peers::Peers;
use crate::proxy::flights::Flights;
use crate::proxy::places::Places;
use crate::proxy::recorder::Recorder;
use crate::proxy::servers::Servers;
use crate::proxy::upstream::{Queue, Upstream};
use crate::proxy::verbatim::Verbatim;
use crate::quota::Quota;
use crate::retention;
use crate::watchdog::{self, Watchdog};

/// As many calls may be under way as a semaphore can count to. Whoever holds all permits knows that none is.
pub(crate) const ALL_CALLS: u32 = 1 << 20;

/// The parts of a running gateway.
pub(crate) struct App {
    pub(crate) config: GatewayConfig,
    /// See [`GatewayConfig::shown_store`].
    pub(crate) shown_store: String,
    pub(crate) store: SharedStore,
    pub(crate) keys: Keys,
    pub(crate) gate: Arc<Gate>,
    /// One pause or resume at a time: store and gate change together.
    pub(crate) pausing: tokio::sync::Mutex<()>,
    pub(crate) servers: Arc<Servers>,
    pub(crate) places: Arc<Places>,
    pub(crate) quota: Quota,
    pub(crate) watchdog: Arc<Watchdog>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) upstream: Upstream,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) verbatim: Verbatim,
    pub(crate) metrics: Metrics,
    pub(crate) flights: Arc<Flights>,
    /// A permit per call under way, also of harnesses that have hung up.
    pub(crate) calls: Arc<Semaphore>,
    /// True once the gateway is asked to stop: streams end then.
    pub(crate) stopping: watch::Sender<bool>,
}

impl App {
    pub(crate) async fn open(config: GatewayConfig) -> Result<Arc<Self>, GatewayError> {
        let store = agl_store::open(&config.store).await?;
        let secret = store.secret("attempt keys", rand::random()).await?;
        let keys = Keys::new(config.key.clone(), secret);
        let gate = Gate::new(store.pause().await?, duration(config.hold.max_seconds), config.hold.max_requests);
        let servers = Arc::new(Servers::load(Arc::clone(&store)).await?);
        let places = Places::new(&config);
        let patience = duration(config.watchdog_seconds);
        let watchdog = Watchdog::new(patience);
        let queue = Queue { gate: Arc::clone(&gate), places: Arc::clone(&places), watchdog: Arc::clone(&watchdog) };
        let peers = Peers::join(Arc::clone(&store), Arc::clone(&gate), Arc::clone(&servers)).await?;
        let upstream = Upstream::new(&config, queue, Arc::clone(&servers))?;
        let recorder = Recorder::start(Arc::clone(&store));
        let quota = Quota::new(config.limits.max_events_per_rollout, Arc::clone(&store));
        let app = Arc::new(Self {
            shown_store: config.shown_store(),
            config,
            store,
            keys,
            gate,
            pausing: tokio::sync::Mutex::new(()),
            servers,
            places,
            quota,
            watchdog,
            peers,
            upstream,
            recorder,
            verbatim: Verbatim::default(),
            metrics: Metrics::new()?,
            flights: Arc::default(),
            calls: Arc::new(Semaphore::new(ALL_CALLS as usize)),
            stopping: watch::Sender::new(false),
        });
        tokio::spawn(tidy_metrics(Arc::downgrade(&app)));
        tokio::spawn(watchdog::keep_watch(Arc::downgrade(&app), patience));
        tokio::spawn(watchdog::keep_asking(Arc::downgrade(&app), patience));
        tokio::spawn(retention::keep_within_limits(Arc::downgrade(&app)));
        Ok(app)
    }

    /// Deletes a rollout and what is remembered of it. One that does not exist is no error.
    pub(crate) async fn delete_rollout(&self, rollout_id: &str) -> Result<(), StoreError> {
        self.store.delete_rollout(rollout_id).await?;
        self.recorder.forget(rollout_id);
        self.quota.forget(rollout_id);
        Ok(())
    }

    /// What the request may do on the URLs of this attempt. The signature is checked first, then whether the key has ended.
    pub(crate) async fn check_attempt(
        &self,
        headers: &HeaderMap,
        uri: &Uri,
        rollout_id: &str,
        attempt_id: &str,
    ) -> Result<Access, ApiError> {
        let access = self.keys.check(&presented(headers, uri), Some((rollout_id, attempt_id)))?;
        let Access::Attempt(scope) = access else { return Ok(access) };
        let Some(Standing { rollout, attempt }) = self.store.standing(rollout_id, attempt_id).await? else {
            return Err(ApiError::unauthorized());
        };
        let attempt = attempt.ok_or_else(ApiError::unauthorized)?;
        if let Some(ended) = scope.ended(&attempt) {
            return Err(ApiError::forbidden(ended));
        }
        if scope == Scope::Agent && rollout.status.state.is_terminal() {
            return Err(ApiError::forbidden(format!("Rollout {rollout_id} has ended, and its agent's key with it")));
        }
        Ok(access)
    }
}

/// Samples must not pile up where nobody asks for the metrics.
async fn tidy_metrics(app: std::sync::Weak<App>) {
    const EVERY: std::time::Duration = std::time::Duration::from_secs(5);
    loop {
        tokio::time::sleep(EVERY).await;
        let Some(app) = app.upgrade() else { return };
        app.metrics.tidy();
    }
}
