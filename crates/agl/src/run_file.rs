//! `run.toml`: one file for gateway, controller and trainer, whether they run in one process or in three.

use std::path::{Path, PathBuf};

use agl_controller::ControllerConfig;
use agl_engine::EngineConfig;
use agl_gateway::GatewayConfig;
use agl_trainer::run::Settings;
use agl_trainer::{ActorConfig, AlgorithmConfig, DataConfig, ModelConfig, RolloutSection, TrainerConfig};
use figment::Figment;
use figment::providers::{Env, Format, Toml};
use serde::{Deserialize, Serialize};

use crate::failure::usage;

/// Every section of a run file. Unknown keys are errors.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunFile {
    /// The gateway.
    pub gateway: GatewayConfig,
    /// The controller.
    pub controller: ControllerConfig,
    /// The policy.
    pub model: ModelConfig,
    /// The native engine.
    pub engine: EngineConfig,
    /// The tasks.
    pub data: DataConfig,
    /// The agent.
    pub rollout: RolloutSection,
    /// Credit.
    pub algorithm: AlgorithmConfig,
    /// The update.
    pub actor: ActorConfig,
    /// The run.
    pub trainer: TrainerConfig,
}

/// What stands for the run file's own folder in the agent's and the evaluator's strings.
const CONFIG_DIR: &str = "{{ config_dir }}";

/// Where a setting stands, its key, and what is wrong with it.
fn told(cause: &figment::Error, file: Option<&Path>) -> String {
    let key = cause.path.join(".");
    let from = cause.metadata.as_ref().map_or("", |metadata| &metadata.name);
    let place = match file {
        _ if from.starts_with("TOML source") => "--set".to_owned(),
        _ if from.contains("environment") => format!("AGL_{}", key.to_uppercase().replace('.', "__")),
        Some(file) => file.display().to_string(),
        None => "the settings".to_owned(),
    };
    if key.is_empty() { format!("{place}: {}", cause.kind) } else { format!("{place}: `{key}`: {}", cause.kind) }
}

impl RunFile {
    /// Reads a file, then `AGL_SECTION__KEY` from the environment, then `--set section.key=value`; each wins over the one
    /// before. Relative paths in the file are relative to the file.
    ///
    /// # Errors
    /// A usage error that names the file and the key.
    pub fn read(path: Option<&Path>, overrides: &[String]) -> anyhow::Result<Self> {
        let mut figment = Figment::new();
        if let Some(path) = path {
            if !path.is_file() {
                return Err(usage(format!("{}: there is no such run file", path.display())));
            }
            figment = figment.merge(Toml::file_exact(path));
        }
        figment = figment.merge(Env::prefixed("AGL_").split("__").filter(|key| key.as_str().contains('.')));
        for assignment in overrides {
            figment = figment.merge(Toml::string(&as_toml(assignment)?));
        }
        let mut file: Self = figment.extract().map_err(|error| {
            let causes: Vec<String> = error.into_iter().map(|cause| told(&cause, path)).collect();
            usage(causes.join("; "))
        })?;
        file.follow(&figment);
        if let Some(folder) = path.and_then(Path::parent) {
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            let folder = std::path::absolute(folder)?;
            file.anchor(&folder);
            file.hide(&folder.join(path.and_then(Path::file_name).unwrap_or_default()));
        }
        file.read_job_template()?;
        Ok(file)
    }

    /// Says once what two sections must agree on: the policy's name and the sampling temperatures.
    fn follow(&mut self, given: &Figment) {
        let is_given = |key: &str| given.find_value(key).is_ok();
        let proxy = &mut self.gateway.default_proxy;
        if !is_given("gateway.default_proxy.model_name") {
            proxy.model_name.clone_from(&self.model.name);
        }
        if !is_given("gateway.default_proxy.train.temperature") {
            proxy.train.temperature = self.rollout.temperature;
        }
        if !is_given("gateway.default_proxy.val.temperature") {
            proxy.val.temperature = self.rollout.val_temperature;
        }
        if !is_given("gateway.store") {
            self.gateway.store = self.derived_store();
        }
        if !is_given("controller.agent_url") {
            self.controller.agent_url.clone_from(&self.gateway.agent_url);
        }
        if !is_given("controller.work_dir") {
            self.controller.work_dir = self.derived_work_dir();
        }
    }

