"""A patient harness: three calls with a growing history, each tried again while nobody answers.

After every answer it appends the call's id to ACKNOWLEDGED/ROLLOUT.ATTEMPT: the client side of "nothing acknowledged is lost".
The reward depends on the answers alone, so that groups have variance.
"""

import http.client
import json
import os
import re
import sys
import time
import urllib.parse

BASE = os.environ["OPENAI_BASE_URL"]
ROLLOUT, ATTEMPT = re.search(r"/rollout/([^/]+)/attempt/([^/]+)/", BASE).groups()


def post(url, key, body):
    """The answer and its headers; patient for two minutes."""
    address = urllib.parse.urlsplit(url)
    deadline = time.time() + 120
    while True:
        try:
            connection = http.client.HTTPConnection(address.hostname, address.port, timeout=120)
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            connection.request("POST", address.path, json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read()
            if answer.status < 500:
                return answer.status, answer.headers, content
        except (OSError, http.client.HTTPException):
            pass
        if time.time() > deadline:
            sys.exit(f"nobody answers at {url}")
        time.sleep(0.1)


def main():
    messages = [{"role": "user", "content": sys.argv[1]}]
    said = ""
    for _ in range(3):
        body = {"model": "policy", "messages": messages, "max_tokens": 96}
        status, headers, content = post(BASE + "/chat/completions", os.environ["OPENAI_API_KEY"], body)
        if status != 200:
            sys.exit(f"{status}: {content.decode(errors='replace')}")
        with open(os.path.join(os.environ["ACKNOWLEDGED"], f"{ROLLOUT}.{ATTEMPT}"), "a") as log:
            log.write(headers["X-Agl-Call-Id"] + "\n")
        message = json.loads(content)["choices"][0]["message"]
        said += message.get("content") or ""
        messages += [message, {"role": "user", "content": "and then?"}]
    reward = {"event_type": "reward", "data": {"value": float(sum(said.encode()) % 2)}}
    status, _, content = post(os.environ["AGL_EVENT_URL"], os.environ["AGL_KEY"], reward)
    if status >= 400:
        sys.exit(f"{status}: {content.decode(errors='replace')}")


main()
