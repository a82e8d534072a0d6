"""The gateway's speed, storage and steadiness: `./x bench gateway`, `./x bench storage`, `./x check soak`.

Everything runs on this machine, callers and inference server too, each in a process of its own; see `src/main.rs` for what they are.
Targets take turns, round by round, and the medians of the rounds are printed: on a shared machine single rounds mean little, and
the ratio of two neighbours more than either.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(os.environ.get("AGL_BENCH_DATA", ROOT / "target" / "bench-data"))
KEY = "server-key"
NGINX = """
worker_processes auto;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
daemon off;
worker_rlimit_nofile 4096;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  keepalive_requests 1000000000;
  client_max_body_size 64m;
  client_body_buffer_size 1m;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  proxy_buffers 32 16k;
  proxy_max_temp_file_size 0;
  upstream model {{ server 127.0.0.1:{upstream}; keepalive 64; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://model;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
    }}
  }}
}}
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port, method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


class Process:
    """A process that is stopped with the bench, and what it takes."""

    def __init__(self, command, port, log):
        self.port = port
        self.log = log
        with open(log, "w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                sys.exit(f"{command[0]} does not listen on port {port}; its log is {log}")
            time.sleep(0.05)

    def family(self):
        """The process and its children: nginx works in those."""
        pid = self.process.pid
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            return [pid, *map(int, children.read().split())]

    def resident(self):
        """Bytes."""
        pages = 0
        for pid in self.family():
            with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/statm") as statm:
                pages += int(statm.read().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Stage:
    """The inference server and whatever is put before it."""

    def __init__(self, options, shape, name):
        self.bench = options.bench
        self.python = options.python
        self.shape = shape
        self.folder = HERE / name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.processes = []
        port = free_port()
        self.upstream = self.start([self.bench, "upstream", "--listen", f"127.0.0.1:{port}", "--shape", shape], port, "upstream")
        self.summary = json.loads(subprocess.check_output([self.bench, "shape", shape]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, command, port, name):
        process = Process(list(map(str, command)), port, self.folder / f"{name}.log")
        self.processes.append(process)
        return process

    def nginx(self):
        folder = self.folder / "nginx"
        folder.mkdir()
        port = free_port()
        config = folder / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, upstream=self.upstream.port, port=port))
        return self.start(["nginx", "-p", folder, "-c", config], port, "nginx")

    def agl(self):
        port = free_port()
        self.database = self.folder / "agl.db"
        config = {"listen": f"127.0.0.1:{port}", "key": KEY, "store": f"sqlite:{self.database}"}
        process = self.start([self.bench, "serve", json.dumps(config)], port, "agl")
        self.register(port)
        return process

    def original(self):
        port = free_port()
        server = Path(self.python).parent / "agl-server"
        # Its configuration library writes a folder of its own into the folder that it is started in.
        settings = [f"hydra.run.dir={self.folder / 'hydra'}", "host=127.0.0.1", f"port={port}", f"key={KEY}", "default_proxy.model_name=policy"]
        process = self.start([server, *settings], port, "original")
        self.register(port)
        return process

    def register(self, port):
        ask(port, "POST", "/api/models", [{"model": "policy", "endpoint": f"http://127.0.0.1:{self.upstream.port}/v1"}])

    def load(self, process, before, **options):
        command = [self.bench, "load", "--address", f"127.0.0.1:{process.port}", "--before", before, "--shape", self.shape]
        command += ["--server-key", KEY]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            sys.exit(f"the callers of {before} failed: {done.stderr.strip()}")
        return json.loads(done.stdout)


def beside():
    """What else wants the machine's cores."""
    with open("/proc/loadavg") as loadavg:
        return loadavg.read().strip()


def megabytes(count):
    return f"{count / 1e6:,.0f} MB"


TARGETS = ["nginx", "agl", "original"]
KINDS = {"nginx": "proxy", "agl": "agl", "original": "original"}


def compare(options):
    shapes = {"small": (0.45, 35, True), "large": (0.18, 15, False)}
    failed = []
    for shape in options.shapes:
        of_nginx, of_original, is_open = shapes[shape]
        failed += compare_shape(options, shape, of_nginx, of_original, is_open)
    return failed


def compare_shape(options, shape, of_nginx, of_original, is_open):
    targets = [target for target in TARGETS if target != "original" or options.python]
    with Stage(options, shape, f"gateway-{shape}") as stage:
        summary = stage.summary
        print(f"\n{shape}: {json.dumps(summary)}", flush=True)
        servers = {target: getattr(stage, target)() for target in targets}
        turns = summary["turns"]
        # The first round finds out how many rollouts a round takes, and warms everything up.
        needed = {"nginx": 40_000, "agl": 20_000, "original": 400}
        if shape == "large":
            needed = {"nginx": 2_000, "agl": 1_000, "original": 60}

        def play(target, seconds, **more):
            while True:
                result = stage.load(
                    servers[target], KINDS[target], seconds=seconds, warm_up=0.5, rollouts=needed[target], **more
                )
                if not result["ran_out"]:
                    return result
                needed[target] *= 2

        resident = {target: [servers[target].resident()] for target in targets}
        rates = {target: [] for target in targets}
        for number in range(options.rounds + 1):
            for target in targets:
                before = beside()
                result = play(target, options.seconds if number else 1.5)
                needed[target] = int(result["rate"] * (options.seconds + 0.5) * 1.4 / turns) + 64
                if number == 0:
                    resident[target] = [servers[target].resident()]
                    calls = {target: 0 for target in targets}
                    continue
                calls[target] += result["calls"]
                rates[target].append(result["rate"])
                resident[target].append(servers[target].resident())
                print(
                    f"  round {number} {target:9} {result['rate']:9,.0f} calls/s  p50 {result['p50_ms']:.2f} ms"
                    f"  p99 {result['p99_ms']:.2f} ms  resident {megabytes(resident[target][-1])}  (load before: {before})",
                    flush=True,
                )
        failed = []

        def hold(is_so, what):
            print(f"  {'ok   ' if is_so else 'FAILS'} {what}", flush=True)
            if not is_so:
                failed.append(f"{shape}: {what}")

        for target in targets:
            found = rates[target]
            grown = (resident[target][-1] - resident[target][0]) / max(calls[target], 1)
            print(
                f"  {target:9} median {statistics.median(found):9,.0f} calls/s ({min(found):,.0f} – {max(found):,.0f}),"
                f" resident {megabytes(resident[target][0])} → {megabytes(resident[target][-1])}"
                f" over {calls[target]:,} calls: {grown:,.0f} bytes a call"
            )

        def ratio(other):
            return statistics.median(mine / theirs for mine, theirs in zip(rates["agl"], rates[other]))

        hold(ratio("nginx") >= of_nginx, f"{ratio('nginx'):.3f} of nginx's throughput (at least {of_nginx})")
        if "original" in targets:
            hold(ratio("original") >= of_original, f"{ratio('original'):.1f} times the original's (at least {of_original})")
        if is_open:
            rate = statistics.median(rates["agl"]) / 2
            differences = []
            for number in range(options.rounds):
                found = {}
                for target in ["nginx", "agl"]:
                    needed[target] = int(rate * (options.seconds + 0.5) * 1.4 / turns) + 64
                    found[target] = play(target, options.seconds, rate=rate)
                differences.append(found["agl"]["p99_ms"] - found["nginx"]["p99_ms"])
                print(
                    f"  open, {rate:,.0f} calls/s, round {number + 1}: "
                    + ", ".join(f"{name} p50 {one['p50_ms']:.2f} p99 {one['p99_ms']:.2f} ms" for name, one in found.items())
                    + f"  (load after: {beside()})",
                    flush=True,
                )
            added = statistics.median(differences)
            hold(added <= 2.0, f"{added:.2f} ms added to nginx's p99 at {rate:,.0f} calls/s (at most 2)")
        return failed


def storage(options):
    """200-turn rollouts that grow to 128k tokens: what is stored, and what stays in memory."""
    with Stage(options, "long", "storage") as stage:
        gateway = stage.agl()
        summary = stage.summary
        rollouts = options.rollouts
        tokens = summary["tokens"] * rollouts
        print(json.dumps(summary))
        time.sleep(1)
        before = gateway.resident()
        began = time.monotonic()
        result = stage.load(gateway, "agl", rollouts=rollouts, connections=rollouts)
        took = time.monotonic() - began
        time.sleep(1)
        after = gateway.resident()
        with sqlite3.connect(stage.database) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.close()
        stored = stage.database.stat().st_size
        whole = summary["all_bytes"] * rollouts
        print(f"  {rollouts} rollouts of {summary['turns']} turns at once, {result['calls']} calls in {took:.0f} s, {tokens:,} tokens")
        print(f"  each call stored whole: {whole / tokens:,.0f} bytes a token ({megabytes(whole)})")
        print(f"  resident {megabytes(before)} → {megabytes(after)}")
        tables(stage.database)
        failed = []
        for is_so, what in [
            (stored / tokens <= 12, f"{stored / tokens:.2f} bytes stored a token (at most 12)"),
            ((after - before) / tokens <= 32, f"{(after - before) / tokens:.1f} bytes resident a token (at most 32)"),
        ]:
            print(f"  {'ok   ' if is_so else 'FAILS'} {what}")
            if not is_so:
                failed.append(what)
        return failed


def tables(path):
    """Where the bytes of a database are, if this SQLite can say so."""
    with contextlib.suppress(sqlite3.OperationalError), sqlite3.connect(path) as database:
        rows = database.execute("SELECT name, sum(pgsize) FROM dbstat GROUP BY name ORDER BY 2 DESC LIMIT 6").fetchall()
        print("  " + ", ".join(f"{name} {megabytes(size)}" for name, size in rows))


def soak(options):
    """Many rollouts made, played and deleted: memory, descriptors and tasks must not grow."""
    with Stage(options, "small", "soak") as stage:
        gateway = stage.agl()
        log = (stage.folder / "callers.log").open("w")
        seconds = options.soak_seconds
        command = [stage.bench, "load", "--address", f"127.0.0.1:{gateway.port}", "--before", "agl", "--shape", "small"]
        command += ["--server-key", KEY, "--churn", "--seconds", str(seconds)]
        callers = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        began = time.monotonic()
        samples = []
        try:
            while callers.poll() is None:
                time.sleep(5)
                told = metrics(gateway.port)
                calls = sum(value for name, value in told.items() if name.startswith("agl_gateway_calls_total"))
                disk = sum(file.stat().st_size for file in stage.folder.glob("agl.db*"))
                at = time.monotonic() - began
                if callers.poll() is None:
                    samples.append((at, calls, gateway.resident(), gateway.descriptors(), told["agl_gateway_tasks"], disk))
                if len(samples) % 12 == 0:
                    at, calls, resident, descriptors, tasks, disk = samples[-1]
                    print(
                        f"  {at:5.0f} s  {calls:10,.0f} calls  resident {resident / 1e6:.1f} MB  descriptors {descriptors}"
                        f"  tasks {tasks:.0f}  disk {megabytes(disk)}  (load: {beside()})",
                        flush=True,
                    )
        finally:
            callers.kill()
        if callers.wait() != 0:
            sys.exit(f"the callers failed: {(stage.folder / 'callers.log').read_text()}")
        return judge(samples, options.soak_calls)


def judge(samples, wanted):
    last = samples[-1][0]
    window = [sample for sample in samples if sample[0] >= last - 300]
    thirds = len(window) // 3

    # A sample may hold a few answers on their way: parts of the window are compared, not two moments.
    def level(part, field):
        return statistics.median(sample[field] for sample in part)

    # Descriptors and tasks come and go with calls and with connections to the server. A leak lifts the least of them, in the end above all
    # that there was before.
    def extent(part, field):
        return min(sample[field] for sample in part), max(sample[field] for sample in part)

    first, end = window[:thirds], window[-thirds:]
    grown = level(end, 2) / level(first, 2) - 1
    calls = samples[-1][1]
    checks = [
        (calls >= wanted, f"{calls:,.0f} calls (at least {wanted:,})"),
        (last >= 300, f"{last:.0f} seconds (at least 300)"),
        (grown <= 0.02, f"resident memory {grown:+.2%} over the last five minutes (at most 2 %)"),
    ]
    for name, field in [("descriptors", 3), ("tasks", 4)]:
        (least, most), (least_then, most_then) = extent(first, field), extent(end, field)
        checks.append((least_then <= most, f"{name} {least:.0f} – {most:.0f}, then {least_then:.0f} – {most_then:.0f}"))
    for is_so, what in checks:
        print(f"  {'ok   ' if is_so else 'FAILS'} {what}")
    return [what for is_so, what in checks if not is_so]


def metrics(port):
    told = {}
    for line in ask(port, "GET", "/metrics").decode().splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            told[name] = float(value)
    return told


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["gateway", "storage", "soak"])
    parser.add_argument("shapes", nargs="*", default=["small", "large"], help="for gateway: small, large, or both")
    parser.add_argument("--bench", required=True, help="the program gateway-bench")
    parser.add_argument("--python", help="the Python that has agentlightning; without it the original is left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rollouts", type=int, default=8, help="for storage")
    parser.add_argument("--soak-calls", type=int, default=1_500_000)
    parser.add_argument("--soak-seconds", type=float, default=600.0)
    options = parser.parse_args()
    options.shapes = options.shapes or ["small", "large"]
    print(f"load before: {beside()}")
    failed = {"gateway": compare, "storage": storage, "soak": soak}[options.what](options)
    print(f"load after: {beside()}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
