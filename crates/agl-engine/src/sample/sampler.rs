//! The sampler thread: it alone owns the cache and the running batch.
//!
//! Each turn of its loop is a token boundary: callers that have gone leave, waiting requests join (their prompts are
//! processed, at most `max_prefill_tokens` of them), the newest policy is taken, and every sequence advances by one token.
//!
//! A prompt that begins like a finished or a running sequence takes that beginning over and only the rest of it is processed.
//! What one policy has computed is never taken over under another.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use burn::tensor::Tensor;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rayon::prelude::*;

use super::prefixes::{Found, Prefixes, SHORTEST_PREFIX, shared};
use super::request::GenerateRequest;
use super::sequence::{Place, Reply, Sequence};
use crate::engine::{Policy, Shared};
use crate::model::cache::{KvCache, Prompt, Step};
use crate::model::extend::Suffix;
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

/// What the sampler is told.
pub(crate) enum Message {
    /// Continue a prompt.
    Generate(Box<Job>),
    /// An update has begun: what finished sequences hold will be of no use, and their memory may be needed.
    ForgetPrefixes,
}

/// Runs until every sender of `messages` is gone and nothing is left to do.
pub(crate) fn run(shared: &Shared, messages: &Receiver<Message>) {
    let cache = KvCache::new(&shared.decoder.config, shared.device.clone());
    let mut sampler = Sampler {
        shared,
        prefix_tokens: shared.config.prefix_tokens(cache.bytes_per_token()),
        cache,
        prefixes: Prefixes::default(),
        generation: 0,
        waiting: VecDeque::new(),
        running: Vec::new(),
    };
    while sampler.receive(messages) {
        let started = Instant::now();
        sampler.drop_abandoned();
        let policy = shared.policy();
        sampler.follow(&policy);
        sampler.admit(&policy);
        sampler.step(&policy);
        shared.counters.add_busy(started.elapsed());
    }
}

struct Sampler<'a> {
    shared: &'a Shared,
    cache: KvCache,
    /// Finished sequences, all of the current generation.
    prefixes: Prefixes,
    /// Most positions their slots may have room for; 0 keeps none and shares nothing.
    prefix_tokens: usize,
    /// The policy that new sequences begin under.
    generation: u64,
    waiting: VecDeque<Job>,
    running: Vec<Sequence>,
}

/// Requests that join together: whole prompts are processed as one batch, and so is what follows prefixes.
#[derive(Default)]
struct Wave {
    whole: Vec<Sequence>,
    suffixes: Vec<Sequence>,
}

impl Wave {
    fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.whole.iter().chain(&self.suffixes)
    }

    fn len(&self) -> usize {
        self.whole.len() + self.suffixes.len()
    }

    /// Tokens to process, padding included, if `prompt` tokens joined of which `cached` are known.
    fn tokens_with(&self, prompt: usize, cached: usize) -> usize {
        let joins_whole = usize::from(cached == 0);
        let longest = self.whole.iter().map(|s| s.prompt().len()).fold(joins_whole * prompt, usize::max);
        let suffixes: usize = self.suffixes.iter().map(|s| s.prompt().len() - s.cached()).sum();
        (self.whole.len() + joins_whole) * longest + suffixes + (1 - joins_whole) * (prompt - cached)
    }
}

