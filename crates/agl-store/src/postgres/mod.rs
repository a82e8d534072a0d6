//! A store in a Postgres database, which several gateways may share.
//!
//! * [`connections`] — a few connections to the server; [`fault`] — what goes wrong with them, and what is tried again.
//! * [`schema`] — the tables, the version check, and servers that are refused.
//! * [`rollouts`], [`attempts`], [`events`], [`calls`], [`settings`] — the statements, each a function over a connection.
//! * [`gateways`] — who else is on this database; [`listener`] — hears of what the others commit.
//!
//! A write resolves after its commit, with `synchronous_commit` on. Commits of different calls go over different connections at
//! once: the server lets them share the flushes of its disk.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use agl_core::attempt::{Attempt, AttemptPatch};
use agl_core::event::{Event, EventCreate};
use agl_core::rollout::{Consumed, Rollout, StatusPatch};
use async_trait::async_trait;
use bytes::Bytes;
use sqlx::Connection;
use sqlx::postgres::PgConnectOptions;
use tokio::sync::watch;
use url::Url;

use crate::bases::{Bases, pack};
use crate::peers::{Agreement, Peer, Peers, Presence};
use crate::record::{
    AttemptDetail, CallRecord, Change, Pause, RegisteredModel, RolloutQuery, Settlement, StoredCall, StoredEvent,
    TerminalPage,
};
use crate::{Store, StoreError};

mod attempts;
mod calls;
mod connections;
mod events;
mod fault;
mod gateways;
mod listener;
mod rollouts;
mod schema;
mod settings;

use fault::{Again, Fault, Patience};

/// No operation takes longer, or the connection is given up.
const LIMIT: Duration = Duration::from_secs(30);
/// A check-in that takes longer is none: the gateway must know soon.
const CHECK_IN_LIMIT: Duration = Duration::from_secs(2);

/// A store in a Postgres database.
#[derive(Debug)]
pub struct PostgresStore {
    /// The URL without its password, for messages.
    database: String,
    connections: connections::Connections,
    /// This gateway's number among all that ever were on this database.
    gateway: i64,
    bases: Bases<i64>,
    news: Arc<listener::News>,
    listening: tokio::task::AbortHandle,
}

/// Runs `$body`, which uses a connection as `$sql`; once more, on another connection, where the server was away or two
/// transactions stood in each other's way and that does no harm.
macro_rules! attempt {
    ($store:expr, $again:expr, |$sql:ident| $body:expr) => {{
        let mut patience = Patience::new();
        loop {
            let tried = async {
                let mut used = $store.connections.take().await?;
                let $sql = used.sql();
                let outcome: Result<_, Fault> = $body.await;
                if outcome.as_ref().err().is_none_or(Fault::leaves_connection) {
                    used.give_back();
                }
                outcome
            };
            match tokio::time::timeout(LIMIT, tried).await.unwrap_or(Err(Fault::Late(LIMIT))) {
                Err(fault) if patience.allows(&fault, $again).await => $store.connections.forget_idle(),
                outcome => break outcome.map_err(|fault| fault.named(&$store.database)),
            }
        }
    }};
}

/// As [`attempt!`], in a transaction that is committed where `$body` succeeds.
macro_rules! transaction {
    ($store:expr, $again:expr, |$sql:ident| $body:expr) => {
        attempt!($store, $again, |connection| async {
            let mut transaction = connection.begin().await?;
            let $sql = &mut *transaction;
            let outcome: Result<_, Fault> = $body.await;
            match outcome {
                Ok(value) => transaction.commit().await.map(|()| value).map_err(Fault::Commit),
                Err(fault) => {
                    if fault.leaves_connection() {
                        transaction.rollback().await?;
                    }
                    Err(fault)
                }
            }
        })
    };
}

