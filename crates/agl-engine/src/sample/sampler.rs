//! The sampler thread: it alone owns the cache and the running batch.
//!
//! Each turn of its loop is a token boundary: callers that have gone leave, waiting requests join (their prompts are
//! processed, at most `max_prefill_tokens` of them), the newest policy is taken, and every sequence advances by one token.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use burn::tensor::Tensor;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rayon::prelude::*;

use super::request::GenerateRequest;
use super::sequence::{Reply, Sequence};
use crate::engine::{Policy, Shared};
use crate::model::cache::{KvCache, Prompt, Step};
use crate::ops::inference::host_values;

/// A request on its way to the sampler, already checked.
pub(crate) struct Job {
    pub request: GenerateRequest,
    /// Seed of the request's own generator: its draws do not depend on what else is in the batch.
    pub seed: u64,
    /// Most tokens it may sample.
    pub limit: usize,
    pub reply: Reply,
}

/// Runs until every sender of `jobs` is gone and nothing is left to do.
pub(crate) fn run(shared: &Shared, jobs: &Receiver<Job>) {
    let mut sampler = Sampler {
        shared,
        cache: KvCache::new(&shared.decoder.config, shared.device.clone()),
        waiting: VecDeque::new(),
        running: Vec::new(),
    };
    while sampler.receive(jobs) {
        let started = Instant::now();
        sampler.drop_abandoned();
        let policy = shared.policy();
        sampler.admit(&policy);
        sampler.step(&policy);
        shared.counters.add_busy(started.elapsed());
    }
}

struct Sampler<'a> {
    shared: &'a Shared,
    cache: KvCache,
    waiting: VecDeque<Job>,
    running: Vec<Sequence>,
}

impl Sampler<'_> {
    /// Takes in what has arrived, waiting only if there is nothing else to do; false when there never will be.
    fn receive(&mut self, jobs: &Receiver<Job>) -> bool {
        if self.running.is_empty() && self.waiting.is_empty() {
            match jobs.recv() {
                Ok(job) => self.waiting.push_back(job),
                Err(_) => return false,
            }
        }
        loop {
            match jobs.try_recv() {
                Ok(job) => self.waiting.push_back(job),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return !(self.running.is_empty() && self.waiting.is_empty()),
            }
        }
    }

    fn drop_abandoned(&mut self) {
        self.waiting.retain(|job| !job.reply.is_closed());
        let cache = &mut self.cache;
        self.running.retain(|sequence| {
            let gone = sequence.reply.is_closed();
            if gone {
                cache.release(sequence.slot);
            }
            !gone
        });
    }

    /// Lets waiting requests join in order of arrival and samples their first tokens.
    fn admit(&mut self, policy: &Policy) {
        let mut joining: Vec<Sequence> = Vec::new();
        let mut longest = 0;
        while let Some(job) = self.waiting.front() {
            longest = longest.max(job.request.prompt.len());
            let full = self.running.len() + joining.len() >= self.shared.config.max_batch_size;
            let heavy = !joining.is_empty() && (joining.len() + 1) * longest > self.shared.config.max_prefill_tokens;
            if full || heavy {
                break;
            }
            let Some(Job { request, seed, limit, reply }) = self.waiting.pop_front() else { break };
            let rng = ChaCha8Rng::seed_from_u64(seed);
            joining.push(Sequence::new(request, rng, limit, self.cache.take_slot(), reply));
        }
        if joining.is_empty() {
            return;
        }
        let prompts: Vec<Prompt<'_>> = joining.iter().map(|s| Prompt { slot: s.slot, ids: s.prompt() }).collect();
        self.shared.counters.add_prompt_tokens(prompts.iter().map(|p| p.ids.len()).sum());
        let hidden = self.cache.prefill(&self.shared.decoder, &policy.weights, &prompts);
        self.draw(&mut joining, hidden, policy);
        self.running.append(&mut joining);
        self.deliver();
    }

    fn step(&mut self, policy: &Policy) {
        let steps: Vec<Step> = self
            .running
            .iter()
            .filter_map(|s| s.last().map(|(id, position)| Step { slot: s.slot, id, position }))
            .collect();
        if steps.is_empty() {
            return;
        }
        let hidden = self.cache.step(&self.shared.decoder, &policy.weights, &steps);
        let mut running = std::mem::take(&mut self.running);
        self.draw(&mut running, hidden, policy);
        self.running = running;
        self.deliver();
    }

    /// One token for each sequence from its hidden state.
    fn draw(&self, sequences: &mut [Sequence], hidden: Tensor<2>, policy: &Policy) {
        let logits = host_values(self.shared.decoder.logits(&policy.weights, hidden));
        let vocab = self.shared.decoder.config.vocab_size;
        self.shared.counters.add_sampled_tokens(sequences.len());
        // Below about 64 Ki logits one thread is done before another has woken up.
        sequences
            .par_iter_mut()
            .zip(logits.par_chunks_exact(vocab))
            .with_min_len(65_536 / vocab + 1)
            .for_each(|(sequence, logits)| sequence.advance(logits, policy.version, &self.shared.tokenizer));
    }

    fn deliver(&mut self) {
        for sequence in self.running.extract_if(.., |sequence| sequence.is_finished()) {
            self.cache.release(sequence.slot);
            sequence.finish(&self.shared.tokenizer);
        }
    }
}

/// Starts the thread. It ends with the last sender of its jobs.
pub(crate) fn spawn(shared: Arc<Shared>, jobs: Receiver<Job>) -> std::io::Result<()> {
    std::thread::Builder::new().name("agl-sampler".to_owned()).spawn(move || run(&shared, &jobs)).map(drop)
}
