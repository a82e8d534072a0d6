//! The store as a whole: settings, deletion, size, many writers, the end.

use super::*;

#[tokio::test]
async fn a_deleted_rollout_takes_everything_with_it_and_its_id_is_free_again() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        store.create_attempt("r", None, 2.0).await.unwrap();
        store.record_call(call(vec![row(0, Delivery::Delivered)])).await.unwrap();
        store.delete_rollout("r").await.unwrap();
        assert_eq!(store.rollout("r").await.unwrap(), None);
        assert!(matches!(store.record_call(call(vec![])).await, Err(StoreError::RolloutNotFound(_))));

        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        assert!(store.attempts("r").await.unwrap().is_empty());
        assert!(store.calls("r", "0", 0).await.unwrap().is_empty());
        assert!(store.events("r", "0", None).await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn models_are_replaced_by_model_and_endpoint_and_removed_by_either() {
    let model = |model: &str, endpoint: &str, version| RegisteredModel {
        version,
        kind: "vllm".to_owned(),
        trainable: Some(false),
        api_key_env: Some("KEY".to_owned()),
        stream: Some("through".to_owned()),
        ..RegisteredModel::new(model, endpoint)
    };
    for Opened { store, .. } in &all().await {
        store.put_models(vec![model("b", "y", 0), model("a", "x", 0), model("b", "x", 0)]).await.unwrap();
        store.put_models(vec![model("b", "x", 5)]).await.unwrap();
        assert_eq!(store.models().await.unwrap(), [model("a", "x", 0), model("b", "x", 5), model("b", "y", 0)]);
        store.delete_models("b", Some("x")).await.unwrap();
        assert_eq!(store.models().await.unwrap(), [model("a", "x", 0), model("b", "y", 0)]);
        store.delete_models("b", None).await.unwrap();
        assert_eq!(store.models().await.unwrap(), [model("a", "x", 0)]);
    }
}

#[tokio::test]
async fn the_pause_and_the_secret_are_kept() {
    let pause = Pause { retry_after_seconds: 5, reason: None, owner: Some("t".to_owned()), lease_expires_at: 99.5 };
    for Opened { store, .. } in &all().await {
        assert_eq!(store.pause().await.unwrap(), None);
        assert!(store.put_pause(None, Some(pause.clone())).await.unwrap());
        assert_eq!(store.pause().await.unwrap(), Some(pause.clone()));
        let other = Pause { owner: Some("other".to_owned()), ..pause.clone() };
        assert!(!store.put_pause(None, Some(other)).await.unwrap(), "somebody was faster");
        assert!(store.put_pause(Some(pause.clone()), None).await.unwrap());
        assert_eq!(store.pause().await.unwrap(), None);
        assert_eq!(store.secret("keys", [1; 32]).await.unwrap(), [1; 32]);
        assert_eq!(store.secret("keys", [2; 32]).await.unwrap(), [1; 32]);
    }
}

#[tokio::test]
async fn a_closed_store_says_so() {
    for Opened { store, .. } in &all().await {
        store.close().await;
        store.close().await;
        assert!(matches!(store.rollout("r").await, Err(StoreError::Closed)));
        assert!(matches!(store.create_rollouts(vec![rollout("r")]).await, Err(StoreError::Closed)));
    }
}

#[tokio::test]
async fn many_writers_at_once_lose_nothing() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        let tasks: Vec<_> = (0..300_u32)
            .map(|n| {
                let store = Arc::clone(store);
                tokio::spawn(async move {
                    let data: Map<String, Value> = json!({"n": n}).as_object().cloned().unwrap();
                    // Every third one names a rollout that does not exist: its failure must not touch its neighbours.
                    let id = if n % 3 == 0 { "nobody" } else { "r" };
                    store.append_event(id, "0", EventCreate { event_type: "note".into(), data }, 2.0).await.is_ok()
                })
            })
            .collect();
        let mut kept = 0;
        for task in tasks {
            kept += u32::from(task.await.unwrap());
        }
        assert_eq!(kept, 200);
        assert_eq!(store.events("r", "0", None).await.unwrap().len(), 200);
    }
}

#[tokio::test]
async fn the_stored_bytes_grow_with_what_is_written_and_fall_when_it_is_deleted() {
    let [memory, sqlite, postgres] = &all().await;
    for (Opened { store, .. }, shrinks) in [(memory, true), (sqlite, true), (postgres, false)] {
        let empty = store.stored_bytes().await.unwrap();
        store.create_rollouts(vec![rollout("r"), rollout("s")]).await.unwrap();
        for seq in 0..100 {
            let rows = vec![CallRow { parent: None, shared_prefix: 0, ..row(seq, Delivery::Delivered) }];
            store.record_call(CallRecord { rows, ..turn("main", seq) }).await.unwrap();
        }
        let full = store.stored_bytes().await.unwrap();
        assert!(full > empty + 50_000, "{empty} → {full}");
        store.delete_rollout("r").await.unwrap();
        let left = store.stored_bytes().await.unwrap();
        assert!(left < empty + 20_000 || !shrinks, "{full} → {left}");
        assert!(left > 0);
    }
}
