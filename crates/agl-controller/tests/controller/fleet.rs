//! A stage with a cluster.

use serde_json::{Value, json};

use crate::cluster::{FakeCluster, NAMESPACE};
use crate::stage::Stage;

pub struct Fleet {
    pub stage: Stage,
    pub cluster: FakeCluster,
}

impl Fleet {
    /// A fleet without a controller.
    pub async fn empty() -> Self {
        Self { stage: Stage::empty().await, cluster: FakeCluster::start().await }
    }

    /// One whose controller runs with `settings` in `[controller]` and `kubernetes` in `[controller.kubernetes]`.
    pub async fn with(settings: Value, kubernetes: Value) -> Self {
        let mut fleet = Self::empty().await;
        fleet.start(settings, kubernetes);
        fleet
    }

    pub fn start(&mut self, settings: Value, kubernetes: Value) {
        let settings = self.settings(settings, kubernetes);
        self.stage.start(settings);
    }

    pub fn settings(&self, mut settings: Value, kubernetes: Value) -> Value {
        let mut cluster = json!({
            "namespace": NAMESPACE, "kubeconfig": self.cluster.kubeconfig(self.stage.folder.path()),
            "leader_election": false,
        });
        cluster.as_object_mut().unwrap().extend(kubernetes.as_object().unwrap().clone());
        settings["runner"] = json!("kubernetes");
        settings["max_concurrent"] = json!(10_000);
        settings["kubernetes"] = cluster;
        settings
    }
}

/// A rollout with a Job.
pub fn k8s() -> Value {
    json!({"k8s": {"job_template": TEMPLATE}, "timeout_seconds": 60})
}

pub const TEMPLATE: &str = r#"
apiVersion: batch/v1
kind: Job
metadata:
  name: overwritten
  labels: {team: math}
spec:
  backoffLimit: 6
  template:
    spec:
      containers:
        - name: agent
          image: agent:1
          command: ["agent", {{ input.question | yaml_escape }}, "{{ job_name }}", "{{ attempt }}"]
          env:
            - {name: AGL_KEY, value: overwritten}
            - {name: GREETING, value: hello}
"#;
