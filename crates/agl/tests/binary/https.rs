//! Model servers behind TLS: trusted are the certificates of the system, or those of the file that `SSL_CERT_FILE` names.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use agl_mock_llm::{MockLlm, Script};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

use crate::support::{Running, agl, eventually, free_port, get, http};

const LIMIT: Duration = Duration::from_secs(60);
const KEY: &str = "server-key";

/// A gateway in front of a model server that has a certificate of its own.
struct Stage {
    url: String,
    endpoint: String,
    gateway: Running,
    model: MockLlm,
    _runtime: tokio::runtime::Runtime,
    _folder: tempfile::TempDir,
}

impl Stage {
    /// `trusted`: the gateway is told of the certificate.
    fn start(trusted: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let (model, front, certificate) = runtime.block_on(async {
            let model = MockLlm::start(Script::texts(["four"])).await.unwrap();
            let (front, certificate) = tls_front(model.address()).await;
            (model, front, certificate)
        });
        let file: PathBuf = folder.path().join("authority.pem");
        std::fs::write(&file, certificate).unwrap();
        let url = format!("http://127.0.0.1:{}", free_port());
        let mut gateway = agl();
        gateway.args(["serve", "--key", KEY, "--store", "memory", "--listen", url.trim_start_matches("http://")]);
        gateway.env_remove("SSL_CERT_DIR").env_remove("SSL_CERT_FILE");
        if trusted {
            gateway.env("SSL_CERT_FILE", file);
        }
        let gateway = Running::start(&mut gateway, "serve", folder.path());
        eventually("the gateway is up", LIMIT, || get(&format!("{url}/healthz")).is_some());
        let endpoint = format!("https://localhost:{}/v1", front.port());
        let stage = Self { url, endpoint, gateway, model, _runtime: runtime, _folder: folder };
        stage.post("api/models", json!([{"model": "policy", "endpoint": stage.endpoint}]));
        stage.post("api/rollouts", json!([{"rollout_id": "r", "input": {}}]));
        stage
    }

    fn post(&self, path: &str, body: Value) -> (u16, Value) {
        http("POST", &format!("{}/{path}", self.url), KEY, Some(&body)).unwrap()
    }

    fn ask(&self) -> (u16, Value) {
        let body = json!({"messages": [{"role": "user", "content": "2+2?"}]});
        self.post("proxy/rollout/r/attempt/0/mode/train/openai/v1/chat/completions", body)
    }
}

/// Takes TLS off connections and passes them on. Gives its address, and its self-signed certificate in PEM.
async fn tls_front(behind: SocketAddr) -> (SocketAddr, String) {
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(own.signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(vec![own.cert.der().clone()], key);
    let acceptor = TlsAcceptor::from(Arc::new(config.unwrap()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                // Whoever does not trust the certificate hangs up.
                let Ok(mut outer) = acceptor.accept(stream).await else { return };
                let mut inner = TcpStream::connect(behind).await.unwrap();
                let _ended = tokio::io::copy_bidirectional(&mut outer, &mut inner).await;
            });
        }
    });
    (address, own.cert.pem())
}

#[test]
fn a_call_goes_to_a_server_whose_certificate_is_trusted() {
    let stage = Stage::start(true);
    let (status, answer) = stage.ask();
    assert_eq!(status, 200, "{answer}\n{}", stage.gateway.output());
    assert_eq!(answer["choices"][0]["message"]["content"], "four");
    let (_, recorded) = http("GET", &format!("{}/api/rollouts/r/sequences", stage.url), KEY, None).unwrap();
    assert_eq!(recorded["counts"]["live"], 1, "{recorded}");
}

#[test]
fn a_certificate_that_is_not_trusted_is_an_error_at_once_and_the_log_names_the_server() {
    let stage = Stage::start(false);
    let (status, answer) = stage.ask();
    assert_eq!(status, 502, "{answer}");
    assert_eq!(stage.model.received(), 0);
    let log = stage.gateway.output();
    for words in [&stage.endpoint, "invalid peer certificate", "SSL_CERT_FILE"] {
        assert!(log.contains(words), "{words:?} is not in the log:\n{log}");
    }
    assert!(!log.contains("trying the upstream again"), "another try would come to the same:\n{log}");
    assert!(!answer.to_string().contains("localhost"), "the names of machines are none of an agent's business");
}
