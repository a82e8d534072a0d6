//! The controller between the real gateway and a scripted model server.

use std::time::Duration;

use agl_client::{GatewayClient, Model};
use agl_controller::{Controller, ControllerConfig};
use agl_core::attempt::{AttemptState, FailureClass};
use agl_core::rollout::{Rollout, RolloutCreate, RolloutState};
use agl_core::trajectory::Level;
use agl_gateway::{Gateway, GatewayConfig, GatewayError};
use agl_mock_llm::{Answer, Fault, FaultRule, MockLlm, Script, Select, ToolCall};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::stage::{PROGRAM, read, sh, with};

const SERVER_KEY: &str = "server-key";

struct RunningGateway {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), GatewayError>>,
}

impl RunningGateway {
    /// Returns the address too.
    async fn start(config: Value) -> (Self, String) {
        let config: GatewayConfig = serde_json::from_value(config).unwrap();
        let gateway = Gateway::bind(config).await.unwrap();
        let url = format!("http://{}", gateway.addr());
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(gateway.serve(async {
            let _ = stopped.await;
        }));
        (Self { stop, task }, url)
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.task.await.unwrap().unwrap();
    }
}

struct House {
    gateway: RunningGateway,
    url: String,
    client: GatewayClient,
    model: MockLlm,
    folder: TempDir,
    controller: JoinHandle<()>,
}

impl House {
    async fn build(script: Script) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (gateway, url) = RunningGateway::start(Self::settings("127.0.0.1:0", &folder)).await;
        let client = GatewayClient::new(&url, SERVER_KEY).unwrap();
        let model = MockLlm::start(script).await.unwrap();
        let endpoint = model.endpoint();
        let policy = Model {
            model: "policy".into(),
            endpoint,
            version: 3,
            kind: None,
            trainable: None,
            upstream_model: None,
            api_key_env: None,
            stream: None,
        };
        client.register_models(&[policy]).await.unwrap();
        let config: ControllerConfig = serde_json::from_value(json!({
            "work_dir": folder.path().join("work"), "supervisor": PROGRAM, "kill_grace_seconds": 1.0,
            "retry_backoff_seconds": 0.01,
        }))
        .unwrap();
        let run = Controller::new(config, client.clone()).run(std::future::pending());
        let controller = tokio::spawn(async move { run.await.unwrap() });
        Self { gateway, url, client, model, folder, controller }
    }

    fn settings(listen: &str, folder: &TempDir) -> Value {
        json!({
            "listen": listen, "key": SERVER_KEY, "store": format!("sqlite:{}", folder.path().join("agl.db").display()),
            "default_proxy": {"model_name": "policy"}, "upstream": {"max_attempts": 1}, "shutdown_grace_seconds": 1.0,
        })
    }

    async fn create(&self, config: Value) -> String {
        let create: RolloutCreate =
            serde_json::from_value(json!({"input": {"question": "2+2?"}, "config": config})).unwrap();
        self.client.create_rollouts(&[create]).await.unwrap()[0].rollout_id.clone()
    }

    async fn ended(&self, id: &str) -> Rollout {
        let wait = async {
            loop {
                let rollout = self.client.get_rollout(id).await.unwrap().rollout;
                if rollout.status.state.is_terminal() {
                    return rollout;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap()
    }

    fn log(&self, id: &str, attempt: &str, name: &str) -> String {
        read(self.folder.path().join("work/rollouts").join(id).join(attempt).join(name))
    }
}

impl Drop for House {
    fn drop(&mut self) {
        self.controller.abort();
    }
}

/// An agent of the standard library that knows nothing of agl: it calls the model, uses a tool, calls again, and may post
/// a reward.
const AGENT: &str = r#"
import json, os, sys, urllib.request
def post(url, body, key):
    request = urllib.request.Request(url, json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request))
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
messages = [{"role": "user", "content": json.load(open(os.environ["AGL_INPUT"]))["question"]}]
for turn in range(2):
    answer = post(base + "/chat/completions", {"model": "any", "messages": messages}, key)
    message = answer["choices"][0]["message"]
    messages.append(message)
    for call in message["tool_calls"]:
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "4"})
print("answer:", messages[-1]["content"])
if "--reward" in sys.argv:
    post(os.environ["AGL_EVENT_URL"], {"event_type": "reward", "data": {"value": 0.5}}, os.environ["AGL_KEY"])
"#;

fn agent(arguments: &[&str]) -> Value {
    let mut argv = vec!["python3", "-c", AGENT];
    argv.extend(arguments);
    json!({"process": {"argv": argv}, "timeout_seconds": 60})
}

fn calculator() -> Script {
    let call = ToolCall { name: "calculator".into(), arguments: json!({"expression": "2+2"}) };
    let answers = vec![Answer::Tools { text: String::new(), tool_calls: vec![call] }, Answer::Text("4".into())];
    Script { answers, select: Select::Turn, ..Script::default() }
}

