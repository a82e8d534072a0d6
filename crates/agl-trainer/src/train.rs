//! The loop. What happens in a step stands in [`Trainer::step`], top to bottom.

use std::time::{Duration, Instant};

use agl_client::GatewayClient;
use agl_core::rollout::RolloutConfig;
use agl_engine::{Engine, EngineError, OptimConfig, UpdateStats};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::TrainerError;
use crate::alarms::alarms;
use crate::checkpoint::{CheckpointState, RunFolder, RunIdentity, Totals, write_json};
use crate::collect::{Collector, Launch, reasons};
use crate::config::check;
use crate::data::Tasks;
use crate::describe;
use crate::evaluate::{Evaluation, EvaluationPlan, cancel_open};
use crate::measure::{measure, needs_reference};
use crate::metrics::{MetricsLog, StepMetrics};
use crate::picture::reward_curve;
use crate::run::{Progress, RunSummary, Settings};
use crate::serving::Serving;
use crate::update::Samples;

/// A run: its folder, its engine, and its connection to the gateway.
pub struct Trainer {
    settings: Settings,
    rollout_config: RolloutConfig,
    folder: RunFolder,
    identity: RunIdentity,
    engine: Engine,
    serving: Serving,
    collector: Collector,
    client: GatewayClient,
    train_tasks: Tasks,
    val_tasks: Tasks,
    log: MetricsLog,
    step: u64,
    /// The step of the checkpoint this lineage goes on from.
    parent: Option<u64>,
    /// Trained on since that checkpoint.
    consumed: Vec<String>,
    totals: Totals,
    initial_val_reward: Option<f64>,
    last_validation: Option<(u64, Evaluation)>,
    started: Instant,
    wall_before: f64,
}

impl Trainer {
    /// Prepares a run, or with `resume` continues the one in `trainer.default_local_dir` from its newest checkpoint: what is
    /// newer than the checkpoint is cancelled and will be enqueued again under new ids.
    ///
    /// # Errors
    /// Where the configuration, a file, the engine or the gateway does not play along.
    pub async fn prepare(settings: Settings, client: GatewayClient, resume: bool) -> Result<Self, TrainerError> {
        check(&settings.data, &settings.rollout, &settings.algorithm, &settings.actor, &settings.trainer)?;
        let train_tasks = Tasks::read(&settings.data.train_files)?;
        let val_tasks = Tasks::read(&settings.data.val_files)?;
        if train_tasks.is_empty() {
            let what = "is empty; name at least one .jsonl or .parquet file of tasks".to_owned();
            return Err(TrainerError::Config { key: "data.train_files", what });
        }
        let folder = RunFolder::open(&settings.trainer.default_local_dir)?;
        // The engine first: a missing model file must not leave a run behind.
        let newest = if resume { folder.newest()? } else { None };
        let weights = newest.map_or_else(|| settings.model.path.clone(), |step| folder.checkpoint(step).join("policy"));
        let engine_config = settings.engine.clone();
        // The reference is the policy of the run's start, also when the run goes on from a later one.
        let reference = needs_reference(&settings.algorithm, &settings.actor).then(|| settings.model.path.clone());
        let engine = tokio::task::spawn_blocking(move || {
            let engine = Engine::load(&weights, engine_config)?;
            match reference {
                Some(start) if start == weights => engine.keep_reference(),
                Some(start) => engine.load_reference(&start)?,
                None => {}
            }
            Ok::<_, EngineError>(engine)
        })
        .await??;
        let identity = folder.identify(resume)?;
        let state = match newest {
            Some(step) => {
                engine.load_optimizer(&folder.checkpoint(step).join("optimizer"))?;
                Some(folder.state(step)?)
            }
            None => None,
        };
        if resume {
            let cancelled = cancel_open(&client, &identity.run_id).await?;
            tracing::info!(run_id = identity.run_id, cancelled, from_step = newest.unwrap_or(0), "resuming");
        }
        if let Some(state) = &state {
            // The run may have died between the checkpoint and the marks.
            client.mark_consumed(&identity.run_id, state.step, &state.consumed).await?;
        }
        let serving = Serving::start(engine.clone(), &settings.model, client.clone(), &identity.run_id).await?;
        let wait_limit = Duration::from_secs(settings.trainer.wait_limit_seconds);
        let algorithm = &settings.algorithm;
        let collector = Collector::new(
            client.clone(),
            algorithm.level,
            algorithm.reward_fillna_value,
            algorithm.on_missing_reward,
            wait_limit,
        );
        let step = state.as_ref().map_or(0, |state| state.step);
        let log = MetricsLog::open(&settings.trainer.default_local_dir, step)?;
        let totals = state.as_ref().map_or_else(Totals::default, |state| state.totals);
        let mut trainer = Self {
            rollout_config: settings.rollout.for_controller(),
            settings,
            folder,
            identity,
            engine,
            serving,
            collector,
            client,
            train_tasks,
            val_tasks,
            log,
            step,
            parent: state.as_ref().map(|state| state.step),
            consumed: Vec::new(),
            initial_val_reward: state.as_ref().and_then(|state| state.initial_val_reward),
            last_validation: None,
            started: Instant::now(),
            wall_before: totals.wall_seconds,
            totals,
        };
        trainer.publish().await?;
        Ok(trainer)
    }