    /// Makes relative paths absolute, and fills in `{{ config_dir }}`.
    fn anchor(&mut self, folder: &Path) {
        let join = |path: &mut PathBuf| *path = folder.join(&*path);
        join(&mut self.model.path);
        join(&mut self.trainer.default_local_dir);
        join(&mut self.controller.work_dir);
        self.controller.supervisor.iter_mut().chain(&mut self.controller.container.relay).for_each(join);
        self.controller.zygote.iter_mut().flat_map(|zygote| &mut zygote.path).for_each(join);
        self.controller.isolation.iter_mut().for_each(|isolation| isolation.anchor(folder));
        self.data.train_files.iter_mut().chain(&mut self.data.val_files).for_each(join);
        if let Some(path) = store_path(&self.gateway.store) {
            self.gateway.store = format!("sqlite:{}", folder.join(path).display());
        }
        let here = folder.display().to_string();
        let fill = |text: &mut String| *text = text.replace(CONFIG_DIR, &here).replace("{{config_dir}}", &here);
        if let Some(process) = &mut self.rollout.process {
            process.argv.iter_mut().chain(process.env.values_mut()).chain(&mut process.cwd).for_each(fill);
            // A folder that begins with a template is whatever the template says.
            for cwd in process.cwd.iter_mut().filter(|cwd| !cwd.starts_with("{{")) {
                *cwd = folder.join(&*cwd).display().to_string();
            }
        }
        if let Some(container) = &mut self.rollout.container {
            container.argv.iter_mut().chain(&mut container.entrypoint).flatten().for_each(fill);
            container.env.values_mut().chain([&mut container.image]).chain(&mut container.cwd).for_each(fill);
            for source in container.mounts.iter_mut().map(|mount| &mut mount.source) {
                fill(source);
                if !source.starts_with("{{") {
                    *source = folder.join(&*source).display().to_string();
                }
            }
        }
        let k8s = self.rollout.k8s.iter_mut().filter_map(|k8s| k8s.job_template_path.as_mut());
        k8s.chain(&mut self.controller.kubernetes.kubeconfig).for_each(join);
        for evaluator in self.rollout.evaluator.iter_mut().chain(&mut self.controller.evaluator) {
            evaluator.argv.iter_mut().chain(evaluator.env.values_mut()).for_each(fill);
        }
    }

    /// Who reads the gateway's database or the run file can make keys: both are hidden from agents behind walls. So is the
    /// run's folder, unless the run file and with it the agent may lie in it.
    fn hide(&mut self, run_file: &Path) {
        let Some(isolation) = &mut self.controller.isolation else { return };
        let run = Some(self.trainer.default_local_dir.clone()).filter(|run| !run_file.starts_with(run));
        let store = store_path(&self.gateway.store);
        let store = store.iter().flat_map(|path| ["", "-wal", "-shm"].map(|end| PathBuf::from(format!("{path}{end}"))));
        for place in run.into_iter().chain(store).chain([run_file.to_owned()]) {
            if !isolation.hidden.contains(&place) {
                isolation.hidden.push(place);
            }
        }
    }

    /// A Job's template travels as text, also into the settings of the run: what it trained with stays known.
    fn read_job_template(&mut self) -> anyhow::Result<()> {
        let Some(k8s) = &mut self.rollout.k8s else { return Ok(()) };
        let Some(path) = k8s.job_template_path.take() else { return Ok(()) };
        if k8s.job_template.is_some() {
            return Err(usage("rollout.k8s has both job_template and job_template_path: remove one of them"));
        }
        let text = std::fs::read_to_string(&path).map_err(|error| {
            usage(format!("rollout.k8s.job_template_path: cannot read {}: {error}", path.display()))
        })?;
        k8s.job_template = Some(text);
        Ok(())
    }

