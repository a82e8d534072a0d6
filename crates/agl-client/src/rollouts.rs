//! Rollouts: created, listed, patched, ended; their events and sequences.

use agl_core::event::{Event, EventCreate};
use agl_core::rollout::{Rollout, RolloutCreate, RolloutState, StatusPatch};
use agl_core::trajectory::Level;
use reqwest::Method;
use serde::Serialize;
use serde_json::json;

use crate::error::ClientError;
use crate::transport::{Call, GatewayClient, Repeat, encode};
use crate::wire::{RolloutDetail, SequencesResponse, TerminalPage};

/// In which form events are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventFormat {
    /// As they were recorded, with the whole request and response.
    #[default]
    Raw,
    /// Token ids, log-probs and scalar rewards only; of several calls with one prompt the last.
    Triplet,
}

#[derive(Serialize)]
struct StatusBody<'a> {
    status: &'a StatusPatch,
}

impl GatewayClient {
    /// True once the gateway answers. Asks a single time and needs no key.
    pub async fn healthz(&self) -> bool {
        let url = self.url(&["healthz"]);
        let call = Call { method: Method::GET, url, body: None, repeat: Repeat::Freely };
        self.send_once(&call).await.is_ok_and(|response| response.status().is_success())
    }

    /// Creates rollouts, in order. Those without an id get one here, so that a lost answer may be asked for again.
    ///
    /// # Errors
    /// [`ClientError`]; the gateway creates all or none.
    pub async fn create_rollouts(&self, rollouts: &[RolloutCreate]) -> Result<Vec<Rollout>, ClientError> {
        let mut rollouts = rollouts.to_vec();
        for create in &mut rollouts {
            create.rollout_id.get_or_insert_with(|| uuid::Uuid::now_v7().simple().to_string());
        }
        self.post(self.url(&["api", "rollouts"]), &rollouts, Repeat::Freely).await
    }

    /// Rollouts in any of `states`, oldest first, at most `limit`, those after the rollout `after` only, those with
    /// `metadata.run_id == run_id` only.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn list_rollouts(
        &self,
        states: &[RolloutState],
        limit: usize,
        after: Option<&str>,
        run_id: Option<&str>,
    ) -> Result<Vec<Rollout>, ClientError> {
        let mut url = self.url(&["api", "rollouts"]);
        {
            let mut query = url.query_pairs_mut();
            for state in states {
                query.append_pair("state_in", state.as_str());
            }
            query.append_pair("limit", &limit.to_string());
            for (name, value) in [("after", after), ("run_id", run_id)] {
                if let Some(value) = value {
                    query.append_pair(name, value);
                }
            }
        }
        self.get(url).await
    }

    /// Rollouts that have ended, in that order, after the cursor `after` (0: from the first).
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn terminal(&self, after: u64, limit: usize) -> Result<TerminalPage, ClientError> {
        let mut url = self.url(&["api", "rollouts", "terminal"]);
        url.query_pairs_mut().append_pair("after", &after.to_string()).append_pair("limit", &limit.to_string());
        self.get(url).await
    }

    /// One rollout.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::is_not_found`] for an unknown id.
    pub async fn get_rollout(&self, rollout_id: &str) -> Result<RolloutDetail, ClientError> {
        self.get(self.url(&["api", "rollouts", rollout_id])).await
    }

    /// Changes a rollout's status. A conflict that only says that our own lost patch had arrived is no error.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::is_conflict`] for a step that the state machine refuses.
    pub async fn patch_rollout(&self, rollout_id: &str, status: &StatusPatch) -> Result<Rollout, ClientError> {
        let url = self.url(&["api", "rollouts", rollout_id]);
        let body = encode(&url, &StatusBody { status })?;
        let asked = status.state;
        self.patch(url, body, asked.is_some(), async || {
            let rollout = self.get_rollout(rollout_id).await?.rollout;
            Ok((asked == Some(rollout.status.state)).then_some(rollout))
        })
        .await
    }

    /// Removes a rollout and all its events. A rollout that is gone already is no error.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn delete_rollout(&self, rollout_id: &str) -> Result<(), ClientError> {
        self.delete(self.url(&["api", "rollouts", rollout_id])).await
    }

    /// Ends a rollout as failed («cancelled»); the controller kills its process. One that has ended stays as it is.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn cancel(&self, rollout_id: &str) -> Result<Rollout, ClientError> {
        self.post(self.url(&["api", "rollouts", rollout_id, "cancel"]), &json!({}), Repeat::Freely).await
    }

    /// Repeats a rollout that has ended: a new one with `retry_of`.
    ///
    /// # Errors
    /// [`ClientError`]. Not repeated when the answer was lost: there would be two.
    pub async fn retry(&self, rollout_id: &str) -> Result<Rollout, ClientError> {
        self.post(self.url(&["api", "rollouts", rollout_id, "retry"]), &json!({}), Repeat::OnlyUnheard).await
    }

    /// Appends an event to an attempt.
    ///
    /// # Errors
    /// [`ClientError`]. Not repeated when the answer was lost: there might be two.
    pub async fn post_event(
        &self,
        rollout_id: &str,
        attempt_id: &str,
        event: &EventCreate,
    ) -> Result<Event, ClientError> {
        let url = self.url(&["api", "rollouts", rollout_id, "attempt", attempt_id, "events"]);
        self.post(url, event, Repeat::OnlyUnheard).await
    }

    /// The events of a rollout's current attempt, oldest first; those of one type only where `event_type` is given.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn events(
        &self,
        rollout_id: &str,
        event_type: Option<&str>,
        format: EventFormat,
    ) -> Result<Vec<Event>, ClientError> {
        let mut url = self.url(&["api", "rollouts", rollout_id, "events"]);
        if let Some(event_type) = event_type {
            url.query_pairs_mut().append_pair("event_type", event_type);
        }
        if format == EventFormat::Triplet {
            url.query_pairs_mut().append_pair("format", "triplet");
        }
        self.get(url).await
    }

    /// The training sequences of an attempt (`None`: the one that counts), with the rewards.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn sequences(
        &self,
        rollout_id: &str,
        level: Level,
        attempt_id: Option<&str>,
    ) -> Result<SequencesResponse, ClientError> {
        let mut url = self.url(&["api", "rollouts", rollout_id, "sequences"]);
        {
            let mut query = url.query_pairs_mut();
            let level = match level {
                Level::Trajectory => "trajectory",
                Level::Transition => "transition",
            };
            query.append_pair("level", level);
            if let Some(attempt_id) = attempt_id {
                query.append_pair("attempt_id", attempt_id);
            }
        }
        self.get(url).await
    }

    /// Marks rollouts as trained on by the checkpoint of `step` of run `run_id`, which is on disk.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn mark_consumed(&self, run_id: &str, step: u64, rollout_ids: &[String]) -> Result<(), ClientError> {
        let body = json!({"run_id": run_id, "step": step, "rollout_ids": rollout_ids});
        let _: serde_json::Value = self.post(self.url(&["api", "rollouts", "consumed"]), &body, Repeat::Freely).await?;
        Ok(())
    }
}
