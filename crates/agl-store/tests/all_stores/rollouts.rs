//! Rollouts, attempts, and the log of their changes.

use super::*;

#[tokio::test]
async fn a_known_rollout_id_returns_the_existing_rollout_untouched() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        store.patch_rollout("r", becoming(RolloutState::Running), 2.0).await.unwrap();
        let mut again = rollout("r");
        again.input = json!("something else");
        let answers = store.create_rollouts(vec![again, rollout("s")]).await.unwrap();
        assert_eq!(answers[0].status.state, RolloutState::Running);
        assert_eq!(answers[0].input, rollout("r").input);
        assert_eq!(answers[1].rollout_id, "s");
    }
}

#[tokio::test]
async fn a_rollout_created_twice_in_one_request_exists_once() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r"), rollout("r")]).await.unwrap();
        assert_eq!(store.list_rollouts(query(&[RolloutState::Queuing])).await.unwrap().len(), 1);
    }
}

#[tokio::test]
async fn rollouts_are_listed_by_state_oldest_first_in_pages_and_by_run() {
    for Opened { store, .. } in &all().await {
        for id in ["c", "a", "b"] {
            store.create_rollouts(vec![rollout(id)]).await.unwrap();
        }
        let mut other = rollout("other run");
        other.metadata.insert("run_id".to_owned(), json!(17));
        store.create_rollouts(vec![other]).await.unwrap();
        store.patch_rollout("a", becoming(RolloutState::Running), 2.0).await.unwrap();

        let ids = |page: &[Rollout]| page.iter().map(|rollout| rollout.rollout_id.clone()).collect::<Vec<_>>();
        let queuing = store.list_rollouts(query(&[RolloutState::Queuing])).await.unwrap();
        assert_eq!(ids(&queuing), ["c", "b", "other run"]);
        let all = store.list_rollouts(query(&RolloutState::ALL)).await.unwrap();
        assert_eq!(ids(&all), ["c", "a", "b", "other run"]);
        let page = RolloutQuery { after: Some("c".to_owned()), limit: 2, ..query(&RolloutState::ALL) };
        assert_eq!(ids(&store.list_rollouts(page).await.unwrap()), ["a", "b"]);
        let run = RolloutQuery { run_id: Some("17".to_owned()), ..query(&RolloutState::ALL) };
        assert_eq!(ids(&store.list_rollouts(run).await.unwrap()), ["other run"]);
        assert!(store.list_rollouts(query(&[])).await.unwrap().is_empty());
        let unknown = RolloutQuery { after: Some("gone".to_owned()), ..query(&RolloutState::ALL) };
        assert!(matches!(store.list_rollouts(unknown).await, Err(StoreError::RolloutNotFound(id)) if id == "gone"));
    }
}

#[tokio::test]
async fn an_illegal_transition_is_refused_and_changes_nothing() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        let refused = store.patch_rollout("r", becoming(RolloutState::Succeeded), 2.0).await.unwrap_err();
        assert_eq!(refused.to_string(), "Rollout r: cannot transition queuing -> succeeded");
        assert_eq!(store.rollout("r").await.unwrap().unwrap(), rollout("r"));
        let missing = store.patch_rollout("nobody", becoming(RolloutState::Running), 2.0).await.unwrap_err();
        assert!(matches!(missing, StoreError::RolloutNotFound(id) if id == "nobody"));
    }
}

