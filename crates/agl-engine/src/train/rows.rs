//! Training rows and their grouping into micro-batches.

use super::loss::TokenInput;
use crate::EngineError;

/// One training row: a token sequence with what the loss needs per position. All vectors have the length of `ids`.
///
/// Position 0 is never trained: nothing predicts it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrainRow {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Whether the token at this position was sampled by the policy and is trained.
    pub mask: Vec<bool>,
    /// Loss weight of the token (Eq. 14–16, already normalised over the update); ignored where `mask` is false.
    pub weights: Vec<f32>,
    /// Advantage of the token.
    pub advantages: Vec<f32>,
    /// log π_old of the token: the denominator of the ratio.
    pub old_log_probs: Vec<f32>,
    /// Constant factor of the token's policy loss, such as π_old/π_rollout where the two differ; 1 everywhere if `None`.
    pub importance_weights: Option<Vec<f32>>,
    /// log π_ref of the token, where the loss has a divergence from the reference policy.
    pub ref_log_probs: Option<Vec<f32>>,
}

/// A row whose log-probs are asked for where `mask` is true. Position 0 has none: nothing predicts it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MaskedRow {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Parallel to `ids`.
    pub mask: Vec<bool>,
}

impl MaskedRow {
    /// A row of which every token is asked for.
    #[must_use]
    pub fn whole(ids: Vec<u32>) -> Self {
        Self { mask: vec![true; ids.len()], ids }
    }

    /// The positions asked for.
    pub(crate) fn asked(&self) -> impl Iterator<Item = usize> + '_ {
        (1..self.ids.len()).filter(|at| self.mask[*at])
    }

    pub(crate) fn check(&self, row: usize, vocab: usize, max_len: usize) -> Result<(), EngineError> {
        if self.mask.len() != self.ids.len() {
            let what = format!("`mask` has {} entries, but `ids` has {}", self.mask.len(), self.ids.len());
            return Err(EngineError::Row { row, what });
        }
        check_ids(row, &self.ids, vocab, max_len)
    }
}

impl TrainRow {
    /// A row of supervised fine-tuning: `mask` says which tokens are learned, each with loss weight `weight`.
    #[must_use]
    pub fn supervised(ids: Vec<u32>, mask: Vec<bool>, weight: f32) -> Self {
        let len = ids.len();
        Self {
            ids,
            mask,
            weights: vec![weight; len],
            advantages: vec![1.0; len],
            old_log_probs: vec![0.0; len],
            importance_weights: None,
            ref_log_probs: None,
        }
    }

    /// The positions that contribute to the loss.
    pub(crate) fn trained(&self) -> impl Iterator<Item = usize> + '_ {
        (1..self.ids.len()).filter(|at| self.mask[*at] && self.weights[*at] != 0.0)
    }

    /// What the loss needs to know of the token at a trained position.
    pub(crate) fn token(&self, at: usize) -> TokenInput {
        TokenInput {
            weight: f64::from(self.weights[at]),
            advantage: f64::from(self.advantages[at]),
            old_log_prob: f64::from(self.old_log_probs[at]),
            importance: self.importance_weights.as_ref().map_or(1.0, |values| f64::from(values[at])),
            ref_log_prob: self.ref_log_probs.as_ref().map(|values| f64::from(values[at])),
            row_log_ratio: 0.0,
        }
    }

    pub(crate) fn check(&self, row: usize, vocab: usize, max_len: usize) -> Result<(), EngineError> {
        let wrong = |what: String| Err(EngineError::Row { row, what });
        let len = self.ids.len();
        let lengths = [
            ("mask", self.mask.len()),
            ("weights", self.weights.len()),
            ("advantages", self.advantages.len()),
            ("old_log_probs", self.old_log_probs.len()),
            ("importance_weights", self.importance_weights.as_ref().map_or(len, Vec::len)),
            ("ref_log_probs", self.ref_log_probs.as_ref().map_or(len, Vec::len)),
        ];
        for (name, found) in lengths {
            if found != len {
                return wrong(format!("`{name}` has {found} entries, but `ids` has {len}"));
            }
        }
        check_ids(row, &self.ids, vocab, max_len)?;
        for at in self.trained() {
            let optional = |values: &Option<Vec<f32>>| values.as_ref().map_or(0.0, |values| values[at]);
            let values = [
                ("weights", self.weights[at]),
                ("advantages", self.advantages[at]),
                ("old_log_probs", self.old_log_probs[at]),
                ("importance_weights", optional(&self.importance_weights)),
                ("ref_log_probs", optional(&self.ref_log_probs)),
            ];
            if let Some((name, value)) = values.into_iter().find(|(_, value)| !value.is_finite()) {
                return wrong(format!("`{name}` is {value} at trained position {at}"));
            }
        }
        Ok(())
    }
}

