//! Which inference server a call goes to.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use agl_store::{RegisteredModel, SharedStore, StoreError};
use sha2::{Digest, Sha256};
use tokio::sync::watch;

/// The registered servers: a copy of what the store holds, and whoever waits for one.
pub(crate) struct Servers {
    /// By model, then endpoint.
    known: Mutex<Vec<RegisteredModel>>,
    changed: watch::Sender<()>,
    /// Store and copy change together: one change at a time.
    changing: tokio::sync::Mutex<SharedStore>,
}

impl Servers {
    pub(crate) async fn load(store: SharedStore) -> Result<Self, StoreError> {
        let known = Mutex::new(store.models().await?);
        Ok(Self { known, changed: watch::Sender::new(()), changing: tokio::sync::Mutex::new(store) })
    }

    fn known(&self) -> MutexGuard<'_, Vec<RegisteredModel>> {
        // Replaced as a whole: never half changed.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn list(&self) -> Vec<RegisteredModel> {
        self.known().clone()
    }

    pub(crate) async fn register(&self, models: Vec<RegisteredModel>) -> Result<(), StoreError> {
        let store = self.changing.lock().await;
        store.put_models(models).await?;
        self.reload(&store).await
    }

    pub(crate) async fn remove(&self, model: &str, endpoint: Option<&str>) -> Result<(), StoreError> {
        let store = self.changing.lock().await;
        store.delete_models(model, endpoint).await?;
        self.reload(&store).await
    }

    /// Reads anew what another gateway may have changed.
    pub(crate) async fn refresh(&self) -> Result<(), StoreError> {
        let store = self.changing.lock().await;
        self.reload(&store).await
    }

    async fn reload(&self, store: &SharedStore) -> Result<(), StoreError> {
        let models = store.models().await?;
        *self.known() = models;
        self.changed.send_replace(());
        Ok(())
    }

    /// The server of this rollout. Each rollout stays with one server while the registrations stay: its prefix cache then
    /// holds the rollout's context.
    pub(crate) fn pick(&self, model: &str, rollout_id: &str) -> Option<RegisteredModel> {
        let known = self.known();
        let servers: Vec<&RegisteredModel> = known.iter().filter(|server| server.model == model).collect();
        let index = pin(rollout_id).checked_rem(servers.len() as u64)?;
        servers.get(usize::try_from(index).ok()?).map(|server| (*server).clone())
    }

    /// As [`Self::pick`], but waits for a registration.
    pub(crate) async fn wait_for(&self, model: &str, rollout_id: &str, patience: Duration) -> Option<RegisteredModel> {
        let mut changed = self.changed.subscribe();
        let wait = async {
            loop {
                if let Some(server) = self.pick(model, rollout_id) {
                    return Some(server);
                }
                changed.changed().await.ok()?;
            }
        };
        tokio::time::timeout(patience, wait).await.ok().flatten()
    }
}

/// The first eight bytes of the id's SHA-256, as the original pins.
fn pin(rollout_id: &str) -> u64 {
    let digest: [u8; 32] = Sha256::digest(rollout_id.as_bytes()).into();
    digest.first_chunk::<8>().map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use agl_store::MemoryStore;

    use super::*;

    fn server(model: &str, endpoint: &str) -> RegisteredModel {
        RegisteredModel::new(model, endpoint)
    }

    #[tokio::test]
    async fn a_rollout_is_pinned_where_the_original_pins_it() {
        let servers = Servers::load(Arc::new(MemoryStore::new())).await.unwrap();
        servers
            .register(vec![server("m", "c"), server("m", "a"), server("m", "b"), server("other", "0")])
            .await
            .unwrap();
        // int.from_bytes(hashlib.sha256(b"rollout-1").digest()[:8], "big") % 3, and so on.
        let pinned: Vec<_> = ["rollout-1", "rollout-2", "rollout-3", "rollout-4"]
            .iter()
            .map(|id| servers.pick("m", id).unwrap().endpoint)
            .collect();
        assert_eq!(pinned, PINNED_BY_THE_ORIGINAL);
        assert!(servers.pick("unknown", "rollout-1").is_none());
    }

    const PINNED_BY_THE_ORIGINAL: [&str; 4] = ["b", "a", "b", "b"];

    #[tokio::test]
    async fn a_call_waits_for_a_registration() {
        let servers = Arc::new(Servers::load(Arc::new(MemoryStore::new())).await.unwrap());
        let waiting = tokio::spawn({
            let servers = Arc::clone(&servers);
            async move { servers.wait_for("m", "r", Duration::from_secs(30)).await }
        });
        tokio::task::yield_now().await;
        servers.register(vec![server("m", "a")]).await.unwrap();
        assert_eq!(waiting.await.unwrap().unwrap().endpoint, "a");
        servers.remove("m", None).await.unwrap();
        assert!(servers.wait_for("m", "r", Duration::from_millis(5)).await.is_none());
    }
}