impl PostgresStore {
    /// Connects to `postgres://USER:PASSWORD@HOST:PORT/DATABASE`, makes the tables if there are none, and listens for what other
    /// gateways change. What the URL leaves out comes from `PGHOST`, `PGUSER`, `PGPASSWORD` and so on, or from `~/.pgpass`.
    ///
    /// # Errors
    /// [`StoreError::BadUrl`], [`StoreError::Unreachable`], [`StoreError::UnsafeServer`], [`StoreError::DatabaseVersion`],
    /// [`StoreError::NotOurs`], or what else the server says.
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        let options = options(url)?;
        let database = shown(url);
        let connections = connections::Connections::new(options.clone());
        let opening = Opening { database: database.clone(), connections };
        attempt!(opening, Again::Always, |sql| schema::prepare(sql, &opening.database))?;
        let gateway = attempt!(opening, Again::Always, |sql| gateways::number(sql))?;
        let news = Arc::new(listener::News::new());
        let (change, epoch) = attempt!(opening, Again::Always, |sql| settings::newest(sql))?;
        listener::tell(&news.change, change);
        listener::tell(&news.agreement, epoch);
        let listening = tokio::spawn(listener::listen(options, Arc::clone(&news), database.clone())).abort_handle();
        Ok(Self { database, connections: opening.connections, gateway, bases: Bases::default(), news, listening })
    }

    fn announce<T>(&self, (value, newest): (T, Option<u64>)) -> T {
        if let Some(newest) = newest {
            listener::tell(&self.news.change, newest);
        }
        value
    }
}

/// What there is of a store while it is opened.
struct Opening {
    database: String,
    connections: connections::Connections,
}

impl Drop for PostgresStore {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

/// How we connect: the URL, and what our sessions rely on.
fn options(url: &str) -> Result<PgConnectOptions, StoreError> {
    let options = PgConnectOptions::from_str(url).map_err(|error| match error {
        // Its text is about the form of a URL and holds nothing of this one.
        sqlx::Error::Configuration(reason) => StoreError::BadUrl { reason: reason.to_string() },
        _ => StoreError::BadUrl { reason: "it is no URL".to_owned() },
    })?;
    Ok(options.application_name("agl").options([
        ("search_path", "agl"),
        ("synchronous_commit", "on"),
        ("statement_timeout", "25s"),
        ("lock_timeout", "20s"),
        ("idle_in_transaction_session_timeout", "30s"),
    ]))
}

/// The URL without its password, which may stand in it twice.
pub(crate) fn shown(url: &str) -> String {
    let Ok(mut url) = Url::parse(url) else { return "postgres://…".to_owned() };
    let kept: Vec<_> = url
        .query_pairs()
        .filter(|(name, _)| name != "password")
        .map(|(n, v)| (n.into_owned(), v.into_owned()))
        .collect();
    // Fails only for a URL without a host, which has no password either.
    let _without = url.set_password(None);
    url.set_query(None);
    if !kept.is_empty() {
        url.query_pairs_mut().extend_pairs(kept);
    }
    url.into()
}

/// Postgres' integers are signed; ours never reach the sign bit.
fn signed(number: u64) -> i64 {
    number.min(i64::MAX.cast_unsigned()).cast_signed()
}

fn to_json(value: &impl serde::Serialize, what: &str) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|error| corrupt(what, error))
}

fn from_json<T: serde::de::DeserializeOwned>(text: &str, what: &str) -> Result<T, StoreError> {
    serde_json::from_str(text).map_err(|error| corrupt(what, error))
}

fn corrupt(what: &str, reason: impl std::fmt::Display) -> StoreError {
    StoreError::Corrupt { what: what.to_owned(), reason: reason.to_string() }
}

#[async_trait]
impl Store for PostgresStore {
    async fn create_rollouts(&self, new: Vec<Rollout>) -> Result<Vec<Rollout>, StoreError> {
        transaction!(self, Again::Always, |sql| rollouts::create(sql, &new)).map(|done| self.announce(done))
    }

    async fn rollout(&self, rollout_id: &str) -> Result<Option<Rollout>, StoreError> {
        attempt!(self, Again::Always, |sql| rollouts::get(sql, rollout_id))
    }

    async fn list_rollouts(&self, query: RolloutQuery) -> Result<Vec<Rollout>, StoreError> {
        attempt!(self, Again::Always, |sql| rollouts::list(sql, &query))
    }

    async fn patch_rollout(&self, rollout_id: &str, patch: StatusPatch, now: f64) -> Result<Rollout, StoreError> {
        transaction!(self, Again::IfNotMade, |sql| rollouts::patch(sql, rollout_id, &patch, now))
            .map(|done| self.announce(done))
    }

