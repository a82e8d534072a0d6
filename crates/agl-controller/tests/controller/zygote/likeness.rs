//! A warm agent cannot tell that it is one.

use serde_json::{Value, json};

use super::{interpreter, outcome, python, stage, warm_stage, write, zygote, zygote_of};
use crate::stage::{Stage, read, with};

/// Everything that an agent can easily see of itself, as JSON.
const DUMP: &str = r#"
import gc, json, os, signal, sys, threading
def stream(stream):
    kept = [stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.name, stream.seekable()]
    return kept + [type(stream.buffer).__name__, stream is getattr(sys, "__%s__" % stream.name.strip("<>"))]
def descriptors():
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            yield name, os.readlink("/proc/self/fd/" + name).split(":")[0]
        except OSError:
            pass
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "orig_argv": getattr(sys, "orig_argv", None), "path": sys.path, "flags": str(sys.flags),
    "executable": sys.executable, "prefix": sys.prefix, "environ": dict(os.environ), "cwd": os.getcwd(),
    "globals": sorted(set(globals()) - {"stream", "descriptors", "main", "sent"}), "is_main": main.__dict__ is globals(),
    "file": globals().get("__file__"), "name": __name__, "package": __package__, "loader": str(type(__loader__)),
    "spec": getattr(__spec__, "name", None), "cached": globals().get("__cached__"), "doc": __doc__,
    "stdin": sys.stdin.read(), "stdout": stream(sys.stdout), "stderr": stream(sys.stderr),
    "descriptors": list(descriptors()), "tasks": len(os.listdir("/proc/self/task")),
    "thread": [threading.current_thread().name, threading.current_thread() is threading.main_thread()],
    "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "umask": os.umask(0o22), "gc": gc.isenabled(),
    "leads_group": os.getpgrp() == os.getpid(), "session_is_supervisors": os.getsid(0) == os.getppid(),
    "excepthook": sys.excepthook is sys.__excepthook__, "nice": os.nice(0), "recursion": sys.getrecursionlimit(),
}, sort_keys=True, indent=1))
"#;

/// Runs the commands under a controller without a zygote, then under one that has one, and gives both outcomes of each,
/// with the rollouts' numbers made the same.
async fn cold_and_warm(
    mut stage: Stage,
    imports: &[&str],
    configs: &[Value],
) -> Vec<[(String, String, Option<i32>); 2]> {
    let mut both = [Vec::new(), Vec::new()];
    let settings = [json!({}), zygote(&stage, imports)];
    for (settings, outcomes) in settings.into_iter().zip(&mut both) {
        stage.start(settings);
        for config in configs {
            let id = format!("r{}", stage.gateway.rollouts());
            let (out, err, code) = outcome(&stage, config.clone()).await;
            let same =
                |text: String| text.replace(&format!("/{id}/"), "/r/").replace(&format!("agent-{id}-"), "agent-r-");
            outcomes.push((same(out), same(err), code));
        }
        stage.stop().await;
    }
    let [cold, warm] = both;
    cold.into_iter().zip(warm).map(|(cold, warm)| [cold, warm]).collect()
}

#[tokio::test]
async fn a_warm_agent_finds_itself_as_a_cold_one_does() {
    let stage = stage().await;
    let dir = stage.folder.path().join("agent");
    std::fs::create_dir_all(dir.join("package")).unwrap();
    std::os::unix::fs::symlink("agent", stage.folder.path().join("link")).unwrap();
    let script = write(dir.join("run.py"), DUMP);
    write(dir.join("package/__main__.py"), DUMP);
    write(dir.join("package/__init__.py"), "");
    let link = stage.folder.path().join("link/run.py");
    let process = |argv: Value, more: Value| json!({"process": with(json!({"argv": argv}), more)});
    let configs = [
        process(json!([interpreter(), script, "a", "-b", ""]), json!({})),
        process(json!([interpreter(), "-u", "./run.py"]), json!({"cwd": dir})),
        process(
            json!([interpreter(), "run.py"]),
            json!({"cwd": dir, "env": {"PYTHONPATH": "package::/nowhere", "TZ": "Asia/Tokyo"}}),
        ),
        process(json!([interpreter(), link]), json!({"env": {"PYTHONUNBUFFERED": "1"}})),
        process(json!([interpreter(), "-m", "package", "x"]), json!({"cwd": dir})),
        process(json!([interpreter(), "-c", DUMP, "x"]), json!({})),
    ];
    for (config, [cold, warm]) in configs.iter().zip(cold_and_warm(stage, &["marker"], &configs).await) {
        assert_eq!(cold.2, Some(0), "{}", cold.1);
        assert_eq!(cold, warm, "{config}");
    }
}

