//! A store in memory: for tests and throw-away runs. The reference for what the other stores must do.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use agl_core::attempt::{Attempt, AttemptPatch};
use agl_core::event::{Event, EventCreate, MODEL_REQUEST};
use agl_core::rollout::{Rollout, StatusPatch};
use agl_core::trajectory::{CallOutcome, CallRow, Delivery};
use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::watch;

use crate::bases::{Bases, pack};
use crate::record::{
    AttemptDetail, CallRecord, Change, ChangeKind, LastCall, Pause, RegisteredModel, RolloutQuery, Settlement,
    StoredCall, StoredEvent, TerminalItem, TerminalPage, Writer, run_id_of,
};
use crate::{Body, Store, StoreError};

/// A store whose content ends with the process.
///
/// One std mutex guards all of it: no operation waits for anything while it holds it.
#[derive(Debug)]
pub struct MemoryStore {
    content: Mutex<Content>,
    bases: Bases<()>,
    newest_change: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Content {
    closed: bool,
    rollouts: BTreeMap<u64, Rollout>,
    numbers: HashMap<String, u64>,
    last_number: u64,
    attempts: HashMap<String, Vec<Attempt>>,
    /// In the order of appending, all attempts of a rollout in one list.
    events: HashMap<String, Vec<StoredEvent>>,
    calls: HashMap<(String, String), Vec<StoredCall>>,
    /// About how many bytes each rollout takes: its JSON, and its bodies and tokens as they are kept.
    sizes: HashMap<String, usize>,
    last_calls: HashMap<(String, String), LastCall>,
    terminal: Vec<TerminalItem>,
    changes: Vec<(ChangeKind, String)>,
    models: BTreeMap<(String, String), RegisteredModel>,
    pause: Option<Pause>,
    secrets: HashMap<&'static str, [u8; 32]>,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self { content: Mutex::new(Content::default()), bases: Bases::default(), newest_change: watch::Sender::new(0) }
    }

    fn content(&self) -> Result<MutexGuard<'_, Content>, StoreError> {
        // Every change below is complete before anything in it can panic, so a poisoned lock guards whole content.
        let content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        if content.closed { Err(StoreError::Closed) } else { Ok(content) }
    }

    fn announce(&self, content: &Content) {
        let newest = content.changes.len() as u64;
        self.newest_change.send_if_modified(|cursor| std::mem::replace(cursor, newest) != newest);
    }
}

impl Content {
    fn rollout(&self, rollout_id: &str) -> Option<&Rollout> {
        self.rollouts.get(self.numbers.get(rollout_id)?)
    }

    fn rollout_mut(&mut self, rollout_id: &str) -> Option<&mut Rollout> {
        self.rollouts.get_mut(self.numbers.get(rollout_id)?)
    }

    fn must_exist(&self, rollout_id: &str) -> Result<(), StoreError> {
        if self.numbers.contains_key(rollout_id) {
            Ok(())
        } else {
            Err(StoreError::RolloutNotFound(rollout_id.to_owned()))
        }
    }

    fn grew(&mut self, rollout_id: &str, by: usize) {
        *self.sizes.entry(rollout_id.to_owned()).or_default() += by;
    }

    fn log(&mut self, kind: ChangeKind, rollout_id: &str) {
        self.changes.push((kind, rollout_id.to_owned()));
    }

