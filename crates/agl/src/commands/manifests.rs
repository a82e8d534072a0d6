//! `agl manifests`: gateway and controller on Kubernetes without Helm, object for object what the chart in `deploy/helm/agl` makes.

mod controller;
mod gateway;
mod network;

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::failure::usage;
use crate::output::{line, note};
use crate::run_file::RunFile;

/// See `agl manifests --help`.
#[derive(Args)]
pub struct ManifestsArgs {
    /// The run file of gateway and controller. What the manifests decide (address, store, runner, namespace, work directory) wins over it.
    #[arg(value_name = "RUN.TOML")]
    run_file: Option<PathBuf>,
    /// What the objects' names begin with.
    #[arg(long, default_value = "agl", value_parser = name)]
    name: String,
    /// Where gateway and controller run.
    #[arg(long, default_value = "agl", value_parser = name)]
    namespace: String,
    /// Where agents run; the controller may start what it likes there.
    #[arg(long, default_value = "agents", value_parser = name)]
    rollouts_namespace: String,
    /// The image, made from `deploy/Dockerfile`.
    #[arg(long, default_value = concat!("agl:", env!("CARGO_PKG_VERSION")))]
    image: String,
    /// The Secret that has the gateway's server key under `key`; NAME-server-key if absent.
    #[arg(long, value_name = "NAME", value_parser = subdomain)]
    key_secret: Option<String>,
    /// Gateways; more than one needs `--postgres-secret`.
    #[arg(long, default_value_t = 1)]
    replicas: u32,
    /// Controllers: one works, the others wait to take over.
    #[arg(long, default_value_t = 2)]
    controller_replicas: u32,
    /// The Secret that has the URL of a Postgres database, password included; SQLite on a volume if absent.
    #[arg(long, value_name = "NAME", value_parser = subdomain)]
    postgres_secret: Option<String>,
    /// The URL's key in that Secret.
    #[arg(long, default_value = "uri", value_name = "KEY")]
    postgres_key: String,
    /// The size of the volume for SQLite.
    #[arg(long, default_value = "20Gi")]
    storage: String,
    /// The volume's storage class; the cluster's default if absent.
    #[arg(long, value_name = "NAME")]
    storage_class: Option<String>,
    /// How long calls in flight may go on when a gateway is asked to stop.
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    shutdown_grace: u32,
    /// The gateway's URL as agents reach it; the IP address of its Service if absent, so that rollouts need no DNS.
    #[arg(long, value_name = "URL")]
    agent_url: Option<String>,
    /// Let rollouts ask the cluster's DNS, through which data can leave the cluster.
    #[arg(long)]
    allow_dns: bool,
    /// Another namespace whose Pods may reach the gateway, of a trainer or of Prometheus; may be repeated.
    #[arg(long, value_name = "NAMESPACE", value_parser = name)]
    gateway_from: Vec<String>,
    /// The cluster's version, if it is older than 1.21.
    #[arg(long, value_name = "1.MINOR", value_parser = minor)]
    kubernetes_version: Option<u32>,
    /// Only the NetworkPolicies.
    #[arg(long)]
    network_policy_only: bool,
}

/// Everything the objects are made from.
struct Deployment<'a> {
    args: &'a ManifestsArgs,
    /// The text of the run file.
    run_file: String,
}

/// Prints the manifests as YAML.
pub fn manifests(args: &ManifestsArgs) -> anyhow::Result<()> {
    if args.replicas > 1 && args.postgres_secret.is_none() {
        return Err(usage("--replicas: several gateways need Postgres: give --postgres-secret, or --replicas 1"));
    }
    let deployment = Deployment { args, run_file: run_file_text(args)? };
    let objects = if args.network_policy_only { deployment.network_policies() } else { deployment.objects() };
    for object in &objects {
        let text = serde_saphyr::to_string(object)?;
        line("---");
        // The text of a run file may be its end, blank lines and all.
        line(text.strip_suffix('\n').unwrap_or(&text));
    }
    if !args.network_policy_only {
        let (secret, namespace) = (deployment.key_secret(), &args.namespace);
        note(format!(
            "agl: the server key is not among the manifests. If there is no Secret {secret} yet, make one after applying them:\n  \
             kubectl create secret generic {secret} --namespace {namespace} --from-literal=key=\"$(openssl rand -hex 24)\""
        ));
    }
    Ok(())
}

/// The run file as it is written, once it is known to be one that holds no secrets.
fn run_file_text(args: &ManifestsArgs) -> anyhow::Result<String> {
    let Some(path) = &args.run_file else { return Ok(String::new()) };
    let file = RunFile::read(Some(path), &[])?;
    let text = std::fs::read_to_string(path)?;
    let key = &file.gateway.key;
    if !key.is_empty() && text.contains(key.as_str()) {
        return Err(usage(format!(
            "{}: gateway.key would stand in a ConfigMap: take it out and put it into the Secret",
            path.display()
        )));
    }
    Ok(text)
}

