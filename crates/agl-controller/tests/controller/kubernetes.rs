//! Given this rollout and this cluster, the controller makes exactly these calls.

use std::time::{Duration, Instant};

use agl_core::attempt::FailureClass;
use agl_core::rollout::RolloutState;
use serde_json::{Value, json};

use crate::cluster::{exited, waiting};
use crate::fleet::{Fleet, TEMPLATE, k8s};
use crate::stage::{read, with};

const JOB: &str = "agl-rollout-r0";

#[tokio::test]
async fn a_good_run_is_claimed_made_watched_and_reported() {
    let fleet = Fleet::with(json!({}), json!({})).await;
    let gateway = &fleet.stage.gateway;
    let id = gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    fleet.cluster.say_log(JOB, "what the agent said\n");
    fleet.cluster.pod_runs(JOB);
    gateway.until("it is reported to run", |it| it.calls().contains(&"PATCH r0/0 running".to_owned())).await;
    fleet.cluster.pod_exits(JOB, 0, "Completed");
    let rollout = gateway.ended(&id).await;
    assert_eq!(rollout.status.state, RolloutState::Succeeded);
    assert_eq!(rollout.status.k8s_job_name.as_deref(), Some(JOB));
    assert_eq!(
        gateway.calls(),
        [
            "POST r0/0",
            "PATCH r0 running 0",
            "PATCH r0/0 running",
            "PATCH r0/0 agent_ended",
            "PATCH r0/0 succeeded",
            "PATCH r0 succeeded",
        ]
    );
    assert_eq!(fleet.cluster.calls(), [format!("POST jobs {JOB}"), format!("POST secrets {JOB}")]);
    let attempt = &gateway.attempts(&id)[0];
    assert_eq!(attempt.runner["kind"], "kubernetes");
    assert_eq!(attempt.runner["job"], JOB);
    assert_eq!(read(fleet.stage.attempt("r0", "0").stdout()), "what the agent said\n");
}

#[tokio::test]
async fn a_job_is_what_its_template_says_and_what_we_decide_over_it() {
    let fleet =
        Fleet::with(json!({"agent_url": "http://gateway.agl.svc:8080/"}), json!({"ttl_seconds_after_finished": 77}))
            .await;
    fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    let job = fleet.cluster.get("jobs", JOB).unwrap();
    let spec = &job["spec"];
    assert_eq!(
        json!([spec["backoffLimit"], spec["ttlSecondsAfterFinished"], spec["activeDeadlineSeconds"]]),
        json!([0, 77, 660])
    );
    // The agent's time is the pod's; the Job's has the time to start on top.
    assert_eq!(spec["template"]["spec"]["activeDeadlineSeconds"], 60);
    assert_eq!(spec["template"]["spec"]["restartPolicy"], "Never");
    assert_eq!(spec["template"]["spec"]["automountServiceAccountToken"], false);
    assert_eq!(job["metadata"]["namespace"], "agents");
    assert_eq!(job["metadata"]["labels"]["team"], "math");
    for labels in [&job["metadata"]["labels"], &spec["template"]["metadata"]["labels"]] {
        assert_eq!(labels["app.kubernetes.io/managed-by"], "agl");
        assert_eq!(json!([labels["agl/rollout-id"], labels["agl/attempt-id"]]), json!(["r0", "0"]));
    }
    assert_eq!(spec["template"]["metadata"]["labels"]["agl/role"], "rollout");
    let container = &spec["template"]["spec"]["containers"][0];
    assert_eq!(container["command"], json!(["agent", "2+2?", JOB, "0"]));
    let env = container["env"].as_array().unwrap();
    let variable = |name: &str| {
        let of_name: Vec<&Value> = env.iter().filter(|entry| entry["name"] == name).collect();
        assert_eq!(of_name.len(), 1, "{name} in {env:?}");
        of_name[0].clone()
    };
    let base = "http://gateway.agl.svc:8080/proxy/rollout/r0/attempt/0/mode/train/openai/v1";
    assert_eq!(variable("AGL_OPENAI_BASE_URL")["value"], base);
    assert_eq!(variable("OPENAI_BASE_URL")["value"], base);
    assert_eq!(variable("AGL_EVENT_URL")["value"], "http://gateway.agl.svc:8080/api/rollouts/r0/attempt/0/events");
    assert_eq!(variable("GREETING")["value"], "hello");

    // The key is in the Secret alone, which the Job owns.
    let reference = json!({"secretKeyRef": {"name": JOB, "key": "key"}});
    for name in ["AGL_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"] {
        assert_eq!(variable(name), json!({"name": name, "valueFrom": reference}));
    }
    assert!(!job.to_string().contains("agent-r0-0"), "the key is readable in the Job");
    let secret = fleet.cluster.get("secrets", JOB).unwrap();
    assert_eq!(secret["stringData"]["key"], "agent-r0-0");
    let owner = &secret["metadata"]["ownerReferences"][0];
    assert_eq!(json!([owner["kind"], owner["name"], owner["uid"]]), json!(["Job", JOB, job["metadata"]["uid"]]));
}

