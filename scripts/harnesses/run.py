"""Command-line harnesses, unmodified, through the gateway: `./x check harnesses [NAME…]`.

Each is installed into `target/harnesses`, gets the variables that the controller sets (and what its own configuration needs to
look there), and does a small task with a tool, against `agl-mock-llm`. Looked at is what the gateway captured: every call with
token ids, and the turns merged into one row.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "target" / "harnesses"
TASK = "Run the shell command: echo $((6 * 7)). Then tell me what it printed."
RESULT = "It printed 42."
COMMAND = "echo $((6 * 7))"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; " + COMMAND
KEY = "server-key"


def npm(name, package):
    folder = HOME / name
    if not (folder / ".installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = ["npm", "install", "--prefix", folder, "--no-save", "--no-audit", "--no-fund", "--silent", package]
        subprocess.run(command, check=True)
        (folder / ".installed").write_text(package)
    return folder / "node_modules" / ".bin"


def pip(name, *packages):
    folder = HOME / name
    if not (folder / ".installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        python = os.environ.get("AGL_PYTHON312", "python3")
        if subprocess.run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 12))"]).returncode != 0:
            sys.exit(f"{name} needs Python 3.12, which {python} is not: name one in AGL_PYTHON312")
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", *packages], check=True)
        (folder / ".installed").write_text(" ".join(packages))
    return folder / "bin"


def claude_code(stage, home):
    command = [npm("claude-code", "@anthropic-ai/claude-code@2.1.197") / "claude", "-p", TASK, "--model", "policy", "--allowedTools", "Bash"]
    return command, {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}


def codex(stage, home):
    folder = home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        'model = "policy"\nmodel_provider = "agl"\napproval_policy = "never"\nsandbox_mode = "danger-full-access"\n'
        f'[model_providers.agl]\nname = "agl"\nbase_url = "{stage.base}/openai/v1"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
    )
    command = [npm("codex", "@openai/codex@0.171.0") / "codex", "exec", "--skip-git-repo-check", TASK]
    return command, {}


def opencode(stage, home):
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{stage.base}/openai/v1", "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {"policy": {"name": "policy"}},
    }
    settings = {"provider": {"agl": provider}, "permission": "allow", "autoupdate": False}
    (home / "opencode.json").write_text(json.dumps(settings))
    command = [npm("opencode", "opencode-ai@1.18.33") / "opencode", "run", "-m", "agl/policy", TASK]
    return command, {"OPENCODE_CONFIG": str(home / "opencode.json")}


def qwen_code(stage, home):
    command = [npm("qwen-code", "@qwen-code/qwen-code@0.15.10") / "qwen", "--yolo", "-p", TASK]
    return command, {"OPENAI_MODEL": "policy"}


def mini_swe_agent(stage, home, *options):
    command = [pip("mini-swe-agent", "mini-swe-agent==2.4.6") / "mini", "--yolo", "--exit-immediately", "--model", "openai/policy", "--task", TASK, "--output", home / "trajectory.json", *options]
    variables = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return command, variables


def mini_swe_agent_text(stage, home):
    return mini_swe_agent(stage, home, "--config", "mini_textbased.yaml", "--model-class", "litellm_textbased")


def openhands_sdk(stage, home):
    packages = ["openhands-sdk==1.58.2", "openhands-tools==1.58.2"]
    command = [pip("openhands-sdk", *packages) / "python", ROOT / "scripts" / "harnesses" / "openhands_agent.py", TASK]
    return command, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def hermes_agent(stage, home):
    folder = home / ".hermes"
    folder.mkdir()
    settings = f"model:\n  default: policy\n  provider: custom\n  base_url: {stage.base}/openai/v1\n  api_key: {stage.key}\n"
    (folder / "config.yaml").write_text(settings)
    command = [pip("hermes-agent", "hermes-agent==0.19.0") / "hermes", "chat", "--quiet", "--yolo", "-t", "terminal", "-q", TASK]
    return command, {"HERMES_HOME": str(folder)}


def tool(name, **arguments):
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


def block(command):
    """A command as mini-SWE-agent's text mode reads it."""
    return f"THOUGHT: The shell can do that.\n\n```mswea_bash_command\n{command}\n```"


# Each with the calls of its own tools that the model is scripted to make.
HARNESSES = {
    "claude-code": (claude_code, [tool("Bash", command=COMMAND, description="multiplies")]),
    "codex": (codex, [tool("exec_command", cmd=COMMAND)]),
    "opencode": (opencode, [tool("bash", command=COMMAND, description="multiplies")]),
    # Its conversations begin with a word of the assistant's: the first answer is never asked for.
    "qwen-code": (qwen_code, ["", tool("run_shell_command", command=COMMAND, is_background=False)]),
    "hermes-agent": (hermes_agent, [tool("terminal", command=COMMAND)]),
    "openhands-sdk": (openhands_sdk, [tool("terminal", command=COMMAND)]),
    "mini-swe-agent": (mini_swe_agent, [tool("bash", command=COMMAND), tool("bash", command=SUBMIT)]),
    "mini-swe-agent-text": (mini_swe_agent_text, [block(COMMAND), block(SUBMIT)]),
}