    async fn delete_rollout(&self, rollout_id: &str) -> Result<(), StoreError> {
        let deleted = transaction!(self, Again::Always, |sql| rollouts::delete(sql, rollout_id));
        self.bases.forget(rollout_id);
        deleted.map(|done| self.announce(done))
    }

    async fn terminal(&self, after: u64, limit: usize) -> Result<TerminalPage, StoreError> {
        attempt!(self, Again::Always, |sql| rollouts::terminal(sql, after, limit))
    }

    async fn mark_consumed(&self, run_id: &str, step: u64, rollout_ids: Vec<String>) -> Result<u64, StoreError> {
        let mark = Consumed { run_id: run_id.to_owned(), step };
        transaction!(self, Again::Always, |sql| rollouts::mark_consumed(sql, &mark, &rollout_ids))
            .map(|done| self.announce(done))
    }

    async fn create_attempt(
        &self,
        rollout_id: &str,
        attempt_id: Option<String>,
        now: f64,
    ) -> Result<(AttemptDetail, bool), StoreError> {
        // Without an id the second time would make a second attempt.
        let again = if attempt_id.is_some() { Again::Always } else { Again::IfNotMade };
        transaction!(self, again, |sql| attempts::create(sql, rollout_id, attempt_id.as_deref(), now))
    }

    async fn attempt(&self, rollout_id: &str, attempt_id: &str) -> Result<Option<Attempt>, StoreError> {
        attempt!(self, Again::Always, |sql| attempts::get(sql, rollout_id, attempt_id))
    }

    async fn attempts(&self, rollout_id: &str) -> Result<Vec<AttemptDetail>, StoreError> {
        attempt!(self, Again::Always, |sql| attempts::list(sql, rollout_id))
    }

    async fn patch_attempt(
        &self,
        rollout_id: &str,
        attempt_id: &str,
        patch: AttemptPatch,
        now: f64,
    ) -> Result<AttemptDetail, StoreError> {
        transaction!(self, Again::IfNotMade, |sql| attempts::patch(sql, rollout_id, attempt_id, &patch, now))
    }

    async fn append_event(
        &self,
        rollout_id: &str,
        attempt_id: &str,
        event: EventCreate,
        now: f64,
    ) -> Result<Event, StoreError> {
        let event = Event {
            event_type: event.event_type,
            rollout_id: rollout_id.to_owned(),
            attempt_id: attempt_id.to_owned(),
            timestamp: now,
            data: event.data,
        };
        transaction!(self, Again::IfNotMade, |sql| events::append(sql, &event))?;
        Ok(event)
    }

    async fn events(
        &self,
        rollout_id: &str,
        attempt_id: &str,
        event_type: Option<&str>,
    ) -> Result<Vec<StoredEvent>, StoreError> {
        attempt!(self, Again::Always, |sql| events::list(sql, rollout_id, attempt_id, event_type))
    }

    async fn count_events(&self, rollout_id: &str) -> Result<u64, StoreError> {
        attempt!(self, Again::Always, |sql| events::count(sql, rollout_id))
    }

    async fn attempts_with_events(&self, rollout_id: &str) -> Result<Vec<String>, StoreError> {
        attempt!(self, Again::Always, |sql| events::attempts(sql, rollout_id))
    }

    async fn record_call(&self, call: CallRecord) -> Result<(), StoreError> {
        let mut candidates = self.bases.candidates(&call);
        loop {
            let (packed, base) = pack(&call, std::mem::take(&mut candidates), Bytes::new()).await?;
            let written = attempt!(self, Again::Always, |sql| async {
                match calls::record(sql, &call, &packed, base.as_deref(), self.gateway).await {
                    // A row of that number is there: ours, where the connection was lost after the commit.
                    Err(fault) if fault.is_duplicate() => {
                        let is_ours = calls::is_there(sql, &call).await?;
                        if is_ours { Ok(None) } else { Err(calls::raced(&call).into()) }
                    }
                    written => written.map(Some),
                }
            });
            match written? {
                None => return Ok(()),
                Some(calls::Written::Yes { request, response }) => {
                    let said = packed.into_said(|body| body.hollow(), request, response.unwrap_or(request));
                    self.bases.keep(&call.rollout_id, &call.attempt_id, said);
                    return Ok(());
                }
                // The rollout has been deleted and made anew.
                Some(calls::Written::WithoutBase) => self.bases.forget(&call.rollout_id),
            }
        }
    }