impl Sampler<'_> {
    /// Takes in what has arrived, waiting only if there is nothing else to do; false when there never will be.
    fn receive(&mut self, messages: &Receiver<Message>) -> bool {
        while self.running.is_empty() && self.waiting.is_empty() {
            match messages.recv() {
                Ok(message) => self.take_in(message),
                Err(_) => return false,
            }
        }
        loop {
            match messages.try_recv() {
                Ok(message) => self.take_in(message),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return !(self.running.is_empty() && self.waiting.is_empty()),
            }
        }
    }

    fn take_in(&mut self, message: Message) {
        match message {
            Message::Generate(job) => self.waiting.push_back(*job),
            Message::ForgetPrefixes => self.keep_at_most(0),
        }
    }

    fn drop_abandoned(&mut self) {
        self.waiting.retain(|job| !job.reply.is_closed());
        let gone: Vec<Sequence> = self.running.extract_if(.., |sequence| sequence.reply.is_closed()).collect();
        for sequence in &gone {
            self.retire(sequence);
        }
    }

    /// Forgets what was computed under another policy.
    fn follow(&mut self, policy: &Policy) {
        if policy.generation != self.generation {
            self.keep_at_most(0);
            self.generation = policy.generation;
        }
    }

    /// Lets waiting requests join in order of arrival and samples their first tokens.
    fn admit(&mut self, policy: &Policy) {
        let mut spent = 0;
        loop {
            let (wave, tokens) = self.next_wave(spent);
            if wave.len() == 0 {
                return;
            }
            spent += tokens;
            self.process(wave, policy);
        }
    }

    /// The requests that join next, and the tokens they have to be processed. One that begins like another of the wave waits for
    /// the next wave, to take over what that one computes.
    fn next_wave(&mut self, spent: usize) -> (Wave, usize) {
        let (mut wave, mut tokens) = (Wave::default(), 0);
        while let Some(job) = self.waiting.front() {
            let prompt = &job.request.prompt;
            let found = self.longest_prefix(prompt);
            let cached = found.map_or(0, |found| found.len);
            let full = self.running.len() + wave.len() >= self.shared.config.max_batch_size;
            let tokens_then = wave.tokens_with(prompt.len(), cached);
            let heavy = spent + tokens > 0 && spent + tokens_then > self.shared.config.max_prefill_tokens;
            let may_share = |other: &Sequence| shared(other.prompt(), prompt) >= cached + SHORTEST_PREFIX;
            if full || heavy || (self.prefix_tokens > 0 && wave.iter().any(may_share)) {
                break;
            }
            let Some(Job { request, seed, limit, reply }) = self.waiting.pop_front() else { break };
            let place = Place { slot: self.slot_with(found), cached, generation: self.generation };
            self.shared.counters.add_prompt_tokens(request.prompt.len() - cached, cached);
            let sequence = Sequence::new(request, ChaCha8Rng::seed_from_u64(seed), limit, place, reply);
            if cached == 0 {
                wave.whole.push(sequence)
            } else {
                wave.suffixes.push(sequence)
            }
            tokens = tokens_then;
        }
        (wave, tokens)
    }

    /// The finished or running sequence that begins most like `prompt`.
    fn longest_prefix(&self, prompt: &[u32]) -> Option<Found> {
        if self.prefix_tokens == 0 {
            return None;
        }
        let running = self.running.iter().filter(|sequence| sequence.generation() == self.generation);
        let running = running.map(|s| Found { slot: s.slot(), len: s.shared_with(prompt), whole: false });
        let running = running.filter(|found| found.len >= SHORTEST_PREFIX);
        // The last of equals is taken: a finished sequence, whose slot may be had without copying.
        running.chain(self.prefixes.longest(prompt)).max_by_key(|found| found.len)
    }

    /// A slot for a new sequence that holds what was found.
    fn slot_with(&mut self, found: Option<Found>) -> usize {
        if let Some(Found { slot, whole: true, .. }) = found {
            self.prefixes.hand_over(slot);
            return slot;
        }
        let slot = self.cache.take_slot(self.shared.config.max_batch_size.saturating_add(self.most_kept(0)));
        if let Some(found) = found {
            self.prefixes.reuse(found.slot);
            self.cache.copy(found.slot, slot, found.len);
        }
        slot
    }

    /// Processes the prompts of a wave and draws the first token of each answer.
    fn process(&mut self, mut wave: Wave, policy: &Policy) {
        self.make_room(wave.iter().map(|sequence| sequence.prompt().len()).max().unwrap_or(0));
        let decoder = &self.shared.decoder;
        if !wave.whole.is_empty() {
            let prompts: Vec<Prompt<'_>> =
                wave.whole.iter().map(|s| Prompt { slot: s.slot(), ids: s.prompt() }).collect();
            let hidden = self.cache.prefill(decoder, &policy.weights, &prompts);
            self.draw(&mut wave.whole, hidden, policy);
        }
        if !wave.suffixes.is_empty() {
            let suffixes: Vec<Suffix<'_>> = wave.suffixes.iter().map(Sequence::suffix).collect();
            let hidden = self.cache.extend(decoder, &policy.weights, &suffixes);
            self.draw(&mut wave.suffixes, hidden, policy);
        }
        self.running.append(&mut wave.whole);
        self.running.append(&mut wave.suffixes);
        self.deliver();
    }

    fn step(&mut self, policy: &Policy) {
        let steps: Vec<Step> = self
            .running
            .iter()
            .filter_map(|s| s.last().map(|(id, position)| Step { slot: s.slot(), id, position }))
            .collect();
        if steps.is_empty() {
            return;
        }
        self.make_room(steps.iter().map(|step| step.position + 1).max().unwrap_or(0));
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
        let finished: Vec<Sequence> = self.running.extract_if(.., |sequence| sequence.is_finished()).collect();
        for sequence in finished {
            self.retire(&sequence);
            sequence.finish(&self.shared.tokenizer);
        }
    }

    /// Keeps what a sequence that has left the batch holds, if later prompts may begin with it.
    fn retire(&mut self, sequence: &Sequence) {
        if self.prefix_tokens == 0 || sequence.generation() != self.generation {
            self.cache.release(sequence.slot());
            return;
        }
        for slot in self.prefixes.keep(sequence.slot(), sequence.held()) {
            self.cache.release(slot);
        }
        self.make_room(0);
    }

    /// How many finished sequences may be kept when the cache has room for sequences of `len`.
    fn most_kept(&self, len: usize) -> usize {
        self.prefix_tokens / self.cache.capacity_for(len).max(1)
    }

    /// Lets go of finished sequences that would take up too much once there is room for one of `len`.
    fn make_room(&mut self, len: usize) {
        self.keep_at_most(self.most_kept(len));
    }

    fn keep_at_most(&mut self, most: usize) {
        for slot in self.prefixes.shrink(most) {
            self.cache.release(slot);
        }
    }
}

/// Starts the thread. It ends with the last sender of its messages.
pub(crate) fn spawn(shared: Arc<Shared>, messages: Receiver<Message>) -> std::io::Result<()> {
    std::thread::Builder::new().name("agl-sampler".to_owned()).spawn(move || run(&shared, &messages)).map(drop)
}
