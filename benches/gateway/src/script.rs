//! What is said in a rollout, turn by turn: requests as an OpenAI client writes them, answers as vLLM does.
//!
//! The text is this repository's own sources, cut into pieces of about four bytes as a byte-pair tokenizer would; a piece's id grows
//! with its rank by frequency. So words, phrases and ids recur as they do in the contexts of coding agents. Every turn sends all that
//! was said before, the model's answer among it, and the tool's output.

use std::collections::HashMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::ValueEnum;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;

/// How long a rollout is and what its turns add.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    /// Short prompts, answers of 7 kB.
    Small,
    /// On average 16k tokens of context, 512 of them sampled by the turn: prompts of 63 kB, answers of 147 kB.
    Large,
    /// 200 turns that grow to 128k tokens, three in ten of them sampled.
    Long,
}

struct Sizes {
    turns: usize,
    system: usize,
    sampled: usize,
    observed: usize,
}

impl Shape {
    fn sizes(self) -> Sizes {
        match self {
            Self::Small => Sizes { turns: 8, system: 96, sampled: 52, observed: 24 },
            Self::Large => Sizes { turns: 16, system: 12_700, sampled: 512, observed: 256 },
            Self::Long => Sizes { turns: 200, system: 1_400, sampled: 190, observed: 443 },
        }
    }
}

/// One turn.
pub struct Turn {
    /// The body that the agent sends. It ends with the number of the turn, for the server to find.
    pub request: Vec<u8>,
    /// The body of the answer.
    pub answer: Vec<u8>,
    prompt_tokens: usize,
    sampled_tokens: usize,
}

/// All turns of a rollout.
pub struct Script {
    pub turns: Vec<Turn>,
}

/// What a script comes to.
#[derive(Debug, Serialize)]
pub struct Summary {
    turns: usize,
    mean_request_bytes: usize,
    mean_answer_bytes: usize,
    mean_prompt_tokens: usize,
    sampled_tokens_per_turn: usize,
    /// Of the last turn, its answer included: what a rollout holds, each token once.
    tokens: usize,
    /// Of all requests and answers: what storing each call whole would keep.
    all_bytes: usize,
}

struct Token {
    id: usize,
    text: String,
}