    /// Runs to the last step and writes `summary.json` and `reward.svg`. However it ends, the gateway is left as if the
    /// trainer had never been there: not paused, without its model server, its open rollouts cancelled.
    ///
    /// # Errors
    /// What stops the run, or [`TrainerError::Interrupted`] when `stop` is ready. Everything up to the newest checkpoint is
    /// kept; `--resume` goes on from there.
    pub async fn run(
        mut self,
        mut progress: impl FnMut(Progress),
        stop: impl Future<Output = ()>,
    ) -> Result<RunSummary, TrainerError> {
        let result = tokio::select! {
            result = self.steps(&mut progress) => result,
            () = stop => Err(TrainerError::Interrupted { step: self.step }),
        };
        match result {
            Ok(()) => self.finish().await,
            Err(error) => {
                self.leave().await;
                Err(error)
            }
        }
    }

    async fn steps(&mut self, progress: &mut impl FnMut(Progress)) -> Result<(), TrainerError> {
        let total = self.settings.trainer.total_training_steps;
        let run_id = self.identity.run_id.clone();
        progress(Progress::Started { run_id, done: self.step, total });
        let due_now = if self.step == 0 { self.settings.trainer.val_before_train } else { self.validation_is_due() };
        if due_now && !self.was_validated()? {
            self.validate(progress).await?;
        }
        while self.step < total {
            self.step(progress).await?;
            if self.is_due(self.settings.trainer.save_freq) {
                self.save(progress).await?;
            }
            if self.validation_is_due() {
                self.validate(progress).await?;
            }
        }
        Ok(())
    }

    /// Cleans up after a run that did not finish. What the gateway does not take any more, a resume will clean up.
    async fn leave(self) {
        let client = self.client.clone().with_patience(Duration::from_secs(3));
        if let Err(error) = cancel_open(&client, &self.identity.run_id).await {
            tracing::warn!(%error, "the run's open rollouts could not be cancelled");
        }
        if let Err(error) = self.serving.stop(&client).await {
            tracing::warn!(%error, "the gateway could not be told that the policy's server is gone");
        }
    }

    /// One training step: sample whole groups, credit them, update the policy, publish it.
    async fn step(&mut self, progress: &mut impl FnMut(Progress)) -> Result<(), TrainerError> {
        let step = self.step + 1;
        let mut metrics = StepMetrics::new(step);

        // Sample: `train_batch_size` groups of `n` siblings; a group is consumed only whole.
        let sampling = Instant::now();
        let sampler_before = self.engine.sampler_totals();
        let data = &self.settings.data;
        let tasks = self.train_tasks.batch(step, data.train_batch_size, data.shuffle, self.settings.trainer.seed);
        let launch = Launch {
            run_id: &self.identity.run_id,
            prefix: format!("{}-g{}-t{step:05}", self.identity.run_id, self.identity.generation),
            step,
            is_train: true,
            n: self.settings.rollout.n,
            seed: self.settings.trainer.seed,
            config: &self.rollout_config,
        };
        let creates = launch.rollouts(&tasks);
        let mut done = 0;
        let collected = self
            .collector
            .run(&creates, |_| {
                done += 1;
                progress(Progress::Rollout { step, is_train: true, done, of: creates.len() });
            })
            .await?;
        metrics.set("timing/sampling_seconds", sampling.elapsed().as_secs_f64());
        describe::rollouts(&mut metrics, &collected, &self.engine);
        describe::sampler(&mut metrics, sampler_before, self.engine.sampler_totals());

        // Measure and credit: what the update's policies say of the sampled tokens; one advantage per rollout, from its group.
        let consumed: Vec<String> = collected.iter().map(|rollout| rollout.rollout.rollout_id.clone()).collect();
        let model_calls: usize = collected.iter().map(|rollout| rollout.counts.calls).sum();
        let sampled_tokens = metrics.get("tokens/sampled").unwrap_or(0.0);
        let (algorithm, actor) = (&self.settings.algorithm, &self.settings.actor);
        let mut samples = Samples::of(collected, algorithm);
        let temperature = self.settings.rollout.temperature;
        let measured = measure(&mut samples, &self.engine, algorithm, actor, temperature).await?;
        describe::measurement(&mut metrics, &measured, algorithm);
        let advantages = samples.advantages(algorithm);
        describe::credit(&mut metrics, &samples, &advantages);
        if samples.samples.iter().all(|sample| sample.verdict.reward().is_none()) {
            return Err(nothing_usable(step, &samples));
        }

        // Update: the gateway holds new calls, calls at the server end, the policy learns.
        progress(Progress::Updating { step });
        let updating = Instant::now();
        self.serving.pause().await?;
        let updated = self.update(step, &samples, &advantages, &mut metrics).await;
        let published = match updated {
            Ok(()) => self.publish().await,
            Err(error) => Err(error),
        };
        self.serving.resume().await?;
        published?;
        metrics.set("timing/update_seconds", updating.elapsed().as_secs_f64());
        metrics.set("policy_version", self.engine.policy_version() as f64);
        for alarm in alarms(&metrics) {
            tracing::warn!(step, metric = alarm.metric, value = alarm.value, "{}", alarm.advice);
        }

        // Account: what was trained on belongs to the next checkpoint.
        self.step = step;
        self.totals.rollouts += consumed.len() as u64;
        self.totals.rows += samples.samples.iter().map(|sample| sample.rows.len() as u64).sum::<u64>();
        self.totals.model_calls += model_calls as u64;
        self.totals.sampled_tokens += sampled_tokens as u64;
        self.totals.sampling_seconds += metrics.get("timing/sampling_seconds").unwrap_or(0.0);
        self.consumed.extend(consumed);
        self.log.append(&metrics)?;
        progress(Progress::Step(metrics));
        Ok(())
    }

