//! From a rollout's creation to its agent's first call.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use agl_client::GatewayClient;
use agl_controller::config::ZygoteConfig;
use agl_controller::{Controller, ControllerConfig};
use agl_core::rollout::RolloutCreate;
use agl_gateway::{Gateway, GatewayConfig};
use anyhow::ensure;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::Options;
use crate::figures::Figures;
use crate::model::Model;

/// Gateway, controller and model server in this process.
struct House {
    client: GatewayClient,
    model: Model,
    stop: Vec<oneshot::Sender<()>>,
    parts: Vec<JoinHandle<anyhow::Result<()>>>,
    _folder: tempfile::TempDir,
}

impl House {
    async fn build(max_concurrent: usize, zygote: Option<ZygoteConfig>) -> anyhow::Result<Arc<Self>> {
        let folder = tempfile::tempdir()?;
        let store = format!("sqlite:{}", folder.path().join("agl.db").display());
        let config: GatewayConfig = serde_json::from_value(json!({
            "listen": "127.0.0.1:0", "key": "k", "store": store, "default_proxy": {"model_name": "policy"},
        }))?;
        let gateway = Gateway::bind(config).await?;
        let client = GatewayClient::new(&format!("http://{}", gateway.addr()), "k")?;
        let model = Model::start().await?;
        let registered = json!({"model": "policy", "endpoint": model.url, "version": 0});
        let (stop_gateway, stopped) = oneshot::channel();
        let gateway = tokio::spawn(async move { Ok(gateway.serve(async { drop(stopped.await) }).await?) });
        client.register_models(&[serde_json::from_value(registered)?]).await?;
        let config = ControllerConfig {
            max_concurrent,
            work_dir: folder.path().join("work"),
            zygote,
            ..ControllerConfig::default()
        };
        let (stop_controller, stopped) = oneshot::channel();
        let controller = Controller::new(config, client.clone());
        let controller = tokio::spawn(async move { Ok(controller.run(async { drop(stopped.await) }).await?) });
        Ok(Arc::new(Self {
            client,
            model,
            stop: vec![stop_controller, stop_gateway],
            parts: vec![controller, gateway],
            _folder: folder,
        }))
    }

    async fn end(self: Arc<Self>) -> anyhow::Result<()> {
        let Some(house) = Arc::into_inner(self) else { return Ok(()) };
        for (stop, part) in house.stop.into_iter().zip(house.parts) {
            drop(stop);
            part.await??;
        }
        Ok(())
    }

    /// Plays one rollout to its end and gives the time to its first call.
    async fn rollout(&self, agent: &[PathBuf]) -> anyhow::Result<Duration> {
        let create: RolloutCreate = serde_json::from_value(json!({
            "input": {}, "config": {"process": {"argv": agent, "env": {"TAG": "{{ rollout_id }}"}}, "max_attempts": 1},
        }))?;
        let before = SystemTime::now();
        let id = self.client.create_rollouts(&[create]).await?.remove(0).rollout_id;
        self.ended(&id).await?;
        self.model.first_call(&id, before)
    }

