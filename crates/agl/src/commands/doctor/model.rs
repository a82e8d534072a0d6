//! The model that the harness talks to while it is looked at, and how its tokens read.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agl_client::GatewayClient;
use agl_client::wire::Model;
use agl_core::trajectory::TokenDecoder;
use agl_engine::{Engine, EngineConfig};
use agl_mock_llm::{Answer, MockLlm, Script, Select, WhenDone};
use agl_trainer::ModelConfig;
use agl_trainer::serving::Serving;
use anyhow::Context;
use clap::Args;
use serde_json::{Value, json};

use crate::GatewayArgs;
use crate::failure::usage;

/// Which model answers the harness.
#[derive(Args)]
pub struct ModelArgs {
    /// A Hugging Face directory, run by the native engine. Without this and the next two, a probe answers: no model at all, it
    /// calls a tool of the harness where there is one, and then says «Done.»
    #[arg(long, value_name = "DIR", group = "which")]
    model: Option<PathBuf>,
    /// A model server, such as `http://host:8000/v1`.
    #[arg(long, value_name = "URL", group = "which")]
    endpoint: Option<String>,
    /// A model that the gateway at `--gateway` knows: its servers answer, that gateway is not touched.
    #[arg(long, value_name = "NAME", group = "which")]
    registered: Option<String>,
    /// What the server at `--endpoint` is, as in `agl models register`.
    #[arg(long, requires = "endpoint", value_name = "KIND")]
    kind: Option<String>,
    /// The model's name at `--endpoint`; the first that it lists if absent.
    #[arg(long, requires = "endpoint", value_name = "NAME")]
    model_name: Option<String>,
    /// What the probe says, turn by turn, in place of its own words; may be repeated. The last is said again.
    #[arg(long, value_name = "TEXT", conflicts_with = "which")]
    answer: Vec<String>,
    /// What the probe says, as `agl-mock-llm` reads it: tool calls too.
    #[arg(long, value_name = "JSON FILE", conflicts_with_all = ["which", "answer"])]
    script: Option<PathBuf>,
    #[command(flatten)]
    gateway: GatewayArgs,
}

/// A model that is served until this is dropped.
pub enum Served {
    /// Scripted.
    Probe(#[expect(dead_code, reason = "it answers as long as it is kept")] MockLlm),
    /// The native engine.
    Native(Box<Engine>, Serving),
    /// Somebody else's servers.
    Elsewhere(Vec<String>),
}

impl ModelArgs {
    /// Starts the model and tells `client` of it, under the name `policy.name`. `own` is the model directory of a run file.
    pub async fn serve(
        &self,
        own: Option<&Path>,
        policy: &ModelConfig,
        engine: &EngineConfig,
        client: &GatewayClient,
    ) -> anyhow::Result<Served> {
        if let Some(name) = &self.registered {
            return self.known_to_a_gateway(name, policy, client).await;
        }
        if let Some(endpoint) = &self.endpoint {
            return self.at(endpoint, policy, client).await;
        }
        let scripted = self.script.is_some() || !self.answer.is_empty();
        let own = own.filter(|folder| !scripted && folder.join("config.json").is_file());
        if let Some(folder) = self.model.as_deref().or(own) {
            let (folder, config) = (folder.to_owned(), engine.clone());
            let engine = tokio::task::spawn_blocking(move || Engine::load(&folder, config)).await??;
            let settings = ModelConfig { listen: "127.0.0.1:0".into(), advertise_url: None, ..policy.clone() };
            let mut serving = Serving::start(engine.clone(), &settings, client.clone(), "doctor").await?;
            serving.publish(1).await?;
            return Ok(Served::Native(Box::new(engine), serving));
        }
        let probe = MockLlm::start(self.probe_script()?).await?;
        register(client, policy, probe.endpoint(), None, None).await?;
        Ok(Served::Probe(probe))
    }

    fn probe_script(&self) -> anyhow::Result<Script> {
        if let Some(path) = &self.script {
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            return serde_json::from_str(&text).map_err(|error| usage(format!("{}: {error}", path.display())));
        }
        let answers: Vec<_> = self.answer.iter().cloned().map(Answer::Text).collect();
        let when_done = if answers.is_empty() { WhenDone::Probe } else { WhenDone::RepeatLast };
        Ok(Script { answers, select: Select::Turn, when_done, only_offered_tools: true, ..Script::default() })
    }

    async fn at(&self, endpoint: &str, policy: &ModelConfig, client: &GatewayClient) -> anyhow::Result<Served> {
        let name = match &self.model_name {
            Some(name) => name.clone(),
            None => first_model(endpoint).await?,
        };
        register(client, policy, endpoint.to_owned(), self.kind.clone(), Some(name)).await?;
        Ok(Served::Elsewhere(vec![endpoint.to_owned()]))
    }

