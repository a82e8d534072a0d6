//! A rollout's template as a Job, and the Secret with its key. Nothing here touches the world.

use std::collections::BTreeMap;

use agl_core::rollout::Rollout;
use minijinja::{Environment, UndefinedBehavior};
use serde_json::{Map, Value, json};

use crate::address::AgentAddress;
use crate::launch::{LaunchError, render_with};
use crate::runner::Order;
use crate::runner::names::{ATTEMPT_ID, INSTANCE, LONGEST, MANAGED_BY, ROLE, ROLLOUT_ID, job_name, short_hash};

use super::KubernetesConfig;

/// How long a pod may take to end, in seconds.
const LONGEST_GRACE: u64 = 50;
/// The key's place in the Secret.
const SECRET_KEY: &str = "key";

/// When the rollout was created: an id may be used again once its rollout was deleted.
pub(super) const CREATED_AT: &str = "agl/created-at";

/// An id as a label's value.
fn label_value(id: &str) -> String {
    let edge = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let inside = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let bytes = id.as_bytes();
    let fits = id.len() <= LONGEST && edge(bytes.first().copied()) && edge(bytes.last().copied());
    if fits && bytes.iter().copied().all(inside) { id.to_owned() } else { format!("sha256-{}", short_hash(id)) }
}

/// A rollout's [`CREATED_AT`].
pub(super) fn created_at(rollout: &Rollout) -> String {
    format!("{:.6}", rollout.status.created_at)
}

/// The labels by which a controller finds its own.
pub(super) fn selector(config: &KubernetesConfig) -> String {
    format!("{MANAGED_BY}=agl,{INSTANCE}={}", config.instance)
}

/// The Job of an attempt: the template's, with what we decide over what it says.
///
/// # Errors
/// [`LaunchError`], written for whoever wrote the template.
pub fn job(order: &Order, config: &KubernetesConfig, sdk_environment: bool) -> Result<Value, LaunchError> {
    let (rollout, attempt_id) = (&order.rollout, &order.attempt_id);
    let name = job_name(&rollout.rollout_id, attempt_id);
    let template = rollout.config.k8s.as_ref().and_then(|k8s| k8s.job_template.as_deref());
    let template = template.filter(|template| !template.is_empty()).ok_or(LaunchError::NoJobTemplate)?;
    let mut job = one_job(&render(order, &name, template)?)?;
    let labels = labels(order, config);
    let annotations = json!({ROLLOUT_ID: rollout.rollout_id, ATTEMPT_ID: attempt_id, CREATED_AT: created_at(rollout)});

    set(&mut job, &["apiVersion"], json!("batch/v1"))?;
    set(&mut job, &["metadata", "name"], json!(name))?;
    set(&mut job, &["metadata", "namespace"], json!(config.namespace))?;
    remove(&mut job, &["metadata", "generateName"]);
    merge(&mut job, &["metadata", "labels"], &labels)?;
    merge(&mut job, &["metadata", "annotations"], &annotations)?;
    // One pod, once: further tries are further attempts, with keys and events of their own.
    set(&mut job, &["spec", "backoffLimit"], json!(0))?;
    set(&mut job, &["spec", "completions"], json!(1))?;
    set(&mut job, &["spec", "parallelism"], json!(1))?;
    for key in ["backoffLimitPerIndex", "podFailurePolicy", "suspend", "completionMode", "successPolicy"] {
        remove(&mut job, &["spec", key]);
    }
    set(&mut job, &["spec", "ttlSecondsAfterFinished"], json!(config.ttl_seconds_after_finished))?;
    // The agent's time is its pod's, which the kubelet counts from when it has it. The Job's is a net below it: it counts the
    // queue for a node too, which is not the agent's fault.
    let start = config.start_timeout_seconds.ceil() as u64;
    for (path, seconds) in [
        (&["spec", "template", "spec", "activeDeadlineSeconds"][..], rollout.config.timeout_seconds),
        (&["spec", "activeDeadlineSeconds"], rollout.config.timeout_seconds.saturating_add(start)),
    ] {
        match rollout.config.timeout_seconds {
            0 => remove(&mut job, path),
            _ => set(&mut job, path, json!(seconds))?,
        }
    }
    merge(&mut job, &["spec", "template", "metadata", "labels"], &labels)?;
    merge(&mut job, &["spec", "template", "metadata", "labels"], &json!({ROLE: "rollout"}))?;
    merge(&mut job, &["spec", "template", "metadata", "annotations"], &annotations)?;
    set(&mut job, &["spec", "template", "spec", "restartPolicy"], json!("Never"))?;
    // An agent is no business of the API server's, unless its template says so.
    let pod = mapping(&mut job, &["spec", "template", "spec"])?;
    pod.entry("automountServiceAccountToken").or_insert(json!(false));
    // A pod that is being ended is waited for, though not for ever.
    if pod.get("terminationGracePeriodSeconds").and_then(Value::as_u64).is_some_and(|grace| grace > LONGEST_GRACE) {
        pod.insert("terminationGracePeriodSeconds".to_owned(), json!(LONGEST_GRACE));
    }
    let containers = job.pointer_mut("/spec/template/spec/containers").and_then(Value::as_array_mut);
    let containers = containers.filter(|containers| !containers.is_empty()).ok_or_else(|| {
        LaunchError::JobTemplate("spec.template.spec.containers is missing: there is nothing to run".to_owned())
    })?;
    let environment = environment(order, &name, sdk_environment);
    for container in containers {
        inject(container, &environment)?;
    }
    Ok(job)
}

