//! The engine: one policy, shared by a sampler and a trainer.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use burn::tensor::Device;
use tokio::sync::oneshot;

use crate::EngineError;
use crate::chat::tokenizer::ChatTokenizer;
use crate::checkpoint::directory::{ModelFiles, read_optimizer, read_weights, write_optimizer};
use crate::checkpoint::tensors::SaveDtype;
use crate::config::{EngineConfig, LossConfig, OptimConfig, check_training_temperature};
use crate::model::forward::Decoder;
use crate::model::weights::Weights;
use crate::sample::request::{GenerateOutput, GenerateRequest};
use crate::sample::sampler::{self, Job, Message};
use crate::train::adamw::{self, OptimizerState};
use crate::train::gradient;
use crate::train::rows::{MaskedRow, TrainRow, check_ids};

mod reference;

/// A policy model with its sampler and its optimiser. Cloning gives another handle on the same one; the sampler thread ends
/// with the last handle.
///
/// Sampling and training share the parameters: [`Engine::update`] puts new ones in place, and the sampler uses them from its
/// next token on. Answers in progress go on with the keys and values they have; the prefix cache is emptied.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    name: String,
    sampler: Sender<Message>,
    /// Requests without a seed so far.
    unseeded: AtomicU64,
    /// Held through a whole update: there is one trainer at a time.
    optimizer: Mutex<OptimizerState>,
    /// Parameters that no update changes: see [`Engine::keep_reference`].
    reference: Mutex<Option<Weights>>,
}

/// What the sampler thread and the handles have in common.
pub(crate) struct Shared {
    pub config: EngineConfig,
    pub max_model_len: usize,
    pub decoder: Decoder,
    pub tokenizer: ChatTokenizer,
    pub device: Device,
    pub counters: Counters,
    files: ModelFiles,
    /// Replaced, never changed: whoever took one keeps it as it was. A plain lock, held for the time of copying a pointer.
    policy: RwLock<Arc<Policy>>,
}

impl Shared {
    pub(crate) fn policy(&self) -> Arc<Policy> {
        self.policy.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn replace_policy(&self, change: impl FnOnce(&Policy) -> Policy) {
        let mut current = self.policy.write().unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(Policy { generation: current.generation + 1, ..change(&current) });
    }
}

/// Parameters and the number they go by.
pub(crate) struct Policy {
    pub weights: Weights,
    pub version: u64,
    /// Counts the policies there were, unlike the version: several updates may pass under one version.
    pub generation: u64,
}

/// What the sampler has done since it started.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    sampled_tokens: AtomicU64,
    prompt_tokens: AtomicU64,
    cached_prompt_tokens: AtomicU64,
    busy_micros: AtomicU64,
}

impl Counters {
    pub(crate) fn add_sampled_tokens(&self, count: usize) {
        self.sampled_tokens.fetch_add(count as u64, Ordering::Relaxed);
    }

    pub(crate) fn add_prompt_tokens(&self, processed: usize, cached: usize) {
        self.prompt_tokens.fetch_add(processed as u64, Ordering::Relaxed);
        self.cached_prompt_tokens.fetch_add(cached as u64, Ordering::Relaxed);
    }

    pub(crate) fn add_busy(&self, time: Duration) {
        self.busy_micros.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }
}

/// Totals of the sampler since the engine was made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerTotals {
    /// Tokens sampled.
    pub sampled_tokens: u64,
    /// Prompt tokens processed.
    pub prompt_tokens: u64,
    /// Prompt tokens that were not, because the prefix cache had them.
    pub cached_prompt_tokens: u64,
    /// Time in which at least one request was being worked on.
    pub busy: Duration,
}

/// What one update did. Means are over trained tokens.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct UpdateStats {
    /// The loss before the update (a sum: the rows' weights normalise it).
    pub loss: f64,
    /// Global norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Share of tokens whose clipped branch was active.
    pub clip_fraction: f64,
    /// Share of tokens whose dual clip was active.
    pub clip_fraction_lower: f64,
    /// Mean of r − 1 − log r: estimates KL(π_old ‖ π).
    pub approx_kl: f64,
    /// Mean of r = π/π_old.
    pub ratio_mean: f64,
    /// Largest r.
    pub ratio_max: f64,
    /// (Σ r)² / (N Σ r²): 1 where all r are equal.
    pub ratio_ess: f64,
    /// Mean estimate of KL(π ‖ π_ref); 0 without a reference.
    pub ref_kl: f64,
    /// Mean entropy of the whole distribution, in nats, at the loss's temperature.
    pub entropy: f64,
    /// Tokens in the rows.
    pub tokens: usize,
    /// Tokens with a loss.
    pub trained_tokens: usize,
    /// Wall time.
    pub seconds: f64,
}

