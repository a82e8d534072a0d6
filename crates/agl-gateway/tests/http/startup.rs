//! What keeps a gateway from starting, and what it says then.

use agl_gateway::{Gateway, GatewayConfig, GatewayError};

use crate::scene::quick;

fn in_memory() -> GatewayConfig {
    GatewayConfig { store: "memory".to_owned(), ..quick() }
}

#[tokio::test]
async fn a_port_in_use_is_named_with_the_remedy() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap().to_string();
    let error = Gateway::bind(GatewayConfig { listen: listen.clone(), ..in_memory() }).await.unwrap_err();
    assert!(matches!(error, GatewayError::AddressInUse { .. }));
    assert!(error.to_string().contains(&listen) && error.to_string().contains("`listen`"), "{error}");
}

#[tokio::test]
async fn an_address_of_another_machine_is_named() {
    for listen in ["203.0.113.1:8080", "nonsense"] {
        let error = Gateway::bind(GatewayConfig { listen: listen.to_owned(), ..in_memory() }).await.unwrap_err();
        assert!(error.to_string().contains(listen), "{error}");
    }
}

#[tokio::test]
async fn without_a_key_only_the_loopback_address_is_served() {
    let open = GatewayConfig { key: String::new(), listen: "0.0.0.0:0".to_owned(), ..in_memory() };
    let error = Gateway::bind(open.clone()).await.unwrap_err();
    assert!(
        matches!(error, GatewayError::NoKey { .. }) && error.to_string().contains("allow_unauthenticated"),
        "{error}"
    );
    Gateway::bind(GatewayConfig { allow_unauthenticated: true, ..open.clone() }).await.unwrap();
    Gateway::bind(GatewayConfig { key: "k".to_owned(), ..open.clone() }).await.unwrap();
    Gateway::bind(GatewayConfig { listen: "127.0.0.1:0".to_owned(), ..open }).await.unwrap();
}

#[tokio::test]
async fn a_database_of_another_version_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("old.db");
    rusqlite::Connection::open(&path).unwrap().pragma_update(None, "user_version", 77).unwrap();
    let config = GatewayConfig { store: path.display().to_string(), ..quick() };
    let error = Gateway::bind(config).await.unwrap_err().to_string();
    assert!(error.contains("old.db") && error.contains("77"), "{error}");
}

#[tokio::test]
async fn a_setting_that_cannot_be_used_is_named() {
    let mut config = in_memory();
    config.upstream.max_attempts = 0;
    assert!(Gateway::bind(config).await.unwrap_err().to_string().contains("upstream.max_attempts"));
}

#[tokio::test]
async fn agents_reach_it_under_its_own_address_or_the_one_configured() {
    let gateway = Gateway::bind(in_memory()).await.unwrap();
    assert_eq!(gateway.agent_url(), format!("http://{}", gateway.addr()));
    let agent_url = Some("http://gateway.example:80/".to_owned());
    let gateway = Gateway::bind(GatewayConfig { agent_url, ..in_memory() }).await.unwrap();
    assert_eq!(gateway.agent_url(), "http://gateway.example:80");
}