#[tokio::test]
async fn every_end_is_that_of_a_cold_start() {
    let stage = stage().await;
    let at = |name: &str| stage.folder.path().join(name);
    let deep = "def inner():\n    raise ValueError('deep')\ntry:\n    inner()\nexcept ValueError as error:\n    raise KeyError('x') from error\n";
    let mut configs = vec![
        json!({"process": {"argv": [interpreter(), write(at("deep.py"), deep)]}}),
        json!({"process": {"argv": [interpreter(), write(at("wrong.py"), "print('never')\nx = = 1\n")]}}),
        json!({"process": {"argv": [interpreter(), write(at("inner.py"), "exec(compile('1/0', '<string>', 'exec'))")]}}),
        json!({"process": {"argv": [interpreter(), "-m", "no_such_module"]}}),
        json!({"process": {"argv": [interpreter(), "-m", "json.tool", "--no-such-flag"]}}),
    ];
    for script in [
        "1/0",
        "exec(compile('1/0', '<string>', 'exec'))",
        "def fail():\n    1/0\nfail()",
        "x = = 1",
        "import sys; sys.exit('the message')",
        "import sys; sys.exit(7)",
        "import sys; sys.exit()",
        "raise SystemExit(300)",
        "raise KeyboardInterrupt",
        "import os; print('lost'); os._exit(3)",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.abort()",
        "print('no newline', end='')",
        "import atexit, sys; atexit.register(print, 'at exit'); print('first'); sys.exit(2)",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start(); print('main')",
        "import sys; sys.excepthook = lambda *all: print('hook', all[0].__name__, all[2].tb_lineno); 1/0",
        "import os, signal; signal.signal(signal.SIGTERM, lambda *_: print('told')); os.kill(os.getpid(), 15)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import subprocess; print(subprocess.run(['false']).returncode)",
        "import os; pid = os.fork() or os._exit(4); print(os.waitpid(pid, 0)[1])",
        "import multiprocessing as m; print(m.get_context('fork').Pool(2).map(abs, [-1, -2]))",
        "import warnings; warnings.warn('careful')",
        "import sys; sys.stdout.write('\\udc80')",
        "import os; os.close(1); print('into nothing')",
    ] {
        configs.push(json!({"process": {"argv": [interpreter(), "-c", script]}}));
    }
    for (config, [cold, warm]) in configs.iter().zip(cold_and_warm(stage, &["marker"], &configs).await) {
        assert_eq!(cold, warm, "{config}");
    }
}

#[tokio::test]
async fn an_exception_is_a_traceback_and_code_1_and_an_exit_with_words_says_them() {
    let stage = warm_stage().await;
    let (out, err, code) = outcome(&stage, python("print('before')\nraise ValueError('broken on purpose')")).await;
    assert_eq!((out.as_str(), code), ("before\n", Some(1)));
    assert!(
        err.starts_with("Traceback (most recent call last):\n") && err.ends_with("ValueError: broken on purpose\n")
    );
    assert!(!err.contains("zygote>"), "{err}");
    let (_, err, code) = outcome(&stage, python("sys.exit('the message')")).await;
    assert_eq!((err.as_str(), code), ("the message\n", Some(1)));
    assert!(zygote_of(&stage, "r0").is_some() && zygote_of(&stage, "r1").is_some());
}

