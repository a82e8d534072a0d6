//! How long a rollout waits for its process: from before the request that creates it to the first thing the agent does.
//!
//! `cargo run --release -p agl-controller --example spawn_latency` prints median, 95th percentile and maximum of rollouts
//! created one by one, and the rate of a burst; with the argument `isolated`, of isolated agents. The gateway runs in this process on a SQLite store, as `agl up` does it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use agl_client::GatewayClient;
use agl_controller::{Controller, ControllerConfig, Isolation, supervisor};
use agl_core::rollout::RolloutCreate;
use agl_gateway::{Gateway, GatewayConfig};
use anyhow::Context;
use serde_json::{Value, json};
use std::io::Write;

const SINGLE: usize = 100;
const BURST: usize = 200;

fn main() -> anyhow::Result<()> {
    // The controller starts this program again as the supervisor.
    let mut arguments = std::env::args().skip(1);
    let (command, argument) = (arguments.next(), arguments.next());
    match (command.as_deref(), argument) {
        (Some("supervise"), Some(dir)) => {
            let _ = supervisor::main(Path::new(&dir));
            Ok(())
        }
        (Some("isolate"), Some(part)) => {
            let _ = supervisor::isolation::main(&part);
            Ok(())
        }
        (word, _) => {
            let isolation = (word == Some("isolated")).then(Isolation::default);
            tokio::runtime::Runtime::new()?.block_on(measure(isolation))
        }
    }
}

async fn measure(isolation: Option<Isolation>) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let store = format!("sqlite:{}", folder.path().join("agl.db").display());
    let config: GatewayConfig = serde_json::from_value(json!({"listen": "127.0.0.1:0", "key": "k", "store": store}))?;
    let gateway = Gateway::bind(config).await?;
    let client = GatewayClient::new(&format!("http://{}", gateway.addr()), "k")?;
    let served = tokio::spawn(gateway.serve(std::future::pending()));
    let work_dir = folder.path().join("work");
    let config = ControllerConfig { max_concurrent: 8, work_dir, isolation, ..ControllerConfig::default() };
    let controlled = tokio::spawn(Controller::new(config, client.clone()).run(std::future::pending()));

    // `date` is a program of its own: its start is part of what is measured.
    let agent = json!({"process": {"argv": ["sh", "-c", "date +%s%N > started"]}});
    let mut latencies = Vec::new();
    for _ in 0..SINGLE {
        let before = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let id = create(&client, &agent, 1).await?.remove(0);
        ended(&client, &id).await?;
        let started = read(&folder.path().join("work/rollouts").join(&id).join("0/work/started"))?;
        latencies.push(started.saturating_sub(before));
    }
    latencies.sort();
    let began = Instant::now();
    for id in create(&client, &json!({"process": {"argv": ["true"]}}), BURST).await? {
        ended(&client, &id).await?;
    }
    let rate = BURST as f64 / began.elapsed().as_secs_f64();
    let ms = |latency: Duration| latency.as_secs_f64() * 1e3;
    writeln!(
        std::io::stdout(),
        "creation to the agent's first act, {SINGLE} rollouts one by one: median {:.1} ms, 95 % {:.1} ms, longest {:.1} ms\n\
         {BURST} rollouts at once, max_concurrent 8: {rate:.0} whole rollouts per second",
        ms(latencies[SINGLE / 2]),
        ms(latencies[SINGLE * 95 / 100]),
        ms(latencies[SINGLE - 1]),
    )?;
    served.abort();
    controlled.abort();
    Ok(())
}

async fn create(client: &GatewayClient, config: &Value, count: usize) -> anyhow::Result<Vec<String>> {
    let create: RolloutCreate = serde_json::from_value(json!({"input": {}, "config": config}))?;
    let rollouts = client.create_rollouts(&vec![create; count]).await?;
    Ok(rollouts.into_iter().map(|rollout| rollout.rollout_id).collect())
}

async fn ended(client: &GatewayClient, id: &str) -> anyhow::Result<()> {
    while !client.get_rollout(id).await?.rollout.status.state.is_terminal() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

fn read(path: &PathBuf) -> anyhow::Result<Duration> {
    let text = std::fs::read_to_string(path).with_context(|| format!("no agent wrote {}", path.display()))?;
    Ok(Duration::from_nanos(text.trim().parse()?))
}