    async fn calls(&self, rollout_id: &str, attempt_id: &str, from: u64) -> Result<Vec<StoredCall>, StoreError> {
        attempt!(self, Again::Always, |sql| calls::list(sql, rollout_id, attempt_id, from, self.gateway))
    }

    async fn settle(&self, settlements: Vec<Settlement>) -> Result<(), StoreError> {
        attempt!(self, Again::Always, |sql| calls::settle(sql, &settlements))
    }

    async fn put_models(&self, models: Vec<RegisteredModel>) -> Result<(), StoreError> {
        transaction!(self, Again::Always, |sql| settings::put_models(sql, &models))
    }

    async fn delete_models(&self, model: &str, endpoint: Option<&str>) -> Result<(), StoreError> {
        transaction!(self, Again::Always, |sql| settings::delete_models(sql, model, endpoint))
    }

    async fn models(&self) -> Result<Vec<RegisteredModel>, StoreError> {
        attempt!(self, Again::Always, |sql| settings::models(sql))
    }

    async fn put_pause(&self, before: Option<Pause>, after: Option<Pause>) -> Result<bool, StoreError> {
        // The second time it is no longer as it was before, and the caller looks again.
        transaction!(self, Again::Always, |sql| settings::put_pause(sql, before.as_ref(), after.as_ref()))
    }

    async fn pause(&self) -> Result<Option<Pause>, StoreError> {
        attempt!(self, Again::Always, |sql| settings::pause(sql))
    }

    async fn secret(&self, name: &'static str, fresh: [u8; 32]) -> Result<[u8; 32], StoreError> {
        attempt!(self, Again::Always, |sql| settings::secret(sql, name, fresh))
    }

    async fn stored_bytes(&self) -> Result<u64, StoreError> {
        attempt!(self, Again::Always, |sql| schema::stored_bytes(sql))
    }

    async fn changes(&self, after: u64, limit: usize) -> Result<Vec<Change>, StoreError> {
        attempt!(self, Again::Always, |sql| rollouts::changes(sql, after, limit))
    }

    fn newest_change(&self) -> watch::Receiver<u64> {
        self.news.change.subscribe()
    }

    fn peers(&self) -> Option<&dyn Peers> {
        Some(self)
    }

    async fn close(&self) {
        if self.connections.is_closed() {
            return;
        }
        self.listening.abort();
        let left: Result<(), StoreError> = attempt!(self, Again::Always, |sql| gateways::leave(sql, self.gateway));
        if let Err(error) = left {
            tracing::warn!(%error, "this gateway could not say that it ends: the others wait for it once");
        }
        self.connections.close().await;
    }
}

#[async_trait]
impl Peers for PostgresStore {
    fn lease(&self) -> Duration {
        gateways::LEASE
    }

    fn newest_agreement(&self) -> watch::Receiver<u64> {
        self.news.agreement.subscribe()
    }

    async fn check_in(&self, presence: Presence) -> Result<Agreement, StoreError> {
        let checked = async { attempt!(self, Again::Always, |sql| gateways::check_in(sql, self.gateway, presence)) };
        let reason = format!("no answer for {} seconds", CHECK_IN_LIMIT.as_secs());
        let late = || StoreError::Unreachable { database: self.database.clone(), reason };
        tokio::time::timeout(CHECK_IN_LIMIT, checked).await.unwrap_or_else(|_| Err(late()))
    }

    async fn roll_call(&self) -> Result<Vec<Peer>, StoreError> {
        attempt!(self, Again::Always, |sql| gateways::roll_call(sql, self.gateway))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_password_is_never_shown() {
        let shown = shown("postgres://user:hunter2@db.example:5433/agl?password=hunter2&sslmode=require");
        assert_eq!(shown, "postgres://user@db.example:5433/agl?sslmode=require");
        let refused = options("postgres://user:hunter2@db.example:notaport/agl").unwrap_err().to_string();
        assert!(!refused.contains("hunter2") && refused.contains("postgres://USER@HOST"), "{refused}");
    }
}
