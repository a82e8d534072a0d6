//! The two doors of an agent's network, both on its own loopback address: one leads to the gateway and nowhere else, the
//! other is a proxy that refuses everything and notes who wanted to go where.
//!
//! The stage opened them inside and handed them out: a socket stays in the namespace where it was made, and whoever holds
//! it may serve it from outside. Nothing that could be reached runs inside.

use std::io;
use std::net::TcpListener as Listener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use agl_client::GatewayClient;
use agl_core::event::EventCreate;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};

use crate::isolation::{Enclosure, Report};

/// The event that a refused attempt becomes.
pub const REFUSED: &str = "network_refused";
/// So many of them are told one by one; of the others only how many there were.
const TOLD: usize = 100;
/// Connections at a time, each of which takes two descriptors; more wait at the door.
const CONNECTIONS: usize = 256;
/// How long the gateway has to take a connection.
const CONNECT: Duration = Duration::from_secs(30);
/// How long a request to the proxy may take to arrive.
const REQUEST: Duration = Duration::from_secs(5);
/// A request line that is longer is no request.
const LONGEST: usize = 8192;
/// A host that is longer is cut off: it comes from the agent.
const LONGEST_HOST: usize = 255;
/// How long the gateway has to take the events once the agent has ended.
const LAST_EVENTS: Duration = Duration::from_secs(3);

const ANSWER: &str = "HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: 80\r\n\r\n\
                      agl: the network is closed to this agent; only its model's base URL can be used\n";

/// Open as long as it is held.
pub struct Doors {
    serving: JoinSet<()>,
    refusals: Refusals,
    reporter: JoinHandle<()>,
}

impl Doors {
    /// Serves the listeners.
    ///
    /// # Errors
    /// What the system says.
    pub fn open([gateway, proxy]: [Listener; 2], enclosure: &Enclosure) -> io::Result<Self> {
        let ours = |listener: Listener| listener.set_nonblocking(true).and_then(|()| TcpListener::from_std(listener));
        let (gateway, proxy) = (ours(gateway)?, ours(proxy)?);
        let (sender, receiver) = mpsc::channel(TOLD);
        let refusals = Refusals { told: sender, further: Arc::default() };
        let reporter = tokio::spawn(report(enclosure.report.clone(), receiver, refusals.further.clone()));
        let mut serving = JoinSet::new();
        let address = enclosure.gateway.clone();
        serving.spawn(serve(gateway, move |inside| relay(inside, address.clone())));
        let noted = refusals.clone();
        serving.spawn(serve(proxy, move |inside| refuse(inside, noted.clone())));
        Ok(Self { serving, refusals, reporter })
    }

    /// Closes them, and waits a little until the gateway has heard what was refused.
    pub async fn close(mut self) {
        self.serving.shutdown().await;
        drop(self.refusals);
        let stop = self.reporter.abort_handle();
        if tokio::time::timeout(LAST_EVENTS, self.reporter).await.is_err() {
            stop.abort();
        }
    }
}

async fn serve<F: Future<Output = ()> + Send + 'static>(door: TcpListener, welcome: impl Fn(TcpStream) -> F) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    // They end with the door.
    let mut connections = JoinSet::new();
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        match door.accept().await {
            Ok((inside, _)) => {
                let welcomed = welcome(inside);
                connections.spawn(async move {
                    welcomed.await;
                    drop(place);
                });
            }
            // Out of descriptors, perhaps: some will come back.
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
        while connections.try_join_next().is_some() {}
    }
}

/// A gateway that cannot be reached is to the agent a connection that closes.
async fn relay(mut inside: TcpStream, gateway: String) {
    let Ok(Ok(mut outside)) = tokio::time::timeout(CONNECT, TcpStream::connect(gateway)).await else { return };
    let _ = inside.set_nodelay(true);
    let _ = outside.set_nodelay(true);
    let _ = copy_bidirectional(&mut inside, &mut outside).await;
}

#[derive(Clone)]
struct Refusals {
    told: mpsc::Sender<Refusal>,
    further: Arc<AtomicU64>,
}

/// Who wanted to go where.
#[derive(Debug, PartialEq, Eq)]
struct Refusal {
    method: String,
    host: String,
    port: Option<u16>,
}

