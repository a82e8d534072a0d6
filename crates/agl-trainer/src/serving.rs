//! The policy's model server: where it listens, under which version the gateway knows it, and the pause around updates.

use std::time::Duration;

use agl_client::{GatewayClient, wire::Model};
use agl_engine::Engine;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::TrainerError;
use crate::config::ModelConfig;

/// Calls at the server are waited for this long before an update is given up.
const DRAIN_LIMIT: Duration = Duration::from_secs(900);
/// A pause ends by itself after this if the trainer dies.
const PAUSE_LEASE: Duration = Duration::from_secs(3600);

/// Serves the engine over HTTP and keeps the gateway informed. Dropping it stops the server.
#[derive(Debug)]
pub struct Serving {
    client: GatewayClient,
    model: Model,
    owner: String,
    stop: Option<oneshot::Sender<()>>,
    server: JoinHandle<()>,
}

impl Serving {
    /// Starts the server. The gateway hears of it with the first [`Serving::publish`]; servers of an earlier start of this
    /// policy are removed, and a pause that this owner left behind is ended.
    ///
    /// # Errors
    /// [`TrainerError::Listen`], or where the gateway stays away.
    pub async fn start(
        engine: Engine,
        config: &ModelConfig,
        client: GatewayClient,
        owner: &str,
    ) -> Result<Self, TrainerError> {
        let refused = |source| TrainerError::Listen { address: config.listen.clone(), source };
        let listener = TcpListener::bind(&config.listen).await.map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let (stop, stopped) = oneshot::channel::<()>();
        let server = tokio::spawn(async move {
            let stopped = async {
                // A dropped sender stops the server as a message does.
                let _ = stopped.await;
            };
            if let Err(error) = agl_engine::server::serve(engine, listener, stopped).await {
                tracing::error!(%error, "the policy's model server ended");
            }
        });
        client.delete_models().await?;
        client.resume(Some(owner)).await?;
        let endpoint = config.advertise_url.clone().unwrap_or_else(|| format!("http://{address}/v1"));
        let model = Model {
            model: config.name.clone(),
            endpoint,
            version: 0,
            kind: Some("agl".into()),
            trainable: Some(true),
            upstream_model: None,
            api_key_env: None,
            stream: None,
        };
        Ok(Self { client, model, owner: owner.to_owned(), stop: Some(stop), server })
    }

    /// Tells the gateway which policy version is served from now on.
    ///
    /// # Errors
    /// Where the gateway stays away.
    pub async fn publish(&mut self, version: u64) -> Result<(), TrainerError> {
        self.model.version = version;
        self.client.register_models(std::slice::from_ref(&self.model)).await?;
        Ok(())
    }

    /// Holds new calls at the gateway and waits until none is at the server.
    ///
    /// # Errors
    /// [`TrainerError::Drain`] where calls do not end.
    pub async fn pause(&self) -> Result<(), TrainerError> {
        let mut state = self.client.pause(&self.owner, PAUSE_LEASE, "weight update").await?;
        let started = Instant::now();
        while state.inflight > 0 {
            if started.elapsed() > DRAIN_LIMIT {
                self.resume().await?;
                return Err(TrainerError::Drain { inflight: state.inflight, waited: started.elapsed().as_secs() });
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            state = self.client.proxy_state().await?;
        }
        Ok(())
    }

    /// Lets held calls go on.
    ///
    /// # Errors
    /// Where the gateway stays away.
    pub async fn resume(&self) -> Result<(), TrainerError> {
        self.client.resume(Some(&self.owner)).await?;
        Ok(())
    }

    /// Takes the server out of the gateway, lifts a pause, and stops the server.
    ///
    /// # Errors
    /// Where the gateway stays away longer than `client`'s patience.
    pub async fn stop(mut self, client: &GatewayClient) -> Result<(), TrainerError> {
        let removed = client.delete_model(&self.model.model, &self.model.endpoint).await;
        let resumed = client.resume(Some(&self.owner)).await;
        if let Some(stop) = self.stop.take() {
            // Nobody to tell where the server has ended already.
            let _ = stop.send(());
        }
        removed?;
        resumed?;
        Ok(())
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if self.stop.is_some() {
            self.server.abort();
        }
    }
}