    /// The trainer's part.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings {
            model: self.model.clone(),
            engine: self.engine.clone(),
            data: self.data.clone(),
            rollout: self.rollout.clone(),
            algorithm: self.algorithm.clone(),
            actor: self.actor.clone(),
            trainer: self.trainer.clone(),
        }
    }

    /// Writes the settings, so that a run can be looked at and continued: without the server key and the password of the
    /// database, and without what follows from other keys, so that it still follows when these are overridden.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let mut table = toml::Table::try_from(self)?;
        if let Some(gateway) = table.get_mut("gateway").and_then(toml::Value::as_table_mut) {
            gateway.insert("store".to_owned(), self.gateway.shown_store().into());
        }
        let derived = [
            ("gateway.key", true),
            ("gateway.store", self.gateway.store == self.derived_store()),
            ("gateway.default_proxy.model_name", self.gateway.default_proxy.model_name == self.model.name),
            ("gateway.default_proxy.train", self.gateway.default_proxy.train.temperature == self.rollout.temperature),
            ("gateway.default_proxy.val", self.gateway.default_proxy.val.temperature == self.rollout.val_temperature),
            ("controller.agent_url", self.controller.agent_url == self.gateway.agent_url),
            ("controller.work_dir", self.controller.work_dir == self.derived_work_dir()),
        ];
        for (key, _) in derived.iter().filter(|(_, follows)| *follows) {
            remove(&mut table, key);
        }
        let text = toml::to_string_pretty(&table)?;
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, text)
            .and_then(|()| std::fs::rename(&fresh, path))
            .map_err(|error| anyhow::anyhow!("cannot write {}: {error}", path.display()))
    }

    fn derived_store(&self) -> String {
        format!("sqlite:{}", self.trainer.default_local_dir.join("gateway.db").display())
    }

    fn derived_work_dir(&self) -> PathBuf {
        self.trainer.default_local_dir.join("controller")
    }

    /// Where clients find the gateway when nothing else is said: where this file says it listens.
    #[must_use]
    pub fn gateway_url(&self) -> String {
        let listen = self.gateway.listen.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]");
        format!("http://{listen}")
    }
}

/// The file of a SQLite store, which may be written with or without its scheme.
pub fn store_path(store: &str) -> Option<&str> {
    let is_file = store != "memory" && !store.starts_with("postgres://") && !store.starts_with("postgresql://");
    is_file.then(|| store.strip_prefix("sqlite:").unwrap_or(store))
}

fn remove(table: &mut toml::Table, key: &str) {
    match key.split_once('.') {
        Some((section, rest)) => {
            if let Some(inner) = table.get_mut(section).and_then(toml::Value::as_table_mut) {
                remove(inner, rest);
            }
        }
        None => drop(table.remove(key)),
    }
}

