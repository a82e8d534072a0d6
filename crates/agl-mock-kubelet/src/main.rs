//! `agl-mock-kubelet`: plays a node for a real API server that has none.

use std::path::PathBuf;

use agl_mock_kubelet::Kubelet;
use anyhow::Context;
use clap::Parser;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

/// Runs the pods of a namespace as processes of this host.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// How to reach the API server; with the rights of an administrator.
    #[arg(long)]
    kubeconfig: PathBuf,
    /// Whose pods.
    #[arg(long)]
    namespace: String,
    /// For logs, and the ledger of when which process ran.
    #[arg(long)]
    folder: PathBuf,
    /// The node's name.
    #[arg(long, default_value = "mock-node")]
    name: String,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let kubeconfig = Kubeconfig::read_from(&options.kubeconfig).context("cannot read the kubeconfig")?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let kubelet = Kubelet::start(Client::try_from(config)?, &options.name, &options.namespace, &options.folder).await?;
    tokio::select! {
        () = kubelet.run() => Ok(()),
        stopped = tokio::signal::ctrl_c() => Ok(stopped?),
    }
}
