//! Finished sequences whose keys and values are still in the cache, for prompts that begin as they do.
//!
//! They are few (a slot each, and slots are as long as the longest sequence), so a search looks at all of them.

/// Prefixes shorter than this are processed again: one small batch costs less than two.
pub(super) const SHORTEST_PREFIX: usize = 16;

/// The kept sequences. Slots that it hands back are no longer kept, and their room may be given away.
#[derive(Debug, Default)]
pub(super) struct Prefixes {
    kept: Vec<Kept>,
    clock: u64,
}

#[derive(Debug)]
struct Kept {
    slot: usize,
    ids: Vec<u32>,
    /// When it was last of use.
    used: u64,
}

/// What a search found: the sequence in `slot` begins with `len` tokens of the prompt, and they are all it has if `whole`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub slot: usize,
    pub len: usize,
    pub whole: bool,
}

impl Prefixes {
    /// The sequence that shares the longest beginning with `prompt`, if it is worth it. One whose tokens are all shared wins
    /// over others of that length.
    pub(super) fn longest(&self, prompt: &[u32]) -> Option<Found> {
        let shared = |kept: &Kept| {
            let len = shared(&kept.ids, prompt);
            Found { slot: kept.slot, len, whole: len == kept.ids.len() }
        };
        let best = self.kept.iter().map(shared).max_by_key(|found| (found.len, found.whole))?;
        (best.len >= SHORTEST_PREFIX).then_some(best)
    }

    /// Keeps a sequence, `ids` being the tokens whose keys and values its slot holds; answers the slots of those that are now
    /// held twice, its own perhaps.
    pub(super) fn keep(&mut self, slot: usize, ids: Vec<u32>) -> Vec<usize> {
        if ids.len() < SHORTEST_PREFIX {
            return vec![slot];
        }
        if let Some(holder) = self.kept.iter().position(|kept| kept.ids.starts_with(&ids)) {
            self.touch(holder);
            return vec![slot];
        }
        let doubles = self.kept.extract_if(.., |kept| ids.starts_with(&kept.ids)).map(|kept| kept.slot).collect();
        self.kept.push(Kept { slot, ids, used: 0 });
        self.touch(self.kept.len() - 1);
        doubles
    }

    /// Notes that the sequence in `slot` was of use, and keeps it.
    pub(super) fn reuse(&mut self, slot: usize) {
        if let Some(number) = self.kept.iter().position(|kept| kept.slot == slot) {
            self.touch(number);
        }
    }

    /// Hands `slot` over to a new sequence.
    pub(super) fn hand_over(&mut self, slot: usize) {
        self.kept.retain(|kept| kept.slot != slot);
    }

    /// Drops those longest not of use until `most` are left; answers their slots.
    pub(super) fn shrink(&mut self, most: usize) -> Vec<usize> {
        let excess = self.kept.len().saturating_sub(most);
        if excess > 0 {
            self.kept.sort_unstable_by_key(|kept| kept.used);
        }
        self.kept.drain(..excess).map(|kept| kept.slot).collect()
    }

    fn touch(&mut self, number: usize) {
        self.clock += 1;
        self.kept[number].used = self.clock;
    }
}

/// How many tokens `prompt` may take over from a sequence that holds `ids`: those they begin with alike, but never the whole
/// prompt, since the state of its last token is what the answer is drawn from.
pub(super) fn shared(ids: &[u32], prompt: &[u32]) -> usize {
    let most = prompt.len().saturating_sub(1);
    ids.iter().zip(&prompt[..most]).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(range: std::ops::Range<u32>) -> Vec<u32> {
        range.collect()
    }

    #[test]
    fn the_longest_common_beginning_is_found_and_never_the_whole_prompt() {
        let mut prefixes = Prefixes::default();
        assert_eq!(prefixes.longest(&ids(0..50)), None);
        prefixes.keep(3, ids(0..20));
        prefixes.keep(4, [ids(0..30), vec![99]].concat());
        assert_eq!(prefixes.longest(&ids(0..50)), Some(Found { slot: 4, len: 30, whole: false }));
        assert_eq!(prefixes.longest(&[ids(0..20), vec![77; 9]].concat()).map(|found| found.len), Some(20));
        assert_eq!(prefixes.longest(&ids(0..20)).map(|found| found.len), Some(19), "its last token is processed");
        assert_eq!(prefixes.longest(&ids(0..16)), None, "15 tokens are not worth it");
        assert_eq!(prefixes.longest(&ids(1..50)), None);
    }

    #[test]
    fn a_sequence_held_by_a_longer_one_is_not_kept_twice() {
        let mut prefixes = Prefixes::default();
        assert!(prefixes.keep(0, ids(0..20)).is_empty());
        assert_eq!(prefixes.keep(1, ids(0..30)), [0], "the longer one has all of the shorter");
        assert_eq!(prefixes.keep(2, ids(0..25)), [2]);
        assert_eq!(prefixes.keep(5, ids(0..9)), [5], "too short to be of use");
        assert_eq!(prefixes.kept.len(), 1);
    }

    #[test]
    fn what_was_longest_not_of_use_goes_first() {
        let mut prefixes = Prefixes::default();
        for slot in 0..4 {
            let begin = slot as u32 * 100;
            assert!(prefixes.keep(slot, ids(begin..begin + 20)).is_empty());
        }
        prefixes.reuse(0);
        assert_eq!(prefixes.shrink(2), [1, 2]);
        prefixes.hand_over(3);
        assert_eq!(prefixes.shrink(0), [0]);
        assert_eq!(prefixes.kept.len(), 0);
    }
}
