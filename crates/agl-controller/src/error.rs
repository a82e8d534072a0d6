//! What ends a controller.

use std::path::PathBuf;

use agl_client::ClientError;

/// A controller that cannot work. What goes wrong with a single rollout is that rollout's failure, not one of these.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    /// The work directory cannot be used.
    #[error("the controller's work_dir cannot be used: {path}: {source}; make it writable or set another work_dir")]
    WorkDir {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Another controller uses the work directory.
    #[error("another controller is using {path}; stop it, or give this one another work_dir")]
    WorkDirInUse {
        /// The folder.
        path: PathBuf,
    },
    /// No cluster to run on.
    #[error(
        "the controller finds no Kubernetes cluster: {problem}; set KUBECONFIG, or run it in a pod with a service account"
    )]
    Cluster {
        /// Why.
        problem: String,
    },
    /// No engine to run containers on.
    #[error(
        "the controller finds no Docker or Podman: {problem}; start one, or set controller.container.host or DOCKER_HOST \
         to its socket"
    )]
    Engine {
        /// Why.
        problem: String,
    },
    /// A value of the configuration makes no sense.
    #[error("controller configuration: {key} = {value} is not usable: {reason}")]
    Config {
        /// Which key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        reason: &'static str,
    },
    /// The gateway refuses us.
    #[error("the controller cannot watch the gateway: {0}")]
    Gateway(#[from] ClientError),
}