    async fn ended(&self, id: &str) -> anyhow::Result<()> {
        loop {
            let rollout = self.client.get_rollout(id).await?.rollout;
            if rollout.status.state.is_terminal() {
                ensure!(
                    rollout.status.state.as_str() == "succeeded",
                    "{id} failed: {:?}",
                    rollout.status.error_message
                );
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Starts the command as a child of this program, with the environment that a rollout would give it.
    async fn alone(&self, agent: &[PathBuf], tag: &str) -> anyhow::Result<Duration> {
        let folder = tempfile::tempdir()?;
        let mut command = tokio::process::Command::new(&agent[0]);
        command.args(&agent[1..]).current_dir(folder.path()).stdin(std::process::Stdio::null());
        command.env("TAG", tag).env("AGL_OPENAI_BASE_URL", &self.model.url).env("AGL_KEY", "k");
        for name in ["AGL_EVENT_URL", "AGL_INPUT", "OPENAI_BASE_URL", "OPENAI_API_KEY"] {
            command.env(name, &self.model.url);
        }
        let before = SystemTime::now();
        let output = command.output().await?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        self.model.first_call(tag, before)
    }
}

/// Does something `count` times, `at_a_time` of them together.
async fn repeat<F, T>(count: usize, at_a_time: usize, work: F) -> anyhow::Result<Figures>
where
    F: Fn(usize) -> T + Clone + Send + 'static,
    T: Future<Output = anyhow::Result<Duration>> + Send,
{
    let next = Arc::new(AtomicUsize::new(0));
    let workers: Vec<_> = (0..at_a_time)
        .map(|_| {
            let (work, next) = (work.clone(), next.clone());
            tokio::spawn(async move {
                let mut durations = Vec::new();
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return anyhow::Ok(durations);
                    }
                    durations.push(work(number).await?);
                }
            })
        })
        .collect();
    let mut durations = Vec::new();
    for worker in workers {
        durations.extend(worker.await??);
    }
    Ok(Figures::of(durations))
}

/// An agent's words: the interpreter and its script.
pub fn agent(options: &Options, name: &str) -> anyhow::Result<[PathBuf; 2]> {
    // The interpreter's own path says whose packages it has: links are not to be followed.
    let python = std::env::current_dir()?.join(&options.python);
    Ok([python, options.agents.join(name).canonicalize()?])
}

/// What the zygote of these measurements imports: the package, and what the first call of its client would import.
pub fn zygote(options: &Options) -> anyhow::Result<ZygoteConfig> {
    let python = agent(options, "with_openai.py")?[0].display().to_string();
    Ok(serde_json::from_value(json!({
        "imports": ["openai", "openai.resources.chat.completions"], "python": python, "ready_seconds": 120,
    }))?)
}

/// Measures and reports.
pub async fn measure(options: &Options, report: &mut impl Write) -> anyhow::Result<()> {
    writeln!(
        report,
        "from a rollout's creation to its agent's first call, ms {:>18} {:>9} {:>9}",
        "p50", "p90", "p99"
    )?;
    let house = House::build(options.load, None).await?;
    let light = agent(options, "light.py")?;
    for at_a_time in [1, options.load] {
        compare(&house, &light, "standard library", options.count, at_a_time, report).await?;
    }
    let with_openai = agent(options, "with_openai.py")?;
    compare(&house, &with_openai, "openai", options.count.div_ceil(3), 1, report).await?;
    burst(&house, report).await?;
    house.end().await?;
    let house = House::build(options.load, Some(zygote(options)?)).await?;
    // The first one waits for the imports.
    house.rollout(&with_openai).await?;
    for at_a_time in [1, options.load] {
        let warm = play(&house, &with_openai, options.count, at_a_time).await?;
        writeln!(report, "  openai, zygote, {at_a_time:>2} at a time: rollout {:>20}{warm}", "")?;
    }
    house.end().await
}

async fn play(house: &Arc<House>, agent: &[PathBuf], count: usize, at_a_time: usize) -> anyhow::Result<Figures> {
    let (house, agent) = (house.clone(), agent.to_vec());
    repeat(count, at_a_time, move |_| {
        let (house, agent) = (house.clone(), agent.clone());
        async move { house.rollout(&agent).await }
    })
    .await
}

async fn compare(
    house: &Arc<House>,
    agent: &[PathBuf],
    name: &str,
    count: usize,
    at_a_time: usize,
    report: &mut impl Write,
) -> anyhow::Result<()> {
    let alone = {
        let (house, agent) = (house.clone(), agent.to_vec());
        let name = Path::new(name).display().to_string();
        repeat(count, at_a_time, move |number| {
            let (house, agent, tag) = (house.clone(), agent.clone(), format!("{name} {at_a_time} {number}"));
            async move { house.alone(&agent, &tag).await }
        })
        .await?
    };
    let rollouts = play(house, agent, count, at_a_time).await?;
    let what = format!("  {name}, {at_a_time} at a time");
    writeln!(report, "{what:<36} {:<28} {alone}", "the command by itself")?;
    writeln!(report, "{what:<36} {:<28} {rollouts}", "rollout")?;
    let beyond = rollouts.beyond(alone.median());
    writeln!(report, "{what:<36} {:<28} {beyond}", "beyond the command's median")?;
    Ok(())
}

/// How many rollouts of a command that does nothing are done in a second.
async fn burst(house: &House, report: &mut impl Write) -> anyhow::Result<()> {
    const COUNT: usize = 200;
    let config: Value = json!({"input": {}, "config": {"process": {"argv": ["true"]}}});
    let create: RolloutCreate = serde_json::from_value(config)?;
    let began = Instant::now();
    for rollout in house.client.create_rollouts(&vec![create; COUNT]).await? {
        house.ended(&rollout.rollout_id).await?;
    }
    writeln!(
        report,
        "  {COUNT} rollouts of `true` at once: {:.0} a second",
        COUNT as f64 / began.elapsed().as_secs_f64()
    )?;
    Ok(())
}
