//! The images that containers are made of.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bollard::models::ImageInspect;
use tokio::sync::Mutex;

use super::engine::Engine;
use super::refusal::Refusal;
use super::settings::Pull;
use crate::supervisor::record::NotStarted;

/// Between two tries at fetching an image whose registry is away.
const RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));

/// The images that containers are made of. Each is fetched by one attempt at a time.
#[derive(Debug)]
pub(super) struct Images {
    patience: Duration,
    turns: std::sync::Mutex<HashMap<String, Arc<Mutex<()>>>>,
}

impl Images {
    /// Images that may take so long to be fetched.
    pub(super) fn new(pull_timeout_seconds: f64) -> Self {
        let patience = Duration::try_from_secs_f64(pull_timeout_seconds).unwrap_or(Duration::MAX);
        Self { patience, turns: std::sync::Mutex::default() }
    }

    /// An image, fetched where that is wanted.
    pub(super) async fn have(&self, engine: &Engine, name: &str, pull: Pull) -> Result<ImageInspect, NotStarted> {
        let refused =
            |refusal: Refusal| NotStarted { permanent: refusal.is_permanent(), message: refusal.message().to_owned() };
        if pull != Pull::Always
            && let Some(image) = engine.image(name).await.map_err(refused)?
        {
            return Ok(image);
        }
        let missing = || "it is not there";
        if pull == Pull::Never {
            let message = format!("{}, and controller.container.pull = \"never\"", missing());
            return Err(NotStarted { message, permanent: true });
        }
        let turn = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            turns.entry(name.to_owned()).or_default().clone()
        };
        let waited = tokio::time::timeout(self.patience, turn.lock()).await;
        let Ok(_turn) = waited else {
            let message = format!("others waited for it for {} seconds already", self.patience.as_secs_f64());
            return Err(NotStarted { message, permanent: false });
        };
        if pull == Pull::Missing
            && let Some(image) = engine.image(name).await.map_err(refused)?
        {
            return Ok(image);
        }
        self.fetch(engine, name).await?;
        match engine.image(name).await.map_err(refused)? {
            Some(image) => Ok(image),
            None => Err(NotStarted { message: format!("{} after it was fetched", missing()), permanent: false }),
        }
    }

    async fn fetch(&self, engine: &Engine, name: &str) -> Result<(), NotStarted> {
        let mut wait = RETRY.0;
        let mut last = format!("its registry did not deliver it within {} seconds", self.patience.as_secs_f64());
        tracing::info!(image = name, "fetching an image");
        let fetched = async {
            loop {
                match engine.pull(name).await {
                    Ok(()) => return Ok(()),
                    Err(refusal) if refusal.is_no_such_image() => {
                        return Err(NotStarted { message: refusal.message().to_owned(), permanent: true });
                    }
                    Err(refusal) => {
                        tracing::warn!(image = name, "it cannot be fetched, trying again: {}", refusal.message());
                        refusal.message().clone_into(&mut last);
                        tokio::time::sleep(wait).await;
                        wait = (wait * 2).min(RETRY.1);
                    }
                }
            }
        };
        match tokio::time::timeout(self.patience, fetched).await {
            Ok(fetched) => fetched,
            Err(_) => Err(NotStarted { message: last, permanent: false }),
        }
    }
}