    async fn known_to_a_gateway(
        &self,
        name: &str,
        policy: &ModelConfig,
        client: &GatewayClient,
    ) -> anyhow::Result<Served> {
        let known = self.gateway.client()?.list_models().await?;
        let asked: Vec<Model> = known
            .iter()
            .filter(|model| model.model == name)
            .map(|model| Model {
                model: policy.name.clone(),
                upstream_model: Some(model.upstream_model.clone().unwrap_or_else(|| name.to_owned())),
                trainable: Some(true),
                ..model.clone()
            })
            .collect();
        if asked.is_empty() {
            let names: std::collections::BTreeSet<_> = known.iter().map(|model| model.model.as_str()).collect();
            let names = if names.is_empty() { "none".into() } else { names.into_iter().collect::<Vec<_>>().join(", ") };
            return Err(usage(format!("--registered {name}: the gateway knows no such model; it knows {names}")));
        }
        client.register_models(&asked).await?;
        Ok(Served::Elsewhere(asked.into_iter().map(|model| model.endpoint).collect()))
    }
}

async fn register(
    client: &GatewayClient,
    policy: &ModelConfig,
    endpoint: String,
    kind: Option<String>,
    upstream_model: Option<String>,
) -> anyhow::Result<()> {
    let model = Model {
        model: policy.name.clone(),
        endpoint,
        version: 0,
        kind,
        trainable: Some(true),
        upstream_model,
        api_key_env: None,
        stream: None,
    };
    client.register_models(&[model]).await?;
    Ok(())
}

async fn first_model(endpoint: &str) -> anyhow::Result<String> {
    let url = format!("{}/models", endpoint.trim_end_matches('/'));
    let asked = async { reqwest::get(&url).await?.error_for_status()?.json::<Value>().await };
    let list = tokio::time::timeout(Duration::from_secs(10), asked)
        .await
        .map_err(|_| anyhow::anyhow!("{url} did not answer within 10 s"))?
        .with_context(|| format!("cannot ask {url} for its models; name one with --model-name"))?;
    let id = list.pointer("/data/0/id").and_then(Value::as_str).map(str::to_owned);
    id.with_context(|| format!("{url} lists no model; name one with --model-name"))
}

impl Served {
    /// What answers, for a person.
    pub fn name(&self) -> String {
        match self {
            Self::Probe(_) => "a probe, no model: it calls one tool where there is one, then ends".to_owned(),
            Self::Native(engine, _) => format!("{}, the native engine", engine.model_name()),
            Self::Elsewhere(endpoints) => endpoints.join(", "),
        }
    }

    /// How token lists read. Lists that could not be decoded are absent.
    pub async fn decode(&self, lists: Vec<Vec<u32>>) -> Decoded {
        let mut texts = HashMap::new();
        for tokens in lists {
            let text = match self {
                Self::Probe(_) => Some(agl_mock_llm::tokenizer::decode_with_frames(&tokens)),
                Self::Native(engine, _) => engine.tokenizer().decode(&tokens, false).ok(),
                Self::Elsewhere(endpoints) => match endpoints.first() {
                    Some(endpoint) => detokenize(endpoint, &tokens).await,
                    None => None,
                },
            };
            if let Some(text) = text {
                texts.insert(tokens, text);
            }
        }
        Decoded(texts)
    }
}

/// vLLM, SGLang and agl take `/detokenize` beside `/v1` and answer with `prompt`; llama.cpp answers with `content`.
async fn detokenize(endpoint: &str, tokens: &[u32]) -> Option<String> {
    let url = format!("{}/detokenize", endpoint.trim_end_matches('/').trim_end_matches("/v1"));
    let client = reqwest::Client::builder().timeout(Duration::from_secs(10)).build().ok()?;
    let asked = client.post(url).json(&json!({"tokens": tokens})).send().await.ok()?.error_for_status().ok()?;
    let answer: Value = asked.json().await.ok()?;
    ["prompt", "content", "text"].iter().find_map(|key| answer.get(key)?.as_str().map(str::to_owned))
}

/// Texts of token lists that were asked for before.
pub struct Decoded(HashMap<Vec<u32>, String>);

impl Decoded {
    /// True where the text is known.
    pub fn knows(&self, tokens: &[u32]) -> bool {
        self.0.contains_key(tokens)
    }
}

impl TokenDecoder for Decoded {
    fn decode(&self, tokens: &[u32]) -> String {
        self.0.get(tokens).cloned().unwrap_or_default()
    }
}
