//! Assembling 128 rollouts × 50 turns × 16k-token contexts, from recorded calls to training rows.

use std::hint::black_box;

use agl_core::trajectory::row::version_runs;
use agl_core::trajectory::{CallOutcome, CallRow, Delivery, Level, NewCall, TokenTree};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const ROLLOUTS: usize = 128;
const TURNS: usize = 50;
const CONTEXT: usize = 16_384;
/// Of the tokens a turn adds, this many are sampled.
const SAMPLED: usize = 120;

/// The calls of one rollout whose context has grown to [`CONTEXT`] tokens at its last turn.
fn calls(rollout: usize) -> Vec<(Vec<u32>, Vec<u32>)> {
    let per_turn = CONTEXT / TURNS;
    let token = |turn: usize, position: usize| ((rollout * 7919 + turn * 613 + position * 31) % 150_000) as u32;
    let mut context: Vec<u32> = Vec::new();
    (0..TURNS)
        .map(|turn| {
            context.extend((0..per_turn - SAMPLED).map(|position| token(turn, position)));
            let prompt = context.clone();
            let sampled: Vec<u32> = (0..SAMPLED).map(|position| token(turn, 1000 + position)).collect();
            context.extend(&sampled);
            (prompt, sampled)
        })
        .collect()
}

fn record(calls: &[(Vec<u32>, Vec<u32>)]) -> (TokenTree, Vec<CallRow>) {
    let mut tree = TokenTree::new();
    let mut rows = Vec::new();
    for (index, (prompt, sampled)) in calls.iter().enumerate() {
        let call = NewCall {
            seq: index as u64,
            call_id: index.to_string(),
            choice: 0,
            prompt,
            sampled: sampled.clone(),
            log_probs: Some(vec![-1.0; sampled.len()]),
            versions: version_runs(sampled.iter().map(|_| 1)),
            delivery: Delivery::Delivered,
            outcome: CallOutcome::Ok,
            trainable: true,
        };
        rows.extend(tree.record(call));
    }
    (tree, rows)
}

fn assembly(criterion: &mut Criterion) {
    let rollouts: Vec<_> = (0..ROLLOUTS).map(calls).collect();
    let recorded: Vec<_> = rollouts.iter().map(|calls| record(calls)).collect();
    let prompt_tokens: usize = rollouts.iter().flatten().map(|(prompt, sampled)| prompt.len() + sampled.len()).sum();
    let row_tokens = ROLLOUTS * (CONTEXT / TURNS) * TURNS;

    let mut group = criterion.benchmark_group("128 rollouts, 50 turns, 16k context");
    group.sample_size(10);
    group.throughput(Throughput::Elements(prompt_tokens as u64));
    group.bench_function("record (tokens of all prompts and answers)", |bencher| {
        bencher.iter(|| rollouts.iter().map(|calls| record(black_box(calls)).0.tokens()).sum::<usize>());
    });
    group.throughput(Throughput::Elements(row_tokens as u64));
    group.bench_function("rebuild from rows (tokens of the rows)", |bencher| {
        bencher.iter(|| {
            for (_, rows) in &recorded {
                let mut tree = TokenTree::new();
                for row in rows {
                    black_box(tree.insert(row.clone())).ok();
                }
                black_box(tree.tokens());
            }
        });
    });
    group.bench_function("assemble (tokens of the rows)", |bencher| {
        bencher.iter(|| {
            recorded.iter().map(|(tree, _)| black_box(tree.sequences(Level::Trajectory)).sequences.len()).sum::<usize>()
        });
    });
    group.finish();
}

criterion_group!(benches, assembly);
criterion_main!(benches);