impl Deployment<'_> {
    /// All of them, in an order in which they can be applied: the controllers find the gateway's Service in their environment.
    fn objects(&self) -> Vec<Value> {
        let mut objects = vec![json!({
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": self.args.namespace},
        })];
        if self.args.rollouts_namespace != self.args.namespace {
            let mut labels = self.labels("rollouts");
            labels["pod-security.kubernetes.io/enforce"] = json!("baseline");
            objects.push(json!({
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": self.args.rollouts_namespace, "labels": labels},
            }));
        }
        objects.extend(self.network_policies());
        objects.push(json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self.metadata("run-file", "config"),
            "data": {"run.toml": self.run_file},
        }));
        objects.extend(self.gateway());
        objects.extend(self.controller());
        objects
    }

    fn named(&self, suffix: &str) -> String {
        format!("{}-{suffix}", self.args.name)
    }

    fn key_secret(&self) -> String {
        self.args.key_secret.clone().unwrap_or_else(|| self.named("server-key"))
    }

    /// What finds the Pods of a component. Never changes.
    fn selector(&self, component: &str) -> Value {
        json!({
            "app.kubernetes.io/name": "agl",
            "app.kubernetes.io/instance": self.args.name,
            "app.kubernetes.io/component": component,
        })
    }

    fn labels(&self, component: &str) -> Value {
        let mut labels = self.selector(component);
        labels["app.kubernetes.io/version"] = json!(env!("CARGO_PKG_VERSION"));
        labels
    }

    /// Of an object beside gateway and controller.
    fn metadata(&self, suffix: &str, component: &str) -> Value {
        json!({"name": self.named(suffix), "namespace": self.args.namespace, "labels": self.labels(component)})
    }

    /// A Pod of a component, with what both components have in common; `own` is the rest of its specification.
    fn pod(&self, component: &str, own: Value) -> Value {
        let mut specification = json!({
            "securityContext": {
                "runAsNonRoot": true,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "topologySpreadConstraints": [{
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": self.selector(component)},
            }],
        });
        extend(&mut specification, own);
        let run_file = Sha256::digest(&self.run_file);
        json!({
            "metadata": {
                "labels": self.selector(component),
                // A new run file is a new Pod.
                "annotations": {"checksum/run-file": run_file.iter().map(|byte| format!("{byte:02x}")).collect::<String>()},
            },
            "spec": specification,
        })
    }

    /// A component's container, with what both have in common.
    fn container(&self, component: &str, own: Value) -> Value {
        let mut container = json!({
            "name": component,
            "image": self.args.image,
            "imagePullPolicy": "IfNotPresent",
            "securityContext": {
                "allowPrivilegeEscalation": false,
                "readOnlyRootFilesystem": true,
                "capabilities": {"drop": ["ALL"]},
            },
        });
        extend(&mut container, own);
        container
    }

    fn environment(&self) -> Vec<Value> {
        vec![
            json!({"name": "AGL_SERVER_KEY", "valueFrom": {"secretKeyRef": {"name": self.key_secret(), "key": "key"}}}),
            json!({"name": "AGL_LOG", "value": "info"}),
            json!({"name": "AGL_LOG_FORMAT", "value": "json"}),
        ]
    }

    /// The run file's place in a container, beside a folder for temporary files.
    fn mounts(&self) -> Vec<Value> {
        vec![
            json!({"name": "run-file", "mountPath": "/etc/agl", "readOnly": true}),
            json!({"name": "tmp", "mountPath": "/tmp"}),
        ]
    }

    fn volumes(&self) -> Vec<Value> {
        vec![
            json!({"name": "run-file", "configMap": {"name": self.named("run-file")}}),
            json!({"name": "tmp", "emptyDir": {}}),
        ]
    }

    /// How many of a component may be moved at a time: one. Nothing where there is only one.
    fn disruption_budget(&self, component: &str, replicas: u32) -> Option<Value> {
        let old = self.args.kubernetes_version.is_some_and(|minor| minor < 21);
        (replicas > 1).then(|| {
            json!({
                "apiVersion": if old { "policy/v1beta1" } else { "policy/v1" },
                "kind": "PodDisruptionBudget",
                "metadata": self.metadata(component, component),
                "spec": {"maxUnavailable": 1, "selector": {"matchLabels": self.selector(component)}},
            })
        })
    }
}

/// The image's user, who is not root.
const USER: u32 = 65532;

/// Adds the fields of one object to another.
fn extend(object: &mut Value, own: Value) {
    if let (Value::Object(object), Value::Object(own)) = (object, own) {
        object.extend(own);
    }
}

