//! A rollout's configuration as commands and environments. Nothing here touches the world.

use std::collections::BTreeMap;
use std::path::PathBuf;

use agl_core::rollout::{ContainerConfig, EvaluatorConfig, LocalConfig, ProcessConfig, Rollout};
use minijinja::{Environment, UndefinedBehavior};
use serde::Serialize;
use serde_json::{Map, Value, ser};

use crate::address::AgentAddress;
use crate::config::ControllerConfig;
use crate::isolation::{Enclosure, Report};
use crate::runner::{Host, Order};
use crate::supervisor::record::{Command, Spec};
use crate::work_dir::AttemptDir;

/// A rollout that cannot be run as it is configured. No further attempt would change that.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// There is nothing to run.
    #[error(
        "the rollout's config has neither process nor local: there is nothing to run; set config.process.argv to the \
         agent's command, or config.local.agent_class to its Python class"
    )]
    NothingToRun,
    /// There are two things to run.
    #[error("the rollout's config has both process and local: remove one of them")]
    Ambiguous,
    /// A command without a program.
    #[error("{key} is empty: its first word must be the program to run")]
    NoProgram {
        /// Which list.
        key: &'static str,
    },
    /// `local` without a class.
    #[error("invalid rollout config: missing config.local.agent_class")]
    NoAgentClass,
    /// `k8s` without a template.
    #[error("invalid rollout config: missing config.k8s.job_template")]
    NoJobTemplate,
    /// `container` without an image.
    #[error("invalid rollout config: missing config.container.image")]
    NoImage,
    /// A template that renders no Job that can be run.
    #[error("config.k8s.job_template: {0}")]
    JobTemplate(String),
    /// A template that cannot be rendered.
    #[error("the template {key} = {template:?} cannot be rendered: {problem}")]
    Template {
        /// Where it stands.
        key: String,
        /// Its source.
        template: String,
        /// What is wrong, naming what is missing.
        problem: String,
    },
    /// `local.env_map` names a part of the input that is not there.
    #[error("local.env_map path not found: {path}")]
    EnvMap {
        /// The path.
        path: String,
    },
    /// The gateway cannot be reached by an isolated agent.
    #[error("the agent cannot be isolated with agent_url = {agent_url}: {problem}")]
    Isolation {
        /// The gateway as agents reach it.
        agent_url: String,
        /// What is wrong with it.
        problem: &'static str,
    },
}

/// Who is to run, and with which keys.
pub struct Launch<'a> {
    /// The rollout.
    pub rollout: &'a Rollout,
    /// Its attempt.
    pub attempt_id: &'a str,
    /// The agent's own key.
    pub key: &'a str,
    /// The evaluator's key.
    pub reward_key: &'a str,
    /// The gateway as agents reach it, without a trailing slash.
    pub agent_url: &'a str,
    /// The attempt's folder.
    pub dir: &'a AttemptDir,
    /// The controller's working directory, from which Python classes are imported.
    pub controller_cwd: PathBuf,
}

impl<'a> Launch<'a> {
    /// What an order says, in the folder `dir` of its attempt.
    #[must_use]
    pub fn new(order: &'a Order, dir: &'a AttemptDir, host: &Host) -> Self {
        Self {
            rollout: &order.rollout,
            attempt_id: &order.attempt_id,
            key: &order.key,
            reward_key: &order.reward_key,
            agent_url: &order.agent_url,
            dir,
            controller_cwd: host.cwd.clone(),
        }
    }
}

