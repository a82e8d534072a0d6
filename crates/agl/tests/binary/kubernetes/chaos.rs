//! Everything is killed at random, fifty times: `./x check fleet`.
//!
//! Whatever happens, every rollout ends, once, with the right class; none runs twice at the same time; nothing is left.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::{run_file, template};
use crate::support::{Running, agl, eventually, free_port, get, http, pause};

const KILLS: usize = 50;
const UNFINISHED: usize = 24;
const LONG: Duration = Duration::from_secs(300);

/// How agents of a kind end when nobody disturbs them, and with which class.
const KINDS: [(&str, &str, &str, Option<&str>); 4] = [
    ("quick", "exit 0", "succeeded", None),
    ("good", "sleep 0.$((RANDOM % 9 + 1)); exit 0", "succeeded", None),
    ("bad", "sleep 0.2; exit 3", "failed", Some("agent")),
    ("slow", "sleep 1000", "failed", Some("timeout")),
];

struct Chaos {
    folder: PathBuf,
    url: String,
    gateway: Running,
    controller: Running,
    random: StdRng,
    created: usize,
    /// What sets the clocks of programs forward and back, where it is installed.
    faketime: Option<PathBuf>,
    words: fn(&str) -> Value,
}

impl Chaos {
    fn start(folder: &Path, run_file: &str, url: String, words: fn(&str) -> Value) -> Self {
        fs::write(folder.join("run.toml"), run_file).unwrap();
        let seed = std::env::var("AGL_TEST_CHAOS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
        let libraries =
            fs::read_dir("/usr/lib").unwrap().flatten().map(|entry| entry.path().join("faketime/libfaketime.so.1"));
        let faketime = libraries.into_iter().find(|library| library.exists());
        println!(
            "seed {seed}; clocks {}",
            if faketime.is_some() { "move" } else { "stay, as faketime is not installed" }
        );
        let gateway = super::part("serve", folder);
        let controller = super::part("control", folder);
        let random = StdRng::seed_from_u64(seed);
        Self { folder: folder.to_owned(), url, gateway, controller, random, created: 0, faketime, words }
    }

    fn wait_for_gateway(&self) {
        eventually("the gateway is up", LONG, || get(&format!("{}/healthz", self.url)).is_some());
    }

    fn unfinished(&self) -> usize {
        let url = format!("{}/api/rollouts?state_in=queuing&state_in=running&limit=1000", self.url);
        get(&url).map_or(UNFINISHED, |open| open.as_array().unwrap().len())
    }

    /// Sees to it that there is always something to disturb.
    fn refill(&mut self) {
        let missing = UNFINISHED.saturating_sub(self.unfinished());
        let rollouts: Vec<Value> = (0..missing)
            .map(|index| {
                let number = self.created + index;
                let (kind, ..) = KINDS[number % KINDS.len()];
                let mut config = (self.words)(kind);
                config["timeout_seconds"] = json!(if kind == "slow" { 2 } else { 100 });
                // What we break is never the agent's failure, so attempts may not run out.
                config["max_attempts"] = json!(1000);
                json!({"rollout_id": format!("{kind}-x{number}"), "input": {"kind": kind}, "config": config})
            })
            .collect();
        if http("POST", &format!("{}/api/rollouts", self.url), "", Some(&json!(rollouts))).is_some_and(|it| it.0 == 201)
        {
            self.created += missing;
        }
    }

    fn kill_controller(&mut self) {
        self.controller.kill();
        let mut command = agl();
        if let Some(library) = &self.faketime {
            let hours = self.random.random_range(-1000..1000);
            command.env("LD_PRELOAD", library).env("FAKETIME", format!("{hours:+}h")).env("DONT_FAKE_MONOTONIC", "1");
        }
        command.arg("control").arg(self.folder.join("run.toml")).args(["--log", "info"]);
        self.controller = Running::start(&mut command, "control", &self.folder);
    }

    fn restart_gateway(&mut self) {
        self.gateway.kill();
        pause(self.random.random_range(0..500));
        self.gateway = super::part("serve", &self.folder);
        self.wait_for_gateway();
    }

    /// Waits until all have ended, and looks at each.
    fn audit(&mut self) {
        let mut open = usize::MAX;
        eventually(&format!("all rollouts end; see {}", self.folder.display()), LONG, || {
            pause(200);
            open = self.unfinished();
            open == 0
        });
        let mut ended: BTreeMap<String, usize> = BTreeMap::new();
        let mut after = 0;
        loop {
            let page = get(&format!("{}/api/rollouts/terminal?after={after}&limit=200", self.url)).unwrap();
            let items = page["items"].as_array().unwrap();
            for item in items {
                let id = item["rollout_id"].as_str().unwrap();
                *ended.entry(id.to_owned()).or_default() += 1;
                self.judge(&get(&format!("{}/api/rollouts/{id}", self.url)).unwrap()["rollout"]);
            }
            if items.is_empty() {
                break;
            }
            after = page["next_after"].as_u64().unwrap();
        }
        assert_eq!(ended.len(), self.created, "rollouts that ended");
        assert!(ended.values().all(|times| *times == 1), "ended more than once: {ended:?}");
    }

    fn judge(&self, rollout: &Value) {
        let id = rollout["rollout_id"].as_str().unwrap();
        let (_, _, state, class) = KINDS.into_iter().find(|kind| id.starts_with(kind.0)).unwrap();
        assert_eq!(rollout["status"]["state"], state, "{rollout}");
        let attempts = get(&format!("{}/api/rollouts/{id}/attempts", self.url)).unwrap();
        for (index, attempt) in attempts.as_array().unwrap().iter().enumerate() {
            let last = index + 1 == attempts.as_array().unwrap().len();
            assert_eq!(attempt["state"], if last { state } else { "failed" }, "{attempt}");
            let class = if last { class.map_or(Value::Null, Value::from) } else { json!("infrastructure") };
            assert_eq!(attempt["failure"], class, "{attempt}");
        }
    }

    /// What the agents themselves noticed.
    fn assert_no_two_at_once(&self) {
        let overlaps = fs::read_to_string(self.folder.join("overlaps")).unwrap_or_default();
        assert!(overlaps.is_empty(), "ran while another attempt of the same rollout did: {overlaps}");
        let ran = fs::read_to_string(self.folder.join("ran")).unwrap_or_default();
        let distinct: HashSet<&str> = ran.lines().collect();
        assert_eq!(distinct.len(), ran.lines().count(), "an attempt ran twice");
        println!("{} attempts of {} rollouts ran", ran.lines().count(), self.created);
    }
}

/// An agent's script: it notes that it runs, and that nobody else does.
fn script(folder: &Path, kind: &str) -> String {
    let (_, work, ..) = KINDS.into_iter().find(|known| known.0 == kind).unwrap();
    let folder = folder.display();
    format!(
        "exec 9>{folder}/$ROLLOUT.lock; flock -n 9 || {{ echo $ROLLOUT $ATTEMPT >>{folder}/overlaps; exit 9; }}; \
         echo $ROLLOUT $ATTEMPT >>{folder}/ran; {work}"
    )
}

/// Where agents lie that were left alone.
fn left_over(folder: &Path) -> Vec<String> {
    let marker = folder.display().to_string();
    let processes = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
        let text = fs::read(entry.path().join("cmdline")).ok()?;
        let text = String::from_utf8_lossy(&text).replace('\0', " ");
        (text.contains(&marker) && text.contains("flock")).then_some(text)
    });
    processes.collect()
}

