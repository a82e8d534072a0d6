//! The gateway: SQLite on a volume, or several on Postgres.

use serde_json::{Value, json};

use super::Deployment;

impl Deployment<'_> {
    pub(super) fn gateway(&self) -> Vec<Value> {
        let mut objects = vec![
            json!({
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": self.metadata("gateway", "gateway"),
                "automountServiceAccountToken": false,
            }),
            json!({
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": self.metadata("gateway", "gateway"),
                "spec": {
                    "selector": self.selector("gateway"),
                    "ports": [{"name": "http", "protocol": "TCP", "port": 8080, "targetPort": "http"}],
                    // An attempt is a Pod: its calls stay with one gateway, whose caches know it.
                    "sessionAffinity": "ClientIP",
                },
            }),
        ];
        if self.args.postgres_secret.is_none() {
            objects.push(self.volume_claim());
        }
        objects.push(self.gateway_deployment());
        objects.extend(self.disruption_budget("gateway", self.args.replicas));
        objects
    }

    fn volume_claim(&self) -> Value {
        let mut claim = json!({
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": self.metadata("gateway", "gateway"),
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": self.args.storage}},
            },
        });
        if let Some(class) = &self.args.storage_class {
            claim["spec"]["storageClassName"] = json!(class);
        }
        claim
    }

    fn gateway_deployment(&self) -> Value {
        let grace = self.args.shutdown_grace;
        let mut args = vec![
            "serve".to_owned(),
            "/etc/agl/run.toml".to_owned(),
            "--listen=0.0.0.0:8080".to_owned(),
            format!("--set=gateway.shutdown_grace_seconds={grace}"),
        ];
        let (mut env, mut mounts, mut volumes) = (self.environment(), self.mounts(), self.volumes());
        if let Some(secret) = &self.args.postgres_secret {
            env.push(json!({
                "name": "AGL_GATEWAY__STORE",
                "valueFrom": {"secretKeyRef": {"name": secret, "key": self.args.postgres_key}},
            }));
        } else {
            args.push("--store=sqlite:/data/gateway.db".to_owned());
            mounts.push(json!({"name": "data", "mountPath": "/data"}));
            volumes.push(json!({"name": "data", "persistentVolumeClaim": {"claimName": self.named("gateway")}}));
        }
        let probe = |path: &str, period: u32, timeout: u32, failures: u32| {
            json!({
                "httpGet": {"path": path, "port": "http"},
                "periodSeconds": period,
                "timeoutSeconds": timeout,
                "failureThreshold": failures,
            })
        };
        let container = self.container(
            "gateway",
            json!({
                "args": args,
                "env": env,
                "ports": [{"name": "http", "containerPort": 8080, "protocol": "TCP"}],
                "startupProbe": probe("/readyz", 2, 6, 150),
                "readinessProbe": probe("/readyz", 5, 6, 2),
                "livenessProbe": probe("/healthz", 10, 5, 6),
                "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "4Gi"}},
                "volumeMounts": mounts,
            }),
        );
        let pod = self.pod(
            "gateway",
            json!({
                "serviceAccountName": self.named("gateway"),
                "automountServiceAccountToken": false,
                "enableServiceLinks": false,
                // Calls in flight end first, then the store is closed.
                "terminationGracePeriodSeconds": grace + 20,
                "containers": [container],
                "volumes": volumes,
            }),
        );
        // One gateway at a time on a SQLite file.
        let strategy = if self.args.postgres_secret.is_some() { "RollingUpdate" } else { "Recreate" };
        json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": self.metadata("gateway", "gateway"),
            "spec": {
                "replicas": self.args.replicas,
                "strategy": {"type": strategy},
                "selector": {"matchLabels": self.selector("gateway")},
                "template": pod,
            },
        })
    }
}
