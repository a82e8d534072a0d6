"""llama.cpp's own HTTP server behind the gateway, with a tiny model: `./x check llamacpp`.

What is recorded is held against the server itself. It keeps the tokens of its last sequence in a cache and says how many of a new
prompt it found there: given the recorded ids as a prompt of ids, it finds all of them only if they are the ids that it evaluated.
Log-probs are held against those that it gives for the next token after the recorded ones.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
AGL = ROOT / "target" / os.environ.get("AGL_PROFILE", "release") / "agl"
KEY = "server-key"
# Nothing is in its cache but the last sequence.
ONE_SEQUENCE = ["n_parallel=1", "cache_ram_mib=0"]
LOOK = {"type": "object", "properties": {"where": {"type": "string", "enum": ["here", "there"]}}, "required": ["where"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": LOOK}}


class Stage:
    """The server, a gateway, and the server registered as the policy."""

    def __init__(self, folder, model, *settings):
        self.processes = []
        log = open(folder / "server.log", "w")
        server = self.start([sys.executable, HERE / "serve.py", model, *ONE_SEQUENCE, *settings], stdout=subprocess.PIPE, stderr=log)
        self.server = server.stdout.readline().strip()
        assert self.server, (folder / "server.log").read_text()
        log = open(folder / "gateway.log", "w")
        port = free_port()
        self.gateway = f"http://127.0.0.1:{port}"
        self.start([AGL, "serve", "--listen", f"127.0.0.1:{port}", "--store", "memory", "--key", KEY], stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while not self.is_up():
            assert time.monotonic() < deadline, (folder / "gateway.log").read_text()
            time.sleep(0.05)
        register = [AGL, "models", "register", "policy", f"{self.server}/v1", "--kind", "llama.cpp", "--gateway", self.gateway, "--key", KEY]
        subprocess.run([str(word) for word in register], check=True, stdout=subprocess.DEVNULL)
        self.rollouts = 0

    def start(self, command, **options):
        process = subprocess.Popen([str(word) for word in command], text=True, **options)
        self.processes.append(process)
        return process

    def is_up(self):
        try:
            return urllib.request.urlopen(self.gateway + "/readyz", timeout=1).status == 200
        except OSError:
            return False

    def ask(self, path, body):
        """The server itself."""
        return send(self.server + path, body)

    def rollout(self):
        self.rollouts += 1
        return Rollout(self, f"r{self.rollouts}")

    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()


class Rollout:
    def __init__(self, stage, name):
        self.stage, self.name = stage, name
        send(f"{stage.gateway}/api/rollouts", [{"rollout_id": name, "input": {}}])

    def call(self, path="openai/v1/chat/completions", **body):
        return send(f"{self.stage.gateway}/proxy/rollout/{self.name}/attempt/0/mode/train/{path}", body)

    def sequences(self):
        return send(f"{self.stage.gateway}/api/rollouts/{self.name}/sequences")

    def answers(self):
        """As recorded: a list of chat completions."""
        return [event["data"]["response"] for event in send(f"{self.stage.gateway}/api/rollouts/{self.name}/events")]


def send(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=120))


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Check:
    """Counts what held and says what did not."""

    def __init__(self):
        self.failed, self.tokens, self.calls, self.log_probs, self.largest = 0, 0, 0, 0, 0.0

    def holds(self, what, is_so, detail=""):
        print(f"  {'ok   ' if is_so else 'FAILS'} {what}{'' if is_so else f': {detail}'}", flush=True)
        self.failed += not is_so

    def evaluated(self, what, stage, prompt, sampled):
        """These are the ids that the server has in its cache, the last call's being this one."""
        ids = prompt + sampled
        again = stage.ask("/completion", {"prompt": ids, "n_predict": 1, "cache_prompt": True, "return_tokens": True})
        # The last token of a prompt is always evaluated anew, and the last one sampled was not evaluated yet.
        found = again["timings"]["cache_n"]
        self.holds(f"{what}: the server evaluated these {len(prompt)} + {len(sampled)} tokens", found >= len(ids) - 1, f"it finds {found} in its cache")
        self.tokens += len(ids)
        self.calls += 1

    def not_evaluated(self, stage, prompt, sampled):
        """The cache is a witness: of ids that differ in one it finds only those before it."""
        ids = [*prompt, *sampled]
        ids[len(prompt) // 2] += 1
        found = stage.ask("/completion", {"prompt": ids, "n_predict": 1, "cache_prompt": True})["timings"]["cache_n"]
        self.holds("ids of which one is another are not those that were evaluated", found <= len(prompt) // 2, found)

    def text(self, what, stage, sampled, said):
        shown = stage.ask("/detokenize", {"tokens": sampled})["content"]
        self.holds(f"{what}: the sampled ids are the text", shown == said, f"{shown!r} is not {said!r}")

    def same_log_probs(self, what, stage, prompt, sampled, recorded):
        """A few of them, by asking the server for the next token after the recorded ids."""
        wrong = []
        for at in range(0, len(sampled), max(1, len(sampled) // 6)):
            after = stage.ask("/completion", {"prompt": prompt + sampled[:at], "n_predict": 1, "n_probs": 400, "logit_bias": [[ord("a"), 90]]})
            top = {entry["id"]: entry["logprob"] for entry in after["completion_probabilities"][0]["top_logprobs"]}
            off = abs(top.get(sampled[at], math.inf) - recorded[at])
            self.largest = max(self.largest, off)
            self.log_probs += 1
            # The server itself is apart by 0.02 where it evaluates the last of 600 tokens alone or with others.
            if off > 5e-2:
                wrong.append((at, sampled[at], top.get(sampled[at]), recorded[at]))
        self.holds(f"{what}: the log-probs are the server's", not wrong, wrong)


def parts(answer, choice=0):
    """Prompt ids, sampled ids and log-probs of a recorded answer."""
    said = answer["choices"][choice]
    prompt = answer.get("prompt_token_ids") or said.get("prompt_token_ids")
    logs = [entry["logprob"] for entry in (said.get("logprobs") or {}).get("content") or []]
    return prompt, said.get("token_ids"), logs


def user(text):
    return {"role": "user", "content": text}


def main():
    check = Check()
    folder = Path(tempfile.mkdtemp(prefix="agl-llamacpp-"))
    model = folder / "tiny.gguf"
    subprocess.run([sys.executable, HERE / "make_model.py", model], check=True)
    stage = Stage(folder, model)
    word = lambda text: stage.ask("/tokenize", {"content": text, "parse_special": True})["tokens"]
    [end], [begin_call] = word("<|im_end|>"), word("<tool_call>")
    started = time.monotonic()
    try:
        print("an answer that ends by itself, and one that is cut")
        for limit, finish, favour in [(400, "stop", 4), (6, "length", -90)]:
            rollout = stage.rollout()
            answer = rollout.call(messages=[user("hello é €")], max_tokens=limit, logit_bias=[[end, favour]])
            prompt, sampled, logs = parts(rollout.answers()[0])
            check.evaluated(finish, stage, prompt, sampled)
            check.holds(f"{finish}: its end is among the sampled", (sampled[-1] == end) == (finish == "stop"), sampled[-3:])
            check.text(finish, stage, sampled[:-1] if finish == "stop" else sampled, answer["choices"][0]["message"]["content"])
            check.same_log_probs(finish, stage, prompt, sampled, logs)
            check.not_evaluated(stage, prompt, sampled)
            counts = rollout.sequences()["counts"]
            check.holds(f"{finish}: recorded with ids and log-probs", counts["live"] == 1 and len(logs) == len(sampled), counts)

        print("three turns with a tool between them")
        rollout = stage.rollout()
        messages = [{"role": "system", "content": "Be brief."}, user("Where is it?")]
        answer = rollout.call(messages=messages, tools=[TOOL], max_tokens=60, logit_bias=[[begin_call, 60]])
        message = answer["choices"][0]["message"]
        called = [call["function"] for call in message.get("tool_calls", [])]
        check.holds("the call is told as one", [(call["name"], json.loads(call["arguments"])) for call in called] == [("look", {"where": "here"})], answer["choices"][0])
        prompt, sampled, logs = parts(rollout.answers()[0])
        check.evaluated("tool call", stage, prompt, sampled)
        messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "On the table."}]
        for turn in ["second turn", "third turn"]:
            answer = rollout.call(messages=messages, tools=[TOOL], max_tokens=400, logit_bias=[[end, 4]])
            prompt, sampled, logs = parts(rollout.answers()[-1])
            check.evaluated(turn, stage, prompt, sampled)
            check.same_log_probs(turn, stage, prompt, sampled, logs)
            messages += [answer["choices"][0]["message"], user("And then?")]
        assembled = rollout.sequences()
        rows = assembled["sequences"]
        check.holds("the turns are one row", len(rows) == 1 and assembled["counts"]["breaks"] == 0, assembled["counts"])
        check.holds("the row is the last prompt and its answer", rows[0]["token_ids"] == prompt + sampled)

        print("in Anthropic's dialect, streamed")
        rollout = stage.rollout()
        stream = urllib.request.Request(
            f"{stage.gateway}/proxy/rollout/{rollout.name}/attempt/0/mode/train/anthropic/v1/messages",
            json.dumps({"model": "m", "max_tokens": 20, "messages": [user("hi")], "stream": True}).encode(),
            {"x-api-key": KEY},
        )
        said = urllib.request.urlopen(stream).read().decode()
        prompt, sampled, logs = parts(rollout.answers()[0])
        check.holds("it is a stream of that dialect", "event: message_stop" in said, said)
        check.evaluated("anthropic", stage, prompt, sampled)

        print("text that was sampled in other tokens than its tokenisation gives")
        rollout = stage.rollout()
        answer = rollout.call(messages=[user("One letter.")], max_tokens=2, logit_bias=[[0xC3, 60]])
        prompt, sampled, logs = parts(rollout.answers()[0])
        check.holds("its bytes are two tokens", sampled == [0xC3, 0xA9] and len(word("é")) == 1, sampled)
        check.evaluated("é", stage, prompt, sampled)
        rollout.call(messages=[user("One letter."), answer["choices"][0]["message"], user("More.")], max_tokens=4)
        assembled = rollout.sequences()
        check.holds("they are not merged into a prompt that has other tokens", assembled["counts"]["breaks"] == 1 and len(assembled["sequences"]) == 2, assembled["counts"])

        print("characters of several tokens, and stop texts: ids without log-probs")
        for what, body in [("euro", {"max_tokens": 3, "logit_bias": [[0xE2, 60]]}), ("stop", {"max_tokens": 90, "stop": ["a"], "logit_bias": [[ord("a"), 3], [end, -90]]})]:
            rollout = stage.rollout()
            rollout.call(messages=[user("Pay.")], **body)
            prompt, sampled, logs = parts(rollout.answers()[0])
            check.evaluated(what, stage, prompt, sampled)
            check.holds(f"{what}: it sampled what it tells", sampled == [0xE2, 0x82, 0xAC] if what == "euro" else sampled[-1] == ord("a"), sampled)
            row = rollout.sequences()["sequences"][0]
            check.holds(f"{what}: recorded with ids, without log-probs", row["log_probs"] is None and row["token_ids"] == prompt + sampled, (len(logs), len(sampled)))

        print("several choices")
        rollout = stage.rollout()
        answer = rollout.call(messages=[user("Choose.")], n=3, max_tokens=12, seed=1)
        recorded = rollout.answers()[0]
        prompt, sampled = parts(recorded)[0], [parts(recorded, choice)[1] for choice in range(3)]
        check.holds("each has its own ids", len({tuple(ids) for ids in sampled}) == 3, sampled)
        for choice, ids in enumerate(sampled):
            check.text(f"choice {choice}", stage, [id for id in ids if id != end], answer["choices"][choice]["message"]["content"])
        check.holds("all are trained on", rollout.sequences()["counts"]["live"] == 3)

        print("completions")
        for prompt in ["é hello", word("é hello")]:
            rollout = stage.rollout()
            rollout.call("openai/v1/completions", prompt=prompt, max_tokens=8)
            prompt, sampled, logs = parts(rollout.answers()[0])
            check.evaluated("completion", stage, prompt, sampled)
            check.holds("recorded with log-probs", len(logs) == len(sampled) and rollout.sequences()["counts"]["live"] == 1)

        rollout = stage.rollout()
        rollout.call(messages=[user("hello é €")], max_tokens=1)
        counted = rollout.call("anthropic/v1/messages/count_tokens", model="m", messages=[user("hello é €")])
        check.holds("tokens are counted with the server's template", counted == {"input_tokens": len(parts(rollout.answers()[0])[0])}, counted)
    finally:
        stage.stop()

    print("a server that forgets a part of its context")
    stage = Stage(folder, model, "n_ctx=256", "ctx_shift=1")
    try:
        rollout = stage.rollout()
        rollout.call(messages=[user("Go on.")], max_tokens=400, logit_bias=[[end, -90]])
        counts = rollout.sequences()["counts"]
        check.holds("its answer is recorded without ids, and counted", counts["without_token_ids"] == 1 and counts["live"] == 0, counts)
    finally:
        stage.stop()
    print(
        f"xllamacpp {version('xllamacpp')}: {check.calls} calls, {check.tokens} token ids found in the server's cache, {check.log_probs} log-probs within "
        f"{check.largest:.1e}, {time.monotonic() - started:.0f} s; {check.failed} failed"
    )
    sys.exit(check.failed > 0)


if __name__ == "__main__":
    main()
