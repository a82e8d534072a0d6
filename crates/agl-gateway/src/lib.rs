//! The gateway: stores rollouts, models and events; proxies a harness's model calls and records their exact tokens; pauses
//! and resumes around weight updates.
//!
//! * [`Gateway`] — bound to an address, then served until asked to stop.
//! * [`config`] — every setting and its default.
//! * `api` — the management interface: rollouts, attempts, events, models, watch, pause.
//! * `dialect` — what harnesses speak, translated to chat completions and back.
//! * `proxy` — a model call's way to an inference server and back.
//! * `gate` — holds calls during a pause.
//! * `peers` — the other gateways on the same store: one pause for all.
//! * `keys` — who may do what.
//! * `metrics` — what Prometheus is told.
//! * `server` — connections, and limits on slow clients.
//! * `quota` — how many events a rollout may have.
//! * [`traces`] — the spans of requests, for whoever exports them.
//! * `watchdog` — names what is stuck.
//! * `retention` — which rollouts that have ended are deleted.
//! * [`error`] — why a gateway does not start, and the form of its error answers.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpListener;

mod api;
mod app;
mod clock;
pub mod config;
mod dialect;
pub mod error;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzz;
mod gate;
mod keys;
mod metrics;
mod peers;
mod proxy;
mod quota;
mod retention;
mod server;
pub mod traces;
mod watchdog;

pub use config::GatewayConfig;
pub use error::GatewayError;

use app::{ALL_CALLS, App};
use config::duration;

/// A gateway with its store open and its port taken; callers may connect already and are answered once it is served.
pub struct Gateway {
    app: Arc<App>,
    listener: TcpListener,
    addr: SocketAddr,
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway").field("addr", &self.addr).finish_non_exhaustive()
    }
}

impl Gateway {
    /// Checks the settings, takes the port and opens the store.
    ///
    /// # Errors
    /// [`GatewayError`]: an unusable setting, a port in use, no key on a reachable address, or a store that cannot be opened.
    pub async fn bind(config: GatewayConfig) -> Result<Self, GatewayError> {
        if let Some((name, problem)) = config.problem() {
            return Err(GatewayError::Setting { name, problem });
        }
        let address = config.listen.clone();
        let listener = TcpListener::bind(&address).await.map_err(|error| match error.kind() {
            std::io::ErrorKind::AddrInUse => GatewayError::AddressInUse { address: address.clone() },
            _ => GatewayError::CannotListen { address: address.clone(), reason: error.to_string() },
        })?;
        let cannot_listen =
            |error: std::io::Error| GatewayError::CannotListen { address: address.clone(), reason: error.to_string() };
        let addr = listener.local_addr().map_err(cannot_listen)?;
        if config.key.is_empty() && !config.allow_unauthenticated && GatewayConfig::is_reachable(addr) {
            return Err(GatewayError::NoKey { address });
        }
        if config.key.is_empty() {
            tracing::warn!(%addr, "no key is set: whoever reaches this address may do everything");
        }
        let app = App::open(config).await?;
        tracing::info!(%addr, store = app.config.shown_store(), "the gateway is ready");
        Ok(Self { app, listener, addr })
    }

    /// The address it listens on, with the real port.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The URL that agents reach it under: `agent_url`, or its own address.
    #[must_use]
    pub fn agent_url(&self) -> String {
        let configured = self.app.config.agent_url.clone();
        configured.map_or_else(|| format!("http://{}", self.addr), |url| url.trim_end_matches('/').to_owned())
    }

    /// Serves until `shutdown` resolves; then takes no more connections, lets calls in flight finish for
    /// `shutdown_grace_seconds`, and closes the store. Held calls are told at once to come back later.
    ///
    /// # Errors
    /// [`GatewayError::Serve`] if the listener fails.
    pub async fn serve(self, shutdown: impl Future<Output = ()> + Send + 'static) -> Result<(), GatewayError> {
        let Self { app, listener, .. } = self;
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let signal = {
            let app = Arc::clone(&app);
            async move {
                shutdown.await;
                app.stopping.send_replace(true);
                app.gate.close();
                app.places.close();
                let _nobody_waits = stop.send(());
            }
        };
        let server = server::serve(listener, api::router(Arc::clone(&app)), app.config.limits, signal);
        let deadline = async {
            // Fails when the server ended by itself: then it is the other branch that counts.
            if stopped.await.is_ok() {
                tokio::time::sleep(duration(app.config.shutdown_grace_seconds)).await;
            } else {
                std::future::pending::<()>().await;
            }
        };
        let finish = async {
            let served = server.await;
            // Calls whose harness has hung up run on without a connection.
            let _all = app.calls.acquire_many(ALL_CALLS).await;
            served
        };
        let served = tokio::select! {
            served = finish => served,
            () = deadline => {
                tracing::warn!("calls in flight are dropped: they did not finish in time");
                Ok(())
            }
        };
        app.recorder.flush().await;
        app.store.close().await;
        served.map_err(GatewayError::Serve)
    }
}