/// The Secret that holds the attempt's key. It belongs to the Job and goes with it.
#[must_use]
pub fn secret(order: &Order, config: &KubernetesConfig, job_uid: &str) -> Value {
    let name = job_name(&order.rollout.rollout_id, &order.attempt_id);
    json!({
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "immutable": true,
        "metadata": {
            "name": name, "namespace": config.namespace, "labels": labels(order, config),
            "ownerReferences": [{
                "apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job_uid,
                "controller": true, "blockOwnerDeletion": false,
            }],
        },
        "stringData": {SECRET_KEY: order.key},
    })
}

fn labels(order: &Order, config: &KubernetesConfig) -> Value {
    json!({
        MANAGED_BY: "agl",
        INSTANCE: config.instance,
        ROLLOUT_ID: label_value(&order.rollout.rollout_id),
        ATTEMPT_ID: label_value(&order.attempt_id),
    })
}

/// What the agent's containers get; a key is a reference into the Secret.
fn environment(order: &Order, secret: &str, sdk_environment: bool) -> BTreeMap<String, Value> {
    let address = AgentAddress::of(order);
    let mut environment: BTreeMap<String, Value> = address
        .environment(sdk_environment)
        .into_iter()
        .map(|(name, value)| (name.clone(), json!({"name": name, "value": value})))
        .collect();
    for name in AgentAddress::key_names(sdk_environment) {
        let source = json!({"secretKeyRef": {"name": secret, "key": SECRET_KEY}});
        environment.insert((*name).to_owned(), json!({"name": name, "valueFrom": source}));
    }
    environment
}

/// Puts variables into a container, over those of the same name.
fn inject(container: &mut Value, environment: &BTreeMap<String, Value>) -> Result<(), LaunchError> {
    let wrong = || {
        LaunchError::JobTemplate(
            "a container of spec.template.spec.containers is no mapping, or its env no list".to_owned(),
        )
    };
    let container = container.as_object_mut().ok_or_else(wrong)?;
    let env = container.entry("env").or_insert_with(|| json!([]));
    if env.is_null() {
        *env = json!([]);
    }
    let env = env.as_array_mut().ok_or_else(wrong)?;
    env.retain(|entry| !entry["name"].as_str().is_some_and(|name| environment.contains_key(name)));
    // Before the template's own: these may refer to ours as $(NAME).
    env.splice(0..0, environment.values().cloned());
    Ok(())
}

