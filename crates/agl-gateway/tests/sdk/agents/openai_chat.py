"""Chat completions through the `openai` package: `openai_chat.py [stream]`."""

import json
import sys

from openai import OpenAI

import task

client = OpenAI()
tools = [{"type": "function", "function": {"name": task.NAME, "description": task.DESCRIPTION, "parameters": task.SCHEMA}}]
messages = [{"role": "system", "content": task.SYSTEM}, {"role": "user", "content": task.QUESTION}]


def ask():
    if "stream" not in sys.argv:
        return client.chat.completions.create(model="gpt-4o", messages=messages, tools=tools).choices[0].message
    options = {"include_usage": True}
    with client.chat.completions.stream(model="gpt-4o", messages=messages, tools=tools, stream_options=options) as stream:
        for _event in stream:
            pass
        completion = stream.get_final_completion()
    assert completion.usage.completion_tokens > 0, completion
    return completion.choices[0].message


while True:
    message = ask()
    calls = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls or []]
    for call in calls:
        call["function"] = {key: call["function"][key] for key in ("name", "arguments")}
    messages.append({"role": "assistant", "content": message.content, **({"tool_calls": calls} if calls else {})})
    if not calls:
        break
    for call in calls:
        result = task.multiply(**json.loads(call["function"]["arguments"]))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
task.answer(message.content)
