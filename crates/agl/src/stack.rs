//! Gateway and controller inside this process. They talk HTTP to each other and to the trainer all the same, so that
//! splitting them onto machines changes an address and nothing else.

use agl_client::GatewayClient;
use agl_controller::{Controller, ControllerConfig};
use agl_gateway::{Gateway, GatewayConfig};
use anyhow::Context;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A running gateway and a running controller.
pub struct Stack {
    /// Talks to the gateway, with the server key.
    pub client: GatewayClient,
    /// The gateway's own address.
    pub gateway_url: String,
    gateway: Part,
    controller: Part,
}

struct Part {
    stop: oneshot::Sender<()>,
    /// `None` once it has ended and said how.
    task: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Part {
    async fn end(self) -> anyhow::Result<()> {
        // Nobody to tell where it has ended already.
        let _ = self.stop.send(());
        match self.task {
            Some(task) => task.await?,
            None => Ok(()),
        }
    }

    async fn ended(&mut self) -> anyhow::Result<()> {
        let Some(task) = &mut self.task else { return std::future::pending().await };
        let result = task.await;
        self.task = None;
        result?
    }
}

impl Stack {
    /// Starts the gateway, then the controller.
    pub async fn start(gateway: GatewayConfig, controller: ControllerConfig) -> anyhow::Result<Self> {
        let key = gateway.key.clone();
        let gateway = Gateway::bind(gateway).await?;
        let gateway_url = format!("http://{}", gateway.addr());
        let client = GatewayClient::new(&gateway_url, &key)?;
        let (stop, stopped) = oneshot::channel::<()>();
        let task =
            tokio::spawn(
                async move { gateway.serve(async { drop(stopped.await) }).await.context("the gateway ended") },
            );
        let gateway = Part { stop, task: Some(task) };
        let (stop, stopped) = oneshot::channel::<()>();
        let runner = Controller::new(controller, client.clone());
        let task =
            tokio::spawn(
                async move { runner.run(async { drop(stopped.await) }).await.context("the controller ended") },
            );
        Ok(Self { client, gateway_url, gateway, controller: Part { stop, task: Some(task) } })
    }

    /// Stops the controller, which ends its agents, then the gateway, which has written everything it acknowledged.
    pub async fn stop(self) -> anyhow::Result<()> {
        let controller = self.controller.end().await;
        let gateway = self.gateway.end().await;
        controller.and(gateway)
    }

    /// Ends when either part has ended by itself, with its error.
    pub async fn failed(&mut self) -> anyhow::Error {
        let ended = tokio::select! {
            ended = self.gateway.ended() => ended,
            ended = self.controller.ended() => ended,
        };
        ended.err().unwrap_or_else(|| anyhow::anyhow!("the gateway or the controller ended before the run did"))
    }
}

/// Ends at Ctrl-C or SIGTERM.
pub async fn interrupt() {
    let term = async {
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(mut signal) => {
                signal.recv().await;
            }
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        result = tokio::signal::ctrl_c() => drop(result),
        () = term => {}
    }
}
