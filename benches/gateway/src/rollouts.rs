//! Rollouts as a controller makes and ends them, through the management interface.

use anyhow::{Context, bail};
use clap::ValueEnum;
use serde_json::{Value, json};

use crate::http::{Connection, head};

/// What stands between the callers and the inference server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Before {
    /// Something that passes everything on.
    Proxy,
    /// The Python server of Agent Lightning: rollouts, and one key for everything.
    Original,
    /// agl: rollouts, attempts, and a key for each attempt.
    Agl,
}

/// A rollout that may call.
pub struct Playable {
    pub rollout_id: String,
    pub path: String,
    pub key: String,
}

/// Whoever makes rollouts.
pub struct Maker {
    pub before: Before,
    pub server_key: String,
    pub connection: Connection,
}

impl Maker {
    /// Makes `count` rollouts, each with its first attempt.
    pub async fn make(&mut self, count: usize) -> anyhow::Result<Vec<Playable>> {
        let wanted: Vec<Value> = (0..count)
            .map(|number| json!({"input": {"data_id": format!("task-{number}"), "prompt": "Fix the failing test."}}))
            .collect();
        let ids: Vec<String> = if self.before == Before::Proxy {
            (0..count).map(|number| format!("rollout-{number:032}")).collect()
        } else {
            let made = self.ask("POST", "/api/rollouts", &wanted.into()).await?;
            let made = made.as_array().context("rollouts are answered as a list")?;
            made.iter().filter_map(|rollout| rollout["rollout_id"].as_str().map(str::to_owned)).collect()
        };
        let mut playable = Vec::with_capacity(count);
        for rollout_id in ids {
            let key = if self.before == Before::Agl {
                let path = format!("/api/rollouts/{rollout_id}/attempts");
                let grant = self.ask("POST", &path, &json!({})).await?;
                grant["key"].as_str().context("an attempt has a key")?.to_owned()
            } else {
                self.server_key.clone()
            };
            let path = format!("/proxy/rollout/{rollout_id}/attempt/0/mode/train/openai/v1/chat/completions");
            playable.push(Playable { rollout_id, path, key });
        }
        Ok(playable)
    }

    /// The rollout runs from now on.
    pub async fn start(&mut self, rollout_id: &str) -> anyhow::Result<()> {
        self.set_state(rollout_id, "running").await
    }

    /// Rewards the rollout, ends it and deletes it with all that was recorded of it.
    pub async fn finish(&mut self, rollout_id: &str) -> anyhow::Result<()> {
        let events = format!("/api/rollouts/{rollout_id}/attempt/0/events");
        self.ask("POST", &events, &json!({"event_type": "reward", "data": {"value": 1.0}})).await?;
        self.set_state(rollout_id, "succeeded").await?;
        self.ask("DELETE", &format!("/api/rollouts/{rollout_id}"), &Value::Null).await?;
        Ok(())
    }

    async fn set_state(&mut self, rollout_id: &str, state: &str) -> anyhow::Result<()> {
        let path = format!("/api/rollouts/{rollout_id}");
        self.ask("PATCH", &path, &json!({"status": {"state": state}})).await?;
        Ok(())
    }

    async fn ask(&mut self, method: &str, path: &str, body: &Value) -> anyhow::Result<Value> {
        let body = if body.is_null() { Vec::new() } else { serde_json::to_vec(body)? };
        let head = head(method, path, &self.server_key, body.len());
        let (status, answer) = self.connection.call(head.as_bytes(), &body).await?;
        let said = self.connection.body(&answer);
        if !(200..300).contains(&status) {
            bail!("{method} {path} is answered {status}: {}", String::from_utf8_lossy(said));
        }
        Ok(if said.is_empty() { Value::Null } else { serde_json::from_slice(said)? })
    }
}
