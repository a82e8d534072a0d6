//! Invariants of the token tree on random harnesses, and the cases that have a name.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use agl_core::trajectory::row::version_runs;
use agl_core::trajectory::sequence::LengthLimits;
use agl_core::trajectory::{
    Assembly, BreakClass, CallOutcome, CallRow, Continuation, Delivery, Level, NewCall, TokenDecoder, TokenTree,
    TreeError,
};
use proptest::prelude::*;

/// A call as a harness and a server would make it, kept whole: the oracle of these tests.
#[derive(Clone, Debug)]
struct Call {
    prompt: Vec<u32>,
    sampled: Vec<u32>,
    delivery: Delivery,
    trainable: bool,
}

impl Call {
    fn new(prompt: &[u32], sampled: &[u32]) -> Self {
        Self { prompt: prompt.to_vec(), sampled: sampled.to_vec(), delivery: Delivery::Delivered, trainable: true }
    }

    fn context(&self) -> Vec<u32> {
        [self.prompt.clone(), self.sampled.clone()].concat()
    }

    fn is_trained(&self) -> bool {
        self.delivery == Delivery::Delivered && self.trainable && !self.sampled.is_empty()
    }
}

/// A log-prob that names its call and position, so that a misplaced one is seen.
fn log_prob(call: usize, position: usize) -> f32 {
    -((call * 1000 + position) as f32) - 1.0
}

fn new_call(index: usize, call: &Call) -> NewCall<'_> {
    NewCall {
        seq: index as u64,
        call_id: format!("call-{index}"),
        choice: 0,
        prompt: &call.prompt,
        sampled: call.sampled.clone(),
        log_probs: Some((0..call.sampled.len()).map(|position| log_prob(index, position)).collect()),
        versions: version_runs((0..call.sampled.len()).map(|position| (index + position / 2) as u64)),
        delivery: call.delivery,
        outcome: CallOutcome::Ok,
        trainable: call.trainable,
    }
}

fn record(calls: &[Call]) -> (TokenTree, Vec<CallRow>) {
    let mut tree = TokenTree::new();
    let rows = calls.iter().enumerate().map(|(index, call)| tree.record(new_call(index, call)).unwrap()).collect();
    (tree, rows)
}

fn assemble(calls: &[Call]) -> Assembly {
    record(calls).0.sequences(Level::Trajectory)
}

/// `(tokens, calls by seq)` of each row.
fn shape(assembly: &Assembly) -> Vec<(Vec<u32>, Vec<u64>)> {
    assembly
        .sequences
        .iter()
        .map(|row| (row.token_ids.clone(), row.calls.iter().map(|span| span.seq).collect()))
        .collect()
}

fn trained_tokens(assembly: &Assembly) -> usize {
    assembly.sequences.iter().map(|row| row.trained_tokens()).sum()
}

/// What a harness may do next, relative to the calls so far.
#[derive(Clone, Debug)]
enum Step {
    Fresh { prompt: Vec<u32>, sampled: Vec<u32> },
    Extend { of: prop::sample::Index, inserted: Vec<u32>, sampled: Vec<u32> },
    Rewrite { of: prop::sample::Index, keep: prop::sample::Index, inserted: Vec<u32>, sampled: Vec<u32> },
    Repeat { of: prop::sample::Index, sampled: Vec<u32> },
}

/// Two token ids only: coincidences are what breaks prefix matching.
fn tokens(length: std::ops::Range<usize>) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0_u32..2, length)
}

fn step() -> impl Strategy<Value = (Step, Delivery, bool)> {
    let index = any::<prop::sample::Index>;
    let step = prop_oneof![
        1 => (tokens(1..6), tokens(0..4)).prop_map(|(prompt, sampled)| Step::Fresh { prompt, sampled }),
        4 => (index(), tokens(0..4), tokens(0..4)).prop_map(|(of, inserted, sampled)| Step::Extend { of, inserted, sampled }),
        2 => (index(), index(), tokens(0..4), tokens(0..4))
            .prop_map(|(of, keep, inserted, sampled)| Step::Rewrite { of, keep, inserted, sampled }),
        1 => (index(), tokens(0..4)).prop_map(|(of, sampled)| Step::Repeat { of, sampled }),
    ];
    let delivery =
        prop_oneof![6 => Just(Delivery::Delivered), 1 => Just(Delivery::Undelivered), 1 => Just(Delivery::Superseded)];
    (step, delivery, prop::bool::weighted(0.85))
}