#[tokio::test]
async fn an_original_agent_class_is_started_warm() {
    let stage = warm_stage().await;
    let folder = stage.folder.path().join("classes");
    std::fs::create_dir(&folder).unwrap();
    let source = "import os, marker\nclass Agent:\n    async def run(self):\n        print(os.environ['Q'], marker.PID != os.getpid())\n";
    write(folder.join("my_agent.py"), source);
    let map = json!({"Q": "input.question", "PYTHONPATH": folder});
    let (out, err, code) = outcome(&stage, json!({"local": {"agent_class": "my_agent:Agent", "env_map": map}})).await;
    assert_eq!((out.as_str(), code), ("2+2? True\n", Some(0)), "{err}");
}

#[tokio::test]
async fn nothing_of_one_attempt_is_seen_by_the_next() {
    let stage = warm_stage().await;
    let spoil = "import marker, signal\nmarker.state = os.environ['LEAK'] = sys.path[0] = 'spoilt'\n\
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)\nos.chdir('/')";
    let id = stage.gateway.create(with(
        python(spoil),
        json!({"process": {"argv": python(spoil)["process"]["argv"], "env": {"SECRET": "{{ key }}"}}}),
    ));
    stage.gateway.ended(&id).await;
    let look =
        "import marker\nprint(marker.state, 'LEAK' in os.environ, 'SECRET' in os.environ, os.environ['AGL_KEY'])";
    assert_eq!(outcome(&stage, python(look)).await.0, "as imported False False agent-r1-0\n");
    assert_eq!(zygote_of(&stage, "r0"), zygote_of(&stage, "r1"));
    assert!(zygote_of(&stage, "r1").is_some());
}

#[tokio::test]
async fn an_agents_key_is_in_no_command_line_and_not_on_disk() {
    let stage = warm_stage().await;
    let look = "import glob\nfor name in glob.glob('/proc/[0-9]*/cmdline'):\n    try:\n        lines = open(name).read()\n    \
        except OSError:\n        continue\n    if 'agent-r' + '0-0' in lines: print(lines)\n";
    assert_eq!(outcome(&stage, python(look)).await.0, "");
    let mut unseen = vec![stage.folder.path().to_owned()];
    while let Some(path) = unseen.pop() {
        match std::fs::read_dir(&path) {
            Ok(entries) => unseen.extend(entries.map(|entry| entry.unwrap().path())),
            Err(_) => assert!(!String::from_utf8_lossy(&std::fs::read(&path).unwrap()).contains("agent-r0-0")),
        }
    }
}

#[tokio::test]
async fn random_numbers_differ_from_attempt_to_attempt() {
    let mut stage = stage().await;
    super::module(&stage, "numpy/random", "seeds = []\ndef seed():\n    import os\n    seeds.append(os.getpid())\n");
    super::module(&stage, "numpy/__init__", "from . import random\n");
    let settings = zygote(&stage, &["marker", "random", "numpy"]);
    stage.start(settings);
    let draw = python("import random, numpy\nprint(random.random(), numpy.random.seeds == [os.getpid()])");
    let (first, second) = (outcome(&stage, draw.clone()).await.0, outcome(&stage, draw).await.0);
    assert!(first.ends_with(" True\n") && second.ends_with(" True\n"), "{first}{second}");
    assert_ne!(first, second);
}

#[tokio::test]
async fn signal_handlers_and_output_of_imports_are_not_the_agents() {
    let mut stage = stage().await;
    let loud = "import atexit, os, signal\nsignal.signal(signal.SIGTERM, lambda *_: None)\nos.umask(0)\nos.chdir('/')\n\
        print('printed while importing')\natexit.register(lambda: print('at exit'))\n";
    super::module(&stage, "loud", loud);
    let settings = zygote(&stage, &["marker", "loud"]);
    stage.start(settings);
    let look = "import signal\nprint(int(signal.getsignal(15)), oct(os.umask(0)), os.path.basename(os.getcwd()))";
    let (out, _, _) = outcome(&stage, python(look)).await;
    assert!(out.starts_with("0 0o") && !out.starts_with("0 0o0"), "{out}");
    // As if the agent had imported it.
    assert!(out.ends_with(" work\nat exit\n"), "{out}");
    assert!(read(stage.attempt("r0", "0").stderr()).is_empty());
}
