"""A harness for the doctor, in one of several habits: `looked_at.py HABIT`. Standard library only."""

import json
import os
import sys
import urllib.error
import urllib.request

BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def post(url, body, key=KEY):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))


def whole(messages):
    with post(BASE + "/chat/completions", {"messages": messages, "tools": [TOOL]}) as answer:
        return json.load(answer)["choices"][0]["message"]


def streamed(messages):
    message = {"role": "assistant", "content": "", "tool_calls": []}
    with post(BASE + "/chat/completions", {"messages": messages, "tools": [TOOL], "stream": True}) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                delta = choice["delta"]
                message["content"] += delta.get("content") or ""
                for call in delta.get("tool_calls") or []:
                    if call["index"] == len(message["tool_calls"]):
                        message["tool_calls"].append({**call, "function": {"name": "", "arguments": ""}})
                    for key, text in call["function"].items():
                        message["tool_calls"][call["index"]]["function"][key] += text or ""
    return message


def loop(ask, rewrite=lambda messages: messages):
    messages = [{"role": "system", "content": "You may use the shell."}, {"role": "user", "content": "Look around."}]
    while True:
        message = ask(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            return
        for call in message["tool_calls"]:
            assert call["function"]["name"] == "shell", call
            command = json.loads(call["function"]["arguments"])["command"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": os.popen(command).read()})
        messages = rewrite(messages)


def forgetful(messages):
    """Shows the model a summary in place of what it said."""
    return [*messages[:2], {"role": "assistant", "content": "(I ran a command.)"}, messages[-1]]


def bypass():
    try:
        urllib.request.urlopen("https://api.openai.com/v1/models", timeout=5)
    except OSError:
        pass  # no way out of here


def wrong_path():
    for url, key in [(BASE + "/v1/chat/completions", KEY), (BASE + "/chat/completions", "sk-my-own")]:
        try:
            post(url, {"messages": []}, key)
        except urllib.error.HTTPError:
            pass


def crash():
    whole([{"role": "user", "content": "Hello."}])
    sys.exit("the harness is broken")


habit = sys.argv[1]
if habit == "whole":
    loop(whole)
elif habit == "streamed":
    loop(streamed)
elif habit == "forgetful":
    loop(whole, forgetful)
else:
    {"bypass": bypass, "wrong_path": wrong_path, "crash": crash}[habit]()
