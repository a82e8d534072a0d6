//! Hears from the server what other gateways have committed. What is missed, because the connection was lost or something
//! between us and the server swallows notifications, is looked up now and then.

use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use sqlx::{ConnectOptions, Connection};
use tokio::sync::watch;

use super::{Fault, settings};

/// Channel on which the newest cursor of the change log is told.
pub(super) const CHANGES: &str = "agl_changes";
/// Channel on which the newest epoch of the agreement is told.
pub(super) const AGREEMENT: &str = "agl_agreement";

/// After so long without news they are looked up.
const QUIET: Duration = Duration::from_secs(5);
/// Between two tries to reach the server.
const PAUSE: Duration = Duration::from_millis(500);

/// The newest numbers that this gateway knows of.
#[derive(Debug)]
pub(super) struct News {
    pub(super) change: watch::Sender<u64>,
    pub(super) agreement: watch::Sender<u64>,
}

impl News {
    pub(super) fn new() -> Self {
        Self { change: watch::Sender::new(0), agreement: watch::Sender::new(0) }
    }
}

/// Tells a newer number to whoever waits.
pub(super) fn tell(newest: &watch::Sender<u64>, number: u64) {
    newest.send_if_modified(|known| {
        let is_news = number > *known;
        *known = number.max(*known);
        is_news
    });
}

/// Runs until it is aborted.
pub(super) async fn listen(options: PgConnectOptions, news: std::sync::Arc<News>, database: String) {
    let mut told = false;
    loop {
        let Err(error) = listen_once(&options, &news).await;
        if !std::mem::replace(&mut told, true) {
            let error = error.named(&database);
            tracing::warn!(%error, "the connection that hears of other gateways is lost; it is tried again");
        }
        tokio::time::sleep(PAUSE).await;
        if look_up(&options, &news).await.is_ok() {
            told = false;
        }
    }
}

/// Runs until the connection is lost.
async fn listen_once(options: &PgConnectOptions, news: &News) -> Result<std::convert::Infallible, Fault> {
    let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(QUIET).connect_lazy_with(options.clone());
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.eager_reconnect(false);
    listener.listen_all([CHANGES, AGREEMENT]).await?;
    // What was committed before we listened.
    look_up(options, news).await?;
    loop {
        match tokio::time::timeout(QUIET, listener.try_recv()).await {
            Ok(heard) => {
                let heard = heard?.ok_or_else(|| sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into()))?;
                let number = heard.payload().parse().unwrap_or(0);
                match heard.channel() {
                    CHANGES => tell(&news.change, number),
                    _ => tell(&news.agreement, number),
                }
            }
            Err(_) => look_up(options, news).await?,
        }
    }
}

/// Over a connection of its own: one that is broken without saying so must not keep it from us.
async fn look_up(options: &PgConnectOptions, news: &News) -> Result<(), Fault> {
    let look = async {
        let mut sql = options.connect().await?;
        let newest = settings::newest(&mut sql).await?;
        sql.close().await?;
        Ok(newest)
    };
    let (change, epoch) = tokio::time::timeout(QUIET, look).await.unwrap_or(Err(Fault::Late(QUIET)))?;
    tell(&news.change, change);
    tell(&news.agreement, epoch);
    Ok(())
}
