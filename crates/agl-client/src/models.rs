//! Model servers, and the pause of the proxy in front of them.

use std::time::Duration;

use serde_json::json;

use crate::error::ClientError;
use crate::transport::{GatewayClient, Repeat};
use crate::wire::{Model, ProxyState};

impl GatewayClient {
    /// Registers model servers, or renews them.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn register_models(&self, models: &[Model]) -> Result<Vec<Model>, ClientError> {
        self.post(self.url(&["api", "models"]), &models, Repeat::Freely).await
    }

    /// All registered model servers.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn list_models(&self) -> Result<Vec<Model>, ClientError> {
        self.get(self.url(&["api", "models"])).await
    }

    /// Removes the policy's servers, all of them.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn delete_models(&self) -> Result<(), ClientError> {
        self.delete(self.url(&["api", "models"])).await
    }

    /// Removes one server.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn delete_model(&self, model: &str, endpoint: &str) -> Result<(), ClientError> {
        let mut url = self.url(&["api", "models"]);
        url.query_pairs_mut().append_pair("model", model).append_pair("endpoint", endpoint);
        self.delete(url).await
    }

    /// Makes the proxy hold new calls until `owner` resumes, or `lease` has passed.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::is_conflict`] while another owner's pause lasts.
    pub async fn pause(&self, owner: &str, lease: Duration, reason: &str) -> Result<ProxyState, ClientError> {
        let body = json!({"owner": owner, "lease_seconds": lease.as_secs_f64().ceil() as u64, "reason": reason});
        self.post(self.url(&["proxy", "pause"]), &body, Repeat::Freely).await
    }

    /// Ends the pause of `owner`; of anybody where `None`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn resume(&self, owner: Option<&str>) -> Result<ProxyState, ClientError> {
        let body = owner.map_or_else(|| json!({}), |owner| json!({"owner": owner}));
        self.post(self.url(&["proxy", "resume"]), &body, Repeat::Freely).await
    }

    /// Whether the proxy is paused, and how many calls are at the upstream.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn proxy_state(&self) -> Result<ProxyState, ClientError> {
        self.get(self.url(&["proxy", "state"])).await
    }
}