#[tokio::test]
async fn the_terminal_cursor_counts_deleted_rollouts() {
    for Opened { store, .. } in &all().await {
        for id in ["a", "b", "c"] {
            store.create_rollouts(vec![rollout(id)]).await.unwrap();
        }
        for id in ["b", "a", "c"] {
            store.patch_rollout(id, becoming(RolloutState::Failed), 2.0).await.unwrap();
        }
        store.delete_rollout("a").await.unwrap();
        store.delete_rollout("a").await.unwrap();
        let page = store.terminal(0, 2).await.unwrap();
        assert_eq!(page.items.len(), 1);
        assert_eq!(page.items[0].rollout_id, "b");
        assert_eq!(page.items[0].data_id, "task of b");
        assert_eq!((page.next_after, page.total_terminal), (2, 3));
        let rest = store.terminal(2, 10).await.unwrap();
        assert_eq!(rest.items[0].rollout_id, "c");
        assert_eq!(rest.next_after, 3);
        assert_eq!(store.terminal(3, 10).await.unwrap().next_after, 3);
    }
}

#[tokio::test]
async fn the_change_log_tells_what_happened_since_a_cursor() {
    for Opened { store, .. } in &all().await {
        let mut newest = store.newest_change();
        assert_eq!(*newest.borrow_and_update(), 0);
        store.create_rollouts(vec![rollout("a"), rollout("b")]).await.unwrap();
        store.patch_rollout("a", becoming(RolloutState::Running), 2.0).await.unwrap();
        store.patch_rollout("a", StatusPatch::default(), 2.0).await.unwrap();
        store.delete_rollout("b").await.unwrap();
        assert_eq!(store.mark_consumed("run", 4, vec!["a".into(), "gone".into()]).await.unwrap(), 1);
        assert_eq!(store.mark_consumed("run", 4, vec!["a".into()]).await.unwrap(), 1);
        newest.changed().await.unwrap();
        assert_eq!(*newest.borrow(), 5);

        let changes = store.changes(1, 10).await.unwrap();
        let told: Vec<_> =
            changes.iter().map(|c| (c.cursor, c.kind, c.rollout_id.as_str(), c.rollout.is_some())).collect();
        // A store may leave out what came before a deletion.
        assert_eq!(
            told.strip_prefix(&[(2, ChangeKind::Created, "b", false)]).unwrap_or(&told),
            [
                (3, ChangeKind::Updated, "a", true),
                (4, ChangeKind::Deleted, "b", false),
                (5, ChangeKind::Consumed, "a", true),
            ]
        );
        assert_eq!(changes.last().unwrap().rollout.as_ref().unwrap().consumed.as_ref().unwrap().step, 4);
        assert_eq!(store.changes(2, 1).await.unwrap().len(), 1);
    }
}

#[tokio::test]
async fn attempts_are_numbered_from_zero_and_creating_a_known_one_changes_nothing() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        let (first, new) = store.create_attempt("r", None, 2.0).await.unwrap();
        assert_eq!((first.attempt.attempt_id.as_str(), new), ("0", true));
        let (again, new) = store.create_attempt("r", Some("0".into()), 3.0).await.unwrap();
        assert_eq!((again, new), (first, false));
        store.create_attempt("r", Some("7".into()), 3.0).await.unwrap();
        store.create_attempt("r", Some("by-hand".into()), 3.0).await.unwrap();
        let (next, _) = store.create_attempt("r", None, 4.0).await.unwrap();
        assert_eq!(next.attempt.attempt_id, "8");
        let ids: Vec<_> = store.attempts("r").await.unwrap().into_iter().map(|a| a.attempt.attempt_id).collect();
        assert_eq!(ids, ["0", "7", "by-hand", "8"]);
        assert!(matches!(store.create_attempt("nobody", None, 2.0).await, Err(StoreError::RolloutNotFound(_))));
    }
}

#[tokio::test]
async fn an_attempt_ends_with_its_failure_and_withdraws_its_key() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        store.create_attempt("r", None, 2.0).await.unwrap();
        let patch = AttemptPatch {
            state: Some(AttemptState::Failed),
            failure: Some(FailureClass::Infrastructure),
            exit_code: Some(-9),
            ..AttemptPatch::default()
        };
        let detail = store.patch_attempt("r", "0", patch, 3.0).await.unwrap();
        assert!(detail.attempt.agent_ended);
        assert_eq!(store.attempt("r", "0").await.unwrap().unwrap(), detail.attempt);
        let again = AttemptPatch { state: Some(AttemptState::Running), ..AttemptPatch::default() };
        assert!(matches!(store.patch_attempt("r", "0", again, 3.0).await, Err(StoreError::Illegal(_))));
        let missing = store.patch_attempt("r", "1", AttemptPatch::default(), 3.0).await;
        assert!(matches!(missing, Err(StoreError::AttemptNotFound { .. })));
    }
}