impl Script {
    /// The script of a shape, the same every time for the same sources.
    pub fn of(shape: Shape) -> anyhow::Result<Self> {
        let tokens = tokens(&sources()?);
        let mut random = StdRng::seed_from_u64(1);
        let mut next = tokens.iter().cycle();
        let mut take = |count| next.by_ref().take(count).collect::<Vec<&Token>>();
        let Sizes { turns: count, system, sampled, observed } = shape.sizes();
        let mut prompt = take(system);
        let mut messages = format!(r#"{{"role":"system","content":{}}}"#, text(&prompt)?);
        let mut turns = Vec::with_capacity(count);
        for number in 0..count {
            let seen = take(observed);
            write!(messages, r#",{{"role":"user","content":{}}}"#, text(&seen)?)?;
            prompt.extend(seen);
            let said = take(sampled);
            turns.push(Turn {
                request: format!(
                    r#"{{"model":"policy","messages":[{messages}],"max_tokens":1024,"temperature":0.7,"user":"turn-{number:04}"}}"#
                )
                .into_bytes(),
                answer: answer(number, &prompt, &said, &mut random)?.into_bytes(),
                prompt_tokens: prompt.len(),
                sampled_tokens: said.len(),
            });
            write!(messages, r#",{{"role":"assistant","content":{}}}"#, text(&said)?)?;
            prompt.extend(said);
        }
        Ok(Self { turns })
    }

    pub fn summary(&self) -> Summary {
        let mean = |size: fn(&Turn) -> usize| self.turns.iter().map(size).sum::<usize>() / self.turns.len().max(1);
        Summary {
            turns: self.turns.len(),
            mean_request_bytes: mean(|turn| turn.request.len()),
            mean_answer_bytes: mean(|turn| turn.answer.len()),
            mean_prompt_tokens: mean(|turn| turn.prompt_tokens),
            sampled_tokens_per_turn: mean(|turn| turn.sampled_tokens),
            tokens: self.turns.last().map_or(0, |turn| turn.prompt_tokens + turn.sampled_tokens),
            all_bytes: self.turns.iter().map(|turn| turn.request.len() + turn.answer.len()).sum(),
        }
    }
}

/// A chat completion in vLLM's order of fields.
fn answer(number: usize, prompt: &[&Token], said: &[&Token], random: &mut StdRng) -> anyhow::Result<String> {
    let ids = |tokens: &[&Token]| tokens.iter().map(|token| token.id.to_string()).collect::<Vec<_>>().join(",");
    let mut log_probs = Vec::with_capacity(said.len());
    for token in said {
        let bytes = token.text.bytes().map(|byte| byte.to_string()).collect::<Vec<_>>().join(",");
        log_probs.push(format!(
            r#"{{"token":{},"logprob":{},"bytes":[{bytes}],"top_logprobs":[]}}"#,
            serde_json::to_string(&token.text)?,
            python(f64::from(log_prob(random)))
        ));
    }
    let content = text(said)?;
    let (sampled, prompted) = (said.len(), prompt.len());
    Ok(format!(
        r#"{{"id":"chatcmpl-{:032x}","object":"chat.completion","created":{},"model":"policy","choices":[{{"index":0,"message":{{"role":"assistant","content":{content},"refusal":null,"annotations":null,"audio":null,"function_call":null,"tool_calls":[],"reasoning_content":null}},"logprobs":{{"content":[{}]}},"finish_reason":"stop","stop_reason":null,"token_ids":[{}]}}],"service_tier":null,"system_fingerprint":null,"usage":{{"prompt_tokens":{prompted},"total_tokens":{},"completion_tokens":{sampled},"prompt_tokens_details":null}},"prompt_logprobs":null,"prompt_token_ids":[{}],"kv_transfer_params":null}}"#,
        random.random::<u128>(),
        1_764_500_000 + number,
        log_probs.join(","),
        ids(said),
        prompted + sampled,
        ids(prompt),
    ))
}

/// As Python writes it, which vLLM is written in.
fn python(value: f64) -> String {
    let scientific = format!("{value:e}");
    match scientific.split_once("e-") {
        Some((digits, exponent)) if value.abs() < 1e-4 => format!("{digits}e-{exponent:0>2}"),
        _ => format!("{value:?}"),
    }
}

/// Most tokens are nearly certain, some are not.
fn log_prob(random: &mut StdRng) -> f32 {
    if random.random_bool(0.6) {
        -(-random.random_range(1.0_f32..12.0)).exp()
    } else {
        random.random_range(1e-6_f32..1.0).ln() * 0.8
    }
}

fn text(tokens: &[&Token]) -> anyhow::Result<String> {
    let whole: String = tokens.iter().map(|token| token.text.as_str()).collect();
    Ok(serde_json::to_string(&whole)?)
}

/// The sources of this repository, in the order of their names.
fn sources() -> anyhow::Result<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates");
    let mut files = Vec::new();
    collect(&root, &mut files).with_context(|| format!("the sources under {}", root.display()))?;
    files.sort();
    let mut whole = String::new();
    for file in files {
        whole += &std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    }
    Ok(whole)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

fn tokens(source: &str) -> Vec<Token> {
    let pieces = pieces(source);
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for piece in &pieces {
        *counts.entry(piece).or_default() += 1;
    }
    let mut by_rank: Vec<(&str, usize)> = counts.into_iter().collect();
    by_rank.sort_by(|(one, often), (other, rarely)| rarely.cmp(often).then(one.cmp(other)));
    // A vocabulary of 150,000 that these sources use a part of, the frequent pieces first.
    let spread = 150_000.0 / by_rank.len() as f64;
    let ids: HashMap<&str, usize> =
        by_rank.iter().enumerate().map(|(rank, (piece, _))| (*piece, 256 + (rank as f64 * spread) as usize)).collect();
    pieces.iter().map(|piece| Token { id: ids[piece], text: (*piece).to_owned() }).collect()
}

/// A space with the letters behind it, letters, a digit, white space, or a few signs; letters in pieces of at most six.
fn pieces(source: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let skip = usize::from(first == ' ' && rest[1..].starts_with(char::is_alphabetic));
        let run = |is: fn(char) -> bool, most: usize| {
            let body = &rest[skip..];
            body.char_indices()
                .take(most)
                .take_while(|(_, letter)| is(*letter))
                .map(|(at, letter)| at + letter.len_utf8())
                .last()
        };
        let end = run(char::is_alphabetic, 6)
            .or_else(|| run(char::is_numeric, 1))
            .or_else(|| run(char::is_whitespace, 64))
            .or_else(|| run(|letter| !letter.is_alphanumeric() && !letter.is_whitespace(), 3))
            .map_or(first.len_utf8(), |end| skip + end);
        let (piece, after) = rest.split_at(end);
        pieces.push(piece);
        rest = after;
    }
    pieces
}
