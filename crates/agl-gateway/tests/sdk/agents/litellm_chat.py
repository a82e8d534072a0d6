"""litellm, as mini-SWE-agent uses it: `litellm_chat.py openai/gpt-4o | anthropic/claude-sonnet-4-5 [stream]`."""

import json
import os
import sys

import litellm

import task

model = sys.argv[1]
tools = [{"type": "function", "function": {"name": task.NAME, "description": task.DESCRIPTION, "parameters": task.SCHEMA}}]
messages = [{"role": "system", "content": task.SYSTEM}, {"role": "user", "content": task.QUESTION}]
base = {"api_base": os.environ["ANTHROPIC_BASE_URL"]} if model.startswith("anthropic") else {}


def ask():
    stream = "stream" in sys.argv
    answer = litellm.completion(model=model, messages=messages, tools=tools, stream=stream, **base)
    return (litellm.stream_chunk_builder(list(answer), messages=messages) if stream else answer).choices[0].message


while True:
    message = ask()
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = task.multiply(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
task.answer(message.content)
