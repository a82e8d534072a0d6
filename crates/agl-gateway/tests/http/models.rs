//! Which servers there are and which of them a rollout is sent to.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::scene::{KEY, MODEL, Scene, Upstream, chat_path, quick, until};

#[tokio::test]
async fn models_are_registered_listed_and_removed() {
    let scene = Scene::without_model(quick()).await;
    let registered = scene.register(json!([{"model": MODEL, "endpoint": "http://a/v1"}])).await;
    assert_eq!(registered.json(), json!([{"model": MODEL, "endpoint": "http://a/v1", "version": 0, "kind": "openai"}]));
    scene
        .register(json!([
            {"model": MODEL, "endpoint": "http://a/v1", "version": 2},
            {"model": "judge", "endpoint": "http://b/v1", "kind": "vllm", "trainable": false},
            {"model": "judge", "endpoint": "http://c/v1"},
        ]))
        .await;
    let listed = scene.get("/api/models").await.json();
    assert_eq!(listed.as_array().unwrap().len(), 3);
    let of_policy: Vec<&Value> = listed.as_array().unwrap().iter().filter(|m| m["model"] == MODEL).collect();
    assert_eq!(of_policy[0]["version"], 2);

    let removed = scene.delete("/api/models").await;
    assert_eq!((removed.status, removed.json()), (200, json!({"status": "ok"})));
    assert_eq!(scene.get("/api/models").await.json().as_array().unwrap().len(), 2);
    scene.delete("/api/models?model=judge&endpoint=http://b/v1").await;
    assert_eq!(scene.get("/api/models").await.json()[0]["endpoint"], "http://c/v1");
    assert_eq!(scene.post("/api/models", json!([{"model": "m"}])).await.status, 422);
    for endpoint in ["localhost:8000/v1", "", "ftp://api.example/v1"] {
        let refused = scene.post("/api/models", json!([{"model": "m", "endpoint": endpoint}])).await;
        assert_eq!(refused.status, 422, "{endpoint}");
        assert_eq!(refused.json()["detail"][0]["loc"], json!(["body", 0, "endpoint"]));
    }
}

#[tokio::test]
async fn a_call_without_a_server_waits_and_is_then_told_what_to_do() {
    let scene = Scene::without_model(quick()).await;
    scene.enqueue("r").await;
    let refused = scene.call("r", json!({"messages": []})).await;
    assert_eq!(refused.status, 503);
    assert!(refused.detail().starts_with("No servers available for model 'test-model'"), "{}", refused.detail());
    assert!(refused.detail().contains("POST /api/models"));
    let events = scene.events("r").await;
    assert_eq!((&events[0]["data"]["http_status"], &events[0]["data"]["status"]), (&json!(503), &json!("error")));
    assert_eq!(scene.sequences("r").await["counts"]["failed"], 1);
}