fn render(order: &Order, name: &str, template: &str) -> Result<String, LaunchError> {
    let rollout = &order.rollout;
    let context = json!({
        "input": rollout.input, "job_name": name, "attempt": order.attempt_id, "attempt_id": order.attempt_id,
        "rollout_id": rollout.rollout_id, "is_train": rollout.is_train, "mode": rollout.mode(),
        "metadata": rollout.metadata,
    });
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_keep_trailing_newline(true);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("yaml_escape", yaml_escape);
    render_with(&environment, "config.k8s.job_template", template, &context)
}

/// Any value as a YAML string in double quotes, ASCII only: the same text as the original's `json.dumps(str(value))`.
fn yaml_escape(value: minijinja::Value) -> String {
    let mut quoted = String::from("\"");
    for character in value.to_string().chars() {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            ' '..='~' => quoted.push(character),
            _ => {
                let mut units = [0; 2];
                for unit in character.encode_utf16(&mut units) {
                    quoted.push_str(&format!("\\u{unit:04x}"));
                }
            }
        }
    }
    quoted.push('"');
    quoted
}

/// The one Job that a rendered template must hold.
fn one_job(text: &str) -> Result<Value, LaunchError> {
    let wrong = |problem: String| LaunchError::JobTemplate(problem);
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(text).map_err(|error| wrong(format!("what it renders is no YAML: {error}")))?;
    let mut documents: Vec<Value> = documents.into_iter().filter(|document| !document.is_null()).collect();
    let count = documents.len();
    let (Some(job), true) = (documents.pop(), count == 1) else {
        return Err(wrong(format!("it must render exactly one YAML document, and renders {count}")));
    };
    if job["kind"] != "Job" {
        return Err(wrong(format!("it must render a Kubernetes Job, and renders kind: {}", job["kind"])));
    }
    Ok(job)
}

/// The mapping at `path`, made where it is missing.
fn mapping<'a>(value: &'a mut Value, path: &[&str]) -> Result<&'a mut Map<String, Value>, LaunchError> {
    let mut at = value;
    for (depth, part) in path.iter().enumerate() {
        let wrong = || LaunchError::JobTemplate(format!("{} is no mapping", path[..depth].join(".")));
        at = at.as_object_mut().ok_or_else(wrong)?.entry(*part).or_insert(Value::Null);
        if at.is_null() {
            *at = json!({});
        }
    }
    at.as_object_mut().ok_or_else(|| LaunchError::JobTemplate(format!("{} is no mapping", path.join("."))))
}

fn set(value: &mut Value, path: &[&str], to: Value) -> Result<(), LaunchError> {
    if let Some((last, parents)) = path.split_last() {
        mapping(value, parents)?.insert((*last).to_owned(), to);
    }
    Ok(())
}

fn merge(value: &mut Value, path: &[&str], with: &Value) -> Result<(), LaunchError> {
    let into = mapping(value, path)?;
    for (name, value) in with.as_object().into_iter().flatten() {
        into.insert(name.clone(), value.clone());
    }
    Ok(())
}

fn remove(value: &mut Value, path: &[&str]) {
    if let Some((last, parents)) = path.split_last()
        && let Ok(parent) = mapping(value, parents)
    {
        parent.shift_remove(*last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_holds_what_fits_and_else_a_hash() {
        assert_eq!(label_value("r-1_a.b"), "r-1_a.b");
        for id in ["", "-a", "a/b", &"x".repeat(64)] {
            assert!(label_value(id).starts_with("sha256-"), "{id}");
        }
    }

    #[test]
    fn yaml_escape_gives_one_string_whatever_it_is_given() {
        let escaped = |text: &str| yaml_escape(minijinja::Value::from(text));
        assert_eq!(escaped("a\"b\\c\n: {x}"), r#""a\"b\\c\n: {x}""#);
        assert_eq!(escaped("é😀"), r#""\u00e9\ud83d\ude00""#);
        let text = "tab\t: - # 'quote' \u{7f} é 😀 {{ }}";
        let read: String = serde_saphyr::from_str(&escaped(text)).unwrap();
        assert_eq!(read, text);
    }
}
