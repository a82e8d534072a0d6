//! `agl models`: serve a model directory, or change what the gateway knows of model servers.

use std::path::PathBuf;

use agl_client::wire::Model;
use agl_engine::{Engine, EngineConfig};
use anyhow::Context;
use clap::Subcommand;
use tokio::net::TcpListener;

use crate::GatewayArgs;
use crate::output::{json, line, note, table};
use crate::stack::interrupt;

/// See `agl models --help`.
#[derive(Subcommand)]
pub enum ModelsCommand {
    /// Serve a Hugging Face directory over the OpenAI interface, with token ids and log-probs.
    Serve {
        /// The directory.
        dir: PathBuf,
        /// Where to listen.
        #[arg(long, default_value = "127.0.0.1:8000", value_name = "HOST:PORT")]
        listen: String,
        /// Longest prompt plus answer in tokens; the model's own limit if absent.
        #[arg(long)]
        max_model_len: Option<usize>,
        /// Sequences decoded together.
        #[arg(long, default_value_t = EngineConfig::default().max_batch_size)]
        max_batch_size: usize,
    },
    /// The model servers that the gateway knows.
    List {
        #[command(flatten)]
        gateway: GatewayArgs,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Tell the gateway of a model server.
    Register {
        #[command(flatten)]
        gateway: GatewayArgs,
        /// The name that calls ask for.
        model: String,
        /// Its base URL, such as `http://host:8000/v1`.
        endpoint: String,
        /// What server it is: `agl` (`agl models serve`), `vllm`, `sglang`, `llamacpp`, `external` (an API of others, whose calls are
        /// recorded but not trained on), or `openai` for anything that takes vLLM's `return_token_ids`.
        #[arg(long, value_parser = ["agl", "vllm", "sglang", "llamacpp", "llama.cpp", "external", "openai"])]
        kind: Option<String>,
        /// The policy version it serves.
        #[arg(long, default_value_t = 0)]
        version: u64,
        /// Whether its tokens are trained on; if absent, they are where its name is the policy's.
        #[arg(long)]
        trainable: Option<bool>,
        /// The model's name at the server, where it is another one.
        #[arg(long, value_name = "NAME")]
        upstream_model: Option<String>,
        /// The environment variable, of the gateway's process, that holds the server's key.
        #[arg(long, value_name = "VARIABLE")]
        api_key_env: Option<String>,
        /// How streams are made: `through` passes them on as the server gives them, which is for servers that stream all token ids
        /// (vLLM does); `synthesise` cuts them from its whole answer.
        #[arg(long, value_parser = ["synthesise", "through"])]
        stream: Option<String>,
    },
    /// Remove one model server, or with `--policy` all of the policy's.
    Remove {
        #[command(flatten)]
        gateway: GatewayArgs,
        /// Its name.
        #[arg(required_unless_present = "policy", requires = "endpoint")]
        model: Option<String>,
        /// Its base URL.
        endpoint: Option<String>,
        /// All servers of the policy.
        #[arg(long, conflicts_with = "model")]
        policy: bool,
    },
}

/// Runs one of them.
pub async fn models(command: ModelsCommand) -> anyhow::Result<()> {
    match command {
        ModelsCommand::Serve { dir, listen, max_model_len, max_batch_size } => {
            let config = EngineConfig { max_model_len, max_batch_size, ..EngineConfig::default() };
            let engine = tokio::task::spawn_blocking(move || Engine::load(&dir, config)).await??;
            let listener = TcpListener::bind(&listen)
                .await
                .with_context(|| format!("cannot listen on {listen}; choose another address with --listen"))?;
            note(format!("serving on http://{}/v1", listener.local_addr()?));
            agl_engine::server::serve(engine, listener, interrupt()).await?;
            Ok(())
        }
        ModelsCommand::List { gateway, json: as_json } => {
            let models = gateway.client()?.list_models().await?;
            if as_json {
                return json(&models);
            }
            let rows: Vec<Vec<String>> = models
                .iter()
                .map(|model| {
                    let trainable = model.trainable.map_or("–", |trainable| if trainable { "yes" } else { "no" });
                    let kind = model.kind.clone().unwrap_or_else(|| "–".into());
                    vec![model.model.clone(), model.endpoint.clone(), kind, model.version.to_string(), trainable.into()]
                })
                .collect();
            table(&["model", "endpoint", "kind", "version", "trainable"], &rows);
            Ok(())
        }
        ModelsCommand::Register {
            gateway,
            model,
            endpoint,
            kind,
            version,
            trainable,
            upstream_model,
            api_key_env,
            stream,
        } => {
            let model = Model { model, endpoint, version, kind, trainable, upstream_model, api_key_env, stream };
            gateway.client()?.register_models(std::slice::from_ref(&model)).await?;
            line(format!("registered {} at {}", model.model, model.endpoint));
            Ok(())
        }
        ModelsCommand::Remove { gateway, model: Some(model), endpoint: Some(endpoint), .. } => {
            gateway.client()?.delete_model(&model, &endpoint).await?;
            line(format!("removed {model} at {endpoint}"));
            Ok(())
        }
        ModelsCommand::Remove { gateway, .. } => {
            gateway.client()?.delete_models().await?;
            line("removed the policy's servers");
            Ok(())
        }
    }
}
