//! Who reaches whom: rollouts the gateway and nothing else. A policy names whom it is about; what it does not allow to them is denied.

use serde_json::{Value, json};

use super::Deployment;

impl Deployment<'_> {
    pub(super) fn network_policies(&self) -> Vec<Value> {
        let rollouts = json!({"agl/role": "rollout"});
        let in_namespace = |name: &str| json!({"matchLabels": {"kubernetes.io/metadata.name": name}});
        let port = |protocol: &str, port: u16| json!({"protocol": protocol, "port": port});

        let mut egress = vec![json!({
            "to": [{
                "namespaceSelector": in_namespace(&self.args.namespace),
                "podSelector": {"matchLabels": self.selector("gateway")},
            }],
            "ports": [port("TCP", 8080)],
        })];
        if self.args.allow_dns {
            egress.push(json!({
                "to": [{
                    "namespaceSelector": in_namespace("kube-system"),
                    "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
                }],
                "ports": [port("UDP", 53), port("TCP", 53)],
            }));
        }

        let mut from = vec![
            json!({"podSelector": {}}),
            json!({
                "namespaceSelector": in_namespace(&self.args.rollouts_namespace),
                "podSelector": {"matchLabels": rollouts},
            }),
        ];
        from.extend(self.args.gateway_from.iter().map(|name| json!({"namespaceSelector": in_namespace(name)})));

        let mut there = self.metadata("rollouts", "rollouts");
        there["namespace"] = json!(self.args.rollouts_namespace);
        vec![
            json!({
                "apiVersion": "networking.k8s.io/v1",
                "kind": "NetworkPolicy",
                "metadata": there,
                "spec": {
                    "podSelector": {"matchLabels": rollouts},
                    // No rule for ingress: nobody reaches them.
                    "policyTypes": ["Ingress", "Egress"],
                    "egress": egress,
                },
            }),
            json!({
                "apiVersion": "networking.k8s.io/v1",
                "kind": "NetworkPolicy",
                "metadata": self.metadata("gateway", "gateway"),
                "spec": {
                    "podSelector": {"matchLabels": self.selector("gateway")},
                    "policyTypes": ["Ingress"],
                    "ingress": [{"from": from, "ports": [port("TCP", 8080)]}],
                },
            }),
        ]
    }
}
