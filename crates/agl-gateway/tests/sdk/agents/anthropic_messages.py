"""Messages through the `anthropic` package: `anthropic_messages.py [stream]`."""

import sys

from anthropic import Anthropic

import task

client = Anthropic()
tools = [{"name": task.NAME, "description": task.DESCRIPTION, "input_schema": task.SCHEMA}]
messages = [{"role": "user", "content": task.QUESTION}]
request = {"model": "claude-sonnet-4-5", "max_tokens": 1000, "system": task.SYSTEM, "tools": tools}


def ask():
    if "stream" not in sys.argv:
        return client.messages.create(messages=messages, **request)
    with client.messages.stream(messages=messages, **request) as stream:
        for _event in stream:
            pass
        return stream.get_final_message()


assert client.messages.count_tokens(messages=messages, model="claude-sonnet-4-5", tools=tools).input_tokens > 10
while True:
    message = ask()
    assert message.usage.output_tokens > 0, message
    messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True, include={"type", "text", "id", "name", "input"}) for block in message.content]})
    calls = [block for block in message.content if block.type == "tool_use"]
    assert (message.stop_reason == "tool_use") == bool(calls), message
    if not calls:
        break
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": task.multiply(**call.input)} for call in calls]
    messages.append({"role": "user", "content": results})
task.answer(message.content[-1].text)