class Stage:
    """A gateway with a scripted model behind it and one rollout on it."""

    def __init__(self, folder, answers):
        script = {"answers": [*answers, RESULT], "select": "turn", "when_done": "repeat_last", "only_offered_tools": True}
        (folder / "script.json").write_text(json.dumps(script))
        self.processes = []
        release = ROOT / "target" / os.environ.get("AGL_PROFILE", "release")
        mock = self.start([release / "agl-mock-llm", "--port", "0", "--script", folder / "script.json"], stdout=subprocess.PIPE)
        endpoint = mock.stdout.readline().strip()
        log = open(folder / "gateway.log", "w")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.start([release / "agl", "serve", "--listen", f"127.0.0.1:{port}", "--store", "memory", "--key", KEY], stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while not self.is_up():
            assert time.monotonic() < deadline, (folder / "gateway.log").read_text()
            time.sleep(0.05)
        self.request("POST", "/api/models", [{"model": "policy", "endpoint": endpoint}])
        self.request("POST", "/api/rollouts", [{"rollout_id": "r", "input": {}}])
        self.key = self.request("POST", "/api/rollouts/r/attempts", {})["key"]
        self.base = f"{self.url}/proxy/rollout/r/attempt/0/mode/train"

    def start(self, command, **options):
        process = subprocess.Popen([str(word) for word in command], text=True, **options)
        self.processes.append(process)
        return process

    def is_up(self):
        try:
            return urllib.request.urlopen(self.url + "/readyz", timeout=1).status == 200
        except OSError:
            return False

    def request(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Authorization": f"Bearer {KEY}"}, method=method)
        return json.load(urllib.request.urlopen(request))

    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check(name):
    """What came of a harness: a line, and whether it is as it should be."""
    folder = Path(tempfile.mkdtemp(prefix=f"agl-{name}-"))
    home = folder / "home"
    (home / "work").mkdir(parents=True)
    prepare, answers = HARNESSES[name]
    stage = Stage(folder, answers)
    try:
        command, variables = prepare(stage, home)
        environment = {key: value for key, value in os.environ.items() if not re.match("(?i).*proxy|AGL_|OPENAI_|ANTHROPIC_", key)}
        environment |= {
            "HOME": str(home),
            "OPENAI_BASE_URL": f"{stage.base}/openai/v1",
            "OPENAI_API_BASE": f"{stage.base}/openai/v1",
            "ANTHROPIC_BASE_URL": f"{stage.base}/anthropic",
            "GOOGLE_GEMINI_BASE_URL": f"{stage.base}/gemini",
            **dict.fromkeys(["OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"], stage.key),
            **variables,
        }
        started = time.monotonic()
        run = subprocess.run(
            [str(word) for word in command], cwd=home / "work", env=environment, text=True, timeout=180,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        seconds = time.monotonic() - started
        events = [event["data"] for event in stage.request("GET", "/api/rollouts/r/events")]
        sequences = stage.request("GET", "/api/rollouts/r/sequences")
    finally:
        stage.stop()
    (folder / "output.txt").write_text(run.stdout)
    (folder / "events.json").write_text(json.dumps(events, indent=1))
    counts = sequences["counts"]
    dialects = sorted({f"{event['dialect']}{', streamed' if event['stream'] else ''}" for event in events})
    left_out = sorted({field for event in events for field in event.get("left_out", [])})
    problems = []
    if run.returncode != 0 or "42" not in run.stdout:
        problems.append(f"exit code {run.returncode}")
    if counts["calls"] < 2 or counts["live"] != counts["calls"]:
        problems.append("not every call was captured with ids")
    if counts["merges"] < 1 or counts["breaks"] > 0:
        problems.append("the turns do not merge")
    print(
        f"{name:15} {'ok' if not problems else 'FAILS':6} {'; '.join(dialects)}: {counts['calls']} calls, {counts['live']} with ids, "
        f"{counts['merges']} merges, {counts['breaks']} breaks, {len(sequences['sequences'])} rows, {seconds:.0f} s"
    )
    if left_out:
        print(f"{'':15} not carried: {', '.join(left_out)}")
    for problem in problems:
        print(f"{'':15} {problem}; see {folder}")
    if not problems:
        shutil.rmtree(folder)
    return not problems


def main():
    names = sys.argv[1:] or list(HARNESSES)
    unknown = [name for name in names if name not in HARNESSES]
    if unknown:
        sys.exit(f"no such harness: {', '.join(unknown)}; there are {', '.join(HARNESSES)}")
    # All of them, also after one has failed.
    sys.exit(not all([check(name) for name in names]))


if __name__ == "__main__":
    main()