    fn detail(&self, attempt: Attempt) -> AttemptDetail {
        let key = (attempt.rollout_id.clone(), attempt.attempt_id.clone());
        let calls = self.events.get(&key.0).map_or(0, |events| {
            events.iter().filter(|stored| stored.request.is_some() && stored.event.attempt_id == key.1).count()
        });
        AttemptDetail { attempt, calls: calls as u64, last_call: self.last_calls.get(&key).cloned() }
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn create_rollouts(&self, rollouts: Vec<Rollout>) -> Result<Vec<Rollout>, StoreError> {
        let mut content = self.content()?;
        let mut answers = Vec::with_capacity(rollouts.len());
        for rollout in rollouts {
            if let Some(known) = content.rollout(&rollout.rollout_id) {
                answers.push(known.clone());
                continue;
            }
            content.last_number += 1;
            let number = content.last_number;
            content.numbers.insert(rollout.rollout_id.clone(), number);
            content.log(ChangeKind::Created, &rollout.rollout_id);
            content.grew(&rollout.rollout_id, json_size(&rollout));
            content.rollouts.insert(number, rollout.clone());
            answers.push(rollout);
        }
        self.announce(&content);
        Ok(answers)
    }

    async fn rollout(&self, rollout_id: &str) -> Result<Option<Rollout>, StoreError> {
        Ok(self.content()?.rollout(rollout_id).cloned())
    }

    async fn list_rollouts(&self, query: RolloutQuery) -> Result<Vec<Rollout>, StoreError> {
        let content = self.content()?;
        let from = match query.after {
            Some(id) => content.numbers.get(&id).map(|number| number + 1).ok_or(StoreError::RolloutNotFound(id))?,
            None => 0,
        };
        let later = content.rollouts.range(from..).map(|(_, rollout)| rollout);
        Ok(later
            .filter(|rollout| query.states.contains(&rollout.status.state))
            .filter(|rollout| query.run_id.is_none() || run_id_of(rollout) == query.run_id)
            .take(query.limit)
            .cloned()
            .collect())
    }

    async fn patch_rollout(&self, rollout_id: &str, patch: StatusPatch, now: f64) -> Result<Rollout, StoreError> {
        let mut content = self.content()?;
        let Some(rollout) = content.rollout_mut(rollout_id) else {
            return Err(StoreError::RolloutNotFound(rollout_id.to_owned()));
        };
        let was_terminal = rollout.status.state.is_terminal();
        rollout.apply(&patch, now)?;
        let patched = rollout.clone();
        if patched.status.state.is_terminal() && !was_terminal {
            content.terminal.push(terminal_item(&patched));
        }
        if !patch.is_empty() {
            content.log(ChangeKind::Updated, rollout_id);
        }
        self.announce(&content);
        Ok(patched)
    }

    async fn delete_rollout(&self, rollout_id: &str) -> Result<(), StoreError> {
        let mut content = self.content()?;
        let Some(number) = content.numbers.remove(rollout_id) else {
            return Ok(());
        };
        self.bases.forget(rollout_id);
        content.rollouts.remove(&number);
        content.attempts.remove(rollout_id);
        content.events.remove(rollout_id);
        content.sizes.remove(rollout_id);
        content.calls.retain(|(rollout, _), _| rollout != rollout_id);
        content.last_calls.retain(|(rollout, _), _| rollout != rollout_id);
        content.log(ChangeKind::Deleted, rollout_id);
        self.announce(&content);
        Ok(())
    }

    async fn terminal(&self, after: u64, limit: usize) -> Result<TerminalPage, StoreError> {
        let content = self.content()?;
        let ended = &content.terminal;
        let from = usize::try_from(after).unwrap_or(usize::MAX).min(ended.len());
        let page = &ended[from..from.saturating_add(limit).min(ended.len())];
        Ok(TerminalPage {
            items: page.iter().filter(|item| content.numbers.contains_key(&item.rollout_id)).cloned().collect(),
            next_after: after + page.len() as u64,
            total_terminal: ended.len() as u64,
        })
    }

    async fn mark_consumed(&self, run_id: &str, step: u64, rollout_ids: Vec<String>) -> Result<u64, StoreError> {
        let mut content = self.content()?;
        let mark = agl_core::rollout::Consumed { run_id: run_id.to_owned(), step };
        let mut marked = 0;
        for rollout_id in rollout_ids {
            let Some(rollout) = content.rollout_mut(&rollout_id) else { continue };
            marked += 1;
            if rollout.consumed.as_ref() != Some(&mark) {
                rollout.consumed = Some(mark.clone());
                content.log(ChangeKind::Consumed, &rollout_id);
            }
        }
        self.announce(&content);
        Ok(marked)
    }

    async fn create_attempt(
        &self,
        rollout_id: &str,
        attempt_id: Option<String>,
        now: f64,
    ) -> Result<(AttemptDetail, bool), StoreError> {
        let mut content = self.content()?;
        content.must_exist(rollout_id)?;
        let attempts = content.attempts.entry(rollout_id.to_owned()).or_default();
        let known = attempt_id.as_ref().and_then(|id| attempts.iter().find(|attempt| attempt.attempt_id == *id));
        if let Some(known) = known.cloned() {
            return Ok((content.detail(known), false));
        }
        let attempt_id = attempt_id.unwrap_or_else(|| next_attempt_id(attempts.iter().map(|a| a.attempt_id.as_str())));
        let attempt = Attempt::new(rollout_id.to_owned(), attempt_id, now);
        attempts.push(attempt.clone());
        Ok((content.detail(attempt), true))
    }

    async fn attempt(&self, rollout_id: &str, attempt_id: &str) -> Result<Option<Attempt>, StoreError> {
        let content = self.content()?;
        let attempts = content.attempts.get(rollout_id);
        Ok(attempts.and_then(|attempts| attempts.iter().find(|attempt| attempt.attempt_id == attempt_id)).cloned())
    }

    async fn attempts(&self, rollout_id: &str) -> Result<Vec<AttemptDetail>, StoreError> {
        let content = self.content()?;
        content.must_exist(rollout_id)?;
        let attempts = content.attempts.get(rollout_id).cloned().unwrap_or_default();
        Ok(attempts.into_iter().map(|attempt| content.detail(attempt)).collect())
    }

    async fn patch_attempt(
        &self,
        rollout_id: &str,
        attempt_id: &str,
        patch: AttemptPatch,
        now: f64,
    ) -> Result<AttemptDetail, StoreError> {
        let mut content = self.content()?;
        content.must_exist(rollout_id)?;
        let attempts = content.attempts.get_mut(rollout_id);
        let attempt =
            attempts.and_then(|attempts| attempts.iter_mut().find(|attempt| attempt.attempt_id == attempt_id));
        let Some(attempt) = attempt else {
            return Err(StoreError::AttemptNotFound {
                rollout_id: rollout_id.to_owned(),
                attempt_id: attempt_id.to_owned(),
            });
        };
        attempt.apply(&patch, now)?;
        let patched = attempt.clone();
        Ok(content.detail(patched))
    }

    async fn append_event(
        &self,
        rollout_id: &str,
        attempt_id: &str,
        event: EventCreate,
        now: f64,
    ) -> Result<Event, StoreError> {
        let mut content = self.content()?;
        content.must_exist(rollout_id)?;
        let event = Event {
            event_type: event.event_type,
            rollout_id: rollout_id.to_owned(),
            attempt_id: attempt_id.to_owned(),
            timestamp: now,
            data: event.data,
        };
        let stored = StoredEvent { event: event.clone(), request: None, response: None };
        content.grew(rollout_id, json_size(&event));
        content.events.entry(rollout_id.to_owned()).or_default().push(stored);
        Ok(event)
    }

    async fn events(
        &self,
        rollout_id: &str,
        attempt_id: &str,
        event_type: Option<&str>,
    ) -> Result<Vec<StoredEvent>, StoreError> {
        let content = self.content()?;
        content.must_exist(rollout_id)?;
        let events = content.events.get(rollout_id).map_or(&[][..], Vec::as_slice);
        Ok(events
            .iter()
            .filter(|stored| stored.event.attempt_id == attempt_id)
            .filter(|stored| event_type.is_none_or(|wanted| stored.event.event_type == wanted))
            .cloned()
            .collect())
    }

    async fn count_events(&self, rollout_id: &str) -> Result<u64, StoreError> {
        Ok(self.content()?.events.get(rollout_id).map_or(0, |events| events.len() as u64))
    }

    async fn attempts_with_events(&self, rollout_id: &str) -> Result<Vec<String>, StoreError> {
        let content = self.content()?;
        content.must_exist(rollout_id)?;
        let mut attempts: Vec<String> = Vec::new();
        for stored in content.events.get(rollout_id).map_or(&[][..], Vec::as_slice) {
            if !attempts.contains(&stored.event.attempt_id) {
                attempts.push(stored.event.attempt_id.clone());
            }
        }
        Ok(attempts)
    }

    async fn record_call(&self, call: CallRecord) -> Result<(), StoreError> {
        let (packed, _base) = pack(&call, self.bases.candidates(&call), Bytes::new()).await?;
        let (request, response) =
            (packed.request.body.clone(), packed.response.as_ref().map(|response| response.body.clone()));
        let said = packed.into_said(|body| body, (), ());
        let size = |body: &Body| body.stored().len();
        let bodies = size(&request) + response.as_ref().map_or(0, size);
        let tokens: usize = call.rows.iter().map(|row| 4 * row.inserted.len() + 8 * row.sampled.len()).sum();
        let bytes = json_size(&call.data) + bodies + tokens;
        let mut content = self.content()?;
        content.must_exist(&call.rollout_id)?;
        content.grew(&call.rollout_id, bytes);
        let status = call.data.get("status").and_then(|status| status.as_str()).unwrap_or_default().to_owned();
        let event = Event {
            event_type: MODEL_REQUEST.to_owned(),
            rollout_id: call.rollout_id.clone(),
            attempt_id: call.attempt_id.clone(),
            timestamp: call.timestamp,
            data: call.data,
        };
        let key = (call.rollout_id, call.attempt_id);
        self.bases.keep(&key.0, &key.1, said);
        content.events.entry(key.0.clone()).or_default().push(StoredEvent { event, request: Some(request), response });
        content.last_calls.insert(key.clone(), LastCall { http_status: call.http_status, status });
        let rows = content.calls.entry(key).or_default();
        for stored in rows.iter_mut().filter(|stored| call.supersedes.contains(&stored.row.seq)) {
            stored.row.delivery = Delivery::Superseded;
            stored.settled = true;
        }
        rows.extend(call.rows.into_iter().map(|row| StoredCall {
            settled: is_settled(&row),
            request_digest: call.request_digest,
            writer: Writer::Gone,
            row,
        }));
        Ok(())
    }

    async fn calls(&self, rollout_id: &str, attempt_id: &str, from: u64) -> Result<Vec<StoredCall>, StoreError> {
        let content = self.content()?;
        content.must_exist(rollout_id)?;
        let rows = content.calls.get(&(rollout_id.to_owned(), attempt_id.to_owned())).map_or(&[][..], Vec::as_slice);
        Ok(rows.iter().filter(|stored| stored.row.seq >= from).cloned().collect())
    }

    async fn settle(&self, settlements: Vec<Settlement>) -> Result<(), StoreError> {
        let mut content = self.content()?;
        for settlement in settlements {
            let Some(rows) = content.calls.get_mut(&(settlement.rollout_id, settlement.attempt_id)) else { continue };
            for stored in rows.iter_mut().filter(|stored| settlement.seqs.contains(&stored.row.seq)) {
                stored.settled = true;
                if stored.row.delivery != Delivery::Superseded {
                    stored.row.delivery = settlement.delivery;
                }
            }
        }
        Ok(())
    }

    async fn put_models(&self, models: Vec<RegisteredModel>) -> Result<(), StoreError> {
        let mut content = self.content()?;
        for model in models {
            content.models.insert((model.model.clone(), model.endpoint.clone()), model);
        }
        Ok(())
    }

    async fn delete_models(&self, model: &str, endpoint: Option<&str>) -> Result<(), StoreError> {
        let mut content = self.content()?;
        content.models.retain(|(name, url), _| name != model || endpoint.is_some_and(|endpoint| url != endpoint));
        Ok(())
    }

    async fn models(&self) -> Result<Vec<RegisteredModel>, StoreError> {
        Ok(self.content()?.models.values().cloned().collect())
    }

    async fn put_pause(&self, before: Option<Pause>, after: Option<Pause>) -> Result<bool, StoreError> {
        let mut content = self.content()?;
        let is_still_so = content.pause == before;
        if is_still_so {
            content.pause = after;
        }
        Ok(is_still_so)
    }

    async fn pause(&self) -> Result<Option<Pause>, StoreError> {
        Ok(self.content()?.pause.clone())
    }

    async fn secret(&self, name: &'static str, fresh: [u8; 32]) -> Result<[u8; 32], StoreError> {
        Ok(*self.content()?.secrets.entry(name).or_insert(fresh))
    }

    async fn stored_bytes(&self) -> Result<u64, StoreError> {
        Ok(self.content()?.sizes.values().map(|bytes| *bytes as u64).sum())
    }

    async fn changes(&self, after: u64, limit: usize) -> Result<Vec<Change>, StoreError> {
        let content = self.content()?;
        let from = usize::try_from(after).unwrap_or(usize::MAX).min(content.changes.len());
        let entries = content.changes.iter().enumerate().skip(from).take(limit);
        Ok(entries
            .map(|(index, (kind, rollout_id))| Change {
                cursor: index as u64 + 1,
                kind: *kind,
                rollout_id: rollout_id.clone(),
                rollout: content.rollout(rollout_id).cloned(),
            })
            .collect())
    }

    fn newest_change(&self) -> watch::Receiver<u64> {
        self.newest_change.subscribe()
    }

    async fn close(&self) {
        if let Ok(mut content) = self.content() {
            content.closed = true;
        }
    }
}

fn json_size(value: &impl serde::Serialize) -> usize {
    serde_json::to_vec(value).map_or(0, |json| json.len())
}

/// Only an answer that is on its way has an open fate.
pub(crate) fn is_settled(row: &CallRow) -> bool {
    row.delivery != Delivery::Delivered || row.outcome != CallOutcome::Ok
}

pub(crate) fn terminal_item(rollout: &Rollout) -> TerminalItem {
    TerminalItem {
        rollout_id: rollout.rollout_id.clone(),
        state: rollout.status.state,
        data_id: rollout.data_id(),
        is_train: rollout.is_train,
    }
}

/// One more than the highest number among the ids; `"0"` for the first.
pub(crate) fn next_attempt_id<'a>(known: impl Iterator<Item = &'a str>) -> String {
    known.filter_map(|id| id.parse::<u64>().ok()).max().map_or(0, |highest| highest.saturating_add(1)).to_string()
}
