//! A forward proxy that the harness is told to use for everything but this machine: what goes past the gateway goes through it,
//! and is remembered by host. It refuses nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// The longest head of a request that is read.
const LONGEST_HEAD: usize = 64 * 1024;

/// Variables that HTTP clients read their proxy from.
const PROXY_VARIABLES: [&str; 6] = ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"];

/// Hosts of model APIs: a harness that calls one of them calls a model past the gateway.
const MODEL_HOSTS: [&str; 16] = [
    "api.openai.com",
    "openai.azure.com",
    "chatgpt.com",
    "api.anthropic.com",
    "generativelanguage.googleapis.com",
    "aiplatform.googleapis.com",
    "openrouter.ai",
    "api.mistral.ai",
    "api.deepseek.com",
    "api.groq.com",
    "api.together.xyz",
    "api.fireworks.ai",
    "api.x.ai",
    "api.cohere.com",
    "dashscope.aliyuncs.com",
    "dashscope-intl.aliyuncs.com",
];

/// Runs until it is dropped.
pub struct Outside {
    address: String,
    server: JoinHandle<()>,
    hosts: Hosts,
}

type Hosts = Arc<Mutex<BTreeMap<String, usize>>>;

impl Outside {
    /// Starts on a free port. `None` where this machine has a proxy already: it may be the only way out.
    pub async fn start() -> anyhow::Result<Option<Self>> {
        if PROXY_VARIABLES.iter().any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty())) {
            return Ok(None);
        }
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = format!("http://{}", listener.local_addr()?);
        let hosts = Hosts::default();
        let server = tokio::spawn({
            let hosts = Arc::clone(&hosts);
            async move {
                while let Ok((connection, _)) = listener.accept().await {
                    let hosts = Arc::clone(&hosts);
                    // A connection that breaks is the harness's to notice.
                    tokio::spawn(async move { drop(pass_on(connection, &hosts).await) });
                }
            }
        });
        Ok(Some(Self { address, server, hosts }))
    }

    /// What the harness's environment gets.
    pub fn variables(&self) -> Vec<(String, String)> {
        let mut variables: Vec<_> =
            PROXY_VARIABLES.iter().map(|name| ((*name).to_owned(), self.address.clone())).collect();
        for name in ["NO_PROXY", "no_proxy"] {
            variables.push((name.to_owned(), "127.0.0.1,localhost,::1".to_owned()));
        }
        // Node's own fetch reads the variables only when it is told to.
        variables.push(("NODE_USE_ENV_PROXY".to_owned(), "1".to_owned()));
        variables
    }

    /// How often each host was called, by `host:port`.
    pub fn hosts(&self) -> BTreeMap<String, usize> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// True for a host that serves models to the world.
pub fn serves_models(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    name.starts_with("bedrock-runtime.")
        || MODEL_HOSTS.iter().any(|known| name == *known || name.ends_with(&format!(".{known}")))
}

/// True for this machine: some clients ask the proxy for it although they are told not to.
pub fn is_here(host: &str) -> bool {
    ["127.0.0.1:", "localhost:", "[::1]:"].iter().any(|here| host.starts_with(here))
}

async fn pass_on(mut harness: TcpStream, hosts: &Hosts) -> std::io::Result<()> {
    let Some((head, rest)) = read_head(&mut harness).await? else { return Ok(()) };
    let Some(asked) = Asked::read(&head) else {
        return harness.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").await;
    };
    *hosts.lock().unwrap_or_else(PoisonError::into_inner).entry(asked.host.clone()).or_default() += 1;
    let mut server = match TcpStream::connect(&asked.host).await {
        Ok(server) => server,
        Err(error) => {
            let text = format!("agl doctor cannot reach {}: {error}\n", asked.host);
            let head = format!("HTTP/1.1 502 Bad Gateway\r\nContent-Length: {}\r\n\r\n{text}", text.len());
            return harness.write_all(head.as_bytes()).await;
        }
    };
    match asked.head {
        Some(head) => server.write_all(head.as_bytes()).await?,
        None => harness.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?,
    }
    server.write_all(&rest).await?;
    copy_bidirectional(&mut harness, &mut server).await.map(drop)
}

/// The head of a request, and what came behind it already.
async fn read_head(harness: &mut TcpStream) -> std::io::Result<Option<(String, Vec<u8>)>> {
    const END: &[u8] = b"\r\n\r\n";
    let mut read = Vec::new();
    while read.len() < LONGEST_HEAD {
        if harness.read_buf(&mut read).await? == 0 {
            return Ok(None);
        }
        if let Some(end) = read.windows(END.len()).position(|window| window == END) {
            let rest = read.split_off(end + END.len());
            return Ok(Some((String::from_utf8_lossy(&read).into_owned(), rest)));
        }
    }
    Ok(None)
}

/// Where a request to a proxy is to go.
struct Asked {
    host: String,
    /// The head that the server gets; `None` for a tunnel.
    head: Option<String>,
}

impl Asked {
    fn read(head: &str) -> Option<Self> {
        let (first, fields) = head.split_once("\r\n")?;
        let mut words = first.split(' ');
        let (method, target, version) = (words.next()?, words.next()?, words.next()?);
        if method == "CONNECT" {
            return Some(Self { host: target.to_owned(), head: None });
        }
        let (host, path) = target.strip_prefix("http://")?.split_at_checked(target[7..].find('/')?)?;
        let kept = fields.split("\r\n").filter(|field| {
            let name = field.split(':').next().unwrap_or_default().to_lowercase();
            // A connection carries one request, so that the next one is seen too.
            !field.is_empty() && !["connection", "proxy-connection", "keep-alive"].contains(&name.as_str())
        });
        let fields: String = kept.map(|field| format!("{field}\r\n")).collect();
        let host = if host.contains(':') { host.to_owned() } else { format!("{host}:80") };
        Some(Self { host, head: Some(format!("{method} {path} {version}\r\n{fields}Connection: close\r\n\r\n")) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_where_it_goes() {
        let tunnel = Asked::read("CONNECT api.openai.com:443 HTTP/1.1\r\nHost: api.openai.com:443\r\n\r\n").unwrap();
        assert_eq!((tunnel.host.as_str(), tunnel.head), ("api.openai.com:443", None));
        let plain = Asked::read("GET http://example.org/a?b HTTP/1.1\r\nProxy-Connection: keep-alive\r\nX: 1\r\n\r\n");
        let plain = plain.unwrap();
        assert_eq!(plain.host, "example.org:80");
        assert_eq!(plain.head.unwrap(), "GET /a?b HTTP/1.1\r\nX: 1\r\nConnection: close\r\n\r\n");
        assert!(Asked::read("nonsense\r\n\r\n").is_none());
    }

    #[test]
    fn model_apis_are_known_with_their_subdomains() {
        assert!(serves_models("api.openai.com:443"));
        assert!(serves_models("mine.openai.azure.com:443"));
        assert!(!serves_models("pypi.org:443"));
        assert!(!serves_models("notapi.openai.com.example.org:443"));
    }
}