    /// The optimiser's updates of one step.
    async fn update(
        &mut self,
        step: u64,
        samples: &Samples,
        advantages: &agl_core::credit::Advantages,
        metrics: &mut StepMetrics,
    ) -> Result<(), TrainerError> {
        let actor = &self.settings.actor;
        let loss = actor.loss(self.settings.rollout.temperature);
        let lr = actor.optim.lr_at(step, self.settings.trainer.total_training_steps);
        let optim = OptimConfig { lr, ..actor.optim.clone() };
        let mut rng = ChaCha8Rng::seed_from_u64(self.settings.trainer.seed);
        rng.set_stream(step);
        let mut stats: Vec<UpdateStats> = Vec::new();
        for _ in 0..actor.ppo_epochs {
            let plan = samples.plan(advantages, actor, &mut rng);
            metrics.set("batch/dropped_zero_variance", plan.dropped_zero_variance.len() as f64);
            metrics.set("batch/dropped_others", plan.dropped_others.len() as f64);
            for update in &plan.updates {
                let rows = samples.rows(update, advantages, actor);
                if rows.is_empty() {
                    // Every advantage of this update is 0: there is no gradient.
                    continue;
                }
                let (engine, loss, optim) = (self.engine.clone(), loss.clone(), optim.clone());
                stats.push(tokio::task::spawn_blocking(move || engine.update(&rows, &loss, &optim)).await??);
            }
        }
        for update in &stats {
            self.totals.update_tokens += update.tokens as u64;
            self.totals.trained_tokens += update.trained_tokens as u64;
            self.totals.update_seconds += update.seconds;
        }
        metrics.set("actor/lr", lr);
        describe::updates(metrics, &stats, actor);
        Ok(())
    }

    /// Gives the current parameters a version that was never used, and tells the gateway.
    async fn publish(&mut self) -> Result<(), TrainerError> {
        let version = self.folder.published_version()? + 1;
        self.folder.reserve_version(version)?;
        self.engine.set_policy_version(version);
        self.serving.publish(version).await
    }

    /// Writes a checkpoint; then, and only then, marks its rollouts consumed.
    async fn save(&mut self, progress: &mut impl FnMut(Progress)) -> Result<(), TrainerError> {
        self.totals.wall_seconds = self.wall_before + self.started.elapsed().as_secs_f64();
        let state = CheckpointState {
            run_id: self.identity.run_id.clone(),
            step: self.step,
            policy_version: self.engine.policy_version(),
            parent: self.parent,
            consumed: std::mem::take(&mut self.consumed),
            totals: self.totals,
            initial_val_reward: self.initial_val_reward,
        };
        let path = self.folder.save(&self.engine, &state)?;
        self.parent = Some(self.step);
        self.client.mark_consumed(&state.run_id, state.step, &state.consumed).await?;
        if let Some(keep) = self.settings.trainer.max_actor_ckpt_to_keep {
            self.folder.prune(keep)?;
        }
        progress(Progress::Checkpoint { step: self.step, path });
        Ok(())
    }

