//! Many rollouts at once on a real API server: `./x check fleet`.

use std::time::{Duration, Instant};

use serde_json::json;

use super::{Stage, template};
use crate::support::{eventually, get, http, pause};

const ROLLOUTS: usize = 500;
const PER_MINUTE: f64 = 6000.0;

#[test]
#[ignore = "takes long; ./x check fleet runs it"]
fn five_hundred_rollouts_become_jobs_at_the_configured_rate() {
    let more = format!("max_jobs_per_minute = {PER_MINUTE}\njob_burst = 10");
    let Some(mut stage) = Stage::start(&more) else { return };
    // Queued while no controller looks.
    stage.controller.kill();
    for page in 0..ROLLOUTS / 100 {
        let rollouts: Vec<_> = (0..100)
            .map(|index| {
                json!({"rollout_id": format!("r{:03}", page * 100 + index), "input": {},
                       "config": {"k8s": {"job_template": template(&["true"])}}})
            })
            .collect();
        http("POST", &format!("{}/api/rollouts", stage.url), "", Some(&json!(rollouts))).unwrap();
    }
    let watch = stage.cluster.watch_creations();
    stage.controller = super::part("control", stage.folder.path());
    let began = Instant::now();
    eventually("all have ended", Duration::from_secs(300), || {
        pause(500);
        let url = format!("{}/api/rollouts?state_in=queuing&state_in=running&limit=1", stage.url);
        get(&url).is_some_and(|open| open.as_array().unwrap().is_empty())
    });
    let created = watch.stop();
    assert_eq!(created.len(), ROLLOUTS, "Jobs");
    let span = created[created.len() - 1].duration_since(created[0]).as_secs_f64();
    let rate = (ROLLOUTS - 1) as f64 / span * 60.0;
    println!("{ROLLOUTS} Jobs in {span:.2} s: {rate:.0} a minute, {:+.1} %", (rate / PER_MINUTE - 1.0) * 100.0);
    println!("all ended {:.1} s after the controller's start", began.elapsed().as_secs_f64());
    assert!((rate / PER_MINUTE - 1.0).abs() <= 0.05, "{rate:.0} a minute");
    let ran = stage.cluster.ledger();
    assert_eq!(ran.len(), ROLLOUTS, "processes");
}