/// Ids within the vocabulary, and no more of them than the model has positions.
pub(crate) fn check_ids(row: usize, ids: &[u32], vocab: usize, max_len: usize) -> Result<(), EngineError> {
    if ids.len() > max_len {
        let what = format!("it has {} tokens, but the model's maximum is {max_len}; truncate it", ids.len());
        return Err(EngineError::Row { row, what });
    }
    match ids.iter().position(|id| *id as usize >= vocab) {
        Some(at) => {
            let what = format!("token id {} at position {at} is outside the vocabulary of {vocab}", ids[at]);
            Err(EngineError::Row { row, what })
        }
        None => Ok(()),
    }
}

/// Groups rows, given by their lengths, so that each group padded to its longest row stays within `budget` tokens.
///
/// Rows are sorted by length first: neighbours have nearly one length, so little is padding. Padding instead of packing
/// rows end to end, because a packed row needs attention over the square of its whole length, of which the CPU would
/// compute all but the block diagonal for nothing. A row longer than the budget stands alone. Empty rows are left out.
pub(crate) fn micro_batches(lengths: &[usize], budget: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).filter(|row| lengths[*row] > 0).collect();
    order.sort_by_key(|row| (std::cmp::Reverse(lengths[*row]), *row));
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for row in order {
        match groups.last_mut() {
            // The first of a group is its longest.
            Some(group) if (group.len() + 1) * lengths[group[0]] <= budget => group.push(row),
            _ => groups.push(vec![row]),
        }
    }
    groups
}

/// The ids of a group padded with 0 to its longest row, and that length.
pub(crate) fn padded(rows: &[&[u32]]) -> (Vec<u32>, usize) {
    let len = rows.iter().map(|ids| ids.len()).max().unwrap_or(0);
    let mut ids = vec![0; rows.len() * len];
    for (target, row) in ids.chunks_exact_mut(len.max(1)).zip(rows) {
        target[..row.len()].copy_from_slice(row);
    }
    (ids, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_batches_hold_every_row_once_within_the_budget() {
        let lengths = [5, 0, 9, 3, 40, 9, 8, 1];
        let groups = micro_batches(&lengths, 20);
        let mut rows: Vec<usize> = groups.iter().flatten().copied().collect();
        rows.sort_unstable();
        assert_eq!(rows, [0, 2, 3, 4, 5, 6, 7]);
        for group in &groups {
            let longest = group.iter().map(|row| lengths[*row]).max().unwrap();
            assert!(group.len() == 1 || longest * group.len() <= 20, "{group:?}");
        }
    }

    #[test]
    fn a_row_with_uneven_vectors_is_named() {
        let mut row = TrainRow::supervised(vec![1, 2, 3], vec![true; 3], 1.0);
        row.advantages.pop();
        let error = row.check(7, 10, 10).unwrap_err().to_string();
        assert_eq!(error, "training row 7: `advantages` has 2 entries, but `ids` has 3");
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_named() {
        let row = TrainRow::supervised(vec![1, 12], vec![true; 2], 1.0);
        let error = row.check(0, 10, 10).unwrap_err().to_string();
        assert!(error.contains("token id 12 at position 1 is outside the vocabulary of 10"), "{error}");
    }
}