impl Launch<'_> {
    /// What the supervisor has to run.
    ///
    /// # Errors
    /// [`LaunchError`], written for whoever configured the rollout.
    pub fn spec(&self, config: &ControllerConfig) -> Result<Spec, LaunchError> {
        let rollout = &self.rollout.config;
        let isolation = self.enclosure(config)?;
        // Only the agent's URLs lead through the relay.
        let inside = Launch {
            agent_url: isolation.as_ref().map_or(self.agent_url, |isolation| &isolation.inside_url),
            controller_cwd: self.controller_cwd.clone(),
            ..*self
        };
        let mut agent = match (&rollout.process, &rollout.local) {
            (Some(process), None) => inside.process(process, config)?,
            (None, Some(local)) => inside.local(local, config)?,
            (Some(_), Some(_)) => return Err(LaunchError::Ambiguous),
            (None, None) => return Err(LaunchError::NothingToRun),
        };
        if let Some(isolation) = &isolation {
            isolation.furnish(&mut agent.env);
        }
        let evaluator = config.evaluator_of(rollout);
        let mut evaluator = evaluator.map(|evaluator| self.evaluator(evaluator)).transpose()?;
        if let Some(evaluator) = evaluator.as_mut().filter(|_| isolation.is_some()) {
            // It runs outside, in a folder that the agent has written: Python is not to import from there.
            evaluator.env.entry("PYTHONSAFEPATH".to_owned()).or_insert_with(|| "1".to_owned());
        }
        Ok(Spec {
            evaluator,
            agent,
            input: self.rollout.input.clone(),
            log_limit_bytes: config.log_limit_bytes,
            kill_grace_seconds: config.kill_grace_seconds,
            isolation,
        })
    }

    /// What the supervisor of an evaluator has to run whose agent ran elsewhere and exited with `exit_code`. `None`: there is
    /// no evaluator. The supervisor's own folder is [`AttemptDir::evaluation`].
    ///
    /// # Errors
    /// [`LaunchError`], written for whoever configured the rollout.
    pub fn evaluation(&self, config: &ControllerConfig, exit_code: Option<i32>) -> Result<Option<Spec>, LaunchError> {
        let Some(evaluator) = config.evaluator_of(&self.rollout.config) else {
            return Ok(None);
        };
        let mut command = self.evaluator(evaluator)?;
        let input = self.dir.evaluation().input().to_string_lossy().into_owned();
        let code = exit_code.map(|code| code.to_string()).unwrap_or_default();
        command.env.extend([("AGL_INPUT".to_owned(), input), ("AGL_EXIT_CODE".to_owned(), code)]);
        Ok(Some(Spec {
            agent: command,
            evaluator: None,
            input: self.rollout.input.clone(),
            log_limit_bytes: config.log_limit_bytes,
            kill_grace_seconds: config.kill_grace_seconds,
            isolation: None,
        }))
    }

    /// `config.container` with its templates filled in and all that the agent finds in its environment. Paths are as the
    /// container sees them: [`Launch::dir`] is then the attempt's folder inside.
    ///
    /// # Errors
    /// [`LaunchError`], written for whoever configured the rollout.
    pub fn container(&self, config: &ControllerConfig) -> Result<ContainerConfig, LaunchError> {
        let container = self.rollout.config.container.as_ref().ok_or(LaunchError::NoImage)?;
        let image = self.render("config.container.image", &container.image, None)?;
        if image.trim().is_empty() {
            return Err(LaunchError::NoImage);
        }
        let words = |key: &str, words: &Option<Vec<String>>| -> Result<Option<Vec<String>>, LaunchError> {
            let Some(words) = words else { return Ok(None) };
            let rendered = words.iter().enumerate().map(|(at, word)| self.render(&format!("{key}[{at}]"), word, None));
            rendered.collect::<Result<_, _>>().map(Some)
        };
        let text = |key: &str, text: &Option<String>| -> Result<Option<String>, LaunchError> {
            text.as_ref().map(|text| self.render(key, text, None)).transpose()
        };
        let mut mounts = container.mounts.clone();
        for (at, mount) in mounts.iter_mut().enumerate() {
            mount.source = self.render(&format!("config.container.mounts[{at}].source"), &mount.source, None)?;
            mount.target = self.render(&format!("config.container.mounts[{at}].target"), &mount.target, None)?;
        }
        let mut env = self.agent_environment(config);
        env.extend(self.render_env("config.container.env", &container.env, self.key)?);
        Ok(ContainerConfig {
            image,
            argv: words("config.container.argv", &container.argv)?,
            entrypoint: words("config.container.entrypoint", &container.entrypoint)?,
            env,
            cwd: text("config.container.cwd", &container.cwd)?,
            user: text("config.container.user", &container.user)?,
            mounts,
        })
    }

    fn enclosure(&self, config: &ControllerConfig) -> Result<Option<Enclosure>, LaunchError> {
        let report = Report {
            gateway_url: self.agent_url.to_owned(),
            rollout_id: self.rollout.rollout_id.clone(),
            attempt_id: self.attempt_id.to_owned(),
            key: self.key.to_owned(),
        };
        let fault = |problem| LaunchError::Isolation { agent_url: self.agent_url.to_owned(), problem };
        Enclosure::new(config.isolation.as_ref(), report).map_err(fault)
    }

    fn process(&self, process: &ProcessConfig, config: &ControllerConfig) -> Result<Command, LaunchError> {
        let cwd = match &process.cwd {
            Some(cwd) => PathBuf::from(self.render("config.process.cwd", cwd, None)?),
            None => self.dir.work(),
        };
        let mut env = self.agent_environment(config);
        env.extend(self.render_env("config.process.env", &process.env, self.key)?);
        Ok(Command {
            argv: self.render_argv("config.process.argv", &process.argv)?,
            env,
            cwd,
            timeout_seconds: self.rollout.config.timeout_seconds,
        })
    }

    /// As Agent Lightning v1.0 starts it, and without its package: `python -c LOADER CLASS` in the controller's own
    /// working directory, `env_map` over everything else.
    fn local(&self, local: &LocalConfig, config: &ControllerConfig) -> Result<Command, LaunchError> {
        let class = local.agent_class.as_deref().filter(|class| !class.is_empty()).ok_or(LaunchError::NoAgentClass)?;
        let mut env = self.agent_environment(config);
        env.extend(env_from_map(&self.rollout.input, &local.env_map)?);
        Ok(Command {
            argv: [config.python.as_str(), "-c", LOADER, class].map(str::to_owned).to_vec(),
            env,
            cwd: self.controller_cwd.clone(),
            timeout_seconds: self.rollout.config.timeout_seconds,
        })
    }

    fn evaluator(&self, evaluator: &EvaluatorConfig) -> Result<Command, LaunchError> {
        let path = |path: PathBuf| path.to_string_lossy().into_owned();
        let mut env = BTreeMap::from([
            ("AGL_EVENT_URL".to_owned(), self.address().event_url().to_owned()),
            ("AGL_KEY".to_owned(), self.reward_key.to_owned()),
            ("AGL_INPUT".to_owned(), path(self.dir.evaluator_input())),
            ("AGL_AGENT_STDOUT".to_owned(), path(self.dir.stdout())),
            ("AGL_AGENT_STDERR".to_owned(), path(self.dir.stderr())),
            ("AGL_WORKDIR".to_owned(), path(self.dir.work())),
        ]);
        env.extend(self.render_env("config.evaluator.env", &evaluator.env, self.reward_key)?);
        Ok(Command {
            argv: self.render_argv("config.evaluator.argv", &evaluator.argv)?,
            env,
            cwd: self.dir.work(),
            timeout_seconds: evaluator.timeout_seconds,
        })
    }

    fn agent_environment(&self, config: &ControllerConfig) -> BTreeMap<String, String> {
        let mut env = self.address().environment(config.sdk_environment);
        let keys = AgentAddress::key_names(config.sdk_environment);
        env.extend(keys.iter().map(|name| ((*name).to_owned(), self.key.to_owned())));
        env.insert("AGL_INPUT".to_owned(), self.dir.input().to_string_lossy().into_owned());
        env
    }

    fn address(&self) -> AgentAddress {
        AgentAddress::new(self.agent_url, &self.rollout.rollout_id, self.attempt_id, self.rollout.mode())
    }

    fn render_argv(&self, key: &'static str, argv: &[String]) -> Result<Vec<String>, LaunchError> {
        if argv.is_empty() {
            return Err(LaunchError::NoProgram { key });
        }
        let words = argv.iter().enumerate();
        let words: Vec<String> =
            words.map(|(index, word)| self.render(&format!("{key}[{index}]"), word, None)).collect::<Result<_, _>>()?;
        if words.first().is_some_and(String::is_empty) {
            return Err(LaunchError::NoProgram { key });
        }
        Ok(words)
    }

    fn render_env(
        &self,
        key: &str,
        env: &BTreeMap<String, String>,
        secret: &str,
    ) -> Result<BTreeMap<String, String>, LaunchError> {
        env.iter()
            .map(|(name, value)| Ok((name.clone(), self.render(&format!("{key}.{name}"), value, Some(secret))?)))
            .collect()
    }

    /// `key` is there for environments only: a command line is for everybody to read.
    fn render(&self, key: &str, template: &str, secret: Option<&str>) -> Result<String, LaunchError> {
        // Most words are no templates.
        if !template.contains(['{', '}']) {
            return Ok(template.to_owned());
        }
        let (rollout, address) = (self.rollout, self.address());
        let mut context = Map::new();
        for (name, value) in [
            ("input", rollout.input.clone()),
            ("rollout_id", rollout.rollout_id.clone().into()),
            ("attempt_id", self.attempt_id.into()),
            ("is_train", rollout.is_train.into()),
            ("mode", rollout.mode().into()),
            ("metadata", rollout.metadata.clone().into()),
            ("work_dir", self.dir.work().to_string_lossy().into()),
            ("openai_base_url", address.base_url("openai/v1").into()),
            ("anthropic_base_url", address.base_url("anthropic").into()),
            ("gemini_base_url", address.base_url("gemini").into()),
            ("event_url", address.event_url().into()),
        ] {
            context.insert(name.to_owned(), value);
        }
        if let Some(secret) = secret {
            context.insert("key".to_owned(), secret.into());
        }
        let context = Value::Object(context);
        let mut environment = Environment::new();
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        environment.set_keep_trailing_newline(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        render_with(&environment, key, template, &context)
    }
}