/// A name that may be a label's value, and the first part of a longer name.
fn name(text: &str) -> Result<String, String> {
    let is_inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let ends_well = !text.starts_with('-') && !text.ends_with('-');
    if text.is_empty() || text.len() > 63 || !text.chars().all(is_inner) || !ends_well {
        return Err("a name of up to 63 characters a-z, 0-9 and - inside is wanted".to_owned());
    }
    Ok(text.to_owned())
}

/// The name of a Secret: names joined by dots.
fn subdomain(text: &str) -> Result<String, String> {
    text.split('.').try_for_each(|part| name(part).map(drop))?;
    Ok(text.to_owned())
}

/// The minor version of a Kubernetes version 1.x.
fn minor(text: &str) -> Result<u32, String> {
    let minor = text.strip_prefix("1.").and_then(|rest| rest.split('.').next()?.parse().ok());
    minor.ok_or_else(|| "a version such as 1.20 is wanted".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use k8s_openapi::api::apps::v1 as apps;
    use k8s_openapi::api::core::v1 as core;
    use k8s_openapi::api::networking::v1::NetworkPolicy;
    use k8s_openapi::api::policy::v1::PodDisruptionBudget;
    use k8s_openapi::api::rbac::v1 as rbac;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: ManifestsArgs,
    }

    fn objects(arguments: &[&str]) -> Vec<Value> {
        let line = Line::try_parse_from([&["agl"], arguments].concat()).unwrap();
        Deployment { args: &line.args, run_file: run_file_text(&line.args).unwrap() }.objects()
    }

    fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> Option<&'a Value> {
        objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
    }

    /// The object as the newest Kubernetes understands it, which passes over fields that it does not know.
    fn understood<T: serde::Serialize + serde::de::DeserializeOwned>(object: &Value) -> Value {
        serde_json::to_value(serde_json::from_value::<T>(object.clone()).unwrap()).unwrap()
    }

    #[test]
    fn every_field_is_one_that_kubernetes_knows() {
        let sqlite = objects(&["--allow-dns", "--gateway-from=training", "--storage-class=fast"]);
        let postgres = objects(&["--replicas=3", "--postgres-secret=agl-db"]);
        for object in sqlite.iter().chain(&postgres) {
            let understood = match object["kind"].as_str().unwrap() {
                "Namespace" => understood::<core::Namespace>(object),
                "ConfigMap" => understood::<core::ConfigMap>(object),
                "Service" => understood::<core::Service>(object),
                "ServiceAccount" => understood::<core::ServiceAccount>(object),
                "PersistentVolumeClaim" => understood::<core::PersistentVolumeClaim>(object),
                "Deployment" => understood::<apps::Deployment>(object),
                "PodDisruptionBudget" => understood::<PodDisruptionBudget>(object),
                "NetworkPolicy" => understood::<NetworkPolicy>(object),
                "Role" => understood::<rbac::Role>(object),
                "RoleBinding" => understood::<rbac::RoleBinding>(object),
                other => panic!("what is a {other}?"),
            };
            assert_eq!(&understood, object);
        }
    }

    #[test]
    fn rollouts_reach_the_gateway_and_nothing_else_unless_dns_is_asked_for() {
        let policy = |arguments: &[&str]| find(&objects(arguments), "NetworkPolicy", "agl-rollouts").unwrap().clone();
        let closed = policy(&[]);
        assert_eq!(closed["spec"]["policyTypes"], json!(["Ingress", "Egress"]));
        assert_eq!(closed["spec"]["egress"].as_array().unwrap().len(), 1);
        assert_eq!(policy(&["--allow-dns"])["spec"]["egress"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn the_controller_has_rights_in_the_namespace_of_rollouts_alone() {
        let objects = objects(&["--rollouts-namespace", "elsewhere"]);
        let role = find(&objects, "Role", "agl-controller").unwrap();
        assert_eq!(role["metadata"]["namespace"], "elsewhere");
        assert!(!objects.iter().any(|object| object["kind"].as_str().unwrap().starts_with("Cluster")));
    }

    #[test]
    fn gateways_on_postgres_have_no_volume() {
        let objects = objects(&["--replicas", "3", "--postgres-secret", "agl-db"]);
        assert!(find(&objects, "PersistentVolumeClaim", "agl-gateway").is_none());
        assert!(find(&objects, "PodDisruptionBudget", "agl-gateway").is_some());
    }

    #[test]
    fn a_server_key_in_the_run_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        std::fs::write(&path, "gateway.key = \"secret\"\n").unwrap();
        let line = Line::try_parse_from([std::ffi::OsStr::new("agl"), path.as_os_str()]).unwrap();
        let message = run_file_text(&line.args).unwrap_err().to_string();
        assert!(message.contains("gateway.key") && message.contains("run.toml"), "{message}");
    }

    #[test]
    fn names_that_kubernetes_would_refuse_are_refused() {
        for name in ["Agents", "-a", "a_b", ""] {
            assert!(Line::try_parse_from(["agl", &format!("--namespace={name}")]).is_err(), "{name}");
        }
    }
}
