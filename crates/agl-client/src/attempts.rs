//! Attempts: granted with their keys, listed, patched.

use agl_core::attempt::AttemptPatch;
use bytes::Bytes;
use reqwest::{Method, Url};
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::error::ClientError;
use crate::transport::{Call, GatewayClient, Repeat, encode};
use crate::wire::{AttemptDetail, AttemptGrant};

impl GatewayClient {
    /// Makes the attempt `attempt_id` and its keys; asked again it gives the same ones.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn create_attempt(&self, rollout_id: &str, attempt_id: &str) -> Result<AttemptGrant, ClientError> {
        let url = self.url(&["api", "rollouts", rollout_id, "attempts"]);
        self.post(url, &json!({"attempt_id": attempt_id}), Repeat::Freely).await
    }

    /// All attempts of a rollout, oldest first.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn list_attempts(&self, rollout_id: &str) -> Result<Vec<AttemptDetail>, ClientError> {
        self.get(self.url(&["api", "rollouts", rollout_id, "attempts"])).await
    }

    /// Changes an attempt. A conflict that only says that our own lost patch had arrived is no error.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::is_conflict`] for a step that the state machine refuses.
    pub async fn patch_attempt(
        &self,
        rollout_id: &str,
        attempt_id: &str,
        patch: &AttemptPatch,
    ) -> Result<AttemptDetail, ClientError> {
        let url = self.url(&["api", "rollouts", rollout_id, "attempts", attempt_id]);
        let body = encode(&url, patch)?;
        let asked = patch.state;
        self.patch(url, body, asked.is_some(), async || {
            let attempts = self.list_attempts(rollout_id).await?;
            Ok(attempts
                .into_iter()
                .find(|detail| detail.attempt.attempt_id == attempt_id && asked == Some(detail.attempt.state)))
        })
        .await
    }

    /// Sends a patch. Where an answer was lost and the repeated patch conflicts, `arrived` looks whether the first one
    /// did what was asked. One that moves no state machine (`moves`) is the same sent twice, and is simply sent again.
    pub(crate) async fn patch<T: DeserializeOwned>(
        &self,
        url: Url,
        body: Bytes,
        moves: bool,
        arrived: impl AsyncFnOnce() -> Result<Option<T>, ClientError>,
    ) -> Result<T, ClientError> {
        let call = Call { method: Method::PATCH, url, body: Some(body), repeat: Repeat::Freely };
        if !moves {
            return self.decoded(call).await;
        }
        match self.send(&call).await {
            Ok(response) => match response.bytes().await {
                Ok(bytes) => serde_json::from_slice(&bytes)
                    .map_err(|source| ClientError::Decode { url: call.url.to_string(), source }),
                // Accepted, but the answer broke off: what it would have said can be read.
                Err(error) => match arrived().await? {
                    Some(state) => Ok(state),
                    None => Err(crate::transport::unreachable_at(&call.url, std::time::Instant::now(), error)),
                },
            },
            Err(failure) if failure.answer_lost && failure.error.is_conflict() => arrived().await?.ok_or(failure.error),
            Err(failure) => Err(failure.error),
        }
    }
}