fn harness() -> impl Strategy<Value = Vec<Call>> {
    prop::collection::vec(step(), 1..24).prop_map(|steps| {
        let mut calls: Vec<Call> = Vec::new();
        for (step, delivery, trainable) in steps {
            let (prompt, sampled) = match step {
                Step::Fresh { prompt, sampled } => (prompt, sampled),
                _ if calls.is_empty() => continue,
                Step::Extend { of, inserted, sampled } => ([of.get(&calls).context(), inserted].concat(), sampled),
                Step::Rewrite { of, keep, inserted, sampled } => {
                    let context = of.get(&calls).context();
                    ([&context[..keep.index(context.len() + 1)], &inserted].concat(), sampled)
                }
                Step::Repeat { of, sampled } => (of.get(&calls).prompt.clone(), sampled),
            };
            calls.push(Call { prompt, sampled, delivery, trainable });
        }
        calls
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_path_is_given_back_as_it_was_recorded(calls in harness()) {
        let (tree, rows) = record(&calls);
        for (index, call) in calls.iter().enumerate() {
            prop_assert_eq!(&tree.prompt(index as u64).unwrap(), &call.prompt);
            prop_assert_eq!(tree.path(index as u64).unwrap(), call.context());
        }
        let added: usize = rows.iter().map(|row| row.inserted.len() + row.sampled.len()).sum();
        prop_assert!(tree.tokens() <= added, "a tree holds no more than its rows");
    }

    #[test]
    fn every_sampled_token_of_a_live_call_is_trained_exactly_once(calls in harness()) {
        for level in [Level::Trajectory, Level::Transition] {
            let assembly = record(&calls).0.sequences(level);
            let mut trained = vec![0; calls.len()];
            for row in &assembly.sequences {
                for span in row.calls.iter().filter(|span| span.trainable) {
                    let index = span.seq as usize;
                    prop_assert_eq!(&row.token_ids[span.start..span.end], &calls[index].sampled[..]);
                    trained[index] += 1;
                }
            }
            for (call, times) in calls.iter().zip(trained) {
                if call.is_trained() {
                    prop_assert_eq!(times, 1);
                } else {
                    prop_assert!(times == 0 || (call.sampled.is_empty() && call.delivery == Delivery::Delivered));
                }
            }
            let expected: usize = calls.iter().filter(|call| call.is_trained()).map(|call| call.sampled.len()).sum();
            prop_assert_eq!(trained_tokens(&assembly), expected, "both levels train the same tokens");
        }
    }

    #[test]
    fn the_mask_is_one_exactly_on_what_the_policy_sampled_and_all_vectors_are_parallel(calls in harness()) {
        let assembly = assemble(&calls);
        for row in &assembly.sequences {
            let log_probs = row.log_probs.as_ref().unwrap();
            prop_assert_eq!(row.mask.len(), row.token_ids.len());
            prop_assert_eq!(log_probs.len(), row.token_ids.len());
            prop_assert_eq!(row.policy_versions.len(), row.token_ids.len());
            let mut owner = vec![None; row.token_ids.len()];
            for span in row.calls.iter().filter(|span| span.trainable) {
                for (offset, slot) in owner[span.start..span.end].iter_mut().enumerate() {
                    *slot = Some((span.seq as usize, offset));
                }
            }
            for (position, owner) in owner.into_iter().enumerate() {
                let (mask, log_prob, version) = (row.mask[position], log_probs[position], row.policy_versions[position]);
                match owner {
                    None => prop_assert_eq!((mask, log_prob, version), (0, 0.0, -1)),
                    Some((call, offset)) => {
                        prop_assert_eq!((mask, log_prob), (1, self::log_prob(call, offset)));
                        prop_assert_eq!(version, (call + offset / 2) as i64);
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_holds_only_calls_whose_prompts_start_with_what_came_before(calls in harness()) {
        for row in &assemble(&calls).sequences {
            prop_assert_eq!(row.prompt_length, calls[row.calls[0].seq as usize].prompt.len());
            for pair in row.calls.windows(2) {
                let (before, after) = (&calls[pair[0].seq as usize], &calls[pair[1].seq as usize]);
                prop_assert!(after.prompt.starts_with(&before.context()), "(p_i, a_i) must be a prefix of p_i+1");
            }
            let last = &calls[row.calls.last().unwrap().seq as usize];
            prop_assert_eq!(&row.token_ids, &last.context());
        }
    }

    #[test]
    fn a_call_that_could_continue_an_open_path_does(calls in harness()) {
        let assembly = assemble(&calls);
        for row in &assembly.sequences {
            let first = row.calls[0].seq as usize;
            for (index, earlier) in calls.iter().enumerate().take(first) {
                let extends = earlier.delivery == Delivery::Delivered && calls[first].prompt.starts_with(&earlier.context());
                let taken = assembly.sequences.iter().any(|other| {
                    other.calls.windows(2).any(|pair| pair[0].seq as usize == index)
                });
                let longer = calls.iter().enumerate().take(first).any(|(other, call)| {
                    call.delivery == Delivery::Delivered && calls[first].prompt.starts_with(&call.context())
                        && (call.context().len(), other) > (earlier.context().len(), index)
                });
                let untrained = !assembly.sequences.iter().any(|other| other.calls.iter().any(|span| span.seq as usize == index));
                prop_assert!(!extends || taken || longer || untrained, "call {first} could have continued call {index}");
            }
        }
    }

    #[test]
    fn a_tree_rebuilt_from_its_rows_assembles_the_same(calls in harness()) {
        let (tree, rows) = record(&calls);
        let mut rebuilt = TokenTree::new();
        for row in rows {
            rebuilt.insert(row).unwrap();
        }
        for level in [Level::Trajectory, Level::Transition] {
            prop_assert_eq!(tree.sequences(level), rebuilt.sequences(level));
        }
    }

    #[test]
    fn limits_lose_what_they_count(calls in harness(), max_prompt_length in 0_usize..12, max_response_length in 0_usize..12) {
        let assembly = assemble(&calls);
        let before = trained_tokens(&assembly);
        let rows = assembly.sequences.len();
        let (kept, counts) = LengthLimits { max_prompt_length, max_response_length }.apply(assembly.sequences);
        let after: usize = kept.iter().map(|row| row.trained_tokens()).sum();
        prop_assert_eq!(before - after, counts.lost_tokens);
        prop_assert_eq!(rows - kept.len(), counts.dropped_rows + counts.emptied_rows);
        for row in &kept {
            prop_assert!(row.prompt_length <= max_prompt_length && row.token_ids.len() <= row.prompt_length + max_response_length);
            prop_assert!(row.calls.iter().all(|span| span.end <= row.token_ids.len()));
        }
    }
}

/// Six turns, each prompt the whole history and an observation.
fn react() -> Vec<Call> {
    let mut calls: Vec<Call> = Vec::new();
    let mut prompt = vec![1, 2, 3];
    for turn in 0..6 {
        let call = Call::new(&prompt, &[10 + turn, 20 + turn]);
        prompt = [call.context(), vec![100 + turn, 101]].concat();
        calls.push(call);
    }
    calls
}

#[test]
fn a_clean_react_trace_is_one_row() {
    let assembly = assemble(&react());
    assert_eq!(assembly.sequences.len(), 1);
    assert_eq!(assembly.counts.merges, 5);
    assert_eq!(assembly.counts.breaks, 0);
    assert_eq!(assembly.sequences[0].prompt_length, 3);
}

#[test]
fn one_retokenised_action_makes_two_rows_and_loses_no_token() {
    let clean = react();
    let mut broken = react();
    for call in &mut broken[3..] {
        // The third action comes back as one token instead of two.
        let at = clean[2].prompt.len();
        call.prompt.splice(at..at + 2, [77]);
    }
    let assembly = assemble(&broken);
    assert_eq!(assembly.sequences.len(), 2);
    assert_eq!(trained_tokens(&assembly), trained_tokens(&assemble(&clean)));
    assert_eq!(assembly.counts.breaks, 1);
    assert_eq!(assembly.breaks[0].at, clean[2].prompt.len());
}

#[test]
fn a_main_agent_and_its_sub_agent_interleave_and_still_merge() {
    let main_1 = Call::new(&[1, 2], &[3]);
    let sub_1 = Call::new(&[9, 8], &[7]);
    let main_2 = Call::new(&[1, 2, 3, 4], &[5]);
    let sub_2 = Call::new(&[9, 8, 7, 6], &[5]);
    let assembly = assemble(&[main_1, sub_1, main_2, sub_2]);
    assert_eq!(shape(&assembly), [(vec![1, 2, 3, 4, 5], vec![0, 2]), (vec![9, 8, 7, 6, 5], vec![1, 3])]);
}

#[test]
fn a_call_is_told_apart_by_how_it_continues() {
    let calls = [
        Call::new(&[1, 2], &[7]),
        Call::new(&[1, 2, 7, 3], &[8]),
        // The answer before is written in other tokens.
        Call::new(&[1, 2, 7, 3, 9, 4], &[5]),
        // Everything behind the first prompt is rewritten.
        Call::new(&[1, 2, 6], &[5]),
        // Another conversation with the same beginning.
        Call::new(&[1, 4], &[5]),
        // The same question once more.
        Call::new(&[1, 4], &[5]),
    ];
    let (tree, _) = record(&calls);
    let found: Vec<Continuation> = (0..6).map(|seq| tree.continuation(seq).unwrap()).collect();
    use Continuation::{Branch, Break, Merge, New};
    assert_eq!(found, [New, Merge, Break, Break, New, Branch]);
    assert_eq!(tree.continuation(6), Err(TreeError::UnknownCall { seq: 6 }));
}

#[test]
fn an_answer_that_two_calls_continue_trains_in_the_first_only() {
    let assembly = assemble(&[Call::new(&[1], &[2]), Call::new(&[1, 2, 3], &[4]), Call::new(&[1, 2, 5], &[6])]);
    assert_eq!(shape(&assembly), [(vec![1, 2, 3, 4], vec![0, 1]), (vec![1, 2, 5, 6], vec![2])]);
    assert_eq!(assembly.sequences[1].mask, [0, 0, 0, 1]);
    assert_eq!(assembly.sequences[1].prompt_length, 3);
}

#[test]
fn two_draws_of_the_same_tokens_are_both_trained() {
    let assembly = assemble(&[Call::new(&[1], &[2]), Call::new(&[1], &[2])]);
    assert_eq!(shape(&assembly), [(vec![1, 2], vec![0]), (vec![1, 2], vec![1])]);
}

#[test]
fn a_superseded_answer_is_not_trained_and_nothing_is_hung_on_it() {
    let mut lost = Call::new(&[1], &[2]);
    lost.delivery = Delivery::Superseded;
    let assembly = assemble(&[lost, Call::new(&[1], &[3]), Call::new(&[1, 3, 4], &[5])]);
    assert_eq!(shape(&assembly), [(vec![1, 3, 4, 5], vec![1, 2])]);
    assert_eq!(assembly.counts.superseded, 1);
}

#[test]
fn a_frozen_model_s_answer_is_context() {
    let mut frozen = Call::new(&[1], &[2]);
    frozen.trainable = false;
    let assembly = assemble(&[frozen, Call::new(&[1, 2, 3], &[4])]);
    assert_eq!(assembly.sequences[0].mask, [0, 0, 0, 1]);
    assert_eq!(assembly.counts.frozen, 1);
}

#[test]
fn a_missing_log_prob_is_none_for_its_row_alone() {
    let mut tree = TokenTree::new();
    let (with, without) = (Call::new(&[1], &[2]), Call::new(&[5], &[6]));
    tree.record(new_call(0, &with)).unwrap();
    tree.record(NewCall { log_probs: None, ..new_call(1, &without) }).unwrap();
    let assembly = tree.sequences(Level::Trajectory);
    assert!(assembly.sequences[0].log_probs.is_some());
    assert!(assembly.sequences[1].log_probs.is_none());
}

#[test]
fn failed_calls_are_counted_and_contribute_nothing() {
    let mut tree = TokenTree::new();
    let empty = Call::new(&[], &[]);
    tree.record(NewCall { outcome: CallOutcome::Failed, ..new_call(0, &empty) }).unwrap();
    tree.record(NewCall { outcome: CallOutcome::NoTokenIds, ..new_call(1, &empty) }).unwrap();
    let assembly = tree.sequences(Level::Trajectory);
    assert!(assembly.sequences.is_empty());
    assert_eq!((assembly.counts.calls, assembly.counts.failed, assembly.counts.without_token_ids), (2, 1, 1));
}

#[test]
fn a_row_that_contradicts_itself_is_refused_by_name() {
    let mut tree = TokenTree::new();
    let call = Call::new(&[1], &[2, 3]);
    let bad = NewCall { log_probs: Some(vec![0.0]), ..new_call(4, &call) };
    let error = tree.record(bad).unwrap_err();
    assert_eq!(error.to_string(), "call row 4: 2 sampled tokens but 1 log-probs");
    tree.record(new_call(4, &call)).unwrap();
    assert_eq!(tree.record(new_call(4, &call)).unwrap_err(), TreeError::OutOfOrder { seq: 4, last: 4 });
    let mut row = TokenTree::new().record(new_call(5, &call)).unwrap();
    row.parent = Some(4);
    row.shared_prefix = 9;
    assert_eq!(tree.insert(row).unwrap_err(), TreeError::PrefixTooLong { seq: 5, parent: 4, shared: 9, available: 3 });
    assert_eq!(tree.len(), 1, "what is refused leaves nothing behind");
}

/// Each id is a piece of text.
struct Pieces(&'static [&'static str]);

impl TokenDecoder for Pieces {
    fn decode(&self, tokens: &[u32]) -> String {
        tokens.iter().map(|&token| self.0[token as usize]).collect()
    }
}

#[test]
fn a_break_is_named_after_what_the_two_texts_tell() {
    let decoder =
        Pieces(&["<user>", "do it", "h", "aving", "hav", "ing", "<end>", "<think>", "hm", "</think>\n\n", "other"]);
    let class_of = |first: Call, second: &[u32]| {
        let assembly = assemble(&[first, Call::new(second, &[6])]);
        assembly.breaks.first().map(|found| found.classify(&decoder))
    };
    let answer = || Call::new(&[0, 1], &[2, 3, 6]);
    assert_eq!(class_of(answer(), &[0, 1, 2, 3, 6, 0, 1]), None);
    assert_eq!(class_of(answer(), &[0, 1, 4, 5, 6, 0, 1]), Some(BreakClass::Retokenisation));
    assert_eq!(class_of(answer(), &[0, 1, 10, 6, 0, 1]), Some(BreakClass::RewrittenHistory));
    assert_eq!(class_of(answer(), &[0, 10, 6, 0, 1]), Some(BreakClass::NewConversation));
    let thinking = Call::new(&[0, 1, 7], &[8, 9, 2, 3, 6]);
    assert_eq!(class_of(thinking, &[0, 1, 7, 9, 2, 3, 6, 0, 1]), Some(BreakClass::ChatTemplate));
}
