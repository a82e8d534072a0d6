//! What agents and evaluators are started with.

use super::*;
use agl_core::rollout::RolloutCreate;
use serde_json::json;

fn rollout(config: Value) -> Rollout {
    let create: RolloutCreate = serde_json::from_value(json!({
        "input": {"question": "2+2?", "parts": [{"a": 1, "b": "ü"}], "n": 3}, "is_train": false,
        "config": config, "metadata": {"group": "g1"},
    }))
    .unwrap();
    Rollout::new(create, "r 1".to_owned(), 0.0)
}

fn spec_with(rollout: &Rollout, config: &ControllerConfig) -> Result<Spec, LaunchError> {
    Launch {
        rollout,
        attempt_id: "2",
        key: "agent-key",
        reward_key: "reward-key",
        agent_url: "http://gateway:8080",
        dir: &AttemptDir::new("/work/r/2".into()),
        controller_cwd: "/srv".into(),
    }
    .spec(config)
}

fn spec(config: Value) -> Result<Spec, LaunchError> {
    spec_with(&rollout(config), &ControllerConfig::default())
}

#[test]
fn an_agent_gets_the_urls_and_key_of_its_own_attempt() {
    let spec = spec(json!({"process": {"argv": ["agent"]}, "timeout_seconds": 7})).unwrap();
    let base = "http://gateway:8080/proxy/rollout/r%201/attempt/2/mode/val/openai/v1";
    let expected = BTreeMap::from(
        [
            ("AGL_OPENAI_BASE_URL", base),
            ("AGL_EVENT_URL", "http://gateway:8080/api/rollouts/r%201/attempt/2/events"),
            ("AGL_KEY", "agent-key"),
            ("AGL_INPUT", "/work/r/2/input.json"),
            ("OPENAI_BASE_URL", base),
            ("OPENAI_API_BASE", base),
            ("OPENAI_API_KEY", "agent-key"),
            ("ANTHROPIC_BASE_URL", "http://gateway:8080/proxy/rollout/r%201/attempt/2/mode/val/anthropic"),
            ("ANTHROPIC_API_KEY", "agent-key"),
            ("GOOGLE_GEMINI_BASE_URL", "http://gateway:8080/proxy/rollout/r%201/attempt/2/mode/val/gemini"),
            ("GEMINI_API_KEY", "agent-key"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned())),
    );
    assert_eq!(spec.agent.env, expected);
    assert_eq!(spec.agent.cwd, PathBuf::from("/work/r/2/work"));
    assert_eq!(spec.agent.timeout_seconds, 7);
    assert_eq!(spec.evaluator, None);
}

#[test]
fn the_names_that_sdks_read_can_be_switched_off() {
    let config = ControllerConfig { sdk_environment: false, ..ControllerConfig::default() };
    let spec = spec_with(&rollout(json!({"process": {"argv": ["agent"]}})), &config).unwrap();
    assert!(spec.agent.env.keys().all(|name| name.starts_with("AGL_")));
}

#[test]
fn argv_env_and_cwd_are_templates() {
    let spec = spec(json!({"process": {
        "argv": ["agent", "--task={{ input.question }}", "{{ input | tojson }}", "{{ 'val' if not is_train }}", "plain"],
        "env": {"GROUP": "{{ metadata.group }}/{{ attempt_id }}", "OTHER_KEY": "{{ key }}", "URL": "{{ openai_base_url }}", "CLAUDE": "{{ anthropic_base_url }}"},
        "cwd": "/data/{{ input.parts[0].b.upper() }}",
    }}))
    .unwrap();
    assert_eq!(spec.agent.argv[1], "--task=2+2?");
    assert_eq!(serde_json::from_str::<Value>(&spec.agent.argv[2]).unwrap()["n"], 3);
    assert_eq!(spec.agent.argv[3..], ["val", "plain"]);
    assert_eq!(spec.agent.env["GROUP"], "g1/2");
    assert_eq!(spec.agent.env["OTHER_KEY"], "agent-key");
    assert_eq!(spec.agent.env["URL"], spec.agent.env["AGL_OPENAI_BASE_URL"]);
    assert_eq!(spec.agent.env["CLAUDE"], spec.agent.env["ANTHROPIC_BASE_URL"]);
    assert_eq!(spec.agent.cwd, PathBuf::from("/data/Ü"));
}

#[test]
fn a_missing_variable_is_named_together_with_its_template() {
    let message = spec(json!({"process": {"argv": ["agent", "{{ input.qestion }}"]}})).unwrap_err().to_string();
    assert!(message.contains("config.process.argv[1]") && message.contains("no input.qestion"), "{message}");
    // The key does not go into a command line.
    let message = spec(json!({"process": {"argv": ["agent", "--key={{ key }}"]}})).unwrap_err().to_string();
    assert!(message.contains("there is no key"), "{message}");
    let message = spec(json!({"process": {"argv": ["a"], "env": {"X": "{% if %}"}}})).unwrap_err().to_string();
    assert!(message.contains("config.process.env.X"), "{message}");
}

