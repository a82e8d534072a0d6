//! Events, model calls, their bodies and what became of their answers.

use super::*;

#[tokio::test]
async fn events_keep_their_order_and_their_payload() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        store.append_event("r", "1", event("note", json!({"z": 1, "a": [null, 2.5]})), 2.0).await.unwrap();
        store.append_event("r", "0", event(REWARD, json!({"value": 1.0})), 3.0).await.unwrap();
        store.append_event("r", "1", event(REWARD, json!({"value": 0.0})), 4.0).await.unwrap();

        let events = store.events("r", "1", None).await.unwrap();
        assert_eq!(events.len(), 2);
        assert_eq!(serde_json::to_string(&events[0].event.data).unwrap(), r#"{"z":1,"a":[null,2.5]}"#);
        assert_eq!(store.events("r", "1", Some(REWARD)).await.unwrap()[0].event.timestamp, 4.0);
        assert!(store.events("r", "2", None).await.unwrap().is_empty());
        assert_eq!(store.attempts_with_events("r").await.unwrap(), ["1", "0"]);
        assert_eq!(store.count_events("r").await.unwrap(), 3);
        assert_eq!(store.count_events("unknown").await.unwrap(), 0);
        let missing = store.append_event("nobody", "0", event("note", json!({})), 2.0).await;
        assert!(matches!(missing, Err(StoreError::RolloutNotFound(_))));
        assert!(matches!(store.events("nobody", "0", None).await, Err(StoreError::RolloutNotFound(_))));
    }
}

#[tokio::test]
async fn a_model_call_comes_back_as_event_and_rows() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        store.create_attempt("r", None, 2.0).await.unwrap();
        let rows = vec![row(0, Delivery::Delivered), row(1, Delivery::Undelivered)];
        store.record_call(call(rows.clone())).await.unwrap();

        let stored = store.calls("r", "0", 0).await.unwrap();
        assert_eq!(stored.iter().map(|s| s.row.clone()).collect::<Vec<_>>(), rows);
        assert_eq!(stored[0].request_digest, [4; 32]);
        assert_eq!((stored[0].settled, stored[1].settled), (false, true));
        assert_eq!(store.calls("r", "0", 1).await.unwrap(), stored[1..]);

        let event = store.events("r", "0", Some(MODEL_REQUEST)).await.unwrap().remove(0).into_event().unwrap();
        assert_eq!(
            serde_json::to_string(&event.data).unwrap(),
            r#"{"model":"m","request":{"messages":[]},"response":{"choices":[{"token_ids":[7,8]}]},"http_status":200,"status":"ok"}"#
        );
        let detail = store.attempts("r").await.unwrap().remove(0);
        assert_eq!(detail.calls, 1);
        assert_eq!(detail.last_call.unwrap().http_status, 200);
        assert_eq!(store.attempts_with_events("r").await.unwrap(), ["0"]);
    }
}

#[tokio::test]
async fn a_response_that_is_no_json_reads_as_an_empty_object() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        let broken = CallRecord { response: b"<html>".as_slice().into(), ..call(vec![row(0, Delivery::Delivered)]) };
        store.record_call(broken).await.unwrap();
        let stored = store.events("r", "0", None).await.unwrap().remove(0);
        assert_eq!(stored.response.as_ref().unwrap().read().unwrap(), b"<html>");
        assert_eq!(stored.into_event().unwrap().data["response"], json!({}));
    }
}

#[tokio::test]
async fn deliveries_are_settled_and_a_superseded_row_stays_superseded() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        store.record_call(call(vec![row(0, Delivery::Undelivered)])).await.unwrap();
        store.record_call(CallRecord { supersedes: vec![0], ..call(vec![row(1, Delivery::Delivered)]) }).await.unwrap();
        let settle = |seq, delivery| Settlement {
            rollout_id: "r".to_owned(),
            attempt_id: "0".to_owned(),
            seqs: vec![seq],
            delivery,
        };
        let gone = Settlement { rollout_id: "nobody".to_owned(), ..settle(0, Delivery::Delivered) };
        store.settle(vec![settle(0, Delivery::Delivered), settle(1, Delivery::Undelivered), gone]).await.unwrap();
        let rows = store.calls("r", "0", 0).await.unwrap();
        assert_eq!(rows[0].row.delivery, Delivery::Superseded);
        assert_eq!(rows[1].row.delivery, Delivery::Undelivered);
        assert!(rows.iter().all(|row| row.settled));
    }
}

#[tokio::test]
async fn bodies_come_back_whole_however_they_are_stored() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r"), rollout("s")]).await.unwrap();
        let mut sent = Vec::new();
        let mut seq = 0;
        for number in 0..80 {
            // A main agent and its sub-agent take turns, beside another rollout.
            for (rollout_id, agent) in [("r", "main"), ("r", "sub"), ("s", "main")] {
                let mut turn = turn(agent, number);
                turn.rows = vec![CallRow { parent: None, shared_prefix: 0, ..row(seq, Delivery::Delivered) }];
                turn.rollout_id = rollout_id.to_owned();
                seq += 1;
                if rollout_id == "r" {
                    sent.push((turn.request.clone(), turn.response.clone()));
                }
                store.record_call(turn).await.unwrap();
            }
        }
        let events = store.events("r", "0", None).await.unwrap();
        let (mut raw, mut stored) = (0, 0);
        for (event, (request, response)) in events.into_iter().zip(&sent) {
            for (body, expected) in [(event.request.unwrap(), request), (event.response.unwrap(), response)] {
                assert_eq!(&body.read().unwrap(), expected);
                raw += expected.len();
                stored += body.stored().len();
            }
        }
        assert!(stored * 10 < raw, "{stored} bytes for {raw}");
    }
}

#[tokio::test]
async fn a_rollout_that_is_deleted_and_made_anew_does_not_lean_on_what_is_gone() {
    for Opened { store, .. } in &all().await {
        for round in 0..2 {
            store.create_rollouts(vec![rollout("r")]).await.unwrap();
            for number in 0..3 {
                let rows = vec![CallRow { parent: None, shared_prefix: 0, ..row(number, Delivery::Delivered) }];
                store.record_call(CallRecord { rows, ..turn("main", number + round) }).await.unwrap();
            }
            for (number, event) in (0..).zip(store.events("r", "0", None).await.unwrap()) {
                assert_eq!(event.request.unwrap().read().unwrap(), turn("main", number + round).request);
            }
            store.delete_rollout("r").await.unwrap();
        }
    }
}

#[tokio::test]
async fn what_is_told_of_a_rollout_that_was_made_anew_does_not_concern_its_later_calls() {
    for Opened { store, .. } in &all().await {
        store.create_rollouts(vec![rollout("r")]).await.unwrap();
        let late = Settlement {
            rollout_id: "r".to_owned(),
            attempt_id: "0".to_owned(),
            seqs: vec![1],
            delivery: Delivery::Undelivered,
        };
        store.record_call(call(vec![row(0, Delivery::Delivered)])).await.unwrap();
        store.settle(vec![late]).await.unwrap();
        store.record_call(call(vec![row(1, Delivery::Delivered)])).await.unwrap();
        let calls = store.calls("r", "0", 0).await.unwrap();
        assert_eq!(calls.iter().map(|call| call.row.delivery).collect::<Vec<_>>(), [Delivery::Delivered; 2]);
    }
}