/// What a pod does, whose failure that is, how many attempts follow, and what the message says.
#[tokio::test]
async fn the_reason_of_a_failure_is_read_from_the_pod_and_says_whose_it_was() {
    let pod = |reason: &str| json!({"phase": "Failed", "reason": reason, "message": "the node was low on memory"});
    let disrupted = json!({
        "phase": "Failed", "containerStatuses": exited(143, "Error")["containerStatuses"],
        "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}],
    });
    use FailureClass::{Agent, Infrastructure, Timeout};
    for (status, class, attempts, said) in [
        (exited(3, "Error"), Agent, 1, "exited with code 3"),
        (exited(137, "OOMKilled"), Agent, 1, "OOMKilled"),
        (pod("Evicted"), Infrastructure, 2, "Evicted: the node was low on memory"),
        (pod("NodeShutdown"), Infrastructure, 2, "NodeShutdown"),
        (pod("DeadlineExceeded"), Timeout, 1, "timeout_seconds = 60"),
        (disrupted, Infrastructure, 2, "PreemptionByScheduler"),
        (exited(137, "ContainerStatusUnknown"), Infrastructure, 2, "was lost"),
        (exited(128, "StartError"), Infrastructure, 1, "cannot be started: StartError"),
        (waiting("InvalidImageName", "no:such:image"), Infrastructure, 2, "InvalidImageName: no:such:image"),
        (waiting("ImagePullBackOff", "not found"), Infrastructure, 2, "ImagePullBackOff: not found"),
        (waiting("CreateContainerConfigError", "no secret"), Infrastructure, 2, "CreateContainerConfigError"),
        (json!({"phase": "Failed"}), Infrastructure, 2, "no container of it says why"),
        (
            json!({"phase": "Pending", "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}]}),
            Infrastructure,
            2,
            "0/3 nodes",
        ),
    ] {
        // Only what never starts is to run out of time.
        let start = if status["phase"] == "Pending" { 1.5 } else { 600.0 };
        let kubernetes = json!({"start_timeout_seconds": start, "image_pull_grace_seconds": 0.1});
        let fleet = Fleet::with(json!({"max_attempts": 2}), kubernetes).await;
        let id = fleet.stage.gateway.create(k8s());
        for attempt in 0..attempts {
            let job = if attempt == 0 { JOB.to_owned() } else { format!("{JOB}-{attempt}") };
            fleet.cluster.made(&job).await;
            fleet.cluster.pod_status(&job, status.clone());
        }
        let rollout = fleet.stage.gateway.ended(&id).await;
        let message = rollout.status.error_message.unwrap();
        assert!(message.contains(said), "{said} in {message}");
        assert_eq!(rollout.status.state, RolloutState::Failed);
        let classes: Vec<_> = fleet.stage.gateway.attempts(&id).iter().map(|attempt| attempt.failure).collect();
        assert_eq!(classes, vec![Some(class); attempts], "{message}");
    }
}

#[tokio::test]
async fn a_job_beyond_its_deadline_is_the_agents_failure_only_once_it_has_started() {
    for (starts, class, said) in [
        (true, FailureClass::Timeout, "timeout_seconds = 60"),
        (false, FailureClass::Infrastructure, "did not start within its config.timeout_seconds"),
    ] {
        let fleet = Fleet::with(json!({"max_attempts": 1}), json!({})).await;
        let id = fleet.stage.gateway.create(k8s());
        fleet.cluster.made(JOB).await;
        match starts {
            true => fleet.cluster.pod_runs(JOB),
            false => fleet.cluster.pod_status(JOB, waiting("ImagePullBackOff", "")),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        fleet.cluster.keep_deleted_pods(true);
        fleet.cluster.delete("pods", &format!("{JOB}-x7k2p"));
        fleet.cluster.job_fails(JOB, "DeadlineExceeded", "Job was active longer than specified deadline");
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(fleet.stage.gateway.rollout(&id).status.state, RolloutState::Running, "its pod may still run");
        fleet.cluster.keep_deleted_pods(false);
        let message = fleet.stage.gateway.ended(&id).await.status.error_message.unwrap();
        assert!(message.contains(said), "{message}");
        assert_eq!(fleet.stage.gateway.attempts(&id)[0].failure, Some(class));
    }
}

#[tokio::test]
async fn a_failure_after_an_upstream_error_is_infrastructures_and_repeated_under_another_name() {
    let fleet = Fleet::with(json!({}), json!({})).await;
    fleet.stage.gateway.say_calls("0", 2, 503);
    let id = fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    fleet.cluster.pod_exits(JOB, 1, "Error");
    fleet.cluster.made("agl-rollout-r0-1").await;
    fleet.cluster.pod_exits("agl-rollout-r0-1", 0, "Completed");
    let rollout = fleet.stage.gateway.ended(&id).await;
    assert_eq!(rollout.status.state, RolloutState::Succeeded);
    assert_eq!(rollout.status.last_attempt_id.as_deref(), Some("1"));
    assert_eq!(rollout.status.k8s_job_name.as_deref(), Some("agl-rollout-r0-1"));
}

#[tokio::test]
async fn a_deleted_job_is_repeated_only_once_its_pod_is_gone() {
    let fleet = Fleet::with(json!({}), json!({})).await;
    let id = fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    fleet.cluster.pod_runs(JOB);
    fleet.cluster.keep_deleted_pods(true);
    fleet.cluster.delete("jobs", JOB);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(fleet.stage.gateway.attempts(&id).len(), 1, "the first one's pod still runs");
    fleet.cluster.keep_deleted_pods(false);
    fleet.cluster.made("agl-rollout-r0-1").await;
    let first = &fleet.stage.gateway.attempts(&id)[0];
    assert_eq!(first.failure, Some(FailureClass::Infrastructure));
    assert!(first.error_message.as_ref().unwrap().contains("its Job was deleted"));
    fleet.cluster.pod_exits("agl-rollout-r0-1", 0, "Completed");
    assert_eq!(fleet.stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
}

#[tokio::test]
async fn a_pod_that_its_job_forgot_at_the_deadline_is_ended_before_anything_follows() {
    let fleet = Fleet::with(json!({"max_attempts": 1}), json!({})).await;
    let id = fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    fleet.cluster.job_fails(JOB, "DeadlineExceeded", "Job was active longer than specified deadline");
    fleet.cluster.pod_runs(JOB);
    assert_eq!(fleet.stage.gateway.ended(&id).await.status.state, RolloutState::Failed);
    assert!(fleet.cluster.names("pods").is_empty());
    assert!(fleet.cluster.calls().contains(&format!("DELETE pods {JOB}-x7k2p")));
}

#[tokio::test]
async fn a_pod_deleted_under_its_job_is_infrastructures_failure() {
    let fleet = Fleet::with(json!({"max_attempts": 1}), json!({})).await;
    let id = fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    fleet.cluster.pod_runs(JOB);
    fleet.cluster.delete("pods", &format!("{JOB}-x7k2p"));
    fleet.cluster.job_fails(JOB, "BackoffLimitExceeded", "Job has reached the specified backoff limit");
    let message = fleet.stage.gateway.ended(&id).await.status.error_message.unwrap();
    assert!(message.contains("its pod was deleted"), "{message}");
    assert_eq!(fleet.stage.gateway.attempts(&id)[0].failure, Some(FailureClass::Infrastructure));
}

#[tokio::test]
async fn a_late_success_of_a_superseded_attempt_changes_nothing() {
    let fleet = Fleet::with(json!({}), json!({})).await;
    let id = fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    let job = fleet.cluster.get("jobs", JOB).unwrap();
    fleet.cluster.delete("jobs", JOB);
    fleet.cluster.made("agl-rollout-r0-1").await;
    fleet.cluster.put("jobs", job);
    fleet.cluster.inside(|inside| inside.job_ends(JOB, "Complete", "", ""));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(fleet.stage.gateway.rollout(&id).status.state, RolloutState::Running);
    fleet.cluster.pod_exits("agl-rollout-r0-1", 2, "Error");
    assert_eq!(fleet.stage.gateway.ended(&id).await.status.state, RolloutState::Failed);
    assert_eq!(fleet.stage.gateway.attempts(&id)[0].failure, Some(FailureClass::Infrastructure));
}

#[tokio::test]
async fn a_cancelled_rollout_loses_its_job() {
    let fleet = Fleet::with(json!({}), json!({})).await;
    let id = fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    fleet.cluster.pod_runs(JOB);
    fleet.stage.gateway.cancel(&id);
    fleet.cluster.until("the Job is gone", |it| it.names("jobs").is_empty() && it.names("secrets").is_empty()).await;
    fleet.stage.gateway.until("the attempt is cancelled", |it| it.attempts(&id)[0].failure.is_some()).await;
    assert_eq!(fleet.stage.gateway.attempts(&id)[0].failure, Some(FailureClass::Cancelled));
}

#[tokio::test]
async fn an_overloaded_api_server_is_left_alone_for_as_long_as_it_asks() {
    let fleet = Fleet::empty().await;
    fleet.cluster.fail("POST jobs", 429, "TooManyRequests", "slow down", 1);
    let mut fleet = fleet;
    fleet.start(json!({}), json!({}));
    let began = Instant::now();
    let id = fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    assert!(began.elapsed() >= Duration::from_secs(1), "asked again before Retry-After");
    fleet.cluster.pod_exits(JOB, 0, "Completed");
    assert_eq!(fleet.stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
}

#[tokio::test]
async fn requests_that_fail_for_a_while_are_repeated_and_nothing_is_made_twice() {
    let fleet = Fleet::empty().await;
    fleet.cluster.fail("POST jobs", 500, "InternalError", "etcd is away", 2);
    fleet.cluster.fail("POST secrets", 503, "ServiceUnavailable", "starting", 2);
    fleet.cluster.fail("LIST jobs", 503, "ServiceUnavailable", "starting", 1);
    let mut fleet = fleet;
    fleet.start(json!({}), json!({}));
    let id = fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    fleet.cluster.pod_exits(JOB, 0, "Completed");
    assert_eq!(fleet.stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
    assert_eq!(fleet.cluster.calls(), [format!("POST jobs {JOB}"), format!("POST secrets {JOB}")]);
}

#[tokio::test]
async fn a_job_that_the_api_server_refuses_fails_its_rollout_at_once_with_its_words() {
    let fleet = Fleet::empty().await;
    fleet.cluster.fail("POST jobs", 422, "Invalid", "spec.template: Invalid value", 1);
    let mut fleet = fleet;
    fleet.start(json!({}), json!({}));
    let id = fleet.stage.gateway.create(k8s());
    let message = fleet.stage.gateway.ended(&id).await.status.error_message.unwrap();
    assert!(message.contains("spec.template: Invalid value"), "{message}");
    let made = fleet.stage.gateway.attempts(&id);
    assert_eq!((made.len(), made[0].failure), (1, Some(FailureClass::Infrastructure)));
}

#[tokio::test]
async fn an_api_server_that_does_not_know_its_rules_yet_costs_no_attempt() {
    let fleet = Fleet::empty().await;
    fleet.cluster.fail("POST jobs", 403, "Forbidden", "cannot create resource \"jobs\"", 3);
    let mut fleet = fleet;
    fleet.start(json!({"max_attempts": 1}), json!({}));
    let id = fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    fleet.cluster.pod_exits(JOB, 0, "Completed");
    assert_eq!(fleet.stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
}

#[tokio::test]
async fn a_rollout_retried_while_nobody_heard_of_it_does_not_end_with_the_attempt_before() {
    let fleet = Fleet::with(json!({}), json!({})).await;
    let id = fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    fleet.stage.gateway.ask_for_another_attempt_silently(&id);
    fleet.cluster.pod_exits(JOB, 0, "Completed");
    fleet.cluster.made("agl-rollout-r0-1").await;
    assert_eq!(fleet.stage.gateway.rollout(&id).status.state, RolloutState::Running);
    fleet.cluster.pod_exits("agl-rollout-r0-1", 3, "Error");
    assert_eq!(fleet.stage.gateway.ended(&id).await.status.state, RolloutState::Failed);
}

#[tokio::test]
async fn a_job_of_a_deleted_rollout_of_the_same_id_is_not_taken_for_this_ones() {
    let fleet = Fleet::empty().await;
    let old = json!({
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {
            "name": JOB, "namespace": "agents",
            "labels": {"app.kubernetes.io/managed-by": "agl", "app.kubernetes.io/instance": "agl"},
            "annotations": {"agl/rollout-id": "r0", "agl/attempt-id": "0", "agl/created-at": "1.000000"},
        },
        "status": {"conditions": [{"type": "Complete", "status": "True"}]},
    });
    fleet.cluster.put("jobs", old);
    let mut fleet = fleet;
    fleet.start(json!({}), json!({}));
    let id = fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    fleet.cluster.pod_exits(JOB, 3, "Error");
    assert_eq!(fleet.stage.gateway.ended(&id).await.status.state, RolloutState::Failed);
}

#[tokio::test]
async fn a_template_that_renders_no_job_fails_its_rollout_and_says_why() {
    let fleet = Fleet::with(json!({}), json!({})).await;
    for (template, said) in [
        ("kind: Pod", "it must render a Kubernetes Job, and renders kind: \"Pod\""),
        ("kind: Job\n---\nkind: Job\n", "exactly one YAML document, and renders 2"),
        ("kind: [", "no YAML"),
        ("kind: Job\nspec: 3\n", "spec is no mapping"),
        ("kind: Job", "containers is missing"),
        ("kind: {{ input.qestion }}", "there is no input.qestion"),
        ("", "missing config.k8s.job_template"),
    ] {
        let id = fleet.stage.gateway.create(json!({"k8s": {"job_template": template}}));
        let message = fleet.stage.gateway.ended(&id).await.status.error_message.unwrap();
        assert!(message.contains(said), "{message}");
    }
    assert!(fleet.cluster.calls().is_empty());
}

#[tokio::test]
async fn an_evaluator_runs_beside_the_controller_with_the_pods_log_and_its_failure_is_not_the_agents() {
    let fleet = Fleet::with(json!({}), json!({})).await;
    let evaluator = |script: &str| json!({"evaluator": {"argv": ["sh", "-c", script]}});
    let judge = "test \"$(cat $AGL_AGENT_STDOUT)\" = 4 && test $AGL_EXIT_CODE = 0 && grep -q 2+2 $AGL_INPUT && test $AGL_KEY = reward-r0-0";
    for (index, script, state) in
        [(0, judge, RolloutState::Succeeded), (1, "echo no tests >&2; exit 7", RolloutState::Failed)]
    {
        let id = fleet.stage.gateway.create(with(k8s(), evaluator(script)));
        let job = format!("agl-rollout-r{index}");
        fleet.cluster.made(&job).await;
        fleet.cluster.say_log(&job, "4\n");
        fleet.cluster.pod_runs(&job);
        fleet.cluster.pod_exits(&job, 0, "Completed");
        let rollout = fleet.stage.gateway.ended(&id).await;
        assert_eq!(rollout.status.state, state, "{:?}", rollout.status.error_message);
        if state == RolloutState::Failed {
            let message = rollout.status.error_message.unwrap();
            assert!(message.contains("the evaluator failed") && message.contains("no tests"), "{message}");
            assert_eq!(fleet.stage.gateway.attempts(&id)[0].failure, Some(FailureClass::Infrastructure));
        }
    }
    let calls = fleet.stage.gateway.calls();
    let ended = calls.iter().position(|call| call == "PATCH r0/0 agent_ended").unwrap();
    assert!(calls.iter().position(|call| call == "PATCH r0/0 succeeded").unwrap() > ended);
}

#[tokio::test]
async fn another_job_of_the_same_name_is_not_taken_for_ours() {
    let fleet = Fleet::empty().await;
    fleet.cluster.put(
        "jobs",
        json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": JOB, "namespace": "agents"}}),
    );
    let mut fleet = fleet;
    fleet.start(json!({}), json!({}));
    let id = fleet.stage.gateway.create(k8s());
    let message = fleet.stage.gateway.ended(&id).await.status.error_message.unwrap();
    assert!(message.contains("another Job agl-rollout-r0"), "{message}");
    assert!(fleet.cluster.get("jobs", JOB).is_some(), "it must not be deleted");
}

#[tokio::test]
async fn rollouts_for_processes_are_left_to_other_controllers() {
    let fleet = Fleet::with(json!({}), json!({})).await;
    fleet.stage.gateway.create(json!({"process": {"argv": ["true"]}}));
    let id = fleet.stage.gateway.create(json!({"k8s": {"job_template": TEMPLATE}}));
    fleet.cluster.made("agl-rollout-r1").await;
    fleet.cluster.pod_exits("agl-rollout-r1", 0, "Completed");
    fleet.stage.gateway.ended(&id).await;
    assert_eq!(fleet.stage.gateway.rollout("r0").status.state, RolloutState::Queuing);
}