/// `section.key=value` as TOML; a value that is no TOML literal is taken as a string.
fn as_toml(assignment: &str) -> anyhow::Result<String> {
    let (key, value) = assignment
        .split_once('=')
        .ok_or_else(|| usage(format!("--set {assignment}: write it as section.key=value")))?;
    let (key, value) = (key.trim(), value.trim());
    let literal = format!("{key} = {value}");
    if Figment::from(Toml::string(&literal)).find_value(key).is_ok() {
        return Ok(literal);
    }
    Ok(format!("{key} = {}", serde_json::Value::from(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, overrides: &[&str]) -> anyhow::Result<RunFile> {
        let folder = std::env::temp_dir().join(format!("agl-run-file-{}-{:x}", std::process::id(), text.len()));
        std::fs::create_dir_all(&folder)?;
        let path = folder.join("run.toml");
        std::fs::write(&path, text)?;
        let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
        RunFile::read(Some(&path), &overrides)
    }

    #[test]
    fn the_documented_file_is_readable_and_names_every_key_with_its_default() {
        let page = include_str!("../../../docs/run-file.md");
        let text = page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        let documented: toml::Table = toml::from_str(text).unwrap();
        let mut everything = RunFile::default();
        everything.rollout.process = Some(agl_core::rollout::ProcessConfig::default());
        let defaults: toml::Table = toml::from_str(&toml::to_string(&everything).unwrap()).unwrap();
        compare("", &defaults, &documented, text);
        read(text, &[]).unwrap();
    }

    /// Each default stands in the page, as a value, or as a commented key where it depends on something else.
    fn compare(place: &str, defaults: &toml::Table, documented: &toml::Table, text: &str) {
        for (key, value) in defaults {
            let name = format!("{place}{key}");
            match (value, documented.get(key)) {
                (toml::Value::Table(inner), Some(toml::Value::Table(found))) => {
                    compare(&format!("{name}."), inner, found, text);
                }
                (value, Some(found)) => assert_eq!(value.to_string(), found.to_string(), "{name}"),
                (_, None) => assert!(text.contains(&format!("# {key} = ")), "{name} is not documented"),
            }
        }
    }

    #[test]
    fn what_keys_can_be_made_of_is_hidden_from_agents_behind_walls() {
        for (folder, hides_the_run) in [("out", true), (".", false)] {
            let text = format!("[trainer]\ndefault_local_dir = {folder:?}\n[controller.isolation]\nhidden = []\n");
            let file = read(&text, &[]).unwrap();
            let hidden = &file.controller.isolation.as_ref().unwrap().hidden;
            let store = store_path(&file.gateway.store).unwrap();
            for end in ["", "-wal", "-shm"] {
                assert!(hidden.contains(&PathBuf::from(format!("{store}{end}"))), "{store}{end} in {hidden:?}");
            }
            assert!(hidden.iter().any(|place| place.ends_with("run.toml")), "{hidden:?}");
            assert_eq!(hidden.contains(&file.trainer.default_local_dir), hides_the_run, "{hidden:?}");
        }
    }

    #[test]
    fn the_gateway_follows_the_policy_s_name_and_the_sampling_temperatures_unless_told_otherwise() {
        let file =
            read("[model]\nname = \"mine\"\n[rollout]\ntemperature = 0.5\nval_temperature = 0.25\n", &[]).unwrap();
        let proxy = &file.gateway.default_proxy;
        assert_eq!((proxy.model_name.as_str(), proxy.train.temperature, proxy.val.temperature), ("mine", 0.5, 0.25));
        let file = read("[model]\nname = \"mine\"\n", &["gateway.default_proxy.model_name=other"]).unwrap();
        assert_eq!(file.gateway.default_proxy.model_name, "other");
    }

    #[test]
    fn a_written_file_reads_back_the_same() {
        let text = "[rollout.process]\nargv = [\"{{ config_dir }}/agent\", \"{{ input.question }}\"]\n";
        let file = read(text, &["actor.optim.lr=3e-4", "trainer.seed=7"]).unwrap();
        assert_eq!((file.actor.optim.lr, file.trainer.seed), (3e-4, 7));
        let argv = &file.rollout.process.as_ref().unwrap().argv;
        assert!(Path::new(&argv[0]).is_absolute() && argv[1] == "{{ input.question }}", "{argv:?}");
        let path = std::env::temp_dir().join(format!("agl-run-file-{}.toml", std::process::id()));
        file.write(&path).unwrap();
        let again = RunFile::read(Some(&path), &[]).unwrap();
        assert_eq!(toml::to_string(&again).unwrap(), toml::to_string(&file).unwrap());
    }

    #[test]
    fn a_written_file_holds_no_key_and_what_follows_from_other_keys_still_follows() {
        let store = "postgres://agl:secret@db:5432/agl";
        let text = format!("[gateway]\nkey = \"secret\"\nstore = \"{store}\"\n[rollout]\nval_temperature = 0.7\n");
        let file = read(&text, &[]).unwrap();
        assert_eq!(file.gateway.store, store);
        let path = std::env::temp_dir().join(format!("agl-run-file-follows-{}.toml", std::process::id()));
        file.write(&path).unwrap();
        assert!(!std::fs::read_to_string(&path).unwrap().contains("secret"));
        let again = RunFile::read(Some(&path), &["rollout.val_temperature=0.25".into()]).unwrap();
        assert_eq!(again.gateway.default_proxy.val.temperature, 0.25);
        assert_eq!(again.gateway.store, "postgres://agl@db:5432/agl");
    }

    #[test]
    fn an_override_that_is_no_assignment_is_refused() {
        let message = read("", &["actor.optim.lr"]).unwrap_err().to_string();
        assert!(message.contains("section.key=value"), "{message}");
    }
}