fn folder_of(words: &str) -> PathBuf {
    std::env::temp_dir().join(format!("agl-chaos-{words}-{}", std::process::id()))
}

#[test]
#[ignore = "takes long; ./x check fleet runs it"]
fn processes_survive_fifty_kills_of_their_controller() {
    let folder = folder_of("process");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let url = format!("http://127.0.0.1:{}", free_port());
    let text = format!(
        "[gateway]\nlisten = {:?}\nstore = \"sqlite:gateway.db\"\n[controller]\nmax_concurrent = 16\n\
         retry_backoff_seconds = 0.1\nwork_dir = \"controller\"\nkill_grace_seconds = 1.0\n",
        url.trim_start_matches("http://")
    );
    let mut chaos = Chaos::start(&folder, &text, url, |kind| {
        let script = script(&folder_of("process"), kind);
        let env = json!({"ROLLOUT": "{{ rollout_id }}", "ATTEMPT": "{{ attempt_id }}"});
        json!({"process": {"argv": ["bash", "-c", script], "env": env}})
    });
    chaos.wait_for_gateway();
    for kill in 0..KILLS {
        chaos.refill();
        pause(chaos.random.random_range(20..600));
        chaos.kill_controller();
        if kill % 10 == 7 {
            chaos.restart_gateway();
        }
    }
    chaos.audit();
    chaos.assert_no_two_at_once();
    assert!(chaos.controller.terminate().success(), "{}", chaos.controller.output());
    assert_eq!(left_over(&folder), Vec::<String>::new());
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
#[ignore = "takes long; ./x check fleet runs it"]
fn jobs_survive_fifty_kills_of_their_controller_and_worse() {
    let folder = folder_of("kubernetes");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let Some(cluster) = Cluster::own(&folder) else { return };
    let url = format!("http://127.0.0.1:{}", free_port());
    let text = run_file(&cluster, &url, "leader_election = false\nmax_jobs_per_minute = 6000");
    let mut chaos = Chaos::start(&folder, &text, url, |kind| {
        let job = template(&["bash", "-c", "SCRIPT"]).replace("SCRIPT", &script(&folder_of("kubernetes"), kind));
        let env = "          env: [{name: ROLLOUT, value: \"{{ rollout_id }}\"}, {name: ATTEMPT, value: \"{{ attempt }}\"}]\n";
        json!({"k8s": {"job_template": job + env}})
    });
    chaos.wait_for_gateway();
    let (mut deleted, mut restarts) = (0, 0);
    for kill in 0..KILLS {
        chaos.refill();
        pause(chaos.random.random_range(20..900));
        chaos.kill_controller();
        for job in cluster.unfinished_jobs().iter().take(2) {
            if chaos.random.random_bool(0.3) {
                deleted += usize::from(cluster.delete_job(job));
            }
        }
        if kill % 10 == 7 {
            chaos.restart_gateway();
        }
        if kill % 10 == 3 {
            cluster.part("stop", "apiserver");
            pause(chaos.random.random_range(0..1500));
            cluster.part("start", "apiserver");
            restarts += 1;
        }
    }
    println!("{deleted} Jobs deleted, {restarts} restarts of the API server");
    chaos.audit();
    chaos.assert_no_two_at_once();
    assert!(!cluster.overlaps());
    eventually("no Job is left unfinished", LONG, || cluster.unfinished_jobs().is_empty());
    eventually("no process is left", LONG, || left_over(&folder).is_empty());
    assert!(chaos.controller.terminate().success(), "{}", chaos.controller.output());
    drop(cluster);
    fs::remove_dir_all(&folder).unwrap();
}