#[tokio::test]
async fn a_call_goes_on_when_a_server_is_registered_in_time() {
    let mut config = quick();
    config.no_model_wait_seconds = 10.0;
    let scene = Scene::without_model(config).await;
    scene.enqueue("r").await;
    let (answer, ()) = tokio::join!(scene.call("r", json!({"messages": []})), async {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        assert_eq!(scene.get("/proxy/state").await.json()["inflight"], 0);
        scene.register(json!([{"model": MODEL, "endpoint": scene.upstream.endpoint}])).await;
    });
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn a_rollout_stays_with_one_server_and_rollouts_are_spread() {
    let scene = Scene::start().await;
    let second = Upstream::start().await;
    scene.register(json!([{"model": MODEL, "endpoint": second.endpoint}])).await;
    for rollout in 0..12 {
        let id = format!("r{rollout}");
        scene.enqueue(&id).await;
        let before = (scene.upstream.asked().len(), second.asked().len());
        for turn in 0..3 {
            scene.call(&id, json!({"messages": [turn]})).await;
        }
        let after = (scene.upstream.asked().len(), second.asked().len());
        assert!(matches!((after.0 - before.0, after.1 - before.1), (3, 0) | (0, 3)), "{id}");
    }
    assert!(!scene.upstream.asked().is_empty() && !second.asked().is_empty());
}

#[tokio::test]
async fn answers_of_a_frozen_model_are_context_and_not_trained() {
    let mut config = quick();
    config.default_proxy.override_model = false;
    let scene = Scene::with(config).await;
    let judge = Upstream::start().await;
    scene.register(json!([{"model": "judge", "endpoint": judge.endpoint}])).await;
    scene.enqueue("r").await;
    scene.call("r", json!({"model": MODEL, "messages": []})).await;
    scene.call("r", json!({"model": "judge", "messages": []})).await;
    assert_eq!(judge.asked().len(), 1);
    assert_eq!(scene.sequences("r").await["counts"]["frozen"], 1);
    let unknown = scene.call("r", json!({"model": "nobody", "messages": []})).await;
    assert_eq!(unknown.status, 503);
    assert!(unknown.detail().contains("'nobody'"));
}

#[tokio::test]
async fn our_own_servers_are_sent_a_seed_and_others_are_not() {
    let scene = Scene::start().await;
    scene.enqueue("r").await;
    scene.call("r", json!({"messages": []})).await;
    assert!(scene.upstream.asked()[0].1.get("seed").is_none());

    scene.register(json!([{"model": MODEL, "endpoint": scene.upstream.endpoint, "kind": "agl"}])).await;
    let metadata = json!({"seed": 5, "sample_idx": 2});
    scene
        .post(
            "/api/rollouts",
            json!([
                {"rollout_id": "a", "input": {"data_id": "q"}, "metadata": metadata},
                {"rollout_id": "b", "input": {"data_id": "q"}, "metadata": metadata},
            ]),
        )
        .await;
    for id in ["a", "a", "b"] {
        scene.call(id, json!({"messages": []})).await;
    }
    scene.call("b", json!({"messages": [], "seed": 42})).await;
    let seeds: Vec<Value> = scene.upstream.asked()[1..].iter().map(|(_, body)| body["seed"].clone()).collect();
    assert!(seeds[0].is_u64() && seeds[0] != seeds[1]);
    assert_eq!(seeds[2], seeds[0]);
    assert_eq!(seeds[3], 42);
}

#[tokio::test]
async fn a_kind_that_nobody_knows_is_refused_with_the_known_ones() {
    let scene = Scene::start().await;
    let model = json!([{"model": "m", "endpoint": scene.upstream.endpoint, "kind": "vlmm"}]);
    let answer = scene.post("/api/models", model).await;
    assert_eq!(answer.status, 422);
    assert!(answer.json()["detail"][0]["msg"].as_str().unwrap().contains("vllm, sglang"), "{}", answer.text);
}

#[tokio::test]
async fn routes_send_a_model_name_or_an_agent_elsewhere_and_only_the_policy_is_trained() {
    let mut config = quick();
    config.routes = serde_json::from_value(json!([
        {"model": "*haiku*", "to": "small"},
        {"agent": "judge", "to": "api"},
        {"agent": "critic", "to": MODEL, "trainable": false},
    ]))
    .unwrap();
    let scene = Scene::with(config).await;
    let small = Upstream::start().await;
    let api = Upstream::start().await;
    scene
        .register(json!([
            {"model": "small", "endpoint": small.endpoint, "kind": "vllm"},
            {"model": "api", "endpoint": api.endpoint, "kind": "external", "upstream_model": "gpt-9", "api_key_env": "PATH"},
        ]))
        .await;
    scene.enqueue("r").await;
    let ask = async |model: &str, agent: &str| {
        let request = scene.http.post(format!("{}{}", scene.url, chat_path("r", "train"))).bearer_auth(KEY);
        let body = json!({"model": model, "temperature": 0.3}).to_string();
        let answer = request.header("x-agl-agent", agent).body(body).send().await.unwrap();
        assert_eq!(answer.status(), 200);
    };
    ask("claude-opus", "main").await;
    ask("claude-haiku-4", "main").await;
    ask("claude-opus", "judge").await;
    ask("claude-opus", "critic").await;
    assert_eq!(scene.upstream.asked().len(), 2);
    let frozen = small.asked().remove(0).1;
    assert_eq!(
        frozen,
        json!({"model": "small", "temperature": 0.3, "return_token_ids": true, "logprobs": true}),
        "another model samples as the harness says"
    );
    let external = api.asked().remove(0).1;
    assert_eq!(external, json!({"model": "gpt-9", "temperature": 0.3}), "nothing that it might refuse");
    assert!(api.authorizations()[0].starts_with("Bearer /"), "the key is what the variable holds");
    let counts = scene.sequences("r").await["counts"].clone();
    assert_eq!((&counts["live"], &counts["frozen"]), (&json!(4), &json!(3)), "{counts}");
}

#[tokio::test]
async fn a_key_that_is_not_in_the_environment_is_the_operators_business() {
    let scene = Scene::start().await;
    scene
        .register(json!([{"model": MODEL, "endpoint": scene.upstream.endpoint, "api_key_env": "AGL_TEST_NO_SUCH_KEY"}]))
        .await;
    scene.enqueue("r").await;
    let answer = scene.call("r", json!({})).await;
    assert_eq!(answer.status, 502);
    assert!(answer.detail().contains("its log says which"), "{}", answer.text);
}

#[tokio::test]
async fn without_a_server_key_nobody_can_have_a_variable_sent_anywhere() {
    let scene = Scene::without_model(agl_gateway::GatewayConfig { key: String::new(), ..quick() }).await;
    let model = json!([{"model": "m", "endpoint": "http://thief/v1", "api_key_env": "PATH"}]);
    let answer = scene.send(reqwest::Method::POST, "/api/models", "", Some(&model)).await;
    assert_eq!(answer.status, 403, "{}", answer.text);
}

/// Agents that call one after the other, and how far they are.
#[derive(Default)]
struct Callers {
    begun: AtomicUsize,
    answered: AtomicUsize,
    stop: std::sync::atomic::AtomicBool,
}

impl Callers {
    fn spawn(self: &Arc<Self>, scene: &Scene, rollout: &str, agent: &'static str) -> tokio::task::JoinHandle<()> {
        let (callers, http) = (Arc::clone(self), scene.http.clone());
        let url = format!("{}{}", scene.url, chat_path(rollout, "train"));
        tokio::spawn(async move {
            for number in 0.. {
                if callers.stop.load(Ordering::SeqCst) {
                    return;
                }
                callers.begun.fetch_add(1, Ordering::SeqCst);
                let body = json!({"messages": [number]}).to_string();
                let request = http.post(&url).bearer_auth(KEY).header("x-agl-agent", agent).body(body);
                let answer = request.send().await.unwrap();
                let (status, text) = (answer.status(), answer.text().await.unwrap());
                assert_eq!(status, 200, "{agent}'s call {number}: {text}");
                callers.answered.fetch_add(1, Ordering::SeqCst);
            }
        })
    }

    fn answered(&self) -> usize {
        self.answered.load(Ordering::SeqCst)
    }

    fn waiting(&self) -> usize {
        self.begun.load(Ordering::SeqCst) - self.answered()
    }
}

/// As the trainer of Agent Lightning v1.0 does it: pause and drain after a step, then resume, remove all servers of the policy,
/// and register them anew.
#[tokio::test]
async fn a_trainer_that_removes_and_registers_its_servers_at_every_step_fails_no_call() {
    const AGENTS: usize = 6;
    let mut config = quick();
    config.no_model_wait_seconds = 10.0;
    config.routes = serde_json::from_value(json!([{"agent": "judge", "to": "api"}])).unwrap();
    let scene = Scene::with(config).await;
    let api = Upstream::start().await;
    let external = json!({"model": "api", "endpoint": api.endpoint, "kind": "external"});
    scene.register(json!([external])).await;
    let (agents, judges) = (Arc::new(Callers::default()), Arc::new(Callers::default()));
    let mut calling = Vec::new();
    for number in 0..=AGENTS {
        let id = format!("r{number}");
        scene.enqueue(&id).await;
        calling.push(match number {
            AGENTS => judges.spawn(&scene, &id, "judge"),
            _ => agents.spawn(&scene, &id, "main"),
        });
    }
    for step in 1..=5 {
        let before = agents.answered();
        until("the agents are answered", async || agents.answered() >= before + 2 * AGENTS).await;
        scene.post("/proxy/pause", json!({"reason": format!("rollout_done step={step}")})).await;
        until("the proxy is drained", async || scene.get("/proxy/state").await.json()["inflight"] == 0).await;
        scene.post("/proxy/resume", json!({})).await;
        assert_eq!(scene.delete("/api/models").await.status, 200);
        let judged = judges.answered();
        until("the agents wait for a server, and the judge does not", async || {
            agents.waiting() == AGENTS && judges.answered() > judged + 2
        })
        .await;
        assert_eq!(scene.get("/api/models").await.json().as_array().unwrap().len(), 1, "the external one stays");
        scene.register(json!([{"model": MODEL, "endpoint": scene.upstream.endpoint, "version": 3 + step}])).await;
    }
    let before = agents.answered();
    until("the agents go on", async || agents.answered() >= before + 2 * AGENTS).await;
    for callers in [&agents, &judges] {
        callers.stop.store(true, Ordering::SeqCst);
    }
    for agent in calling {
        agent.await.unwrap();
    }
    for number in 0..AGENTS {
        let events = scene.events(&format!("r{number}")).await;
        assert!(events.iter().all(|event| event["data"]["http_status"] == 200));
        let versions: Vec<u64> = events.iter().map(|event| event["data"]["model_version"].as_u64().unwrap()).collect();
        assert!(
            versions.is_sorted() && versions.starts_with(&[3]) && versions.ends_with(&[8]),
            "each step's server answers: {versions:?}"
        );
    }
    let judged = scene.sequences(&format!("r{AGENTS}")).await["counts"].clone();
    assert_eq!(judged["frozen"], judged["calls"], "what is not the policy is not trained");
}