impl Engine {
    /// Loads a model directory in the layout of Hugging Face: `config.json`, `model.safetensors` (or several files with an
    /// index), `tokenizer.json`, and where present `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json`.
    ///
    /// # Errors
    /// Names the file, key or tensor that is missing or wrong.
    pub fn load(dir: &Path, config: EngineConfig) -> Result<Self, EngineError> {
        let files = ModelFiles::read(&dir.join("config.json"), dir)?;
        Self::assemble(files, dir, config, |decoder, device| {
            read_weights(dir, &decoder.layout, decoder.config.tied_embeddings, device)
        })
    }

    /// A model with random parameters: sizes from `config_json`, tokenizer and chat template from `tokenizer_dir`.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn init(
        config_json: &Path,
        tokenizer_dir: &Path,
        seed: u64,
        config: EngineConfig,
    ) -> Result<Self, EngineError> {
        let files = ModelFiles::read(config_json, tokenizer_dir)?;
        Self::assemble(files, tokenizer_dir, config, |decoder, device| {
            Ok(Weights::random(&decoder.config, decoder.layout.clone(), seed, device))
        })
    }

    fn assemble(
        files: ModelFiles,
        dir: &Path,
        config: EngineConfig,
        weights: impl FnOnce(&Decoder, &Device) -> Result<Weights, EngineError>,
    ) -> Result<Self, EngineError> {
        config.check()?;
        let decoder = Decoder::new(files.model_config()?);
        let tokenizer = ChatTokenizer::new(&files, &decoder.config.eos_token_ids)?;
        // Added tokens may lie beyond what the model knows, as the image marker of Gemma's text models does; a prompt that
        // contains one is refused.
        if tokenizer.trained_vocab_size() > decoder.config.vocab_size {
            return Err(EngineError::Model {
                path: dir.join("tokenizer.json"),
                what: format!(
                    "it has {} tokens, but config.json gives the model a `vocab_size` of {}; they do not belong together",
                    tokenizer.trained_vocab_size(),
                    decoder.config.vocab_size
                ),
            });
        }
        let device = Device::flex();
        let weights = weights(&decoder, &device)?;
        tracing::info!(model = %dir.display(), parameters = weights.parameter_count(), "model ready");
        let name = config.served_model_name.clone().unwrap_or_else(|| directory_name(dir));
        let max_model_len = config.max_model_len.unwrap_or(usize::MAX).min(decoder.config.max_positions);
        let optimizer = Mutex::new(OptimizerState::new(&weights));
        let shared = Arc::new(Shared {
            config,
            max_model_len,
            decoder,
            tokenizer,
            device,
            counters: Counters::default(),
            files,
            policy: RwLock::new(Arc::new(Policy { weights, version: 0, generation: 0 })),
        });
        let (sampler, receiver) = std::sync::mpsc::channel();
        sampler::spawn(shared.clone(), receiver).map_err(EngineError::NoSampler)?;
        let reference = Mutex::new(None);
        Ok(Self { inner: Arc::new(Inner { shared, name, sampler, unseeded: AtomicU64::new(0), optimizer, reference }) })
    }

    /// Name under which the server lists the model.
    #[must_use]
    pub fn model_name(&self) -> &str {
        &self.inner.name
    }

    /// The tokenizer with the chat template.
    #[must_use]
    pub fn tokenizer(&self) -> &ChatTokenizer {
        &self.inner.shared.tokenizer
    }

    /// Longest prompt plus answer, in tokens.
    #[must_use]
    pub fn max_model_len(&self) -> usize {
        self.inner.shared.max_model_len
    }

    /// Number of parameters.
    #[must_use]
    pub fn parameter_count(&self) -> usize {
        self.inner.shared.policy().weights.parameter_count()
    }

    /// Version under which sampled tokens are recorded.
    #[must_use]
    pub fn policy_version(&self) -> u64 {
        self.inner.shared.policy().version
    }

    /// Names the current parameters. [`Engine::update`] leaves the version as it is: one training step may make several
    /// updates, and only the trainer knows which versions were used before.
    pub fn set_policy_version(&self, version: u64) {
        self.inner.shared.replace_policy(|policy| Policy { weights: policy.weights.clone(), version, ..*policy });
    }

    /// What the sampler has done so far.
    #[must_use]
    pub fn sampler_totals(&self) -> SamplerTotals {
        let counters = &self.inner.shared.counters;
        SamplerTotals {
            sampled_tokens: counters.sampled_tokens.load(Ordering::Relaxed),
            prompt_tokens: counters.prompt_tokens.load(Ordering::Relaxed),
            cached_prompt_tokens: counters.cached_prompt_tokens.load(Ordering::Relaxed),
            busy: Duration::from_micros(counters.busy_micros.load(Ordering::Relaxed)),
        }
    }

    /// One optimiser step over `rows`: gradients of micro-batches are summed, clipped, and applied by AdamW. Blocks for as
    /// long as that takes; the sampler goes on meanwhile and has the new parameters from its next token on.
    ///
    /// The learning rate is `optim.lr` itself: which step of its run this is, the caller knows ([`OptimConfig::lr_at`]).
    ///
    /// # Errors
    /// A setting out of range, a malformed row, nothing to train, or a loss or gradient that is not finite; the parameters
    /// and the optimiser state are then unchanged.
    pub fn update(
        &self,
        rows: &[TrainRow],
        loss: &LossConfig,
        optim: &OptimConfig,
    ) -> Result<UpdateStats, EngineError> {
        let started = Instant::now();
        loss.check()?;
        optim.check()?;
        let shared = &self.inner.shared;
        let model = &shared.decoder.config;
        for (number, row) in rows.iter().enumerate() {
            row.check(number, model.vocab_size, model.max_positions)?;
            if loss.kl_loss_coef > 0.0 && row.ref_log_probs.is_none() {
                let what = "`ref_log_probs` is missing, but the loss has a `kl_loss_coef` above 0".to_owned();
                return Err(EngineError::Row { row: number, what });
            }
        }
        let mut optimizer = self.inner.optimizer.lock().unwrap_or_else(PoisonError::into_inner);
        // A sampler that has stopped says so to those who ask it for answers.
        drop(self.inner.sampler.send(Message::ForgetPrefixes));
        let weights = shared.policy().weights.clone();
        let (gradients, sums) =
            gradient::accumulate(&shared.decoder, &weights, rows, loss, shared.config.micro_batch_tokens);
        if sums.trained == 0 {
            return Err(EngineError::NothingToTrain { rows: rows.len() });
        }
        let grad_norm = adamw::global_norm(&gradients);
        for (what, value) in [("the loss", sums.loss), ("the norm of its gradient", grad_norm)] {
            if !value.is_finite() {
                return Err(EngineError::NotFinite { what, value });
            }
        }
        let (weights, state) = adamw::step(&weights, &optimizer, gradients, grad_norm, optim);
        *optimizer = state;
        shared.replace_policy(|policy| Policy { weights, ..*policy });
        let mean = |sum: f64| sum / sums.trained as f64;
        Ok(UpdateStats {
            loss: sums.loss,
            grad_norm,
            clip_fraction: mean(sums.clipped as f64),
            clip_fraction_lower: mean(sums.bounded as f64),
            approx_kl: mean(sums.kl),
            ratio_mean: mean(sums.ratio),
            ratio_max: sums.ratio_max,
            ratio_ess: sums.ratio * sums.ratio / (sums.trained as f64 * sums.ratio_square),
            ref_kl: mean(sums.ref_kl),
            entropy: mean(sums.entropy),
            tokens: rows.iter().map(|row| row.ids.len()).sum(),
            trained_tokens: sums.trained,
            seconds: started.elapsed().as_secs_f64(),
        })
    }

    /// log-softmax(logits / temperature) of every token of every row given those before it; 0 at position 0.
    ///
    /// # Errors
    /// A token outside the vocabulary, a row too long, or a temperature that is not above 0.
    pub fn log_probs(&self, rows: &[Vec<u32>], temperature: f32) -> Result<Vec<Vec<f32>>, EngineError> {
        let rows: Vec<MaskedRow> = rows.iter().map(|ids| MaskedRow::whole(ids.clone())).collect();
        self.masked_log_probs(&rows, temperature)
    }

    /// [`Engine::log_probs`] of the tokens asked for, 0 elsewhere: the output layer is computed for these alone.
    ///
    /// # Errors
    /// As [`Engine::log_probs`], and a mask that does not belong to its row.
    pub fn masked_log_probs(&self, rows: &[MaskedRow], temperature: f32) -> Result<Vec<Vec<f32>>, EngineError> {
        self.log_probs_under(&self.inner.shared.policy().weights, rows, temperature)
    }

    fn log_probs_under(
        &self,
        weights: &Weights,
        rows: &[MaskedRow],
        temperature: f32,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        check_training_temperature(temperature)?;
        let shared = &self.inner.shared;
        for (number, row) in rows.iter().enumerate() {
            row.check(number, shared.decoder.config.vocab_size, shared.decoder.config.max_positions)?;
        }
        Ok(gradient::log_probs(&shared.decoder, weights, rows, temperature, shared.config.micro_batch_tokens))
    }

    /// Logits [positions, vocab] of every position of `ids`, for checks against other implementations.
    ///
    /// # Errors
    /// A token outside the vocabulary or too many of them.
    pub fn logits(&self, ids: &[u32]) -> Result<Vec<Vec<f32>>, EngineError> {
        let shared = &self.inner.shared;
        check_ids(0, ids, shared.decoder.config.vocab_size, shared.decoder.config.max_positions)?;
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let weights = &shared.policy().weights;
        let hidden = shared.decoder.padded(weights, ids, 1, ids.len(), |_, _| {});
        let logits = crate::ops::inference::host_values(shared.decoder.logits(weights, hidden));
        Ok(logits.chunks_exact(shared.decoder.config.vocab_size).map(<[f32]>::to_vec).collect())
    }

    /// Writes a model directory, whole or not at all, that `transformers` and vLLM load; an existing one is replaced.
    ///
    /// # Errors
    /// [`EngineError::Write`] naming the file.
    pub fn save(&self, dir: &Path) -> Result<(), EngineError> {
        self.save_as(dir, SaveDtype::F32)
    }

    /// [`Engine::save`] in another number format.
    ///
    /// # Errors
    /// As [`Engine::save`].
    pub fn save_as(&self, dir: &Path, dtype: SaveDtype) -> Result<(), EngineError> {
        self.inner.shared.files.write(dir, &self.inner.shared.policy().weights, dtype)
    }

    /// Writes the optimiser's moments and step number into a directory of their own.
    ///
    /// # Errors
    /// [`EngineError::Write`] naming the file.
    pub fn save_optimizer(&self, dir: &Path) -> Result<(), EngineError> {
        let state = self.inner.optimizer.lock().unwrap_or_else(PoisonError::into_inner).clone();
        write_optimizer(dir, &self.inner.shared.decoder.layout, &state)
    }

    /// Puts back what [`Engine::save_optimizer`] wrote. With the parameters saved at the same time, training goes on to the
    /// bit as if it had not been interrupted.
    ///
    /// # Errors
    /// Names the file and what in it does not belong to this model.
    pub fn load_optimizer(&self, dir: &Path) -> Result<(), EngineError> {
        let state = read_optimizer(dir, &self.inner.shared.decoder.layout, &self.inner.shared.device)?;
        *self.inner.optimizer.lock().unwrap_or_else(PoisonError::into_inner) = state;
        Ok(())
    }

    /// Continues a prompt. Dropping the future takes the answer out of the batch at the next token.
    ///
    /// # Errors
    /// A request out of range, a prompt too long, or a sampler that has stopped.
    pub async fn generate(&self, request: GenerateRequest) -> Result<GenerateOutput, EngineError> {
        let inner = &self.inner;
        request.sampling.check(inner.shared.decoder.config.vocab_size)?;
        let limit = self.check_prompt(&request.prompt)?;
        let limit = request.sampling.max_tokens.unwrap_or(limit).min(limit);
        let seed = request.sampling.seed.unwrap_or_else(|| {
            let number = inner.unseeded.fetch_add(1, Ordering::Relaxed);
            inner.shared.config.seed.wrapping_add(number.wrapping_mul(0x9E37_79B9_7F4A_7C15))
        });
        let (reply, answer) = oneshot::channel();
        let job = Box::new(Job { request, seed, limit, reply });
        inner.sampler.send(Message::Generate(job)).map_err(|_| EngineError::SamplerStopped)?;
        answer.await.map_err(|_| EngineError::SamplerStopped)?
    }

    /// How many tokens may follow a prompt.
    fn check_prompt(&self, prompt: &[u32]) -> Result<usize, EngineError> {
        let shared = &self.inner.shared;
        let wrong = |what: String| EngineError::Request { param: Some("prompt"), what };
        if prompt.is_empty() {
            return Err(wrong("the prompt has no tokens; at least one is needed to continue from".to_owned()));
        }
        if let Some(id) = prompt.iter().find(|id| **id as usize >= shared.decoder.config.vocab_size) {
            let vocab = shared.decoder.config.vocab_size;
            return Err(wrong(format!("token id {id} is outside the vocabulary of {vocab}")));
        }
        match shared.max_model_len.checked_sub(prompt.len()) {
            None | Some(0) => {
                Err(EngineError::PromptTooLong { prompt: prompt.len(), max_model_len: shared.max_model_len })
            }
            Some(rest) => Ok(rest),
        }
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("model", &self.inner.name)
            .field("policy_version", &self.policy_version())
            .finish()
    }
}

fn directory_name(dir: &Path) -> String {
    let absolute = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    absolute.file_name().map_or_else(|| "policy".to_owned(), |name| name.to_string_lossy().into_owned())
}
