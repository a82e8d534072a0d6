//! The reference policy: parameters that stay as they are while the policy learns, for the divergence from them.

use std::path::Path;
use std::sync::PoisonError;

use super::Engine;
use crate::EngineError;
use crate::checkpoint::directory::read_weights;
use crate::model::weights::Weights;
use crate::train::rows::MaskedRow;

impl Engine {
    /// Keeps the current parameters as the reference policy. Costs nothing until the first update: an update makes new
    /// parameters and leaves those before it to whoever holds them.
    pub fn keep_reference(&self) {
        self.set_reference(self.inner.shared.policy().weights.clone());
    }

    /// Reads the reference policy from a model directory of the same shape, such as the one the run started from.
    ///
    /// # Errors
    /// Names the file or tensor that is missing or does not fit this model.
    pub fn load_reference(&self, dir: &Path) -> Result<(), EngineError> {
        let shared = &self.inner.shared;
        let tied = shared.decoder.config.tied_embeddings;
        self.set_reference(read_weights(dir, &shared.decoder.layout, tied, &shared.device)?);
        Ok(())
    }

    fn set_reference(&self, weights: Weights) {
        *self.inner.reference.lock().unwrap_or_else(PoisonError::into_inner) = Some(weights);
    }

    /// [`Engine::masked_log_probs`] under the reference policy.
    ///
    /// # Errors
    /// As there, and [`EngineError::NoReference`].
    pub fn reference_log_probs(&self, rows: &[MaskedRow], temperature: f32) -> Result<Vec<Vec<f32>>, EngineError> {
        let reference = self.inner.reference.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.log_probs_under(&reference.ok_or(EngineError::NoReference)?, rows, temperature)
    }
}
