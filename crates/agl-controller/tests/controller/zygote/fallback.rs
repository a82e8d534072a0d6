//! Where a warm start cannot be, there is a cold one, and no error.

use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};

use super::{code, interpreter, module, outcome, python, stage, warm_stage, write, zygote, zygote_of};
use crate::stage::{is_running, pid_in, sh, with};

/// Asserts that an agent runs as if there were no zygote.
async fn runs_cold(imports: &[&str], source: &str, more: Value) {
    let mut stage = stage().await;
    module(&stage, "questionable", source);
    let mut settings = zygote(&stage, imports);
    settings["zygote"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    stage.start(settings);
    assert_eq!(outcome(&stage, python("print('ran')")).await.0, "ran\n");
    assert_eq!(zygote_of(&stage, "r0"), None);
}

#[tokio::test]
async fn an_import_that_fails() {
    runs_cold(&["marker", "questionable"], "raise RuntimeError('broken on purpose')", json!({})).await;
}

#[tokio::test]
async fn an_import_that_is_not_there() {
    runs_cold(&["marker", "no_such_module"], "", json!({})).await;
}

#[tokio::test]
async fn an_import_that_ends_the_interpreter() {
    runs_cold(&["marker", "questionable"], "import os\nos._exit(3)", json!({})).await;
}

#[tokio::test]
async fn an_import_that_starts_a_thread() {
    let source = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n";
    runs_cold(&["marker", "questionable"], source, json!({})).await;
}

#[tokio::test]
async fn imports_that_take_too_long() {
    runs_cold(&["marker", "questionable"], "import time\ntime.sleep(600)\n", json!({"ready_seconds": 0.3})).await;
}

#[tokio::test]
async fn a_python_that_is_not_there() {
    runs_cold(&["marker"], "", json!({"python": "/no/such/python"})).await;
}

#[tokio::test]
async fn a_python_that_is_a_script_which_starts_it() {
    let mut stage = stage().await;
    let shim = write(stage.folder.path().join("python"), &format!("#!/bin/sh\nexec {} \"$@\"\n", interpreter()));
    std::fs::set_permissions(&shim, std::fs::Permissions::from_mode(0o755)).unwrap();
    let settings = with(zygote(&stage, &["marker"]), json!({"python": shim}));
    stage.start(settings);
    let (out, err, _) = outcome(&stage, json!({"process": {"argv": [shim, "-c", code("print('ran')")]}})).await;
    assert_eq!(out, "ran\n", "{err}");
    assert_eq!(zygote_of(&stage, "r0"), None);
}

#[tokio::test]
async fn commands_that_a_forked_interpreter_cannot_be() {
    let stage = warm_stage().await;
    let code = code("print('ran')");
    let hash_seed = json!({"PYTHONHASHSEED": "0"});
    for (argv, env) in [
        (json!([interpreter(), "-I", "-c", code]), json!({})),
        (json!([interpreter(), "-S", "-E", "-c", code]), json!({})),
        (json!([interpreter(), "-c", code]), hash_seed),
        (json!(["sh", "-c", "exec $0 -c \"$1\"", interpreter(), code]), json!({})),
    ] {
        let id = format!("r{}", stage.gateway.rollouts());
        let (out, err, _) = outcome(&stage, json!({"process": {"argv": argv, "env": env}})).await;
        assert_eq!(out, "ran\n", "{argv} {err}");
        assert_eq!(zygote_of(&stage, &id), None, "{argv}");
    }
    assert_eq!(outcome(&stage, python("print('ran')")).await.0, "ran\n");
    assert!(zygote_of(&stage, "r4").is_some());
}

#[tokio::test]
async fn a_script_or_folder_that_is_not_there_fails_with_the_message_that_it_always_had() {
    let stage = warm_stage().await;
    let (_, err, code) = outcome(&stage, json!({"process": {"argv": [interpreter(), "missing.py"]}})).await;
    assert!(err.contains("can't open file") && err.contains("missing.py"), "{err}");
    assert_eq!(code, Some(2));
    let id = stage.gateway.create(json!({"process": {"argv": [interpreter(), "-c", ""], "cwd": "/no/such/folder"}}));
    let message = stage.gateway.ended(&id).await.status.error_message.unwrap();
    assert!(message.contains("/no/such/folder does not exist"), "{message}");
}

#[tokio::test]
async fn a_zygote_that_dies_while_an_attempt_starts_costs_nothing() {
    let mut stage = stage().await;
    let settings = with(zygote(&stage, &["marker"]), json!({"max_concurrent": 8}));
    stage.start(settings);
    let first = stage.gateway.create(python("pass"));
    stage.gateway.ended(&first).await;
    let mut zygote = zygote_of(&stage, &first).unwrap();
    for _ in 0..5 {
        let ids: Vec<String> = (0..8).map(|_| stage.gateway.create(python("print('ran')"))).collect();
        tokio::time::sleep(std::time::Duration::from_millis(15)).await;
        if is_running(zygote) {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(zygote), nix::sys::signal::Signal::SIGKILL);
        }
        for id in &ids {
            stage.gateway.ended(id).await;
            assert_eq!(crate::stage::read(stage.attempt(id, "0").stdout()), "ran\n");
            assert_eq!(stage.gateway.attempts(id).len(), 1, "{id} cost an attempt");
            zygote = zygote_of(&stage, id).unwrap_or(zygote);
        }
    }
}

#[tokio::test]
async fn other_programs_start_as_they_always_did() {
    let stage = warm_stage().await;
    let id = stage.gateway.create(sh("echo $$ > pid"));
    stage.gateway.ended(&id).await;
    pid_in(&stage.attempt(&id, "0").work().join("pid")).await;
}
