//! `GET /api/rollouts/watch`: what happens to rollouts, as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use agl_core::rollout::{Rollout, RolloutState};
use agl_store::{RolloutQuery, StoreError};
use axum::extract::State;
use axum::http::Uri;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::stream::{self, Stream};
use serde::Serialize;
use tokio::sync::watch;

use super::input::Query;
use crate::app::App;
use crate::error::ApiError;

/// How many rollouts or changes are read at once.
const PAGE: usize = 500;
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// What the watcher gets. `cursor` is where to resume after this event; during the snapshot it is where the snapshot began.
#[derive(Serialize)]
struct Told {
    cursor: u64,
    kind: &'static str,
    rollout_id: String,
    /// As it is now, which may be later than the change; null if it has been deleted since.
    rollout: Option<Rollout>,
}

struct Watcher {
    app: Arc<App>,
    newest: watch::Receiver<u64>,
    stopping: watch::Receiver<bool>,
    cursor: u64,
    /// The snapshot goes on after this rollout; `None` once it is complete.
    snapshot: Option<Option<String>>,
    ready: VecDeque<Told>,
}

/// Without `after`: every rollout that has not ended (`snapshot`), then what changes. With it: everything after that cursor,
/// also across restarts of the gateway. A cursor that this store has not reached comes from another or an emptied one: it
/// counts as none.
pub(super) async fn watch(
    State(app): State<Arc<App>>,
    uri: Uri,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let after = Query::of(&uri).parsed("after", "Input should be a cursor of this stream", "int_parsing")?;
    let (newest, stopping) = (app.store.newest_change(), app.stopping.subscribe());
    let known = *newest.borrow();
    let after = match after {
        // One that this gateway has not heard of yet may be another gateway's.
        Some(after) if after > known && app.store.changes(after - 1, 1).await?.is_empty() => None,
        after => after,
    };
    let cursor = after.unwrap_or(known);
    let snapshot = after.is_none().then_some(None);
    let watcher = Watcher { app, newest, stopping, cursor, snapshot, ready: VecDeque::new() };
    let events = stream::unfold(watcher, |mut watcher| async move {
        let told = watcher.next().await?;
        Some((Ok(sse(&told)), watcher))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

fn sse(told: &Told) -> Event {
    let event = Event::default().id(told.cursor.to_string()).event("rollout");
    event.json_data(told).unwrap_or_else(|_| Event::default().comment("unreadable"))
}

impl Watcher {
    /// The next thing to tell; `None` ends the stream, which the watcher resumes from its cursor.
    async fn next(&mut self) -> Option<Told> {
        loop {
            if let Some(told) = self.ready.pop_front() {
                return Some(told);
            }
            if *self.stopping.borrow_and_update() {
                return None;
            }
            if let Err(error) = self.read_more().await {
                tracing::warn!(%error, "a watch ends");
                return None;
            }
            if self.ready.is_empty() && self.snapshot.is_none() {
                tokio::select! {
                    newest = self.newest.wait_for(|newest| *newest > self.cursor) => drop(newest.ok()?),
                    stopping = self.stopping.changed() => stopping.ok()?,
                }
            }
        }
    }

    async fn read_more(&mut self) -> Result<(), StoreError> {
        if let Some(after) = self.snapshot.take() {
            return self.read_snapshot(after).await;
        }
        for change in self.app.store.changes(self.cursor, PAGE).await? {
            self.cursor = change.cursor;
            self.ready.push_back(Told {
                cursor: change.cursor,
                kind: change.kind.as_str(),
                rollout_id: change.rollout_id,
                rollout: change.rollout,
            });
        }
        Ok(())
    }

    async fn read_snapshot(&mut self, after: Option<String>) -> Result<(), StoreError> {
        let states = vec![RolloutState::Queuing, RolloutState::Running];
        let page = match self.app.store.list_rollouts(RolloutQuery { states, after, limit: PAGE, run_id: None }).await {
            // The rollout to go on after has been deleted meanwhile: what follows it is told again from the start.
            Err(StoreError::RolloutNotFound(_)) => {
                self.snapshot = Some(None);
                return Ok(());
            }
            page => page?,
        };
        if page.len() == PAGE {
            self.snapshot = Some(page.last().map(|rollout| rollout.rollout_id.clone()));
        }
        self.ready.extend(page.into_iter().map(|rollout| Told {
            cursor: self.cursor,
            kind: "snapshot",
            rollout_id: rollout.rollout_id.clone(),
            rollout: Some(rollout),
        }));
        Ok(())
    }
}
