"""Judges what the agent left and posts the reward. It runs in the agent's folder, after the agent has ended."""

import json
import os
import urllib.request


def reward(task, output):
    """1.0 where the answer is the last line that the agent printed. Put your own judgement in its place."""
    lines = output.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == str(task["answer"]))


def main():
    with open(os.environ["AGL_INPUT"]) as file:
        task = json.load(file)
    with open(os.environ["AGL_AGENT_STDOUT"], errors="replace") as file:
        output = file.read()
    event = {"event_type": "reward", "data": {"value": reward(task, output)}}
    request = urllib.request.Request(
        os.environ["AGL_EVENT_URL"],
        json.dumps(event).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["AGL_KEY"]},
    )
    urllib.request.urlopen(request).close()


main()