/// Renders one template; an error names the template's `key` and what is missing.
///
/// # Errors
/// [`LaunchError::Template`].
pub(crate) fn render_with(
    environment: &Environment<'_>,
    key: &str,
    template: &str,
    context: &Value,
) -> Result<String, LaunchError> {
    let fault = |problem: String| LaunchError::Template { key: key.to_owned(), template: template.to_owned(), problem };
    let compiled = environment.template_from_str(template).map_err(|error| fault(error.to_string()))?;
    compiled.render(context).map_err(|error| {
        let mut missing: Vec<String> = compiled
            .undeclared_variables(true)
            .into_iter()
            .filter(|path| !exists(context, path) && path != "range" && path != "dict")
            .collect();
        if error.kind() == minijinja::ErrorKind::UndefinedError && !missing.is_empty() {
            missing.sort();
            return fault(format!("there is no {}", missing.join(", no ")));
        }
        fault(error.to_string())
    })
}

fn exists(context: &Value, path: &str) -> bool {
    path.split('.').try_fold(context, |value, part| value.get(part)).is_some()
}

/// `env_map` of Agent Lightning v1.0: a name gets the whole `input`, a part of it (`input.a.0.b`), or the literal text.
///
/// # Errors
/// [`LaunchError::EnvMap`] for a path that the input does not have.
pub fn env_from_map(
    input: &Value,
    env_map: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, LaunchError> {
    let missing = |path: &str| LaunchError::EnvMap { path: path.to_owned() };
    let mut env = BTreeMap::new();
    for (name, path) in env_map {
        let value = match path.strip_prefix("input.") {
            Some(rest) => Some(rest.split('.').try_fold(input, step).ok_or_else(|| missing(path))?),
            None => (path == "input").then_some(input),
        };
        let text = match value {
            None => path.clone(),
            Some(Value::String(text)) => text.clone(),
            Some(value) => python_json(value),
        };
        env.insert(name.clone(), text);
    }
    Ok(env)
}

fn step<'a>(value: &'a Value, part: &str) -> Option<&'a Value> {
    match value {
        Value::Object(fields) => fields.get(part),
        Value::Array(items) if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) => {
            items.get(part.parse::<usize>().ok()?)
        }
        _ => None,
    }
}

