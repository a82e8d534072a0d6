"""A small agent to begin with: put your own in its place. It knows nothing of agl, only where its model is."""

import json
import os
import sys
import urllib.request


def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def main():
    messages = [{"role": "user", "content": sys.argv[1]}]
    for remark in ["Is that right? Give the final answer on a line of its own.", None]:
        answer = ask(messages)
        # The history goes back as it was: each turn then continues the one before.
        messages.append({"role": "assistant", "content": answer})
        if remark:
            messages.append({"role": "user", "content": remark})
    print(answer)


main()
