"""The gateway against its own description: `./x check schemathesis [REQUESTS PER OPERATION]`.

A gateway with a scripted model behind it and one rollout on it; schemathesis reads /openapi.json and makes up requests, right and
wrong ones, with the server key. No answer may be a 5xx or a status, a header or a body that the description does not have, and
nothing may panic.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEY = "server-key"
# The watch never ends. A pause and a policy without servers keep every other call waiting: they have a run of their own.
DISTURBING = ["POST /proxy/pause", "POST /proxy/resume", "DELETE /api/models"]
# What a server's URL may be is more than a schema can say.
URLS = "POST /api/models"
SETTINGS = ["hold.max_seconds=0.2", "no_model_wait_seconds=0.1", "upstream.max_attempts=1", "upstream.timeout_seconds=10"]
# A harness's request is passed on or translated as far as it goes, and what has no place is left out: there is no wrong one to refuse.
CHECKS = ["positive_data_acceptance", "negative_data_rejection"]


def start(command, **options):
    return subprocess.Popen([str(word) for word in command], text=True, **options)


def request(url, method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url + path, data, {"Authorization": f"Bearer {KEY}"}, method=method)
    return json.load(urllib.request.urlopen(asked, timeout=10))


def wait_for(url):
    deadline = time.monotonic() + 20
    while True:
        try:
            return urllib.request.urlopen(url + "/readyz", timeout=1)
        except OSError:
            assert time.monotonic() < deadline, "the gateway does not come up"
            time.sleep(0.05)


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def schemathesis(url, examples, *options):
    command = [
        Path(sys.executable).parent / "st", "run", url + "/openapi.json", "--header", f"Authorization: Bearer {KEY}",
        "--max-examples", examples, "--request-timeout", 30, "--suppress-health-check", "all", "--continue-on-failure",
        "--warnings", "off", "--exclude-path", "/api/rollouts/watch", *options,
    ]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(Path(__file__).parent)}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run([str(word) for word in command], env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return run.returncode == 0, run.stdout, time.monotonic() - began


def main():
    examples = sys.argv[1] if len(sys.argv) > 1 else "100"
    release = ROOT / "target" / os.environ.get("AGL_PROFILE", "release")
    folder = Path(tempfile.mkdtemp(prefix="agl-schemathesis-"))
    mock = start([release / "agl-mock-llm", "--port", "0", "--model", "policy"], stdout=subprocess.PIPE)
    endpoint = mock.stdout.readline().strip()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    serve = [release / "agl", "serve", "--listen", f"127.0.0.1:{port}", "--store", f"sqlite:{folder}/agl.db", "--key", KEY]
    settings = [word for setting in SETTINGS for word in ["--set", f"gateway.{setting}"]]
    log = folder / "gateway.log"
    gateway = start([*serve, *settings], stdout=log.open("w"), stderr=subprocess.STDOUT)
    try:
        wait_for(url)
        request(url, "POST", "/api/models", [{"model": "policy", "endpoint": endpoint}])
        request(url, "POST", "/api/rollouts", [{"rollout_id": "r", "input": {}}])
        request(url, "POST", "/api/rollouts/r/attempts", {})
        others = [word for name in [*DISTURBING, URLS] for word in ["--exclude-name", name]]
        disturbing = [word for name in DISTURBING for word in ["--include-name", name]]
        harnesses = "^/proxy/rollout/"
        runs = [
            schemathesis(url, examples, "--exclude-path-regex", harnesses, *others),
            schemathesis(url, examples, "--include-path-regex", harnesses, "--exclude-checks", ",".join(CHECKS)),
            schemathesis(url, examples, *disturbing),
            schemathesis(url, examples, "--include-name", URLS, "--exclude-checks", ",".join(CHECKS)),
        ]
        lives = gateway.poll() is None and wait_for(url).status == 200
    finally:
        gateway.kill()
        mock.kill()
    panicked = "panicked" in log.read_text()
    for (name, (fine, output, seconds)) in zip(["management", "harnesses", "pause and removal", "registration"], runs):
        cases = re.search(r"([\d,]+) (?:generated|test cases)", output)
        if not fine:
            print(output)
        print(f"{name:17} {'ok' if fine else 'FAILS':6} {cases.group(1) if cases else '?'} cases, {seconds:.0f} s")
    if panicked or not lives:
        print(f"the gateway {'panicked' if panicked else 'ended'}; see {log}")
    sys.exit(not (all(fine for fine, *_ in runs) and lives and not panicked))


if __name__ == "__main__":
    main()
