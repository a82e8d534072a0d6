//! Connections: taken, served within limits that slow and greedy clients meet first, and brought to an end.

use std::io::ErrorKind;
use std::pin::{Pin, pin};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_io_timeout::TimeoutStream;

use crate::config::{LimitsConfig, duration};

/// A request whose header is larger is answered 431.
const MAX_HEADER_BYTES: usize = 256 * 1024;
/// Without a free file descriptor there is no connection to be had until another ends.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);

/// Serves until `stop` resolves; then takes no more connections and returns once those that are open have had their answers.
///
/// # Errors
/// Where the listener is broken.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    limits: LimitsConfig,
    stop: impl Future<Output = ()>,
) -> std::io::Result<()> {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(duration(limits.header_timeout_seconds))
        .max_buf_size(MAX_HEADER_BYTES);
    let stopping = watch::Sender::new(());
    let mut stop = pin!(stop);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) if is_of_one_connection(error.kind()) => continue,
            Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::NotConnected) => {
                return Err(error);
            }
            Err(error) => {
                tracing::error!(%error, "a connection cannot be taken; are there too many open files?");
                tokio::time::sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        let service = TowerToHyperService::new(router.clone());
        let connection = http.serve_connection(guarded(stream, limits), service);
        tokio::spawn(serve_one(connection, stopping.subscribe()));
    }
    drop(listener);
    stopping.send_replace(());
    // Every connection that is open holds a receiver.
    stopping.closed().await;
    Ok(())
}

async fn serve_one(connection: http1::Connection<Io, TowerToHyperService<Router>>, mut stopping: watch::Receiver<()>) {
    let mut connection = pin!(connection);
    let served = tokio::select! {
        served = connection.as_mut() => served,
        _ = stopping.changed() => {
            // An answer under way is still given; a connection that is idle ends.
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        // A client that went away, or was too slow: its own business.
        tracing::debug!(%error, "a connection ended early");
    }
}

type Io = TokioIo<Pin<Box<TimeoutStream<TcpStream>>>>;

fn guarded(stream: TcpStream, limits: LimitsConfig) -> Io {
    // Small answers and single events must not wait for an acknowledgement of the bytes before them.
    drop(stream.set_nodelay(true));
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(duration(limits.write_timeout_seconds)));
    TokioIo::new(Box::pin(stream))
}

fn is_of_one_connection(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionRefused | ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset)
}
