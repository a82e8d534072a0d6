//! Controllers come and go, watches break, Jobs stay.

use std::time::Duration;

use agl_core::attempt::{AttemptState, FailureClass};
use agl_core::rollout::RolloutState;
use serde_json::json;

use crate::cluster::Kubelet;
use crate::fleet::{Fleet, k8s};
use crate::stage::Stage;

const JOB: &str = "agl-rollout-r0";

#[tokio::test]
async fn a_job_that_ends_while_no_controller_runs_is_reported_by_the_next() {
    let mut fleet = Fleet::with(json!({}), json!({})).await;
    let id = fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    fleet.cluster.pod_runs(JOB);
    fleet.stage.gateway.until("it runs", |it| it.attempts(&id)[0].state == AttemptState::Running).await;
    fleet.stage.stop().await;
    assert!(fleet.cluster.get("jobs", JOB).is_some(), "a controller that ends leaves its Jobs");
    fleet.cluster.pod_exits(JOB, 0, "Completed");
    fleet.start(json!({}), json!({}));
    assert_eq!(fleet.stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
    assert_eq!(fleet.cluster.names("jobs"), [JOB]);
}

#[tokio::test]
async fn a_controller_that_died_between_job_and_secret_is_completed_by_the_next() {
    let mut fleet = Fleet::with(json!({}), json!({})).await;
    fleet.cluster.fail("POST secrets", 500, "InternalError", "", 1000);
    let id = fleet.stage.gateway.create(k8s());
    fleet.cluster.until("the Job is made", |it| it.get("jobs", JOB).is_some()).await;
    fleet.stage.stop().await;
    fleet.cluster.inside(|inside| inside.forget_faults());
    fleet.stage.gateway.say_calls("0", 0, 0);
    fleet.start(json!({}), json!({}));
    fleet.cluster.made(JOB).await;
    fleet.cluster.pod_exits(JOB, 0, "Completed");
    assert_eq!(fleet.stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
    assert_eq!(fleet.stage.gateway.attempts(&id).len(), 1);
}

#[tokio::test]
async fn a_controller_that_died_before_the_job_costs_no_attempt() {
    let mut fleet = Fleet::empty().await;
    let id = fleet.stage.gateway.create(k8s());
    fleet.stage.gateway.begin_attempt(&id, "0", AttemptState::Starting);
    fleet.stage.gateway.say_calls("0", 0, 0);
    fleet.start(json!({"max_attempts": 1}), json!({}));
    // Not under the same name: the first may have had a Job, and must not run twice.
    fleet.cluster.made("agl-rollout-r0-1").await;
    fleet.cluster.pod_exits("agl-rollout-r0-1", 0, "Completed");
    assert_eq!(fleet.stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
    assert_eq!(fleet.stage.gateway.attempts(&id)[0].failure, Some(FailureClass::Infrastructure));
}

#[tokio::test]
async fn an_attempt_that_ran_and_has_no_job_any_more_is_lost_and_repeated() {
    let mut fleet = Fleet::empty().await;
    let id = fleet.stage.gateway.create(k8s());
    fleet.stage.gateway.begin_attempt(&id, "0", AttemptState::Running);
    fleet.start(json!({}), json!({}));
    fleet.cluster.made("agl-rollout-r0-1").await;
    let first = &fleet.stage.gateway.attempts(&id)[0];
    assert_eq!(first.failure, Some(FailureClass::Infrastructure));
    assert!(first.error_message.as_ref().unwrap().contains("holds no Job agl-rollout-r0"));
}

#[tokio::test]
async fn jobs_that_nobody_wants_are_deleted_and_those_of_others_are_not() {
    let mut fleet = Fleet::with(json!({}), json!({})).await;
    let id = fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    let job = fleet.cluster.get("jobs", JOB).unwrap();
    fleet.stage.stop().await;
    fleet.stage.gateway.cancel(&id);
    let mut foreign = job.clone();
    foreign["metadata"]["name"] = json!("another");
    foreign["metadata"]["labels"]["app.kubernetes.io/instance"] = json!("another");
    fleet.cluster.put("jobs", foreign);
    fleet.start(json!({}), json!({}));
    fleet.cluster.until("the stray is gone", |it| it.names("jobs") == ["another"]).await;
}

#[tokio::test]
async fn what_happens_while_the_watch_is_broken_is_seen_all_the_same() {
    for forget in [false, true] {
        let fleet = Fleet::with(json!({}), json!({})).await;
        let ends = fleet.stage.gateway.create(k8s());
        let vanishes = fleet.stage.gateway.create(k8s());
        fleet.cluster.made(JOB).await;
        fleet.cluster.made("agl-rollout-r1").await;
        fleet.cluster.pod_runs(JOB);
        fleet.cluster.drop_watches(forget);
        fleet.cluster.pod_exits(JOB, 0, "Completed");
        if forget {
            fleet.cluster.silently(|inside| inside.delete("jobs", "agl-rollout-r1", false));
            fleet.cluster.drop_watches(true);
            fleet.cluster.made("agl-rollout-r1-1").await;
            let first = &fleet.stage.gateway.attempts(&vanishes)[0];
            assert_eq!(first.failure, Some(FailureClass::Infrastructure));
        }
        assert_eq!(fleet.stage.gateway.ended(&ends).await.status.state, RolloutState::Succeeded);
    }
}

#[tokio::test]
async fn a_change_of_the_gateway_that_was_missed_is_noticed_by_a_resync() {
    let fleet = Fleet::with(json!({"resync_seconds": 0.2}), json!({})).await;
    let id = fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    fleet.stage.gateway.cancel_silently(&id);
    fleet.cluster.until("the Job is gone", |it| it.names("jobs").is_empty()).await;
}

#[tokio::test]
async fn one_of_two_controllers_leads_and_the_other_takes_over() {
    let mut fleet = Fleet::with(json!({}), json!({"leader_election": true})).await;
    let lease = "agl-controller";
    let holder = |it: &crate::cluster::FakeCluster| {
        it.get("leases", lease).and_then(|lease| lease["spec"]["holderIdentity"].as_str().map(str::to_owned))
    };
    fleet.cluster.until("the first leads", |it| holder(it).is_some()).await;
    let first = holder(&fleet.cluster).unwrap();
    let running = fleet.stage.gateway.create(k8s());
    fleet.cluster.made(JOB).await;
    fleet.cluster.pod_runs(JOB);

    let settings =
        fleet.settings(json!({"work_dir": fleet.stage.folder.path().join("other")}), json!({"leader_election": true}));
    let second = Stage::controller(&fleet.stage, settings);
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(holder(&fleet.cluster).unwrap(), first, "only one leads");
    assert_eq!(fleet.cluster.names("jobs"), [JOB]);

    fleet.stage.stop().await;
    fleet.cluster.until("the second leads", |it| holder(it).is_some_and(|holder| holder != first)).await;
    let queued = fleet.stage.gateway.create(k8s());
    fleet.cluster.made("agl-rollout-r1").await;
    fleet.cluster.pod_exits("agl-rollout-r1", 0, "Completed");
    fleet.cluster.pod_exits(JOB, 0, "Completed");
    for id in [running, queued] {
        assert_eq!(fleet.stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
        assert_eq!(fleet.stage.gateway.attempts(&id).len(), 1);
    }
    second.stop().await;
}

#[tokio::test]
async fn lists_are_read_by_pages_and_nothing_starves_behind_them() {
    let mut fleet = Fleet::empty().await;
    fleet.cluster.set_kubelet(Kubelet::Succeeds(Duration::from_millis(1)));
    let ids: Vec<String> = (0..1200).map(|_| fleet.stage.gateway.create(k8s())).collect();
    fleet.start(json!({}), json!({"max_jobs_per_minute": 100_000, "job_burst": 100}));
    for id in &ids {
        assert_eq!(fleet.stage.gateway.ended(id).await.status.state, RolloutState::Succeeded);
    }
    fleet.stage.stop().await;
    let before = fleet.cluster.lists().len();
    fleet.start(json!({}), json!({}));
    fleet.cluster.until("all Jobs are listed", |it| it.lists().len() >= before + 6).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let mut lists = fleet.cluster.lists()[before..].to_vec();
    lists.sort();
    assert_eq!(lists, ["jobs 0", "jobs 1000", "jobs 500", "pods 0", "pods 1000", "pods 500"]);
}