#[test]
fn the_evaluator_gets_the_reward_key_and_nothing_of_the_agents() {
    let spec = spec(json!({"process": {"argv": ["agent"]},
        "evaluator": {"argv": ["judge", "{{ input.n }}"], "timeout_seconds": 9}}))
    .unwrap();
    let evaluator = spec.evaluator.unwrap();
    assert_eq!(evaluator.argv, ["judge", "3"]);
    assert_eq!(evaluator.timeout_seconds, 9);
    assert_eq!(evaluator.env["AGL_KEY"], "reward-key");
    assert_eq!(evaluator.env["AGL_INPUT"], "/work/r/2/evaluator.input.json");
    assert_eq!(evaluator.env["AGL_AGENT_STDOUT"], "/work/r/2/stdout.log");
    assert_eq!(evaluator.env["AGL_WORKDIR"], "/work/r/2/work");
    assert!(!evaluator.env.values().any(|value| value.contains("agent-key") || value.contains("/proxy/")));
    assert!(!spec.agent.env.values().any(|value| value.contains("reward-key")));
}

#[test]
fn a_rollout_without_an_evaluator_gets_the_controllers() {
    let evaluator = serde_json::from_value(json!({"argv": ["judge"]})).unwrap();
    let config = ControllerConfig { evaluator: Some(evaluator), ..ControllerConfig::default() };
    let spec = spec_with(&rollout(json!({"process": {"argv": ["agent"]}})), &config).unwrap();
    assert_eq!(spec.evaluator.unwrap().argv, ["judge"]);
}

#[test]
fn env_map_gives_what_the_original_gives() {
    let map = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
        pairs.iter().map(|(name, path)| ((*name).to_owned(), (*path).to_owned())).collect()
    };
    let input = json!({"text": "ü", "list": [1, {"a": null, "b": true}], "n": 1.5});
    let paths = map(&[
        ("A", "input"),
        ("B", "input.text"),
        ("C", "input.list.1"),
        ("D", "literal"),
        ("E", "input.n"),
        ("F", "inputs"),
    ]);
    let env = env_from_map(&input, &paths).unwrap();
    assert_eq!(env["A"], r#"{"text": "ü", "list": [1, {"a": null, "b": true}], "n": 1.5}"#);
    assert_eq!(env["B"], "ü");
    assert_eq!(env["C"], r#"{"a": null, "b": true}"#);
    assert_eq!((env["D"].as_str(), env["E"].as_str(), env["F"].as_str()), ("literal", "1.5", "inputs"));
    for path in ["input.nope", "input.list.2", "input.list.x", "input.text.0", "input."] {
        let error = env_from_map(&input, &map(&[("X", path)])).unwrap_err();
        assert_eq!(error.to_string(), format!("local.env_map path not found: {path}"));
    }
}

#[test]
fn a_local_class_runs_where_the_controller_runs_and_its_env_map_goes_first() {
    let config =
        json!({"local": {"agent_class": "pkg.mod:Agent", "env_map": {"AGL_KEY": "mine", "Q": "input.question"}}});
    let spec = spec(config).unwrap();
    assert_eq!(spec.agent.argv[0], "python3");
    assert_eq!(spec.agent.argv.last().unwrap(), "pkg.mod:Agent");
    assert_eq!(spec.agent.cwd, PathBuf::from("/srv"));
    assert_eq!((spec.agent.env["AGL_KEY"].as_str(), spec.agent.env["Q"].as_str()), ("mine", "2+2?"));
}

#[test]
fn a_config_with_nothing_or_two_things_to_run_says_what_to_set() {
    assert!(spec(json!({})).unwrap_err().to_string().contains("config.process.argv"));
    assert_eq!(spec(json!({"local": {}})).unwrap_err(), LaunchError::NoAgentClass);
    assert_eq!(
        spec(json!({"process": {"argv": []}})).unwrap_err(),
        LaunchError::NoProgram { key: "config.process.argv" }
    );
    let both = json!({"process": {"argv": ["a"]}, "local": {"agent_class": "a:B"}});
    assert_eq!(spec(both).unwrap_err(), LaunchError::Ambiguous);
}

#[test]
fn a_container_is_read_as_it_is_written_and_an_unknown_key_in_it_is_named() {
    use agl_core::rollout::RolloutConfig;
    let read = |config: Value| serde_json::from_value::<RolloutConfig>(config);
    let error = read(json!({"container": {"image": "agent:1", "comand": []}})).unwrap_err().to_string();
    assert!(error.contains("comand"), "{error}");
    assert!(read(json!({"container": {"argv": ["agent"]}})).unwrap_err().to_string().contains("image"));
    let config =
        read(json!({"container": {"image": "agent:1", "mounts": [{"source": "/a", "target": "/b"}]}})).unwrap();
    assert!(!config.container.as_ref().unwrap().mounts[0].writable);
    assert_eq!(read(serde_json::to_value(&config).unwrap()).unwrap(), config);
    let without = read(json!({})).unwrap();
    assert!(without.container.is_none() && !serde_json::to_string(&without).unwrap().contains("container"));
    assert!(read(json!({"container": null})).unwrap().container.is_none());
}
