//! The main job, a few steps of it: the plumbing, not the reward.

use std::fs;
use std::process::Command;
use std::time::Duration;

use crate::support::{Running, agl, python, recipe};
use serde_json::Value;

#[test]
fn a_short_quickstart_leaves_a_summary_a_picture_metrics_and_a_checkpoint_that_can_be_evaluated() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut command = agl();
    command.args(["quickstart", "--steps", "2", "--seed", "5", "--out"]).arg(&out);
    command.args(["--set", "data.train_batch_size=4", "--set", "rollout.n=4", "--set", "data.val_batch_size=16"]);
    let mut run = Running::start(&mut command, "quickstart", folder.path());
    run.succeed(Duration::from_secs(240));

    let summary: Value = serde_json::from_slice(&fs::read(out.join("summary.json")).unwrap()).unwrap();
    assert_eq!(summary["steps"], 2);
    assert_eq!(summary["rollouts"], 2 * 4 * 4);
    assert!(summary["model_calls"].as_u64().unwrap() >= 2 * 4 * 4, "{summary}");
    for key in ["initial_val_reward", "final_val_reward"] {
        let reward = summary[key].as_f64().unwrap();
        assert!((0.0..=1.0).contains(&reward), "{key} = {reward}");
    }
    for key in ["rows_per_rollout", "wall_seconds", "sampled_tokens_per_second", "trained_tokens_per_second"] {
        assert!(summary[key].as_f64().unwrap() > 0.0, "{key}: {summary}");
    }
    assert!(fs::read_to_string(out.join("reward.svg")).unwrap().contains("<svg"));
    assert!(fs::read_dir(out.join("tensorboard")).unwrap().count() == 1);
    let shown = run.output();
    for expected in ["validation reward", "reward curve", "what next?", "make_data.py"] {
        assert!(shown.contains(expected), "{expected:?} is not in:\n{shown}");
    }
    let metrics = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let last: Value =
        metrics.lines().map(|line| serde_json::from_str(line).unwrap()).find(|line: &Value| line["step"] == 2).unwrap();
    let (ratio, rows) =
        (last["actor/ratio_mean"].as_f64().unwrap(), last["rollouts/rows_per_rollout"].as_f64().unwrap());
    assert!((ratio - 1.0).abs() < 1e-3, "on policy, recorded log-probs are the trainer's own: {ratio}");
    assert!((rows - 1.0).abs() < 0.2, "the recipe's rollouts merge into one row: {rows}");
    let hits = last["engine/prefix_cache_hit_rate"].as_f64().unwrap();
    assert!(hits > 0.4, "turns of a rollout and siblings of a group share what they begin with: {hits}");
    assert!(last["actor/lr"].as_f64().unwrap() > 0.0);

    let fresh = folder.path().join("fresh.jsonl");
    let made = Command::new(python())
        .arg(recipe().join("make_data.py"))
        .args(["--split", "fresh", "--seed", "9", "--n", "12"])
        .output()
        .unwrap();
    fs::write(&fresh, made.stdout).unwrap();
    let checkpoint = out.join("checkpoints/step-000002");
    let evaluated = agl().arg("eval").arg(&checkpoint).arg("--data").arg(&fresh).output().unwrap();
    let table = String::from_utf8_lossy(&evaluated.stdout);
    assert!(evaluated.status.success(), "{}", String::from_utf8_lossy(&evaluated.stderr));
    assert!(table.contains("mean reward") && table.contains("on 12 rollouts"), "{table}");
}

#[test]
fn a_second_run_in_the_same_folder_is_refused_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run.json"), "{}").unwrap();
    let refused = agl().args(["quickstart", "--out"]).arg(folder.path()).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    let message = String::from_utf8_lossy(&refused.stderr);
    assert!(message.contains("--resume") && message.contains("--out"), "{message}");
}
