//! Callers: each plays rollouts one after the other on a connection of its own, turn by turn.
//!
//! * Closed: the next turn is sent when the answer to the one before is there.
//! * Open (`--rate`): turns are due at even intervals, whoever of the callers is free takes the next, and the time of a turn counts
//!   from when it was due, so that a server that falls behind cannot hide it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::bail;
use serde_json::json;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::http::{Connection, head};
use crate::rollouts::{Before, Maker, Playable};
use crate::script::{Script, Shape};

#[derive(clap::Args)]
pub struct LoadArgs {
    /// Where the calls go.
    #[arg(long)]
    address: String,
    /// What is there.
    #[arg(long)]
    before: Before,
    /// Its server key.
    #[arg(long, default_value = "")]
    server_key: String,
    /// What is said.
    #[arg(long)]
    shape: Shape,
    /// How many callers.
    #[arg(long, default_value_t = 32)]
    connections: usize,
    /// How long it is measured; without it every rollout is played to its end.
    #[arg(long)]
    seconds: Option<f64>,
    /// How long it runs before that.
    #[arg(long, default_value_t = 0.0)]
    warm_up: f64,
    /// Turns per second; without it as many as are answered.
    #[arg(long)]
    rate: Option<f64>,
    /// How many rollouts are made beforehand.
    #[arg(long, default_value_t = 0)]
    rollouts: usize,
    /// Make each rollout when it is its turn, and delete it when it has ended.
    #[arg(long)]
    churn: bool,
}

/// What the callers share.
struct Load {
    args: LoadArgs,
    script: Script,
    ready: Mutex<VecDeque<Playable>>,
    /// When turns are due, for an open load.
    due: Option<tokio::sync::Mutex<UnboundedReceiver<Instant>>>,
    began: Instant,
    /// A caller found no rollout left.
    ran_out: AtomicBool,
    calls: AtomicU64,
    microseconds: Mutex<Vec<u32>>,
}

pub async fn run(args: LoadArgs) -> anyhow::Result<()> {
    let script = Script::of(args.shape)?;
    let ready = if args.churn { VecDeque::new() } else { prepare(&args).await?.into() };
    let began = Instant::now();
    let due = args.rate.map(|rate| tokio::sync::Mutex::new(schedule(began, rate)));
    let load = Arc::new(Load {
        script,
        ready: Mutex::new(ready),
        due,
        began,
        ran_out: AtomicBool::new(false),
        calls: AtomicU64::new(0),
        microseconds: Mutex::default(),
        args,
    });
    let callers: Vec<_> = (0..load.args.connections)
        .map(|_| {
            let load = Arc::clone(&load);
            tokio::spawn(async move { load.call().await })
        })
        .collect();
    for caller in callers {
        caller.await??;
    }
    let took = load.began.elapsed().as_secs_f64() - load.args.warm_up;
    let mut times = std::mem::take(&mut *load.times());
    times.sort_unstable();
    let at = |share: f64| times.get(((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1)));
    let ms = |share: f64| at(share).map(|&microseconds| f64::from(microseconds) / 1000.0);
    crate::print(&json!({
        "calls": load.calls.load(Ordering::Relaxed),
        "measured": times.len(),
        "seconds": took,
        "rate": times.len() as f64 / took,
        "ran_out": load.ran_out.load(Ordering::Relaxed),
        "p50_ms": ms(0.5), "p90_ms": ms(0.9), "p99_ms": ms(0.99), "p999_ms": ms(0.999), "max_ms": ms(1.0),
    }))
}

/// Makes the rollouts, by several at once, since each is durable when it is answered.
async fn prepare(args: &LoadArgs) -> anyhow::Result<Vec<Playable>> {
    const PAGE: usize = 64;
    let mut makers = Vec::new();
    for number in 0..16 {
        let count = args.rollouts / 16 + usize::from(number < args.rollouts % 16);
        let connection = Connection::open(&args.address).await?;
        let mut maker = Maker { before: args.before, server_key: args.server_key.clone(), connection };
        makers.push(tokio::spawn(async move {
            let mut made = Vec::with_capacity(count);
            while made.len() < count {
                made.extend(maker.make(PAGE.min(count - made.len())).await?);
            }
            anyhow::Ok(made)
        }));
    }
    let mut made = Vec::with_capacity(args.rollouts);
    for maker in makers {
        made.extend(maker.await??);
    }
    Ok(made)
}

/// The moments at which turns are due, each given when it has come.
fn schedule(began: Instant, rate: f64) -> UnboundedReceiver<Instant> {
    let (send, due) = tokio::sync::mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for number in 0_u64.. {
            let moment = began + Duration::from_secs_f64(number as f64 / rate);
            #[expect(
                clippy::disallowed_methods,
                reason = "a thread that does nothing else; tokio's clock ticks by the millisecond"
            )]
            std::thread::sleep(moment.saturating_duration_since(Instant::now()));
            if send.send(moment).is_err() {
                return;
            }
        }
    });
    due
}

impl Load {
    fn times(&self) -> std::sync::MutexGuard<'_, Vec<u32>> {
        self.microseconds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn call(&self) -> anyhow::Result<()> {
        let mut connection = Connection::open(&self.args.address).await?;
        let mut maker = Maker {
            before: self.args.before,
            server_key: self.args.server_key.clone(),
            connection: Connection::open(&self.args.address).await?,
        };
        let opens = Duration::from_secs_f64(self.args.warm_up);
        let closes = self.args.seconds.map(|seconds| opens + Duration::from_secs_f64(seconds));
        let is_over = || closes.is_some_and(|closes| self.began.elapsed() >= closes);
        while !is_over() {
            let rollout = if self.args.churn {
                let made = maker.make(1).await?.pop();
                if let Some(rollout) = &made {
                    maker.start(&rollout.rollout_id).await?;
                }
                made
            } else {
                self.ready.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
            };
            let Some(rollout) = rollout else {
                self.ran_out.store(true, Ordering::Relaxed);
                return Ok(());
            };
            for turn in &self.script.turns {
                let Some(due) = self.next_due().await else { return Ok(()) };
                if is_over() {
                    return Ok(());
                }
                let head = head("POST", &rollout.path, &rollout.key, turn.request.len());
                let (status, answer) = connection.call(head.as_bytes(), &turn.request).await?;
                let said = connection.body(&answer);
                // The original writes answers anew, and so a little longer or shorter.
                if status != 200 || (self.args.before != Before::Original && said.len() != turn.answer.len()) {
                    bail!(
                        "{} is answered {status}: {}",
                        rollout.path,
                        String::from_utf8_lossy(&said[..said.len().min(400)])
                    );
                }
                self.calls.fetch_add(1, Ordering::Relaxed);
                if self.began.elapsed() >= opens && !is_over() {
                    self.times().push(u32::try_from(due.elapsed().as_micros()).unwrap_or(u32::MAX));
                }
            }
            if self.args.churn {
                maker.finish(&rollout.rollout_id).await?;
            }
        }
        Ok(())
    }

    async fn next_due(&self) -> Option<Instant> {
        match &self.due {
            Some(due) => due.lock().await.recv().await,
            None => Some(Instant::now()),
        }
    }
}