async fn refuse(mut inside: TcpStream, refusals: Refusals) {
    let mut head = Vec::new();
    let read = async {
        let mut buffer = [0; 1024];
        while head.len() < LONGEST && !ends(&head) {
            match inside.read(&mut buffer).await {
                Ok(0) | Err(_) => break,
                Ok(read) => head.extend_from_slice(&buffer[..read]),
            }
        }
    };
    let _ = tokio::time::timeout(REQUEST, read).await;
    if let Some(refusal) = Refusal::of(&head) {
        refusals.note(refusal);
        let _ = inside.write_all(ANSWER.as_bytes()).await;
        let _ = inside.shutdown().await;
    }
}

fn ends(head: &[u8]) -> bool {
    head.windows(4).any(|bytes| bytes == b"\r\n\r\n")
}

impl Refusal {
    /// `CONNECT host:port HTTP/1.1` or `GET http://host:port/path HTTP/1.1`.
    fn of(head: &[u8]) -> Option<Self> {
        let line = head.split(|byte| *byte == b'\n').next()?;
        let line = String::from_utf8_lossy(line);
        let mut words = line.split_whitespace();
        let (method, target, version) = (words.next()?, words.next()?, words.next()?);
        if !version.starts_with("HTTP/") || method.len() > 20 {
            return None;
        }
        let (scheme, rest) = target.split_once("://").unwrap_or(("", target));
        let authority = rest.split('/').next().unwrap_or_default();
        let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => (host, port.parse().ok()),
            _ => (authority, None),
        };
        let usual = match scheme {
            "http" => Some(80),
            "https" => Some(443),
            _ => None,
        };
        let host = host.chars().take(LONGEST_HOST).collect();
        Some(Self { method: method.to_owned(), host, port: port.or(usual) })
    }
}

impl Refusals {
    fn note(&self, refusal: Refusal) {
        // The channel is as long as the list: it is full only where the gateway takes nothing.
        if self.told.try_send(refusal).is_err() {
            self.further.fetch_add(1, Ordering::Relaxed);
        }
    }
}

async fn report(to: Report, mut refusals: mpsc::Receiver<Refusal>, further: Arc<AtomicU64>) {
    // Most agents never try: for them no client is made.
    let mut client = None;
    let mut told = 0;
    while let Some(refusal) = refusals.recv().await {
        if told == TOLD {
            further.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        told += 1;
        let Some(client) = client.get_or_insert_with(|| connect(&to)) else { continue };
        let data = json!({"method": refusal.method, "host": refusal.host, "port": refusal.port});
        post(client, &to, data).await;
    }
    let further = further.load(Ordering::Relaxed);
    if further > 0
        && let Some(client) = client.get_or_insert_with(|| connect(&to))
    {
        post(client, &to, json!({"further": further})).await;
    }
}

fn connect(to: &Report) -> Option<GatewayClient> {
    GatewayClient::new(&to.gateway_url, &to.key).ok().map(|client| client.with_patience(LAST_EVENTS))
}

async fn post(client: &GatewayClient, to: &Report, data: Value) {
    let data = match data {
        Value::Object(data) => data,
        _ => Map::new(),
    };
    let event = EventCreate { event_type: REFUSED.to_owned(), data };
    if let Err(error) = client.post_event(&to.rollout_id, &to.attempt_id, &event).await {
        use std::io::Write;
        let _ = writeln!(io::stderr(), "agl supervisor: a refused connection could not be reported: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_who_wanted_to_go_where() {
        for (head, expected) in [
            ("CONNECT pypi.org:443 HTTP/1.1\r\n\r\n", Some(("CONNECT", "pypi.org", Some(443)))),
            ("GET http://user:secret@example.com/a:b HTTP/1.1\r\n", Some(("GET", "example.com", Some(80)))),
            ("POST https://example.com:8443 HTTP/1.0\r\n", Some(("POST", "example.com", Some(8443)))),
            ("CONNECT [2001:db8::1]:443 HTTP/1.1\r\n", Some(("CONNECT", "[2001:db8::1]", Some(443)))),
            ("\u{16}\u{3}\u{1} nonsense", None),
            ("", None),
        ] {
            let found = Refusal::of(head.as_bytes());
            let found = found.as_ref().map(|found| (found.method.as_str(), found.host.as_str(), found.port));
            assert_eq!(found, expected, "{head:?}");
        }
    }

    #[test]
    fn the_answer_is_as_long_as_it_says() {
        let (head, body) = ANSWER.split_once("\r\n\r\n").unwrap();
        assert!(head.ends_with(&format!("Content-Length: {}", body.len())), "{}", body.len());
    }
}
