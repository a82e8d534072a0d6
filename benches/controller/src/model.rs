//! A model server that notes when each agent's first call arrives. Agents say who they are in what they ask.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use serde_json::{Value, json};

type Arrivals = Arc<Mutex<HashMap<String, SystemTime>>>;

/// The server. It runs until the runtime ends.
pub struct Model {
    /// Its base URL, as agents and gateways want it.
    pub url: String,
    arrivals: Arrivals,
}

impl Model {
    /// Starts it on a free port.
    pub async fn start() -> anyhow::Result<Self> {
        let arrivals = Arrivals::default();
        let router = Router::new().route("/v1/chat/completions", post(answer)).with_state(arrivals.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/v1", listener.local_addr()?);
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(Self { url, arrivals })
    }

    /// How long after `since` the first call with this tag came.
    pub fn first_call(&self, tag: &str, since: SystemTime) -> anyhow::Result<Duration> {
        let arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let arrival = arrivals.get(tag).with_context(|| format!("the agent {tag} never called its model"))?;
        Ok(arrival.duration_since(since)?)
    }
}

async fn answer(State(arrivals): State<Arrivals>, Json(body): Json<Value>) -> Json<Value> {
    let now = SystemTime::now();
    let tag = body["messages"][0]["content"].as_str().unwrap_or_default().to_owned();
    arrivals.lock().unwrap_or_else(PoisonError::into_inner).entry(tag).or_insert(now);
    Json(json!({
        "id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": "policy", "prompt_token_ids": [1, 2, 3],
        "choices": [{
            "index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4"}, "token_ids": [4],
            "logprobs": {"content": [{"token": "token_id:4", "logprob": -0.5, "bytes": null, "top_logprobs": []}]},
        }],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }))
}
