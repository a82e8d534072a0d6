//! Controllers come and go, engines too, and containers stay.

use std::time::Duration;

use agl_core::attempt::{AttemptState, FailureClass};
use agl_core::rollout::RolloutState;
use serde_json::json;

use crate::dock::{AGENT, Dock, EVALUATOR, boxed, judged};
use crate::stage::{read, with};

#[tokio::test]
async fn a_container_goes_on_without_its_controller_and_the_next_reports_it() {
    for ends_meanwhile in [true, false] {
        let leave = json!({"on_shutdown": "leave"});
        let mut dock = Dock::with(leave.clone(), json!({})).await;
        let id = dock.stage.gateway.create(boxed());
        dock.stage
            .gateway
            .until("it runs", |it| it.attempts(&id).iter().any(|at| at.state == AttemptState::Running))
            .await;
        dock.stage.stop().await;
        assert_eq!(dock.engine.names(), [AGENT]);
        dock.engine.says(AGENT, "said meanwhile", "");
        if ends_meanwhile {
            dock.engine.exits(AGENT, 0);
        }
        dock.start(leave, json!({}));
        if !ends_meanwhile {
            tokio::time::sleep(Duration::from_millis(200)).await;
            dock.engine.exits(AGENT, 0);
        }
        assert_eq!(dock.stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
        assert_eq!(dock.stage.gateway.attempts(&id).len(), 1);
        assert_eq!(read(dock.stage.attempt("r0", "0").stdout()), "said meanwhile");
        assert_eq!(dock.engine.calls(), ["create", "start", "remove"].map(|word| format!("{word} {AGENT}")));
    }
}

#[tokio::test]
async fn a_controller_that_is_told_to_end_ends_its_containers_at_no_cost() {
    let mut dock = Dock::with(json!({"max_attempts": 1}), json!({})).await;
    let id = dock.stage.gateway.create(boxed());
    dock.engine.runs(AGENT).await;
    dock.stage.stop().await;
    assert_eq!(dock.engine.names(), Vec::<String>::new());
    assert_eq!(dock.engine.calls()[2..], [format!("stop {AGENT}"), format!("remove {AGENT}")]);
    dock.start(json!({"max_attempts": 1}), json!({}));
    dock.engine.runs("agl-rollout-r0-1").await;
    dock.engine.exits("agl-rollout-r0-1", 0);
    assert_eq!(dock.stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
}

#[tokio::test]
async fn the_time_limit_goes_on_while_no_controller_runs() {
    let leave = json!({"on_shutdown": "leave"});
    let mut dock = Dock::with(leave.clone(), json!({})).await;
    let id = dock.stage.gateway.create(boxed());
    dock.engine.runs(AGENT).await;
    dock.stage.stop().await;
    dock.engine.began_earlier(AGENT, Duration::from_secs(61));
    dock.start(leave, json!({}));
    dock.stage.gateway.ended(&id).await;
    assert_eq!(dock.stage.gateway.attempts(&id)[0].failure, Some(FailureClass::Timeout));
    assert!(dock.engine.calls().contains(&format!("stop {AGENT}")));
}

#[tokio::test]
async fn what_a_dead_controller_had_only_made_is_started_and_what_it_had_not_made_costs_no_attempt() {
    for made in [true, false] {
        let leave = json!({"on_shutdown": "leave"});
        let mut dock = Dock::with(leave.clone(), json!({})).await;
        let call = if made { "start" } else { "create" };
        dock.engine.fail(&format!("{call} {AGENT}"), 503, "starting", 1000);
        let id = dock.stage.gateway.create(boxed());
        dock.stage.gateway.say_calls("0", 0, 0);
        dock.stage.gateway.until("it is claimed", |it| !it.attempts(&id).is_empty()).await;
        dock.engine.until("it is made", |it| it.names().is_empty() != made).await;
        dock.stage.stop().await;
        dock.engine.inside(|inside| inside.forget_faults());
        dock.start(json!({"on_shutdown": "leave", "max_attempts": 1}), json!({}));
        let name = if made { AGENT } else { "agl-rollout-r0-1" };
        dock.engine.runs(name).await;
        dock.engine.exits(name, 0);
        assert_eq!(dock.stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
        assert_eq!(dock.stage.gateway.attempts(&id).len(), if made { 1 } else { 2 });
        assert_eq!(dock.engine.calls().iter().filter(|call| call.starts_with("create")).count(), 1);
    }
}

#[tokio::test]
async fn an_attempt_that_ran_and_has_no_container_any_more_is_lost_and_repeated() {
    let mut dock = Dock::empty().await;
    let id = dock.stage.gateway.create(boxed());
    dock.stage.gateway.begin_attempt(&id, "0", AttemptState::Running);
    dock.start(json!({}), json!({}));
    dock.engine.runs("agl-rollout-r0-1").await;
    let first = &dock.stage.gateway.attempts(&id)[0];
    assert_eq!(first.failure, Some(FailureClass::Infrastructure));
    let message = first.error_message.as_ref().unwrap();
    assert!(message.contains("has no container agl-rollout-r0"), "{message}");
}

#[tokio::test]
async fn an_evaluation_is_taken_up_where_it_was() {
    for begun in [true, false] {
        let leave = json!({"on_shutdown": "leave"});
        let mut dock = Dock::with(leave.clone(), json!({})).await;
        if !begun {
            dock.engine.fail(&format!("create {EVALUATOR}"), 503, "starting", 1000);
        }
        let id = dock.stage.gateway.create(judged());
        dock.engine.runs(AGENT).await;
        dock.engine.says(AGENT, "the answer", "");
        dock.engine.exits(AGENT, 7);
        dock.stage
            .gateway
            .until("its key has ended", |it| it.calls().contains(&"PATCH r0/0 agent_ended".to_owned()))
            .await;
        if begun {
            dock.engine.runs(EVALUATOR).await;
        }
        dock.stage.stop().await;
        dock.engine.inside(|inside| inside.forget_faults());
        // The agent's container is not needed any more.
        dock.engine.vanishes(AGENT);
        dock.start(leave, json!({}));
        dock.engine.runs(EVALUATOR).await;
        assert_eq!(dock.engine.container(EVALUATOR).unwrap().env("AGL_EXIT_CODE").unwrap(), "7");
        dock.engine.exits(EVALUATOR, 0);
        dock.stage.gateway.ended(&id).await;
        let attempts = dock.stage.gateway.attempts(&id);
        assert_eq!(
            (attempts.len(), attempts[0].failure, attempts[0].exit_code),
            (1, Some(FailureClass::Agent), Some(7))
        );
        assert_eq!(read(dock.stage.attempt("r0", "0").stdout()), "the answer");
    }
}

#[tokio::test]
async fn containers_that_nobody_wants_are_ended_and_those_of_others_are_not() {
    for marked in [true, false] {
        let leave = json!({"on_shutdown": "leave"});
        let mut dock = Dock::with(leave.clone(), json!({})).await;
        let id = dock.stage.gateway.create(boxed());
        dock.engine.runs(AGENT).await;
        dock.stage.stop().await;
        dock.stage.gateway.cancel(&id);
        let mut foreign = dock.engine.container(AGENT).unwrap();
        foreign.body["Labels"]["app.kubernetes.io/instance"] = json!("another");
        dock.engine.puts("another", foreign);
        if !marked {
            std::fs::remove_dir_all(dock.stage.folder.path().join("work/running")).unwrap();
        }
        dock.start(leave, json!({}));
        dock.engine.until("the stray is gone", |it| it.names() == ["another"]).await;
    }
}

#[tokio::test]
async fn a_name_that_somebody_else_has_fails_the_rollout_and_leaves_theirs_alone() {
    let dock = Dock::with(json!({}), json!({})).await;
    let first = dock.stage.gateway.create(boxed());
    dock.engine.runs(AGENT).await;
    let mut foreign = dock.engine.container(AGENT).unwrap();
    foreign.body["Labels"]["app.kubernetes.io/instance"] = json!("another");
    dock.engine.puts("agl-rollout-r1", foreign);
    let second = dock.stage.gateway.create(boxed());
    let message = dock.stage.gateway.ended(&second).await.status.error_message.unwrap();
    assert!(message.contains("there is another container agl-rollout-r1"), "{message}");
    assert!(dock.engine.names().contains(&"agl-rollout-r1".to_owned()));
    dock.engine.exits(AGENT, 0);
    dock.stage.gateway.ended(&first).await;
}

#[tokio::test]
async fn an_engine_that_is_away_for_a_while_costs_nothing() {
    let mut dock = Dock::with(json!({}), json!({})).await;
    let running = dock.stage.gateway.create(boxed());
    dock.engine.runs(AGENT).await;
    dock.engine.says(AGENT, "before, ", "");
    dock.engine.goes_away();
    let queued = dock.stage.gateway.create(boxed());
    tokio::time::sleep(Duration::from_millis(500)).await;
    dock.engine.says(AGENT, "after", "");
    dock.engine.comes_back();
    dock.engine.runs("agl-rollout-r1").await;
    dock.engine.exits(AGENT, 0);
    dock.engine.exits("agl-rollout-r1", 0);
    for id in [running, queued] {
        assert_eq!(dock.stage.gateway.ended(&id).await.status.state, RolloutState::Succeeded);
        assert_eq!(dock.stage.gateway.attempts(&id).len(), 1);
    }
    assert_eq!(read(dock.stage.attempt("r0", "0").stdout()), "before, after");
}

#[tokio::test]
async fn containers_that_an_engine_kills_when_it_is_restarted_are_not_the_agents_failure() {
    let mut dock = Dock::with(json!({}), json!({})).await;
    let id = dock.stage.gateway.create(boxed());
    dock.stage.gateway.until("it runs", |it| it.attempts(&id).iter().any(|at| at.state == AttemptState::Running)).await;
    dock.engine.goes_away();
    dock.engine.exits(AGENT, 137);
    tokio::time::sleep(Duration::from_millis(300)).await;
    dock.engine.comes_back();
    dock.engine.runs("agl-rollout-r0-1").await;
    let first = &dock.stage.gateway.attempts(&id)[0];
    assert_eq!(first.failure, Some(FailureClass::Infrastructure));
    assert!(first.error_message.as_ref().unwrap().contains("when its engine was restarted"));
}

#[tokio::test]
async fn an_attempt_that_is_repeated_anyway_is_not_judged() {
    let dock = Dock::with(json!({}), json!({})).await;
    dock.stage.gateway.say_calls("0", 1, 503);
    dock.stage.gateway.create(with(judged(), json!({"max_attempts": 2})));
    dock.engine.runs(AGENT).await;
    dock.engine.exits(AGENT, 1);
    dock.engine.runs("agl-rollout-r0-1").await;
    assert!(!dock.engine.calls().iter().any(|call| call.contains(EVALUATOR)));
}