#[tokio::test]
async fn an_agent_that_knows_nothing_of_agl_becomes_one_training_sequence() {
    let house = House::build(calculator()).await;
    let id = house.create(agent(&["--reward"])).await;
    let rollout = house.ended(&id).await;
    let logs = house.log(&id, "0", "stderr.log");
    assert_eq!(rollout.status.state, RolloutState::Succeeded, "{:?} {logs}", rollout.status.error_message);
    assert_eq!(house.log(&id, "0", "stdout.log"), "answer: 4\n");
    let response = house.client.sequences(&id, Level::Trajectory, None).await.unwrap();
    assert_eq!(response.reward, Some(0.5));
    assert_eq!(response.assembly.sequences.len(), 1, "two turns merge");
    assert_eq!(response.assembly.sequences[0].calls.len(), 2);
    let attempts = house.client.list_attempts(&id).await.unwrap();
    assert_eq!(attempts[0].calls, 2);
    assert_eq!(attempts[0].attempt.state, AttemptState::Succeeded);
    assert!(attempts[0].attempt.agent_ended);
    // The key of an agent that has ended opens nothing.
    let grant = house.client.create_attempt(&id, "0").await.unwrap();
    let event = serde_json::from_value(json!({"event_type": "reward", "data": {"value": 9}})).unwrap();
    let late = GatewayClient::new(&house.url, &grant.key).unwrap().post_event(&id, "0", &event).await;
    assert!(matches!(late.unwrap_err().status(), Some(401 | 403)));
}

#[tokio::test]
async fn a_reward_that_only_the_evaluator_may_give_comes_from_the_evaluator() {
    let house = House::build(calculator()).await;
    let judge = "import json, os, urllib.request\n\
        right = open(os.environ['AGL_AGENT_STDOUT']).read() == 'answer: 4\\n'\n\
        body = {'event_type': 'reward', 'data': {'value': float(right)}}\n\
        urllib.request.urlopen(urllib.request.Request(os.environ['AGL_EVENT_URL'], json.dumps(body).encode(),\n\
            {'content-type': 'application/json', 'authorization': 'Bearer ' + os.environ['AGL_KEY']}))\n";
    let judged = json!({"evaluator": {"argv": ["python3", "-c", judge]}, "reward_source": "evaluator"});
    let honest = house.create(with(agent(&[]), judged.clone())).await;
    let cheat = house.create(with(agent(&["--reward"]), judged)).await;
    assert_eq!(house.ended(&honest).await.status.state, RolloutState::Succeeded);
    // Its own reward is refused, which ends it; the evaluator judges what it left.
    assert_eq!(house.ended(&cheat).await.status.state, RolloutState::Failed);
    for id in [&honest, &cheat] {
        let logs = house.log(id, "0", "evaluator.stderr.log");
        let response = house.client.sequences(id, Level::Trajectory, None).await.unwrap();
        assert_eq!(response.reward, Some(1.0), "{logs}");
    }
    assert!(house.log(&cheat, "0", "stderr.log").contains("403"));
}

#[tokio::test]
async fn an_agent_that_dies_of_a_dead_upstream_gets_a_new_attempt() {
    let fault = FaultRule::at(Fault::Status { status: 500, retry_after: None }, [0]);
    let house = House::build(calculator().with_fault(fault)).await;
    let id = house.create(agent(&[])).await;
    let rollout = house.ended(&id).await;
    assert_eq!(rollout.status.state, RolloutState::Succeeded, "{:?}", rollout.status.error_message);
    let attempts = house.client.list_attempts(&id).await.unwrap();
    assert_eq!(attempts.len(), 2);
    assert_eq!(attempts[0].attempt.failure, Some(FailureClass::Infrastructure));
    let message = attempts[0].attempt.error_message.clone().unwrap();
    assert!(message.contains("last model call ended with"), "{message}");
    assert_eq!(rollout.status.last_attempt_id.as_deref(), Some("1"));
    let response = house.client.sequences(&id, Level::Trajectory, None).await.unwrap();
    assert_eq!((response.attempt_id.as_str(), response.assembly.sequences.len()), ("1", 1));
}

#[tokio::test]
async fn cancelling_over_the_gateway_ends_the_process_and_frees_its_place() {
    let house = House::build(Script::default()).await;
    let id = house.create(sh("touch began; sleep 600")).await;
    let began = house.folder.path().join("work/rollouts").join(&id).join("0/work/began");
    while !began.exists() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    house.client.cancel(&id).await.unwrap();
    let closed = async {
        while house.client.list_attempts(&id).await.unwrap()[0].attempt.state != AttemptState::Failed {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), closed).await.unwrap();
    let record = house.folder.path().join("work/rollouts").join(&id).join("0/exit.json");
    assert!(read(record).contains("\"stopped\":true"));
}

#[tokio::test]
async fn rollouts_run_on_across_a_restart_of_the_gateway() {
    let delay = FaultRule::with_probability(Fault::Delay { seconds: 0.3 }, 1.0);
    let mut house = House::build(calculator().with_fault(delay)).await;
    // These call the model again when the gateway is away, as an SDK does.
    let patient = AGENT.replace(
        "    return json.load(urllib.request.urlopen(request))",
        "    import time\n    for _ in range(100):\n        try:\n            return json.load(urllib.request.urlopen(request))\n        except OSError:\n            time.sleep(0.1)",
    );
    let config = json!({"process": {"argv": ["python3", "-c", patient]}, "timeout_seconds": 60});
    let mut ids = Vec::new();
    for _ in 0..6 {
        ids.push(house.create(config.clone()).await);
    }
    while house.model.received() < 3 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let listen = house.url.trim_start_matches("http://").to_owned();
    let gateway = std::mem::replace(
        &mut house.gateway,
        RunningGateway { stop: oneshot::channel().0, task: tokio::spawn(async { Ok(()) }) },
    );
    gateway.stop().await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    house.gateway = RunningGateway::start(House::settings(&listen, &house.folder)).await.0;
    for id in &ids {
        let rollout = house.ended(id).await;
        assert_eq!(rollout.status.state, RolloutState::Succeeded, "{:?}", rollout.status.error_message);
        assert_eq!(house.client.list_attempts(id).await.unwrap().len(), 1);
    }
}
