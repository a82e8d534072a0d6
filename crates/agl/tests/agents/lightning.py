"""An agent as Agent Lightning v1.0 documents it: three variables in, one reward event out."""

import json
import os
import sys
import urllib.request


def post(url, body):
    headers = {"Authorization": f"Bearer {os.environ['AGL_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


class Agent:
    def run(self):
        task = json.loads(os.environ["TASK"])
        answer = post(
            os.environ["AGL_OPENAI_BASE_URL"] + "/chat/completions",
            {"model": "whatever", "messages": [{"role": "user", "content": task["question"]}], "max_tokens": 8},
        )
        assert answer["choices"][0]["token_ids"], "answers are passed on whole"
        event = post(os.environ["AGL_EVENT_URL"], {"event_type": "reward", "data": {"value": 0.25}})
        assert event["event_type"] == "reward", event


if __name__ == "__main__":
    sys.exit(Agent().run())
