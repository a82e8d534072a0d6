//! A fresh Postgres database for each test.

use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Connection, Executor};

/// An empty database, which is dropped with this.
pub struct Database {
    pub url: String,
    name: String,
    server: PgConnectOptions,
}

impl Database {
    /// On the server that `AGL_TEST_POSTGRES` names.
    pub async fn create() -> Self {
        let server = std::env::var("AGL_TEST_POSTGRES")
            .expect("AGL_TEST_POSTGRES is not set: run the tests with ./x test, which starts a Postgres server");
        let server = PgConnectOptions::from_str(&server).unwrap();
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
        let name = format!("agl_test_{}_{started}", std::process::id());
        let mut sql = server.connect().await.unwrap();
        sql.execute(format!("CREATE DATABASE {name}").as_str()).await.unwrap();
        sql.close().await.unwrap();
        let url = server.clone().database(&name).to_url_lossy().to_string();
        Self { url, name, server }
    }

    /// A connection beside those of the store.
    #[allow(dead_code, reason = "not every file of tests looks behind the store")]
    pub async fn connect(&self) -> sqlx::PgConnection {
        self.server.clone().database(&self.name).connect().await.unwrap()
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let (server, name) = (self.server.clone(), self.name.clone());
        let drop_it = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut sql = server.connect().await.unwrap();
                // Stores that are still open do not keep it.
                sql.execute(format!("DROP DATABASE {name} WITH (FORCE)").as_str()).await.unwrap();
            });
        };
        // A thread of its own: the test's runtime is busy with dropping this.
        let dropped = std::thread::spawn(drop_it).join();
        if dropped.is_err() && !std::thread::panicking() {
            panic!("the database {} cannot be dropped", self.name);
        }
    }
}