#[tokio::test]
async fn the_standing_of_a_call_is_never_older_than_an_acknowledged_change() {
    for Opened { store, .. } in &all().await {
        let standing = async || store.standing("r", "0").await.unwrap();
        assert_eq!(standing().await, None);
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        assert_eq!(standing().await.unwrap().attempt, None);
        store.create_attempt("r", None, 2.0).await.unwrap();
        assert!(!standing().await.unwrap().attempt.unwrap().agent_ended);
        let patch = AttemptPatch { agent_ended: Some(true), ..AttemptPatch::default() };
        store.patch_attempt("r", "0", patch, 3.0).await.unwrap();
        assert!(standing().await.unwrap().attempt.unwrap().agent_ended);
        store.patch_rollout("r", becoming(RolloutState::Running), 4.0).await.unwrap();
        assert_eq!(standing().await.unwrap().rollout.status.state, RolloutState::Running);
        store.mark_consumed("run-a", 1, vec!["r".to_owned()]).await.unwrap();
        assert!(standing().await.unwrap().rollout.consumed.is_some());
        store.delete_rollout("r").await.unwrap();
        assert_eq!(standing().await, None);
    }
}

#[tokio::test]
async fn a_list_leaves_out_no_state_however_often_and_in_whatever_order_they_are_named() {
    use RolloutState::{Failed, Queuing, Running, Succeeded};
    for Opened { store, _place } in all().await {
        let ids = ["queuing", "running", "succeeded", "failed"];
        store.create_rollouts(ids.map(rollout).to_vec()).await.unwrap();
        for (id, state) in [("running", Running), ("succeeded", Running), ("succeeded", Succeeded), ("failed", Failed)]
        {
            store.patch_rollout(id, becoming(state), 2.0).await.unwrap();
        }
        let states = [Queuing, Running, Queuing, Running, Queuing, Failed];
        let found = store.list_rollouts(query(&states)).await.unwrap();
        let found: Vec<_> = found.iter().map(|rollout| rollout.rollout_id.as_str()).collect();
        assert_eq!(found, ["queuing", "running", "failed"]);
        assert!(store.list_rollouts(query(&[])).await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_change_log_that_is_read_from_before_a_deletion_tells_of_it() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r"), rollout("s")]).await.unwrap();
        store.patch_rollout("r", becoming(RolloutState::Running), 2.0).await.unwrap();
        store.delete_rollout("r").await.unwrap();
        let changes = store.changes(0, 10).await.unwrap();
        let of_r: Vec<_> = changes.iter().filter(|change| change.rollout_id == "r").collect();
        assert_eq!(of_r.last().unwrap().kind, ChangeKind::Deleted);
        assert!(of_r.iter().all(|change| change.rollout.is_none()));
        assert_eq!(changes.last().unwrap().cursor, *store.newest_change().borrow());
    }
}

#[tokio::test]
async fn attempts_are_listed_in_the_order_in_which_they_were_made_whatever_was_heard_of_first() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        store.append_event("r", "b", event("note", json!({})), 1.0).await.unwrap();
        for id in ["a", "b"] {
            store.create_attempt("r", Some(id.to_owned()), 2.0).await.unwrap();
        }
        let ids: Vec<String> =
            store.attempts("r").await.unwrap().into_iter().map(|detail| detail.attempt.attempt_id).collect();
        assert_eq!(ids, ["a", "b"]);
    }
}
