//! From a rollout's creation to its agent's first call.

use std::io::Write;
use std::path::PathBuf;
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

    /// Starts the command as a child of this program, with the environment that a rollout would give it, and in a session
    /// of its own as there: Linux shares processors between sessions.
    async fn alone(&self, agent: &[PathBuf], tag: &str) -> anyhow::Result<Duration> {
        let folder = tempfile::tempdir()?;
        let mut command = tokio::process::Command::new("setsid");
        command.args(agent).current_dir(folder.path()).stdin(std::process::Stdio::null());
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
async fn repeat<F, T>(count: usize, at_a_time: usize, work: F) -> anyhow::Result<Vec<Duration>>
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
    Ok(durations)
}

/// An agent's words: the interpreter and its script.
pub fn agent(options: &Options, name: &str) -> anyhow::Result<Vec<PathBuf>> {
    // The interpreter's own path says whose packages it has: links are not to be followed.
    let python = std::env::current_dir()?.join(&options.python);
    Ok(vec![python, options.agents.join(name).canonicalize()?])
}

/// What the zygote of these measurements imports: the package, and what its first call would import.
pub fn zygote(options: &Options) -> anyhow::Result<ZygoteConfig> {
    let python = agent(options, "with_openai.py")?[0].display().to_string();
    let imports = ["openai", "openai.resources.chat.chat", "httpcore2", "h11", "truststore", "encodings.idna", "tls"];
    let config = json!({
        "imports": imports, "path": [options.agents.canonicalize()?], "python": python, "ready_seconds": 120,
    });
    Ok(serde_json::from_value(config)?)
}

/// Measures and reports.
pub async fn measure(options: &Options, report: &mut impl Write) -> anyhow::Result<()> {
    let columns = format!("{:>9} {:>9} {:>9}", "p50", "p90", "p99");
    writeln!(report, "{:<72} {columns}", "from a rollout's creation to its agent's first call, ms")?;
    let house = House::build(options.load, None).await?;
    let light = agent(options, "light.py")?;
    let with_openai = agent(options, "with_openai.py")?;
    compare(&house, &light, "standard library", options.count, 1, report).await?;
    compare(&house, &light, "standard library", options.count, options.load, report).await?;
    compare(&house, &with_openai, "openai", options.count.div_ceil(3), 1, report).await?;
    burst(&house, report).await?;
    house.end().await?;
    let house = House::build(options.load, Some(zygote(options)?)).await?;
    // The first one waits for the imports.
    house.rollout(&with_openai).await?;
    for at_a_time in [1, options.load] {
        let warm = Figures::of(play(&house, &with_openai, options.count, at_a_time).await?);
        writeln!(report, "{:<72} {warm}", format!("  openai, {at_a_time} at a time: rollout, from a zygote"))?;
    }
    house.end().await
}

async fn play(house: &Arc<House>, agent: &[PathBuf], count: usize, at_a_time: usize) -> anyhow::Result<Vec<Duration>> {
    let (house, agent) = (house.clone(), agent.to_vec());
    repeat(count, at_a_time, move |_| {
        let (house, agent) = (house.clone(), agent.clone());
        async move { house.rollout(&agent).await }
    })
    .await
}

/// The command by itself and in a rollout, by turns: other work on the machine is to meet both.
async fn compare(
    house: &Arc<House>,
    agent: &[PathBuf],
    name: &'static str,
    count: usize,
    at_a_time: usize,
    report: &mut impl Write,
) -> anyhow::Result<()> {
    let (mut alone, mut rollouts) = (Vec::new(), Vec::new());
    let at_once = if at_a_time == 1 { 1 } else { 2 * at_a_time };
    for round in 0..count.div_ceil(at_once) {
        let (by_itself, words) = (house.clone(), agent.to_vec());
        let starts = repeat(at_once, at_a_time, move |number| {
            let (house, words) = (by_itself.clone(), words.clone());
            let tag = format!("{name} {at_a_time} {round} {number}");
            async move { house.alone(&words, &tag).await }
        });
        alone.extend(starts.await?);
        rollouts.extend(play(house, agent, at_once, at_a_time).await?);
    }
    let (alone, rollouts) = (Figures::of(alone), Figures::of(rollouts));
    let beyond = rollouts.beyond(alone.median());
    for (what, figures) in
        [("the command by itself", &alone), ("rollout", &rollouts), ("rollout beyond the command's median", &beyond)]
    {
        writeln!(report, "{:<72} {figures}", format!("  {name}, {at_a_time} at a time: {what}"))?;
    }
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
    let rate = COUNT as f64 / began.elapsed().as_secs_f64();
    writeln!(report, "  {COUNT} rollouts of `true` at once: {rate:.0} a second")?;
    Ok(())
}
