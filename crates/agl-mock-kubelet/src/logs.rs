//! What the API server asks a node for: the logs of its containers, over TLS with a certificate of the node's own.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

/// Serves logs out of `folder` and gives the port.
///
/// # Errors
/// Where no port or certificate can be had.
pub async fn serve(folder: PathBuf, tasks: &mut JoinSet<()>) -> anyhow::Result<u16> {
    let own = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()])?;
    let key = PrivateKeyDer::try_from(own.signing_key.serialize_der()).map_err(anyhow::Error::msg)?;
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(vec![own.cert.der().clone()], key)?;
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.context("no port for logs")?;
    let port = listener.local_addr()?.port();
    let router = Router::new().route("/containerLogs/{namespace}/{pod}/{container}", get(log)).with_state(folder);
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, router) = (acceptor.clone(), router.clone());
            connections.spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let service = TowerToHyperService::new(router);
                let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
            });
            while connections.try_join_next().is_some() {}
        }
    });
    Ok(port)
}

async fn log(
    State(folder): State<PathBuf>,
    Path((_, pod, container)): Path<(String, String, String)>,
) -> Result<Vec<u8>, StatusCode> {
    let name = format!("{pod}.{container}.log");
    if name.contains('/') {
        return Err(StatusCode::BAD_REQUEST);
    }
    std::fs::read(folder.join(name)).map_err(|_| StatusCode::NOT_FOUND)
}
