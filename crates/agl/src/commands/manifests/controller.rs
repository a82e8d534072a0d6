//! The controller, and the few things it may do in the namespace of rollouts.

use serde_json::{Value, json};

use super::Deployment;

impl Deployment<'_> {
    pub(super) fn controller(&self) -> Vec<Value> {
        let name = self.named("controller");
        let mut there = self.metadata("controller", "controller");
        there["namespace"] = json!(self.args.rollouts_namespace);
        let mut objects = vec![
            json!({
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": self.metadata("controller", "controller"),
                "automountServiceAccountToken": false,
            }),
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "Role",
                "metadata": there,
                "rules": [
                    // An attempt is a Job.
                    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create", "get", "list", "watch", "delete"]},
                    // How it goes. A Pod whose Job was deleted without it is deleted too.
                    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "delete"]},
                    // What the agent printed.
                    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
                    // The key of an attempt. It goes with its Job, so it need not be deleted; whose it is is looked at where one is there
                    // already.
                    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "get"]},
                    // Which controller works. Creating cannot be limited to a name.
                    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
                    {
                        "apiGroups": ["coordination.k8s.io"],
                        "resources": ["leases"],
                        "resourceNames": [name],
                        "verbs": ["get", "update"],
                    },
                ],
            }),
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "RoleBinding",
                "metadata": there,
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": self.args.namespace}],
            }),
            self.controller_deployment(),
        ];
        objects.extend(self.disruption_budget("controller", self.args.controller_replicas));
        objects
    }

    fn controller_deployment(&self) -> Value {
        let (name, gateway) = (self.named("controller"), self.named("gateway"));
        let agent_url = self.args.agent_url.clone().unwrap_or_else(|| {
            // Kubernetes tells the Pods of a namespace the addresses of its Services.
            format!("http://$({}_SERVICE_HOST):8080", gateway.to_uppercase().replace('-', "_"))
        });
        let args = [
            "control".to_owned(),
            "/etc/agl/run.toml".to_owned(),
            format!("--gateway=http://{gateway}:8080"),
            "--set=controller.runner=kubernetes".to_owned(),
            format!("--set=controller.kubernetes.namespace={}", self.args.rollouts_namespace),
            format!("--set=controller.kubernetes.instance={}", self.args.name),
            "--set=controller.kubernetes.leader_election=true".to_owned(),
            format!("--set=controller.kubernetes.lease_name={name}"),
            "--set=controller.work_dir=/work".to_owned(),
            format!("--set=controller.agent_url={agent_url}"),
        ];
        let (mut mounts, mut volumes) = (self.mounts(), self.volumes());
        mounts.push(json!({"name": "work", "mountPath": "/work"}));
        volumes.push(json!({"name": "work", "emptyDir": {}}));
        let container = self.container(
            "controller",
            json!({
                "args": args,
                "env": self.environment(),
                "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
                "volumeMounts": mounts,
            }),
        );
        let pod = self.pod(
            "controller",
            json!({
                "serviceAccountName": name,
                "automountServiceAccountToken": true,
                "enableServiceLinks": true,
                "terminationGracePeriodSeconds": 30,
                "containers": [container],
                "volumes": volumes,
            }),
        );
        json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": self.metadata("controller", "controller"),
            "spec": {
                "replicas": self.args.controller_replicas,
                "selector": {"matchLabels": self.selector("controller")},
                "template": pod,
            },
        })
    }
}