    async fn validate(&mut self, progress: &mut impl FnMut(Progress)) -> Result<(), TrainerError> {
        if self.val_tasks.is_empty() {
            return Ok(());
        }
        let step = self.step;
        let count = self.settings.data.val_batch_size.unwrap_or(usize::MAX).min(self.val_tasks.len());
        let tasks: Vec<_> = (0..count).map(|index| self.val_tasks.task(index)).collect();
        let plan = EvaluationPlan {
            run_id: &self.identity.run_id,
            prefix: format!("{}-g{}-v{step:05}", self.identity.run_id, self.identity.generation),
            step,
            n: self.settings.rollout.val_n,
            seed: self.settings.trainer.seed,
            config: &self.rollout_config,
        };
        let started = Instant::now();
        let (mut done, of) = (0, tasks.len() * plan.n);
        let evaluation = plan
            .run(&tasks, &mut self.collector, |_| {
                done += 1;
                progress(Progress::Rollout { step, is_train: false, done, of });
            })
            .await?;
        let seconds = started.elapsed().as_secs_f64();
        self.totals.sampled_tokens += evaluation.sampled_tokens as u64;
        self.totals.sampling_seconds += seconds;
        let mut metrics = StepMetrics::new(step);
        metrics.set("val/reward", evaluation.reward);
        metrics.set("val/standard_error", evaluation.standard_error);
        metrics.set("val/rollouts", evaluation.rollouts as f64);
        metrics.set("val/excluded", evaluation.excluded as f64);
        metrics.set("val/calls_per_solved", evaluation.calls_per_solved);
        metrics.set("timing/validation_seconds", seconds);
        self.log.append(&metrics)?;
        if step == 0 {
            self.initial_val_reward = Some(evaluation.reward);
        }
        self.last_validation = Some((step, evaluation.clone()));
        progress(Progress::Validation { step, evaluation: Box::new(evaluation) });
        Ok(())
    }

    /// True after a step with a checkpoint or validation every `frequency` steps, and after the last.
    fn is_due(&self, frequency: u64) -> bool {
        self.step == self.settings.trainer.total_training_steps
            || (frequency > 0 && self.step.is_multiple_of(frequency))
    }

    fn validation_is_due(&self) -> bool {
        self.is_due(self.settings.trainer.test_freq)
    }

    /// True if the validation of the current step is in the log: a resumed run need not repeat it.
    fn was_validated(&self) -> Result<bool, TrainerError> {
        if !self.folder.file("metrics.jsonl").exists() {
            return Ok(false);
        }
        Ok(self.log.steps()?.iter().any(|line| line.step == self.step && line.get("val/reward").is_some()))
    }

    async fn finish(self) -> Result<RunSummary, TrainerError> {
        let steps = if self.folder.file("metrics.jsonl").exists() { self.log.steps()? } else { Vec::new() };
        let validated =
            |step: u64, name: &str| steps.iter().rev().filter(|line| line.step == step).find_map(|line| line.get(name));
        let totals = &self.totals;
        let per = |amount: u64, seconds: f64| if seconds > 0.0 { amount as f64 / seconds } else { 0.0 };
        let summary = RunSummary {
            run_id: self.identity.run_id.clone(),
            initial_val_reward: self.initial_val_reward.or_else(|| validated(0, "val/reward")),
            final_val_reward: validated(self.step, "val/reward"),
            final_val_standard_error: validated(self.step, "val/standard_error"),
            calls_per_solved: validated(self.step, "val/calls_per_solved"),
            steps: self.step,
            rollouts: totals.rollouts,
            model_calls: totals.model_calls,
            rows_per_rollout: if totals.rollouts > 0 { totals.rows as f64 / totals.rollouts as f64 } else { 0.0 },
            wall_seconds: self.wall_before + self.started.elapsed().as_secs_f64(),
            sampled_tokens_per_second: per(totals.sampled_tokens, totals.sampling_seconds),
            trained_tokens_per_second: per(totals.update_tokens, totals.update_seconds),
            checkpoint: self.folder.checkpoint(self.step),
        };
        write_json(&self.folder.file("summary.json"), &summary)?;
        reward_curve(&self.folder.file("reward.svg"), "Mean reward", &steps)?;
        self.serving.stop(&self.client).await?;
        Ok(summary)
    }
}

fn nothing_usable(step: u64, samples: &Samples) -> TrainerError {
    TrainerError::NothingUsable { step, rollouts: samples.samples.len(), why: reasons(&samples.exclusions()) }
}
