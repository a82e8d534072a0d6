//! What a request asks to be done to the logits before a token is drawn: biases, and penalties for what was said before.

use std::collections::HashMap;

use super::request::SamplingParams;

/// Biases and penalties of one request, with what they have to know of its tokens.
#[derive(Clone, Debug)]
pub(super) struct Adjustment {
    bias: Vec<(u32, f32)>,
    repetition: f32,
    presence: f32,
    frequency: f32,
    /// How often the answer has each id; 0 for one that only the prompt has.
    seen: HashMap<u32, u32>,
}

impl Adjustment {
    /// None where the request asks for nothing: then nothing is counted either.
    pub(super) fn new(params: &SamplingParams, prompt: &[u32]) -> Option<Self> {
        let penalised =
            params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0;
        if !penalised && params.logit_bias.is_empty() {
            return None;
        }
        // The other two penalties look at the answer only.
        let prompt = if params.repetition_penalty == 1.0 { &[] } else { prompt };
        Some(Self {
            bias: params.logit_bias.clone(),
            repetition: params.repetition_penalty,
            presence: params.presence_penalty,
            frequency: params.frequency_penalty,
            seen: prompt.iter().map(|id| (*id, 0)).collect(),
        })
    }

    /// Counts a sampled token.
    pub(super) fn count(&mut self, id: u32) {
        *self.seen.entry(id).or_default() += 1;
    }

    /// The logits to draw from, in vLLM's order: biases are added; logits of ids in prompt or answer are divided by the
    /// repetition penalty if positive and multiplied by it if not; from those of ids in the answer the frequency penalty is
    /// taken once for every time, and the presence penalty once.
    pub(super) fn apply(&self, logits: &[f32]) -> Vec<f32> {
        let mut logits = logits.to_vec();
        for (id, bias) in &self.bias {
            logits[*id as usize] += bias;
        }
        for (id, count) in &self.seen {
            let logit = &mut logits[*id as usize];
            if *logit > 0.0 {
                *logit /= self.repetition;
            } else {
                *logit *= self.repetition;
            }
            if *count > 0 {
                *logit -= self.frequency * *count as f32 + self.presence;
            }
        }
        logits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetition_looks_at_prompt_and_answer_and_the_other_penalties_at_the_answer() {
        let params = SamplingParams {
            repetition_penalty: 2.0,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            logit_bias: vec![(0, 3.0), (4, -1.0)],
            ..SamplingParams::default()
        };
        let mut adjustment = Adjustment::new(&params, &[0, 1]).unwrap();
        for id in [1, 2, 2] {
            adjustment.count(id);
        }
        // 0 is biased before it is divided; 1 is in both; 2 is in the answer, twice; 3 in neither; 4 is only biased.
        let found = adjustment.apply(&[1.0, -1.0, 4.0, 5.0, 6.0]);
        assert_eq!(found, [2.0, -2.0 - 0.75, 2.0 - 1.0, 5.0, 5.0]);
    }

    #[test]
    fn without_a_repetition_penalty_the_prompt_does_not_count() {
        let params = SamplingParams { presence_penalty: 1.0, ..SamplingParams::default() };
        let adjustment = Adjustment::new(&params, &[0, 1]).unwrap();
        assert_eq!(adjustment.apply(&[1.0, -1.0]), [1.0, -1.0]);
        assert!(Adjustment::new(&SamplingParams::default(), &[0, 1]).is_none());
    }
}
