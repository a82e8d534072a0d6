"""Compares the agent's last ANSWER line with the expected number and posts the reward: 1 if equal, else 0.

Run after the agent has stopped, with AGL_INPUT (the question's row as a JSON file), AGL_AGENT_STDOUT (a file),
AGL_EVENT_URL and AGL_KEY in the environment.
"""

import json
import os
import sys
import time

from http_json import HttpError, post_json

MARKER = "ANSWER:"


def given_answer(stdout):
    """The number on the last ANSWER line, or None where there is none."""
    lines = [line for line in stdout.splitlines() if line.startswith(MARKER)]
    if not lines:
        return None
    text = lines[-1][len(MARKER) :].strip()
    digits = text[1:] if text.startswith("-") else text
    return int(text) if digits.isascii() and digits.isdigit() else None


def post(event):
    """A gateway that is being restarted is waited for: a reward that is lost is a rollout that is lost."""
    for tries in range(6):
        try:
            return post_json(os.environ["AGL_EVENT_URL"], os.environ["AGL_KEY"], event)
        except HttpError as error:
            if tries == 5:
                sys.exit(f"evaluator.py: {error}")
            time.sleep(0.2 * 2**tries)


def main():
    with open(os.environ["AGL_INPUT"]) as file:
        expected = json.load(file)["answer"]
    with open(os.environ["AGL_AGENT_STDOUT"], errors="replace") as file:
        given = given_answer(file.read())
    value = 1.0 if given == expected else 0.0
    event = {"event_type": "reward", "data": {"value": value, "source": "evaluator"}}
    post(event)
    print(f"expected {expected}, given {given}: reward {value}")


if __name__ == "__main__":
    try:
        main()
    except KeyError as error:
        sys.exit(f"evaluator.py: {error} is missing: from the environment, or from the row in AGL_INPUT")