/// JSON as Python's `json.dumps(value, ensure_ascii=False)` spaces it.
fn python_json(value: &Value) -> String {
    struct Spaced;
    impl ser::Formatter for Spaced {
        fn begin_array_value<W: ?Sized + std::io::Write>(
            &mut self,
            writer: &mut W,
            first: bool,
        ) -> std::io::Result<()> {
            writer.write_all(if first { b"" } else { b", " })
        }
        fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
            writer.write_all(if first { b"" } else { b", " })
        }
        fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
            writer.write_all(b": ")
        }
    }
    let mut bytes = Vec::new();
    match value.serialize(&mut ser::Serializer::with_formatter(&mut bytes, Spaced)) {
        Ok(()) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(_) => value.to_string(),
    }
}

/// Imports the class, calls `run()`, awaits what it gives if it can be awaited. Imports nothing that it does not need:
/// it runs once per rollout.
const LOADER: &str = r#"import sys
def load(path):
    import importlib
    module, name = path.split(":", 1) if ":" in path else path.rsplit(".", 1)
    loaded = getattr(importlib.import_module(module), name)
    if not isinstance(loaded, type):
        raise TypeError(f"{path} is not a class")
    return loaded
def main(path):
    try:
        result = load(path)().run()
        if result is not None:
            import inspect
            if inspect.isawaitable(result):
                import asyncio
                async def wait():
                    await result
                asyncio.run(wait())
        return 0
    except Exception:
        import traceback
        traceback.print_exc()
        return 1
sys.exit(main(sys.argv[1]))
"#;

#[cfg(test)]
#[path = "launch_tests.rs"]
mod tests;
