//! One answer being sampled.

use rand_chacha::ChaCha8Rng;
use tokio::sync::oneshot;

use super::adjust::Adjustment;
use super::pick::{Pick, pick};
use super::prefixes::shared;
use super::request::{FinishReason, GenerateOutput, GenerateRequest, StopReason};
use crate::EngineError;
use crate::chat::tokenizer::ChatTokenizer;
use crate::model::extend::Suffix;

/// Where an answer goes; closed when the caller has gone.
pub(crate) type Reply = oneshot::Sender<Result<GenerateOutput, EngineError>>;

/// Where in the cache a sequence lives, and what was there before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub slot: usize,
    /// Tokens of the prompt whose keys and values another sequence had computed.
    pub cached: usize,
    /// The policy it began under, and that computed those.
    pub generation: u64,
}

/// An answer in the running batch.
pub(super) struct Sequence {
    request: GenerateRequest,
    rng: ChaCha8Rng,
    adjustment: Option<Adjustment>,
    /// Tokens after which the answer ends, whatever they are.
    limit: usize,
    place: Place,
    pub reply: Reply,
    ids: Vec<u32>,
    log_probs: Vec<f32>,
    top: Vec<Vec<(u32, f32)>>,
    versions: Vec<u64>,
    end: Option<(FinishReason, Option<StopReason>)>,
}

impl Sequence {
    pub(super) fn new(request: GenerateRequest, rng: ChaCha8Rng, limit: usize, place: Place, reply: Reply) -> Self {
        Self {
            adjustment: Adjustment::new(&request.sampling, &request.prompt),
            request,
            rng,
            limit,
            place,
            reply,
            ids: Vec::new(),
            log_probs: Vec::new(),
            top: Vec::new(),
            versions: Vec::new(),
            end: None,
        }
    }

    pub(super) fn prompt(&self) -> &[u32] {
        &self.request.prompt
    }

    pub(super) fn slot(&self) -> usize {
        self.place.slot
    }

    pub(super) fn cached(&self) -> usize {
        self.place.cached
    }

    pub(super) fn generation(&self) -> u64 {
        self.place.generation
    }

    /// What of the prompt is to be processed.
    pub(super) fn suffix(&self) -> Suffix<'_> {
        let Place { slot, cached: start, .. } = self.place;
        Suffix { slot, start, ids: &self.request.prompt[start..] }
    }

    /// Sampled tokens whose keys and values are computed: all but the newest.
    fn processed(&self) -> &[u32] {
        &self.ids[..self.ids.len().saturating_sub(1)]
    }

    /// The tokens whose keys and values its slot holds, once its prompt is processed.
    pub(super) fn held(&self) -> Vec<u32> {
        [&self.request.prompt, self.processed()].concat()
    }

    /// How many of those `prompt` may take over.
    pub(super) fn shared_with(&self, prompt: &[u32]) -> usize {
        let len = shared(&self.request.prompt, prompt);
        if len < self.request.prompt.len() { len } else { len + shared(self.processed(), &prompt[len..]) }
    }

    /// The newest token and its position, which the next step feeds to the model.
    pub(super) fn last(&self) -> Option<(u32, usize)> {
        self.ids.last().map(|id| (*id, self.request.prompt.len() + self.ids.len() - 1))
    }

    pub(super) fn is_finished(&self) -> bool {
        self.end.is_some()
    }

    /// Draws the next token from its logits and decides whether it is the last.
    pub(super) fn advance(&mut self, logits: &[f32], version: u64, tokenizer: &ChatTokenizer) {
        let adjusted = self.adjustment.as_ref().map(|adjustment| adjustment.apply(logits));
        let Pick { id, log_prob, top } = pick(logits, adjusted.as_deref(), &self.request.sampling, &mut self.rng);
        if let Some(adjustment) = &mut self.adjustment {
            adjustment.count(id);
        }
        self.ids.push(id);
        self.log_probs.push(log_prob);
        self.top.push(top);
        self.versions.push(version);
        self.end = self.ends_with(id, tokenizer);
    }

    fn ends_with(&self, id: u32, tokenizer: &ChatTokenizer) -> Option<(FinishReason, Option<StopReason>)> {
        let sampling = &self.request.sampling;
        if !sampling.ignore_eos && tokenizer.eos_token_ids().contains(&id) {
            return Some((FinishReason::Stop, None));
        }
        if sampling.stop_token_ids.contains(&id) {
            return Some((FinishReason::Stop, Some(StopReason::Token(id))));
        }
        if let Some(text) = self.stop_text(tokenizer) {
            return Some((FinishReason::Stop, Some(StopReason::Text(text))));
        }
        (self.ids.len() >= self.limit).then_some((FinishReason::Length, None))
    }

    /// The stop text that the newest token completes.
    fn stop_text(&self, tokenizer: &ChatTokenizer) -> Option<String> {
        let longest = self.request.sampling.stop.iter().map(String::len).max()?;
        // A token holds at least a byte of text, special ones aside: so many tokens cover the longest stop text, and a few
        // more keep a character that straddles the cut from hiding it.
        let window = &self.ids[self.ids.len().saturating_sub(longest + 8)..];
        let text = tokenizer.decode(window, true).ok()?;
        self.request.sampling.stop.iter().find(|stop| text.contains(stop.as_str())).cloned()
    }

    /// Sends the answer to whoever asked.
    pub(super) fn finish(self, tokenizer: &ChatTokenizer) {
        let (finish_reason, stop_reason) = self.end.unwrap_or((FinishReason::Length, None));
        let ended_by_token = finish_reason == FinishReason::Stop && !matches!(stop_reason, Some(StopReason::Text(_)));
        let said = &self.ids[..self.ids.len() - usize::from(ended_by_token)];
        let output = tokenizer.decode(said, true).map(|mut text| {
            if let Some(StopReason::Text(stop)) = &stop_reason
                && let Some(at) = text.find(stop.as_str())
            {
                text.truncate(at);
            }
            GenerateOutput {
                token_ids: self.ids,
                log_probs: self.log_probs,
                top_log_probs: self.top,
                policy_versions: self.versions,
                text,
                finish_reason,
                stop_reason,
                cached_tokens: self.place.cached,
            }
        });
        // The caller may have gone in the meantime; then there is nobody to tell.
        drop(self.reply.send(output));
    }
}
