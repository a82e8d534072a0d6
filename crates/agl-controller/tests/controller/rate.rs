//! Thousands of rollouts at once: `./x check fleet`.

use std::process::{Command, Stdio};
use std::time::Duration;

use agl_core::rollout::RolloutState;
use serde_json::json;

use crate::cluster::Kubelet;
use crate::fleet::{Fleet, k8s};
use crate::stage::PROGRAM;

const ROLLOUTS: usize = 5000;
const PER_MINUTE: f64 = 6000.0;

/// Resident memory of a process, in MB.
fn resident(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1024.0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes a minute; ./x check fleet runs it"]
async fn five_thousand_rollouts_become_jobs_at_the_configured_rate_in_flat_memory() {
    let fleet = Fleet::empty().await;
    fleet.cluster.set_kubelet(Kubelet::Vanishes(Duration::from_secs(2)));
    let ids: Vec<String> = (0..ROLLOUTS).map(|_| fleet.stage.gateway.create(k8s())).collect();
    let settings = fleet.settings(json!({}), json!({"max_jobs_per_minute": PER_MINUTE as u32, "job_burst": 10}));
    let config = fleet.stage.folder.path().join("controller.json");
    std::fs::write(&config, fleet.stage.config(&settings).to_string()).unwrap();
    // A program of its own, so that its memory is its own.
    let mut controller = Command::new(PROGRAM)
        .args(["run", "--gateway", &fleet.stage.gateway.url, "--config"])
        .arg(&config)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut memory = Vec::new();
    let deadline = std::time::Instant::now() + Duration::from_secs(180);
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let created = fleet.cluster.inside(|inside| inside.created.len());
        memory.push((created, resident(controller.id())));
        if created == ROLLOUTS || std::time::Instant::now() > deadline {
            break;
        }
    }
    for id in &ids {
        assert_eq!(fleet.stage.gateway.ended(id).await.status.state, RolloutState::Succeeded);
        assert_eq!(fleet.stage.gateway.attempts(id).len(), 1);
    }
    controller.kill().unwrap();
    controller.wait().unwrap();
    let created = fleet.cluster.inside(|inside| inside.created.clone());
    assert_eq!(created.len(), ROLLOUTS);
    let span = created[ROLLOUTS - 1].duration_since(created[0]).as_secs_f64();
    let rate = (ROLLOUTS - 1) as f64 / span * 60.0;
    let at = |part: usize| memory.iter().find(|(created, _)| *created >= ROLLOUTS * part / 10).unwrap().1;
    println!("{ROLLOUTS} Jobs in {span:.1} s: {rate:.0} a minute, {:+.2} %", (rate / PER_MINUTE - 1.0) * 100.0);
    println!("resident: {:.1} MB at a tenth, {:.1} at a half, {:.1} at the end", at(1), at(5), at(10));
    println!("lists: {:?}", fleet.cluster.lists());
    assert!((rate / PER_MINUTE - 1.0).abs() <= 0.05, "{rate:.0} a minute");
    assert!(at(10) <= at(1) * 1.1, "memory grows: {memory:?}");
    assert_eq!(fleet.cluster.lists().len(), 2, "one LIST each, as both were empty");
}
